"""Handles of a bubblewrap sandbox: what a borrower may do with one, and the owner's right to stop it.

Each run is a sandbox of its own making over the same work directory, so that nothing but files is left of it. Left to
others: who makes sandboxes and says what they hold back (`bubblewrap`), the command line (`bwrap_command`), time and
output (`execute`), the model's URL (`gate`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toprope.protocol.grants import DirectSandbox, SandboxAccess
from toprope.sandbox import bwrap_command as commands
from toprope.sandbox import cgroups, workdir
from toprope.sandbox.execute import Bounds, Ended, Start, execute
from toprope.sandbox.gate import INSIDE_PORT, Gate, inside_url, url_of_run
from toprope.sandbox.leases import LeaseHome
from toprope.sandbox.processes import kill_sandbox, memory_of, usage_below
from toprope.sandbox.provider import KEEP_BYTES, MAX_FILE_BYTES
from toprope.sandbox.spec import (
    WORKDIR,
    Aspect,
    Completed,
    Limits,
    SandboxLost,
    SandboxUnavailable,
    check_run,
)

_ENV = {"HOME": WORKDIR, "LANG": "C.UTF-8", "TMPDIR": "/tmp", "USER": "sandbox", "LOGNAME": "sandbox", "TERM": "dumb"}
_OPEN_FILES = 1024
_SIGNALS = {128 + 24: Aspect.CPU.value, 128 + 25: "file_size"}  # SIGXCPU, SIGXFSZ
_KILLED = 128 + 9


@dataclass(frozen=True, slots=True)
class Host:
    """What a handle needs to know of this host: its programs, where control groups go (or why nowhere), and which user
    sandboxes are (None: the one who runs us)."""

    provider: str
    programs: commands.Programs
    groups: cgroups.Place | str
    user: int | None


class BorrowedBubblewrap:
    """A handle that can run and let go."""

    def __init__(self, host: Host, home: LeaseHome) -> None:
        self._host = host
        self._home = home
        self._spec = home.lease.spec
        groups = host.groups
        self._group = cgroups.Group(groups, group_name(self.sandbox_id)) if isinstance(groups, cgroups.Place) else None
        self._running: set[asyncio.Task[Any]] = set()
        self._let_go = False

    @property
    def sandbox_id(self) -> str:
        """See `BorrowedSandbox`."""
        return self._home.lease.sandbox_id

    @property
    def workdir(self) -> str:
        """See `BorrowedSandbox`."""
        return WORKDIR

    def inside_url(self, model_url: str) -> str:
        """See `BorrowedSandbox.inside_url`."""
        return inside_url(model_url)

    async def write_file(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """See `BorrowedSandbox.write_file`."""
        self._alive()
        owner = self._host.user
        await asyncio.to_thread(workdir.write, self._home.work, path, data, owner=owner, executable=executable)

    async def read_file(self, path: str, *, limit: int = MAX_FILE_BYTES) -> bytes:
        """See `BorrowedSandbox.read_file`."""
        self._alive()
        return await asyncio.to_thread(workdir.read, self._home.work, path, limit)

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        output_limit: int = KEEP_BYTES,
        model_url: str | None = None,
    ) -> Completed:
        """See `BorrowedSandbox.run`."""
        check_run(argv, env)
        url = url_of_run(self.sandbox_id, self._spec.model_url, model_url)
        self._alive()
        limits = self._spec.limits
        if timeout_s is not None:
            limits = dataclasses.replace(limits, wall_s=min(limits.wall_s, timeout_s))
        task = asyncio.get_running_loop().create_task(
            self._run(
                argv,
                {**_ENV, "PATH": commands.search_path(), **self._spec.env, **(env or {})},
                stdin,
                limits,
                output_limit,
                url,
            )
        )
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                task.cancel()  # once: a second time would break into its clean-up
                await asyncio.wait({task})
            if self._let_go:
                raise SandboxLost(f"sandbox {self.sandbox_id}: this handle was let go while the run went on") from None
            raise

    async def disconnect(self) -> None:
        """See `BorrowedSandbox.disconnect`."""
        self._let_go = True
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _alive(self) -> None:
        if self._let_go:
            raise SandboxLost(f"sandbox {self.sandbox_id}: this handle was let go")
        if (reason := self._home.end_reason()) is not None:
            raise SandboxLost(f"sandbox {self.sandbox_id} is gone ({reason})")

    async def _run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdin: bytes | None,
        limits: Limits,
        keep: int,
        url: str | None,
    ) -> Completed:
        async with contextlib.AsyncExitStack() as stack:
            forward = None
            if url is not None:
                gate = Gate(url, self._home.inside / f"{os.urandom(4).hex()}.sock")
                stack.push_async_callback(gate.close)
                await gate.open()
                forward = {"port": INSIDE_PORT, "socket": f"{commands.RUN}/{gate.path.name}"}
            group = await stack.enter_async_context(self._run_group())
            orders: dict[str, Any] = {"argv": list(argv), "env": dict(env), "cwd": WORKDIR, "forward": forward}
            orders["limits"] = self._resource_limits(limits, counted=group is not None)
            ours, theirs = socket.socketpair()
            stack.callback(ours.close)
            stack.callback(theirs.close)
            config = _memory_file(stack, json.dumps(orders).encode())
            start = self._start(stack, group, config, theirs.fileno())
            before = self._counts()
            ended = await self._execute(start, limits, keep, stdin, group, stack, ours)
            after = self._counts()
            ours.setblocking(False)
            if ended.killed_by is None and not _came_to_life(ours):
                said = ended.stderr.text.strip()[-500:]
                self._alive()
                raise SandboxUnavailable(f"the sandbox could not be started (status {ended.status}): {said}")
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

    def _start(
        self,
        stack: contextlib.ExitStack | contextlib.AsyncExitStack,
        group: cgroups.Run | None,
        config: int,
        status: int,
    ) -> Start:
        program, tree = commands.interpreter()
        extra = tuple(dict.fromkeys((*([tree] if tree else []), *self._spec.read_only)))
        trees = commands.Trees(self._home.work, self._home.inside, extra)
        stage = None
        if self._host.user is not None:
            place, words, trees = commands.staged(trees)
            stage = (place, words)
        size = min(self._spec.limits.memory_bytes // 4, self._spec.limits.file_bytes)
        arguments = commands.bwrap_arguments(trees, temporary_bytes=size)
        # Through a file in memory, so that neither the host's list of processes nor the inside shows paths of ours.
        told = _memory_file(stack, b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in arguments))
        own = [program, "-I", "-S", f"{commands.RUN}/inside.py", str(config), str(status)]
        joins = group.joins if group is not None else ()
        argv = commands.start_command(
            self._host.programs, joins, stage, self._host.user, ["--args", str(told), "--", *own]
        )
        return Start(argv, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, "/", (config, status, told))

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


class BubblewrapSandbox(BorrowedBubblewrap):
    """The owner's handle."""

    def __init__(self, host: Host, home: LeaseHome, token: str, release: Callable[[LeaseHome], None]) -> None:
        super().__init__(host, home)
        self._token = token
        self._release = release

    def access(self) -> SandboxAccess:
        """See `Sandbox.access`."""
        descriptor = {"sandbox_id": self.sandbox_id, "token": self._token}
        return SandboxAccess(connection=DirectSandbox(self._host.provider, descriptor), workdir=WORKDIR)

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


def _memory_file(stack: contextlib.ExitStack | contextlib.AsyncExitStack, data: bytes) -> int:
    handle = os.memfd_create("toprope")
    stack.callback(os.close, handle)
    with os.fdopen(handle, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(handle, 0, os.SEEK_SET)
    return handle


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
