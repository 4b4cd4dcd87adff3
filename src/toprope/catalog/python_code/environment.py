"""Write a function; tests call it in a sandbox; the reward is the share of tests that it passes.

Only the arguments of the tests go into the sandbox. What the function returned comes out and is compared here, so that
code can neither read an expected answer nor say that it passed. A sandbox that cannot be had is a failure that can be
tried again, never a low reward. Left to others: the calls themselves (`driver`, inside), what holds the code back
(`toprope.sandbox`).
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

import toprope
from toprope.errors.kinds import Kind
from toprope.errors.tree import ConfigError, TopropeError
from toprope.protocol.episode import Task
from toprope.protocol.ids import TaskId
from toprope.sandbox.plain import PlainSandbox
from toprope.sandbox.provider import Sandbox
from toprope.sandbox.spec import MIB, Limits, SandboxLost, SandboxSpec, SandboxUnavailable
from toprope.servers.resources.environment import Environment, Verdict, final_text

_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_RESULT_BYTES = 256 * 1024
_SAID_BYTES = 8 * MIB
_MOST_CODE = 256 * 1024
_NOT_ITS_DOING = frozenset({"lease", "stop"})


class Case(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call: its arguments, and what it must return or, by the name of the exception, raise."""

    args: list[Any]
    returns: Any = None
    raises: str | None = None


class PythonCode(Environment):
    """`PythonCode(cpu_s=2, wall_s=5, memory_mb=256)`: limits of each test. Its server needs `sandbox`.

    `total_wall_s` bounds all tests of an answer together; `verify_timeout_s` of its environment server must be longer.
    `partial_credit: false` gives 1 for all tests and else 0. `parallel`: answers that are tested at once.
    `create_params`: further fields of the request. `file`: a JSONL file of problems in place of ours (`name`,
    `signature`, `statement`, `tests`). A provider of kind `directory` holds back nothing and is refused, unless
    `unconfined: true` says that the code is trusted.
    """

    def __init__(
        self,
        *,
        cpu_s: int = 2,
        wall_s: float = 5.0,
        total_wall_s: float = 60.0,
        memory_mb: int = 256,
        parallel: int = 4,
        partial_credit: bool = True,
        unconfined: bool = False,
        create_params: Mapping[str, Any] | None = None,
        file: str | None = None,
    ) -> None:
        for name, value in (("cpu_s", cpu_s), ("wall_s", wall_s), ("parallel", parallel)):
            if value <= 0:
                raise ConfigError(f"{name}: {value} given; accepted: a number above 0")
        if memory_mb < 64:
            raise ConfigError(f"memory_mb: {memory_mb} given; accepted: 64 or more")
        limits = Limits(
            wall_s=total_wall_s,
            cpu_s=total_wall_s,
            memory_bytes=(memory_mb + 64) * MIB,
            processes=64,
            output_bytes=_SAID_BYTES,
            file_bytes=16 * MIB,
        )
        self.sandbox = SandboxSpec(limits=limits, network="none", hidden=(_own_source(),))
        self.verify_bound_s = total_wall_s
        self._each = {"cpu_s": cpu_s, "wall_s": wall_s, "memory_bytes": memory_mb * MIB, "result_bytes": _RESULT_BYTES}
        self._room = asyncio.Semaphore(parallel)
        self._driver = files("toprope.catalog.python_code").joinpath("driver.py").read_bytes()
        self.partial_credit = partial_credit
        self.unconfined = unconfined
        self.create_params = dict(create_params or {})
        self.problems = _problems(file)

    def seed(self, task: dict[str, Any], sandbox: Sandbox) -> Sandbox:
        """The session's sandbox. Raises, terminally, for one that holds nothing back."""
        if isinstance(sandbox, PlainSandbox) and not self.unconfined:
            raise TopropeError(
                "seed: python_code runs code that nobody vouches for, and a sandbox of kind directory holds back "
                "nothing; accepted: kind bubblewrap or docker, or config: {unconfined: true}",
                kind=Kind.SEED_FAILED,
                status=422,
                retryable=False,
            )
        return sandbox

    def tasks(self, size: int, seed: int) -> Iterable[Task]:
        """`size` different problems in an order that the seed decides. Raises `ConfigError` for more than there are."""
        if size > len(self.problems):
            raise ConfigError(f"size: {size} problems asked for; accepted: 1 to {len(self.problems)}")
        for problem in random.Random(seed).sample(self.problems, size):
            signature, name = problem["signature"], problem["name"]
            text = (
                f"Write a Python function `{signature}`.\n\n{problem['statement']}\n\n"
                "Answer with one Python code block that defines the function. Use nothing beyond the standard library."
            )
            params = {"input": [{"type": "message", "role": "user", "content": text}], **self.create_params}
            data = {"function": signature.partition("(")[0], "tests": problem["tests"]}
            yield Task(TaskId("python_code", name), {"responses_create_params": params, "task_data": data})

    async def verify(self, sandbox: Sandbox, task: dict[str, Any], response: dict[str, Any]) -> Verdict:
        """The share of passed tests. The row has `passed`, `total`, `outcomes` (one a test) and `extracted_code`."""
        tests = msgspec.convert(task["tests"], list[Case])
        if not tests:
            raise TopropeError("task_data.tests: there is none, so that nothing can be scored", kind=Kind.VERIFY_FAILED)
        code = extract_code(final_text(response), str(task["function"]))
        if code is None or len(code) > _MOST_CODE:
            outcomes = ["no code" if code is None else "too much code"] * len(tests)
        else:
            outcomes = await self._run(sandbox, code, str(task["function"]), tests)
        passed = outcomes.count("passed")
        share = passed / len(tests)
        reward = share if self.partial_credit else float(passed == len(tests))
        extra = {"passed": passed, "total": len(tests), "outcomes": outcomes, "extracted_code": code}
        return Verdict(reward=reward, extra=extra)

    async def _run(self, sandbox: Sandbox, code: str, function: str, tests: Sequence[Case]) -> list[str]:
        orders = {"code": code, "function": function, "calls": [test.args for test in tests], **self._each}
        try:
            async with self._room:
                # A new name: code that was tested here before may have left anything under the old one.
                driver = f"driver-{secrets.token_hex(8)}.py"
                await sandbox.write_file(driver, self._driver)
                done = await sandbox.run(
                    ["python3", "-I", "-S", f"{sandbox.workdir}/{driver}"],
                    stdin=json.dumps(orders).encode(),
                    output_limit=_SAID_BYTES,
                )
        except (SandboxUnavailable, SandboxLost, OSError) as error:
            raise TopropeError(
                f"verify: no sandbox: {error}", kind=Kind.VERIFY_FAILED, status=503, retryable=True
            ) from error
        said = _lines(done.stdout.data)
        if not any("ready" in line for line in said) or done.killed_by in _NOT_ITS_DOING:
            raise TopropeError(
                f"verify: the tests did not start (status {done.exit}, ended by {done.killed_by}): {done.stderr.text}",
                kind=Kind.VERIFY_FAILED,
                status=503,
                retryable=True,
            )
        first: dict[int, Mapping[str, Any]] = {}
        for line in said:
            if type(line.get("index")) is int:
                first.setdefault(line["index"], line)
        nothing = {"failed": f"all tests together used too much ({done.killed_by})"}
        return [judge(test, first.get(index, nothing)) for index, test in enumerate(tests)]


def judge(test: Case, said: Mapping[str, Any]) -> str:
    """`passed`, or in a few words what happened instead."""
    if "value" in said:
        right = test.raises is None and same(said["value"], test.returns)
        return "passed" if right else "wrong"
    if "raised" in said:
        return "passed" if test.raises is not None and said["raised"] == test.raises else f"raised {said['raised']}"
    return str(said.get("failed", "it ended without returning"))[:200]


def same(value: Any, wanted: Any) -> bool:
    """Whether two JSON values are equal: numbers within 1e-6 of each other where one is a float; true is not 1."""
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, int) and isinstance(wanted, int):
        return value == wanted
    if isinstance(value, int | float) and isinstance(wanted, int | float):
        try:
            return math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-9)
        except OverflowError:
            return False
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(same, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(same(value[key], wanted[key]) for key in wanted)
    return type(value) is type(wanted) and bool(value == wanted)


def extract_code(text: str, function: str) -> str | None:
    """The last fenced block that defines `function`; else the last one; else the whole text if it defines it."""
    defines = re.compile(rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(function)}\b|^{re.escape(function)}\s*=", re.M)
    blocks = _FENCE.findall(text)
    for block in reversed(blocks):
        if defines.search(block):
            return str(block)
    if blocks:
        return str(blocks[-1])
    return text if defines.search(text) else None


def _own_source() -> str:
    """Where Toprope itself lies: answers stand in it, and a sandbox may read around it."""
    package = Path(toprope.__file__).resolve().parent
    return str(package.parents[1] if package.parent.name == "src" else package)


def _lines(data: bytes) -> list[dict[str, Any]]:
    found = []
    for line in data.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue  # written by the code over the driver's shoulder, or cut; it counts as nothing said
        if isinstance(value, dict):
            found.append(value)
    return found


def _problems(file: str | None) -> list[dict[str, Any]]:
    place = files("toprope.catalog.python_code").joinpath("problems.jsonl") if file is None else Path(file)
    try:
        lines = place.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"file: {file}: {error.strerror}; accepted: a JSONL file of problems") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            problem = msgspec.json.decode(line, type=_Problem)
        except msgspec.DecodeError as error:
            raise ConfigError(f"file: {place}, line {number}: {error}") from error
        found.append(msgspec.to_builtins(problem))
    if not found:
        raise ConfigError(f"file: {file}: there is no problem in it; accepted: at least one")
    return found


class _Problem(msgspec.Struct, frozen=True):
    name: str
    signature: str
    statement: str
    tests: list[dict[str, Any]]
