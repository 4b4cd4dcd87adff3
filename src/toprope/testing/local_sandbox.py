"""A sandbox that is none: programs run as they are, in a directory of their own. For tests and for trusted code.

It keeps every word of the interface (leases, borrowers, bounded output and time) and says truthfully that it holds back
nothing else: `require_limits` refuses it for whoever asks for files, network, memory or processes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from toprope.errors.tree import Forbidden
from toprope.protocol.grants import DirectSandbox, SandboxAccess
from toprope.sandbox import workdir
from toprope.sandbox.execute import Bounds, Start, execute
from toprope.sandbox.leases import Lease, LeaseDirectory, LeaseHome
from toprope.sandbox.provider import KEEP_BYTES, MAX_FILE_BYTES
from toprope.sandbox.spec import (
    Aspect,
    Completed,
    Enforcement,
    Report,
    SandboxLost,
    SandboxSpec,
    check_run,
)


class LocalSandboxes:
    """The provider."""

    name = "local"

    def __init__(self, lease_dir: Path) -> None:
        self._leases = LeaseDirectory(lease_dir)

    async def enforces(self) -> Report:
        """Output and time; nothing else."""
        held = {Aspect.OUTPUT: "counted by the owner while it reads", Aspect.WALL_TIME: "the owner's clock"}
        why = "programs run unconfined on the host"
        return {each: Enforcement(each, held.get(each), "" if each in held else why) for each in Aspect}

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        """See `SandboxProvider.create`."""
        return await asyncio.to_thread(self._make, spec)

    async def attach(self, descriptor: Mapping[str, Any]) -> BorrowedLocal:
        """See `SandboxProvider.attach`."""
        sandbox_id, token = descriptor.get("sandbox_id"), descriptor.get("token")
        if not isinstance(sandbox_id, str) or not isinstance(token, str):
            raise Forbidden("sandbox descriptor: expected sandbox_id and token, two strings")
        home = await asyncio.to_thread(self._leases.find, sandbox_id)
        home.check(token)
        return BorrowedLocal(home)

    async def reap(self) -> tuple[str, ...]:
        """See `SandboxProvider.reap`."""
        return await asyncio.to_thread(self._leases.reap, self.name, _free)

    def _make(self, spec: SandboxSpec) -> LocalSandbox:
        self._leases.reap_if_due(self.name, _free)
        home, token = self._leases.open(self.name, spec, lambda sandbox_id: {})
        return LocalSandbox(home, token, lambda home: self._leases.release(home, _free))


class BorrowedLocal:
    """A handle that can run and let go."""

    def __init__(self, home: LeaseHome) -> None:
        self._home = home
        self._spec = home.lease.spec
        self._running: set[asyncio.Task[Completed]] = set()
        self._let_go = False

    @property
    def sandbox_id(self) -> str:
        """See `BorrowedSandbox`."""
        return self._home.lease.sandbox_id

    @property
    def workdir(self) -> str:
        """A directory of the host: nothing is hidden here."""
        return str(self._home.work)

    def inside_url(self, model_url: str) -> str:
        """The same URL: nothing stands between."""
        return model_url

    async def write_file(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """See `BorrowedSandbox.write_file`."""
        self._alive()
        await asyncio.to_thread(
            workdir.write, self._home.work, path, data, owner=None, executable=executable, workdir=self.workdir
        )

    async def read_file(self, path: str, *, limit: int = MAX_FILE_BYTES) -> bytes:
        """See `BorrowedSandbox.read_file`."""
        self._alive()
        return await asyncio.to_thread(workdir.read, self._home.work, path, limit, workdir=self.workdir)

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
        self._alive()
        base = {"PATH": os.defpath, "HOME": self.workdir, "LANG": "C.UTF-8"}
        task = asyncio.ensure_future(
            self._run(argv, {**base, **self._spec.env, **(env or {})}, stdin, timeout_s, output_limit)
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
                raise SandboxLost(f"sandbox {self.sandbox_id}: this handle was let go") from None
            raise

    async def disconnect(self) -> None:
        """See `BorrowedSandbox.disconnect`."""
        self._let_go = True
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def _run(
        self, argv: Sequence[str], env: Mapping[str, str], stdin: bytes | None, timeout_s: float | None, keep: int
    ) -> Completed:
        entries: list[Path] = []

        def started(pid: int) -> None:
            if (entry := self._home.register_run(pid)) is not None:
                entries.append(entry)

        limits = dataclasses.asdict(self._spec.limits)
        wall_s = limits["wall_s"] if timeout_s is None else min(limits["wall_s"], timeout_s)
        try:
            ended = await execute(
                Start(["/bin/sh", "-c", 'exec "$@"', "sh", *argv], env, self.workdir),
                Bounds(wall_s, limits["output_bytes"], keep),
                stdin=stdin,
                check=lambda pid: self._home.end_reason(),
                kill=lambda pid, hard: _kill(pid),
                started=started,
            )
        finally:
            for entry in entries:
                entry.unlink(missing_ok=True)
        return Completed(
            None if ended.killed_by else ended.status,
            ended.stdout,
            ended.stderr,
            ended.killed_by,
            wall_s=ended.wall_s,
        )

    def _alive(self) -> None:
        if self._let_go:
            raise SandboxLost(f"sandbox {self.sandbox_id}: this handle was let go")
        if (reason := self._home.end_reason()) is not None:
            raise SandboxLost(f"sandbox {self.sandbox_id} is gone ({reason})")


class LocalSandbox(BorrowedLocal):
    """The owner's handle."""

    def __init__(self, home: LeaseHome, token: str, release: Callable[[LeaseHome], None]) -> None:
        super().__init__(home)
        self._token = token
        self._release = release

    def access(self) -> SandboxAccess:
        """See `Sandbox.access`."""
        descriptor = {"sandbox_id": self.sandbox_id, "token": self._token}
        return SandboxAccess(connection=DirectSandbox(LocalSandboxes.name, descriptor), workdir=self.workdir)

    async def stop(self) -> None:
        """See `Sandbox.stop`."""
        self._home.forbid()
        await self.disconnect()
        await asyncio.shield(asyncio.to_thread(self._release, self._home))


def _free(lease: Lease) -> None:
    """Nothing is held beside the processes and the directory."""


def _kill(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
