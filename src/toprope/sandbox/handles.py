"""Handles of the sandboxes whose programs are processes of ours: what one may do with them, and the right to stop one.

Each run starts `inside.py`, which starts the program; both die with it, and with us. Left to others: how a kind of
sandbox starts a run (`bwrap_handles`, `plain`), time and output (`execute`), the model's URL (`gate`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from toprope.protocol.grants import DirectSandbox, SandboxAccess
from toprope.sandbox import cgroups, workdir
from toprope.sandbox.execute import Bounds, Ended, Start, execute
from toprope.sandbox.gate import INSIDE_PORT, Gate, GateKeys, allowed_url
from toprope.sandbox.leases import LeaseHome
from toprope.sandbox.processes import kill_marked, kill_sandbox, memory_of, usage_below
from toprope.sandbox.provider import KEEP_BYTES, MAX_FILE_BYTES
from toprope.sandbox.runs import Runs
from toprope.sandbox.spec import Aspect, Completed, Limits, SandboxBusy, SandboxLost, check_run

_OPEN_FILES = 1024
_SIGNALS = {128 + 24: Aspect.CPU.value, 128 + 25: "file_size"}  # SIGXCPU, SIGXFSZ
_KILLED = 128 + 9


class ProcessHandle:
    """A handle that can run and let go. A kind of sandbox says how a run starts."""

    base_env: ClassVar[Mapping[str, str]] = {}
    gate_inside: ClassVar[str | None] = None
    """Where code inside finds the sockets of gates; None: it reaches our loopback itself."""

    def __init__(self, home: LeaseHome, groups: cgroups.Place | str, *, owner: int | None = None) -> None:
        self._home = home
        self._spec = home.lease.spec
        self._file_owner = owner
        self._group = cgroups.Group(groups, group_name(self.sandbox_id)) if isinstance(groups, cgroups.Place) else None
        self._runs = Runs(self.sandbox_id, home.end_reason)

    @property
    def sandbox_id(self) -> str:
        """See `BorrowedSandbox`."""
        return self._home.lease.sandbox_id

    @property
    def workdir(self) -> str:
        """See `BorrowedSandbox`."""
        return str(self._home.work)

    def environment(self) -> Mapping[str, str]:
        """What every run is given, before what its sandbox and its caller add."""
        return self.base_env

    async def write_file(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """See `BorrowedSandbox.write_file`."""
        with self._runs.using():
            await asyncio.to_thread(
                workdir.write,
                self._home.work,
                path,
                data,
                owner=self._file_owner,
                executable=executable,
                workdir=self.workdir,
            )

    async def read_file(self, path: str, *, limit: int = MAX_FILE_BYTES) -> bytes:
        """See `BorrowedSandbox.read_file`."""
        with self._runs.using():
            return await asyncio.to_thread(workdir.read, self._home.work, path, limit, workdir=self.workdir)
        raise AssertionError("unreachable")

    def gate(self, model_url: str, *, keys: GateKeys | None = None) -> Gate:
        """See `BorrowedSandbox.gate`."""
        self._runs.require()
        path = self._home.inside / f"{os.urandom(4).hex()}.sock" if self.gate_inside is not None else None
        return Gate(allowed_url(self.sandbox_id, self._spec, model_url), path, keys=keys)

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        output_limit: int = KEEP_BYTES,
        model_url: str | None = None,
        gate: Gate | None = None,
    ) -> Completed:
        """See `BorrowedSandbox.run`."""
        check_run(argv, env)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._runs.using())
            if gate is None and (url := model_url or self._spec.model_url) is not None:
                gate = await stack.enter_async_context(self.gate(url))
            limits = self._spec.limits
            if timeout_s is not None:
                limits = dataclasses.replace(limits, wall_s=min(limits.wall_s, timeout_s))
            given = {**self.environment(), **self._spec.env, **(env or {})}
            return await self._runs.track(self._run(argv, given, stdin, limits, output_limit, gate))
        raise AssertionError("unreachable")

    async def disconnect(self) -> None:
        """See `BorrowedSandbox.disconnect`."""
        await self._runs.let_go()

    # -- what a kind of sandbox says -----------------------------------------------------------------------------

    def _start(
        self, stack: contextlib.AsyncExitStack, group: cgroups.Run | None, orders: dict[str, Any], status: int
    ) -> Start:
        raise TypeError(f"{type(self).__name__} does not define _start")

    def _forward(self, gate: Gate | None) -> dict[str, Any] | None:
        """The orders of the forwarder inside; None where code inside needs none."""
        if gate is None or gate.path is None:
            return None
        return {"port": INSIDE_PORT, "socket": f"{self.gate_inside}/{gate.path.name}"}

    # -- one run -------------------------------------------------------------------------------------------------

    async def _run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdin: bytes | None,
        limits: Limits,
        keep: int,
        gate: Gate | None,
    ) -> Completed:
        async with contextlib.AsyncExitStack() as stack:
            group = await stack.enter_async_context(self._run_group())
            orders: dict[str, Any] = {"argv": list(argv), "env": dict(env), "cwd": self.workdir}
            orders["forward"] = self._forward(gate)
            orders["limits"] = self._resource_limits(limits, counted=group is not None)
            ours, theirs = socket.socketpair()
            stack.callback(ours.close)
            stack.callback(theirs.close)
            start = self._start(stack, group, orders, theirs.fileno())
            before = self._counts()
            ended = await self._execute(start, limits, keep, stdin, group, stack, ours)
            after = self._counts()
            ours.setblocking(False)
            if ended.killed_by is None and not _came_to_life(ours):
                said = ended.stderr.text.strip()[-500:]
                self._runs.require()
                # It could be when its provider was opened.
                raise SandboxBusy(f"the sandbox could not be started (status {ended.status}): {said}")
            return _completed(ended, before, after)
        raise AssertionError("unreachable")

    @contextlib.asynccontextmanager
    async def _run_group(self) -> AsyncIterator[cgroups.Run | None]:
        if self._group is None:
            yield None
            return
        try:
            group = self._group.run()
        except FileNotFoundError:
            raise SandboxLost(f"sandbox {self.sandbox_id} was stopped") from None
        try:
            yield group
        finally:
            await asyncio.shield(asyncio.to_thread(group.remove))

    async def _execute(
        self,
        start: Start,
        limits: Limits,
        keep: int,
        stdin: bytes | None,
        group: cgroups.Run | None,
        stack: contextlib.AsyncExitStack,
        line: socket.socket,
    ) -> Ended:
        def kill(pid: int, hard: bool) -> None:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_WR)  # the first process inside ends, with everything
            kill_sandbox(pid, hard=hard)
            if hard and group is not None:
                group.kill()

        def left_behind() -> None:
            if group is not None:
                group.kill()
            if start.mark is not None:
                kill_marked(start.mark)

        def check(pid: int) -> str | None:
            if (reason := self._home.end_reason()) is not None:
                return reason
            if group is not None:
                try:
                    return Aspect.CPU if group.cpu_s() > limits.cpu_s else None
                except FileNotFoundError:
                    return "stop"  # the owner removed the group between two lines of ours
            return _passed(pid, limits)

        def started(pid: int) -> None:
            if (entry := self._home.register_run(pid)) is not None:
                stack.callback(entry.unlink, missing_ok=True)

        return await execute(
            start,
            Bounds(limits.wall_s, limits.output_bytes, keep),
            stdin=stdin,
            check=check,
            kill=kill,
            started=started,
            left_behind=left_behind,
        )

    def _resource_limits(self, limits: Limits, *, counted: bool) -> dict[str, int]:
        held = {
            "RLIMIT_CORE": 0,
            "RLIMIT_NOFILE": _OPEN_FILES,
            "RLIMIT_CPU": max(1, int(limits.cpu_s + 0.999)),
            "RLIMIT_FSIZE": limits.file_bytes,
            "RLIMIT_NPROC": limits.processes + cgroups.OVERHEAD_PROCESSES,
        }
        return held if counted else {**held, "RLIMIT_DATA": limits.memory_bytes}

    def _counts(self) -> tuple[int, int]:
        try:
            return (self._group.oom_kills(), self._group.refused_forks()) if self._group is not None else (0, 0)
        except FileNotFoundError:
            return (0, 0)  # stopped meanwhile


class OwnedHandle(ProcessHandle):
    """What an owner's handle adds to a borrower's: the right to lend and to stop."""

    def own(self, token: str, release: Callable[[LeaseHome], None]) -> None:
        """Take it: `token` is the borrower's, `release` gives back everything that the lease names."""
        self._token = token
        self._release = release

    def access(self) -> SandboxAccess:
        """See `Sandbox.access`."""
        descriptor = {"sandbox_id": self._home.lease.sandbox_id, "token": self._token}
        return SandboxAccess(connection=DirectSandbox(self._home.lease.provider, descriptor), workdir=self.workdir)

    async def stop(self) -> None:
        """See `Sandbox.stop`."""
        await asyncio.shield(self._stop())

    async def _stop(self) -> None:
        self._home.forbid()
        await self.disconnect()
        await asyncio.to_thread(self._release, self._home)


def group_name(sandbox_id: str) -> str:
    """The name of a sandbox's control groups."""
    return f"toprope-{sandbox_id}"


def free_groups(resources: Mapping[str, Sequence[str]], sandbox_id: str) -> None:
    """Remove the control groups that a lease names, with every process in them."""
    for path in resources.get("cgroups", ()):
        if Path(path).name == group_name(sandbox_id):
            cgroups.remove(Path(path))


def memory_file(stack: contextlib.ExitStack | contextlib.AsyncExitStack, data: bytes) -> int:
    """A handle of a file in memory that holds `data`; closed with `stack`."""
    handle = os.memfd_create("toprope")
    stack.callback(os.close, handle)
    with os.fdopen(handle, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(handle, 0, os.SEEK_SET)
    return handle


def orders_file(stack: contextlib.AsyncExitStack, orders: Mapping[str, Any]) -> int:
    """The orders for `inside.py`, in memory: neither the host's list of processes nor the inside shows them."""
    return memory_file(stack, json.dumps(orders).encode())


def _came_to_life(line: socket.socket) -> bool:
    try:
        return line.recv(1) == b"1"
    except OSError:
        return False


def _passed(pid: int, limits: Limits) -> str | None:
    used = usage_below(pid)
    if used.cpu_s > limits.cpu_s:
        return Aspect.CPU
    if used.resident_bytes > limits.memory_bytes and memory_of(used.family) > limits.memory_bytes:
        return Aspect.MEMORY
    return Aspect.PROCESSES if used.processes > limits.processes + cgroups.OVERHEAD_PROCESSES else None


def _completed(ended: Ended, before: tuple[int, int], after: tuple[int, int]) -> Completed:
    hit = [name for name, was, now in zip((Aspect.MEMORY, Aspect.PROCESSES), before, after, strict=True) if now > was]
    killed_by = ended.killed_by or _SIGNALS.get(ended.status)
    if killed_by is None and ended.status == _KILLED and Aspect.MEMORY in hit:
        killed_by = Aspect.MEMORY
    exit_status = None if killed_by is not None else ended.status
    return Completed(exit_status, ended.stdout, ended.stderr, killed_by, tuple(hit), ended.wall_s)
