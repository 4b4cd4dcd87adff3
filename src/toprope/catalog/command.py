"""`command`: any program as an agent: started, told where its model is, waited for, ended with all that it started.

    use: command
    sandbox: box                      # or one that the environment lends
    config: {argv: [python3, agent.py, "{prompt}"], copy: {agent.py: agent.py}}

The program runs in a sandbox, with a clean environment: base URL, key and model stand in the variables that clients of
the OpenAI and Anthropic APIs read. The URL is a gate's: it leads to the one model server, under this rollout, with a
key of its own, and ends with the activation. Whatever the program leaves running is killed. Its answer becomes a
Responses object. Left to others: isolation (`sandbox`), sessions (`servers.agent`), tokens (the model server).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from toprope.catalog.client_env import client_env, fill, holes
from toprope.catalog.prompts import prompt_of, response_of
from toprope.catalog.said import said
from toprope.errors.kinds import Kind
from toprope.errors.tree import ConfigError, TopropeError
from toprope.sandbox.gate import Gate, GateKeys
from toprope.sandbox.provider import BorrowedSandbox
from toprope.sandbox.spec import MIB, Completed, FileTooLarge, Limits, OutsideWorkdir, SandboxLost, SandboxSpec
from toprope.servers.agent.agent import Activation, Agent

PROMPT_FILE = ".toprope/prompt.txt"
MAX_ANSWER_BYTES = MIB
_MAX_ARGUMENT_BYTES = 128 * 1024 - 1
"""What Linux takes as one argument."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What came of one run of the program: its answer, and why there is none that counts."""

    text: str
    failed: str | None = None
    out_of_time: bool = False
    response_id: str | None = None


class CommandAgent(Agent):
    """`CommandAgent(argv=["python3", "agent.py", "{prompt}"])`.

    `argv`, `stdin`, the values of `env` and of `files` may hold `{base_url}` (ends in /v1), `{root_url}` (without),
    `{api_key}`, `{model}`, `{prompt}`, `{prompt_file}` and `{workdir}`; the prompt must stand in one of them. `files`
    are written into the work directory before each run, `copy` are files of the host, by their path inside, relative
    to the configuration. `answer`: `stdout`, `file:NAME`, or `model`, the last thing that the model said. `model`: the
    name the program is given, where the task names none. `on_failure`: what a program that failed (a status that is
    not 0, killed by a limit, no answer file) makes: a `response` of status failed, which the verifier judges, or a
    `failure` of the episode. One that failed before its model said anything is always a failure. `timeout_s` bounds one
    run; then the response is incomplete. `limits` and `image` are of a sandbox of its own. Bytes of the answer beyond
    `answer_bytes` are left out.
    """

    needs_http_model = True

    def __init__(
        self,
        *,
        directory: Path,
        argv: Sequence[str],
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
        copy: Mapping[str, str] | None = None,
        answer: str = "stdout",
        model: str = "policy",
        on_failure: Literal["response", "failure"] = "response",
        timeout_s: float | None = None,
        limits: Mapping[str, float] | None = None,
        image: str | None = None,
        answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        if not argv or not argv[0]:
            raise ConfigError("argv: it is empty; accepted: a program and its arguments")
        if answer not in ("stdout", "model") and not (answer.startswith("file:") and answer != "file:"):
            raise ConfigError(f"answer: {answer!r} given; accepted: stdout, model, or file:NAME")
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigError(f"timeout_s: {timeout_s} given; accepted: seconds above 0")
        texts = [*argv, stdin or "", *(env or {}).values(), *(files or {}).values()]
        if not any(holes(text) & {"prompt", "prompt_file"} for text in texts):
            raise ConfigError(
                "argv: the prompt reaches the program nowhere; accepted: {prompt} or {prompt_file} in argv, stdin, env "
                "or files"
            )
        self.sandbox = SandboxSpec(limits=_limits(limits or {}), image=image)
        self._argv, self._stdin = list(argv), stdin
        self._env, self._files = dict(env or {}), dict(files or {})
        self._copy = {inside: directory / Path(host).expanduser() for inside, host in (copy or {}).items()}
        for inside, host in self._copy.items():
            if not host.is_file():
                raise ConfigError(f"copy.{inside}: {host} is no file; accepted: a file, relative to the configuration")
        self._answer, self._model = answer, model
        self._on_failure, self._timeout_s, self._answer_bytes = on_failure, timeout_s, answer_bytes

    async def respond(self, activation: Activation) -> dict[str, Any]:
        """The program's answer as a Responses object.

        Raises kind agent_failed where `on_failure` says so, model_unavailable (retryable) where the last thing that the
        program heard from its model was trouble of the infrastructure, session_lost where its sandbox went away.
        """
        assert activation.sandbox is not None  # `sandbox` is set: the agent server made or borrowed one
        sandbox, keys = activation.sandbox, GateKeys(server=activation.model.api_key)
        model = str(activation.request.get("model") or self._model)
        async with sandbox.gate(activation.model.root_url(), keys=keys) as gate:
            activation.partial = partial(_unfinished, gate, model)
            root = gate.inside()
            values = {"base_url": f"{root}/v1", "root_url": root, "api_key": keys.own, "model": model}
            values |= {"prompt": prompt_of(activation.request), "workdir": sandbox.workdir}
            values["prompt_file"] = f"{sandbox.workdir}/{PROMPT_FILE}"
            try:
                done = _without(keys.own, await self._run(sandbox, gate, values))
            finally:
                activation.model.calls += gate.calls
            self._observe(activation, done, gate)
            _require_sound(done, gate)
            outcome = await self._outcome(sandbox, done, gate)
            if outcome.failed is not None and (gate.calls == 0 or self._on_failure == "failure"):
                message = f"command: {outcome.failed}" + ("" if gate.calls else "; its model had not said anything yet")
                kind = Kind.AGENT_TIMEOUT if outcome.out_of_time else Kind.AGENT_FAILED
                raise TopropeError(message, kind=kind, status=502, retryable=True)
            return _response(outcome, model, extended=activation.extended)

    async def _run(self, sandbox: BorrowedSandbox, gate: Gate, values: Mapping[str, str]) -> Completed:
        for path, host in self._copy.items():
            data = await asyncio.to_thread(host.read_bytes)
            await sandbox.write_file(path, data, executable=os.access(host, os.X_OK))
        for path, text in self._files.items():
            await sandbox.write_file(path, fill(text, values).encode("utf-8", "surrogatepass"))
        used = set().union(*(holes(text) for text in [*self._argv, *self._env.values(), *self._files.values()]))
        if "prompt_file" in used | holes(self._stdin or ""):
            await sandbox.write_file(PROMPT_FILE, values["prompt"].encode("utf-8", "surrogatepass"))
        argv = [fill(word, values) for word in self._argv]
        for word in argv:
            if len(word.encode("utf-8", "surrogatepass")) > _MAX_ARGUMENT_BYTES or "\0" in word:
                raise TopropeError(
                    "command: the prompt does not fit into an argument (128 KiB, no zero byte); use {prompt_file} or "
                    "stdin",
                    kind=Kind.AGENT_FAILED,
                    status=502,
                    retryable=False,
                )
        env = client_env(values["root_url"], values["api_key"], values["model"])
        return await sandbox.run(
            argv,
            env=env | {name: fill(value, values) for name, value in self._env.items()},
            stdin=None if self._stdin is None else fill(self._stdin, values).encode("utf-8", "surrogatepass"),
            timeout_s=self._timeout_s,
            output_limit=self._answer_bytes,
            gate=gate,
        )

    def _observe(self, activation: Activation, done: Completed, gate: Gate) -> None:
        activation.invocation.update(
            exit=done.exit,
            killed_by=done.killed_by,
            wall_s=round(done.wall_s, 6),
            stdout_bytes=done.stdout.total,
            stderr_bytes=done.stderr.total,
            stderr_end=done.stderr.data[-2000:].decode("utf-8", "replace"),
            refused_requests=gate.refused,
        )
        if done.hit:
            activation.invocation["hit"] = list(done.hit)
        if activation.number == 1:
            activation.observations.gap("what the program did beside its model calls (tools, files) is not observed")
        if done.stdout.truncated or done.stderr.truncated:
            activation.observations.gap(f"output beyond {self._answer_bytes} bytes was not kept")

    async def _outcome(self, sandbox: BorrowedSandbox, done: Completed, gate: Gate) -> _Outcome:
        failed = _why_failed(done)
        response_id = None
        if self._answer == "stdout":
            text = done.stdout.text.strip()
        elif self._answer == "model":
            last = said(gate.heard)
            text = "" if last is None else last.text
            response_id = None if last is None else last.response_id
            failed = failed or ("the model was not called, or its reply could not be read" if last is None else None)
        else:
            name = self._answer.removeprefix("file:")
            try:
                text = (await sandbox.read_file(name, limit=self._answer_bytes)).decode("utf-8", "replace").strip()
            except (FileNotFoundError, OutsideWorkdir, FileTooLarge) as error:
                text, failed = "", failed or f"there is no answer in {name}: {error}"
        return _Outcome(text, failed, done.timed_out, response_id)


def _response(outcome: _Outcome, model: str, *, extended: bool) -> dict[str, Any]:
    if outcome.failed is None:
        response = response_of(outcome.text, model=model)
    elif outcome.out_of_time:
        reason = "timeout" if extended else None  # the format itself knows no such reason
        response = response_of(outcome.text, model=model, status="incomplete", reason=reason)
    else:
        response = response_of(outcome.text, model=model, status="failed", error=outcome.failed)
    if extended and outcome.response_id is not None:
        response["terminal_response_id"] = outcome.response_id
    return response


def _limits(given: Mapping[str, float]) -> Limits:
    usual = {"wall_s": 3600.0, "cpu_s": 3600.0, "memory_bytes": 4096 * MIB, "processes": 512}
    try:
        return Limits(**{**usual, **given})  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(f"limits: {error}; accepted: {', '.join(Limits.__dataclass_fields__)}") from None


def _why_failed(done: Completed) -> str | None:
    if done.killed_by is not None:
        return f"the program was killed: {done.killed_by}"
    if done.exit != 0:
        last = done.stderr.data[-500:].decode("utf-8", "replace").strip().rpartition("\n")[2]
        return f"the program ended with status {done.exit}" + (f": {last}" if last else "")
    return None


def _without(key: str, done: Completed) -> Completed:
    """What the program wrote, its key (a word of its environment) masked: messages and rows are for many to read."""
    word, mask = key.encode(), b"*" * len(key)
    masked = {
        name: replace(kept, data=kept.data.replace(word, mask))
        for name, kept in (("stdout", done.stdout), ("stderr", done.stderr))
    }
    return replace(done, **masked)  # type: ignore[arg-type]


def _require_sound(done: Completed, gate: Gate) -> None:
    """Raise where what came of the run is not the program's doing."""
    if done.killed_by in ("stop", "lease"):
        raise SandboxLost(f"command: the sandbox went away while the program ran ({done.killed_by})")
    if gate.trouble is not None:
        raise TopropeError(
            f"command: the last model call of the program failed: {gate.trouble}",
            kind=Kind.MODEL_UNAVAILABLE,
            status=502,
            retryable=True,
        )


def _unfinished(gate: Gate, model: str) -> dict[str, Any]:
    last = said(gate.heard)
    return response_of("" if last is None else last.text, model=model, status="incomplete")
