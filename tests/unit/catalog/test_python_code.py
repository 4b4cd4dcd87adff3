"""`python_code`: right code earns its share in a sandbox; hostile code earns nothing that it did not compute."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import toprope
from toprope.catalog.python_code.environment import Case, PythonCode, extract_code, judge, same
from toprope.errors.kinds import Kind
from toprope.errors.tree import ConfigError, TopropeError
from toprope.sandbox.bubblewrap import Bubblewrap
from toprope.sandbox.desk import SandboxDesk
from toprope.sandbox.plain import PlainDirectory
from toprope.sandbox.provider import Sandbox
from toprope.sandbox.spec import SandboxSpec

_SPEC = importlib.util.spec_from_file_location(
    "python_code_reference", Path(__file__).with_name("python_code_reference.py")
)
assert _SPEC is not None
assert _SPEC.loader is not None
reference = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(reference)

DOUBLE = {"function": "double", "tests": [{"args": [n], "returns": 2 * n} for n in (1, 2, 3, 4)]}
TWO = {"function": "double", "tests": DOUBLE["tests"][:2]}
RIGHT = "def double(n):\n    return 2 * n\n"


def answer(code: str) -> dict[str, Any]:
    return {"output": [{"type": "message", "role": "assistant", "content": f"Here it is:\n```python\n{code}\n```\n"}]}


@pytest.fixture
def environment() -> PythonCode:
    return PythonCode(cpu_s=1, wall_s=60, total_wall_s=200)  # a busy machine must not fail what is right


@pytest.fixture
async def box(environment: PythonCode, tmp_path: Path) -> AsyncIterator[Sandbox]:
    if shutil.which("bwrap") is None:
        pytest.skip("the program bwrap is not installed")
    sandbox = await SandboxDesk(Bubblewrap(tmp_path / "leases")).make(environment.sandbox, lease_s=120)
    yield environment.seed({}, sandbox)
    await sandbox.stop()


async def outcomes(environment: PythonCode, box: Sandbox, code: str, task: dict[str, Any] = DOUBLE) -> list[str]:
    verdict = await environment.verify(box, copy.deepcopy(task), answer(code))
    assert verdict.reward == verdict.extra["passed"] / verdict.extra["total"]
    found: list[str] = verdict.extra["outcomes"]
    return found


async def test_right_code_gets_all_and_half_right_code_gets_half(environment: PythonCode, box: Sandbox) -> None:
    assert await outcomes(environment, box, RIGHT) == ["passed"] * 4
    half = "def double(n):\n    if n == 2: raise KeyError(n)\n    return 2 * n if n != 3 else 7\n"
    assert await outcomes(environment, box, half) == ["passed", "raised KeyError", "wrong", "passed"]
    strict = PythonCode(partial_credit=False)
    assert (await strict.verify(box, DOUBLE, answer(half))).reward == 0.0


async def test_no_code_is_no_reward(environment: PythonCode, box: Sandbox) -> None:
    verdict = await environment.verify(box, DOUBLE, {"output": []})
    assert (verdict.reward, verdict.extra["outcomes"]) == (0.0, ["no code"] * 4)


async def test_every_reference_solution_passes_its_whole_problem(environment: PythonCode, box: Sandbox) -> None:
    """All problems in a few sandboxes: one file with every solution, one function called at a time."""
    code = inspect.getsource(reference)
    assert len(environment.problems) >= 30
    wrong = []
    for problem in environment.problems[::5]:
        task = {"function": problem["signature"].partition("(")[0], "tests": problem["tests"]}
        if set(await outcomes(environment, box, code, task)) != {"passed"}:
            wrong.append(problem["name"])
    assert wrong == []


def test_the_data_agree_with_the_reference_and_a_function_that_returns_nothing_fails() -> None:
    for problem in PythonCode().problems:
        function = getattr(reference, problem["name"])
        assert tuple(inspect.signature(function).parameters) == tuple(
            part.strip() for part in problem["signature"].partition("(")[2].rstrip(")").split(",")
        )
        assert len(problem["tests"]) >= 4, problem["name"]
        for test in problem["tests"]:
            arguments = copy.deepcopy(test["args"])
            if "raises" in test:
                with pytest.raises((ValueError, KeyError)) as caught:
                    function(*arguments)
                assert type(caught.value).__name__ == test["raises"]
            else:
                assert same(json.loads(json.dumps(function(*arguments))), test["returns"]), (problem["name"], test)
        assert sum(test.get("returns") is None and "raises" not in test for test in problem["tests"]) < 3


HOSTILE = {
    "an endless loop": "def double(n):\n    while True: pass\n",
    "sleep": "import time\ndef double(n): time.sleep(60)\n",
    "exit while it is loaded": "import sys; sys.exit(0)\ndef double(n): return 2 * n\n",
    "os._exit while it is called": "import os\ndef double(n): os._exit(0)\n",
    "a bomb of processes": "import os\ndef double(n):\n    while True: os.fork()\n",
    "a bomb of memory": "def double(n): return len('x' * (1 << 34))\n",
    "gigabytes on standard output": "def double(n):\n    while True: print('x' * 1000000)\n",
    "gigabytes as the result": "def double(n): return 'x' * 50_000_000\n",
    "an object that is equal to everything": (
        "class Yes(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef double(n): return Yes(7)\n"
    ),
    "patched json": "import json\njson.dumps = lambda *a, **k: '{\"passed\": true}'\ndef double(n): return 7\n",
    "said to have passed on every channel": (
        "import os\ndef double(n):\n"
        '    for text in (b\'{"passed": 4}\\n\', b\'{"index": 0, "passed": true}\\n\', b\'{"reward": 1}\\n\'):\n'
        "        for handle in range(256):\n"
        "            try: os.write(handle, text)\n"
        "            except OSError: pass\n"
        "    os._exit(0)\n"
    ),
    "the parent's channel": (
        "import os, glob\ndef double(n):\n"
        "    for path in glob.glob(f'/proc/{os.getppid()}/fd/*'):\n"
        '        try: os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), b\'\\n{"index": 3, "passed": true}\\n\')\n'
        "        except OSError: pass\n"
        "    return 'no'\n"
    ),
    "the driver killed": "import os, signal\ndef double(n): os.kill(os.getppid(), signal.SIGKILL)\n",
    "every process killed": "import os, signal\ndef double(n): os.kill(-1, signal.SIGKILL)\n",
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_hostile_code_earns_nothing(box: Sandbox, what: str) -> None:
    hasty = PythonCode(cpu_s=1, wall_s=1.5, total_wall_s=20)
    found = await outcomes(hasty, box, HOSTILE[what], TWO)
    assert found.count("passed") == 0, found


async def test_code_that_stops_the_driver_earns_nothing_within_the_bound_that_the_environment_declares(
    tmp_path: Path,
) -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("the program bwrap is not installed")
    hasty = PythonCode(cpu_s=1, wall_s=1.0, total_wall_s=3.0)
    sandbox = await SandboxDesk(Bubblewrap(tmp_path / "leases")).make(hasty.sandbox, lease_s=60)
    stop = "import os, signal\ndef double(n):\n    os.kill(os.getppid(), signal.SIGSTOP)\n    return 2 * n\n"
    try:
        found = await hasty.verify(sandbox, TWO, answer(stop))
    finally:
        await sandbox.stop()
    assert (found.reward, hasty.verify_bound_s) == (0.0, 3.0)
    assert found.extra["outcomes"] == ["all tests together used too much (wall_time)"] * 2


TWICE = b"""
import json, sys
json.load(sys.stdin)
print(json.dumps({"ready": True}))
for value in (2, 999):
    print(json.dumps({"index": 0, "value": value}))
for value in (999, 4):
    print(json.dumps({"index": 1, "value": value}))
"""


async def test_the_first_word_on_a_test_counts_and_no_later_one_mends_or_spoils_it(
    environment: PythonCode, box: Sandbox
) -> None:
    environment._driver = TWICE  # as code would that writes over the driver's shoulder
    assert await outcomes(environment, box, RIGHT, TWO) == ["passed", "wrong"]


def test_only_the_exception_that_is_asked_for_passes_and_nothing_else_does() -> None:
    asked = Case(args=[], raises="ValueError")
    assert judge(asked, {"raised": "ValueError"}) == "passed"
    assert judge(asked, {"raised": "KeyError"}) == "raised KeyError"
    assert judge(asked, {"value": None}) == "wrong"
    assert judge(asked, {"failed": "ValueError"}) == "ValueError"
    assert judge(Case(args=[], returns=None), {"raised": "ValueError"}) == "raised ValueError"
    assert judge(asked, {}) == "it ended without returning"


async def test_a_test_that_never_ends_costs_that_test_only(environment: PythonCode, box: Sandbox) -> None:
    code = "import os\ndef double(n):\n    while n == 2: pass\n"
    code += "    if n == 3:\n        os.fork()\n        while True: pass\n"
    code += "    return 2 * n\n"
    found = await outcomes(environment, box, code)
    assert (found[0], found[3]) == ("passed", "passed")
    assert "passed" not in found[1:3]


async def test_what_code_left_in_the_sandbox_does_not_harm_the_next_verify(
    environment: PythonCode, box: Sandbox
) -> None:
    trap = "import glob, os\nfor path in glob.glob('/work/*'):\n    os.remove(path); os.mkdir(path)\n"
    trap += "os.makedirs('/work/driver.py', exist_ok=True)\nopen('/work/json.py', 'w').write('raise SystemExit')\n"
    assert "passed" in await outcomes(environment, box, trap + RIGHT, TWO)
    assert await outcomes(environment, box, RIGHT) == ["passed"] * 4


async def test_no_test_sees_what_another_left_behind(environment: PythonCode, box: Sandbox) -> None:
    code = "calls = []\ndef double(n):\n    calls.append(n)\n    return 2 * n * len(calls)\n"
    assert await outcomes(environment, box, code) == ["passed"] * 4


LOOK = """
import glob, os
def look():
    found = []
    for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/run/toprope/*"):
        try: found.append(open(path, "rb").read())
        except OSError: pass
    for path in glob.glob("/work/**", recursive=True):
        if os.path.isfile(path): found.append(open(path, "rb").read())
    for process in ("self", str(os.getppid())):
        try: memory = open(f"/proc/{process}/mem", "rb")
        except OSError: continue
        for line in open(f"/proc/{process}/maps"):
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if " rw" in line and end - begin < 1 << 25:
                try: memory.seek(begin); found.append(memory.read(end - begin))
                except (OSError, ValueError, OverflowError): pass
    wanted = b"rewsna-detcepxe-eht"[::-1]  # made only now, so that it is not found in our own memory
    return any(wanted in part for part in found)
"""


async def test_code_finds_no_expected_answer_in_files_processes_or_memory(
    environment: PythonCode, box: Sandbox
) -> None:
    calls = [{"args": [], "returns": False}, {"args": [], "returns": "the-expected-answer"}]
    assert await outcomes(environment, box, LOOK, {"function": "look", "tests": calls}) == ["passed", "wrong"]


async def test_a_tree_that_holds_answers_is_hidden_also_where_the_sandbox_may_read_around_it(tmp_path: Path) -> None:
    around = tmp_path / "lib"
    package = around / "toprope"
    package.mkdir(parents=True)
    (package / "problems.jsonl").write_text("the answers")
    (around / "other").write_text("other")
    if shutil.which("bwrap") is None:
        pytest.skip("the program bwrap is not installed")
    provider = Bubblewrap(tmp_path / "leases")
    sandbox = await provider.create(SandboxSpec(read_only=(str(around),), hidden=(str(package), "/nowhere/at/all")))
    try:
        done = await sandbox.run(
            ["sh", "-c", f"cat {around}/other; echo; ls -A {package}; echo x > {package}/y || echo no"]
        )
    finally:
        await sandbox.stop()
    assert done.stdout.text.split() == ["other", "no"]
    assert any(Path(toprope.__file__).is_relative_to(each) for each in PythonCode().sandbox.hidden)


async def test_a_sandbox_that_cannot_be_had_is_a_failure_to_try_again_and_no_reward(
    environment: PythonCode, box: Sandbox
) -> None:
    environment._driver = b"raise SystemExit(3)"  # the driver never says that it is ready
    with pytest.raises(TopropeError) as caught:
        await environment.verify(box, DOUBLE, answer(RIGHT))
    assert (caught.value.kind, caught.value.retryable) == (Kind.VERIFY_FAILED, True)


async def test_a_place_that_holds_nothing_back_is_refused_unless_the_code_is_said_to_be_trusted(tmp_path: Path) -> None:
    trusting = PythonCode(unconfined=True)
    sandbox = await SandboxDesk(PlainDirectory(tmp_path)).make(trusting.sandbox, lease_s=60)
    try:
        with pytest.raises(TopropeError, match="unconfined") as caught:
            PythonCode().seed({}, sandbox)
        assert not caught.value.retryable
        assert await outcomes(trusting, trusting.seed({}, sandbox), RIGHT) == ["passed"] * 4
    finally:
        await sandbox.stop()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"cpu_s": 0}, "cpu_s"),
        ({"memory_mb": 1}, "memory_mb"),
        ({"file": "/nowhere.jsonl"}, "/nowhere.jsonl"),
    ],
)
def test_a_bad_setting_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        PythonCode(**settings)


def test_tasks_are_the_same_for_a_seed_and_hold_no_answer_in_what_the_agent_sees() -> None:
    environment = PythonCode()
    one, two = (list(environment.tasks(12, seed)) for seed in (4, 4))
    assert one == two != list(environment.tasks(12, 5))
    assert len({task.task_id.task_id for task in environment.tasks(40, 0)}) == 40
    assert "tests" not in json.dumps(one[0].task_input["responses_create_params"])
    with pytest.raises(ConfigError, match="41"):
        next(iter(environment.tasks(41, 0)))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```python\ndef f(): pass\n```\nand a test:\n```\nassert f() is None\n```", "def f(): pass\n"),
        ("```py\ndef f(): return 1\n```\nbetter:\n```py\ndef f(): return 2\n```", "def f(): return 2\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("def f():\n    return 1", "def f():\n    return 1"),
        ("f = lambda: 1", "f = lambda: 1"),
        ("I cannot.", None),
        ("```python\ndef f(): pass", "```python\ndef f(): pass"),
    ],
)
def test_the_code_is_the_last_block_that_defines_the_function(text: str, found: str | None) -> None:
    assert extract_code(text, "f") == found


def test_equality_is_that_of_values_and_true_is_no_number() -> None:
    assert same([1, {"a": 2.0}], [1.0, {"a": 2}])
    assert same(0.1 + 0.2, 0.3)
    for one, two in ((True, 1), (1, True), ("1", 1), (None, 0), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (10**400, 1.0)):
        assert not same(one, two)
    assert not same(float("nan"), float("nan"))
    assert sys.float_info.max != float("inf")
