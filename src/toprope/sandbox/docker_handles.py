"""Handles of a container sandbox: each run is an exec in the one container that lives as long as the sandbox.

An exec cannot be killed through the API, so a run that passes a limit, or is let go, costs the container all its
processes: it is killed and started again, its files stay. Left to others: who makes containers (`docker`), one exec
(`docker_exec`), files (`docker_files`), the model's URL (`gate`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from toprope.protocol.grants import DirectSandbox, SandboxAccess
from toprope.sandbox import docker_files, inside
from toprope.sandbox.docker_exec import Exec
from toprope.sandbox.execute import WATCH_S
from toprope.sandbox.gate import INSIDE_PORT, Gate, GateKeys, allowed_url, inside_url
from toprope.sandbox.leases import LeaseHome
from toprope.sandbox.provider import KEEP_BYTES, MAX_FILE_BYTES
from toprope.sandbox.runs import Runs
from toprope.sandbox.spec import WORKDIR, Aspect, Completed, SandboxBusy, SandboxLost, check_run

RUN = "/run/toprope"
"""Where the container finds what it needs from us."""

T = TypeVar("T")

_ORDERS = "TOPROPE_ORDERS"
_KILLED = 128 + 9
_SIGNALS = {128 + 24: Aspect.CPU.value, 128 + 25: "file_size"}  # SIGXCPU, SIGXFSZ


class BorrowedDocker:
    """A handle that can run and let go."""

    def __init__(self, client: Any, user: str, home: LeaseHome) -> None:
        self._api = client.api
        self._user = user
        self._home = home
        self._spec = home.lease.spec
        self._container = home.lease.resources["containers"][0]
        self._runs = Runs(self.sandbox_id, home.end_reason)

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

    def gate(self, model_url: str, *, keys: GateKeys | None = None) -> Gate:
        """See `BorrowedSandbox.gate`."""
        self._runs.require()
        url = allowed_url(self.sandbox_id, self._spec, model_url)
        return Gate(url, self._home.inside / f"{os.urandom(4).hex()}.sock", keys=keys)

    async def write_file(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """See `BorrowedSandbox.write_file`."""
        with self._runs.using():
            await asyncio.to_thread(
                self._on_files, docker_files.write, path, data, user=self._user, executable=executable
            )

    async def read_file(self, path: str, *, limit: int = MAX_FILE_BYTES) -> bytes:
        """See `BorrowedSandbox.read_file`."""
        with self._runs.using():
            return await asyncio.to_thread(self._on_files, docker_files.read, path, limit)
        raise AssertionError("unreachable")

    def _on_files(self, work: Callable[..., T], *given: Any, **named: Any) -> T:
        """What `work` returns. The engine says "not found" of a file and of a container alike: `SandboxLost` here."""
        errors = importlib.import_module("docker.errors")
        try:
            return work(self._api, self._container, *given, **named)
        except (FileNotFoundError, errors.NotFound):
            try:
                self._api.inspect_container(self._container)
            except errors.NotFound:
                raise SandboxLost(f"sandbox {self.sandbox_id}: somebody removed its container") from None
            raise

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
        wall_s = self._spec.limits.wall_s if timeout_s is None else min(self._spec.limits.wall_s, timeout_s)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._runs.using())
            if gate is None and (url := model_url or self._spec.model_url) is not None:
                gate = await stack.enter_async_context(self.gate(url))
            return await self._runs.track(self._run(argv, dict(env or {}), stdin, wall_s, output_limit, gate))
        raise AssertionError("unreachable")

    async def disconnect(self) -> None:
        """See `BorrowedSandbox.disconnect`. Runs of this handle that still go on cost the container its processes."""
        await self._runs.let_go()

    async def _run(
        self,
        argv: Sequence[str],
        given: dict[str, str],
        stdin: bytes | None,
        wall_s: float,
        output_limit: int,
        gate: Gate | None,
    ) -> Completed:
        async with contextlib.AsyncExitStack() as stack:
            command = list(argv)
            if stdin is not None:
                file = self._home.inside / f"{os.urandom(4).hex()}.in"
                stack.callback(file.unlink, missing_ok=True)
                await asyncio.to_thread(_put, file, stdin)
                command = ["/bin/sh", "-c", 'exec "$@" <"$0"', f"{RUN}/{file.name}", *command]
            if gate is not None and gate.path is not None:
                forward = {"port": INSIDE_PORT, "socket": f"{RUN}/{gate.path.name}"}
                orders = {"argv": command, "env": {}, "cwd": WORKDIR, "limits": {}, "forward": forward}
                command, given = ["python3", f"{RUN}/inside.py", _ORDERS], {**given, _ORDERS: json.dumps(orders)}
            # The program waits until its output is read: the SDK drops what comes together with the engine's reply. By
            # a shell also so that a program that does not exist is status 127, whatever the engine makes of it.
            go = self._home.inside / f"{os.urandom(4).hex()}.go"
            stack.callback(go.unlink, missing_ok=True)
            os.mkfifo(go)
            go.chmod(0o644)
            handle = os.open(go, os.O_RDWR)
            stack.callback(os.close, handle)
            command = ["/bin/sh", "-c", 'read -r _ <"$0"; exec "$@"', f"{RUN}/{go.name}", *command]
            run = Exec(self._api, self._container, output_limit, self._spec.limits.output_bytes, handle)
            return await self._watch(run, command, given, wall_s)
        raise AssertionError("unreachable")

    async def _watch(self, run: Exec, command: list[str], env: dict[str, str], wall_s: float) -> Completed:
        began = time.monotonic()
        # A thread of its own: in the loop's pool, as many runs as it has threads would keep `kill` from being called.
        thread = ThreadPoolExecutor(1, "sandbox-run")
        reading = asyncio.get_running_loop().run_in_executor(thread, run.read, command, env, self._user)
        thread.shutdown(wait=False)
        try:
            while not reading.done():
                left = began + wall_s - time.monotonic()
                if (reason := self._home.end_reason()) is not None:
                    await asyncio.to_thread(run.kill, reason)
                elif left <= 0:
                    await asyncio.to_thread(run.kill, Aspect.WALL_TIME)
                await asyncio.wait({reading}, timeout=WATCH_S if left <= 0 else min(WATCH_S, left))
            status, out_of_memory = await reading
        except importlib.import_module("docker.errors").APIError as error:
            reason = self._home.end_reason()
            if reason is None:
                raise SandboxBusy(f"docker: the run could not be finished: {error}") from error
            raise SandboxLost(f"sandbox {self.sandbox_id} went away during the run ({reason})") from None
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.to_thread(run.kill, "stop"))
            await asyncio.wait({reading})
            raise
        finally:
            if run.killed_by is not None and self._home.end_reason() is None:
                await asyncio.shield(asyncio.to_thread(run.revive))
        stdout, stderr = run.kept()
        if status == 125 and stderr.data.startswith(inside.NOT_STARTED.encode()):
            raise SandboxBusy(f"docker: the run could not be started: {stderr.text.strip()[-300:]}")
        killed_by = run.killed_by or (None if status is None else _SIGNALS.get(status))
        if killed_by is None and status == _KILLED and out_of_memory:
            killed_by = Aspect.MEMORY
        hit = (Aspect.MEMORY.value,) if out_of_memory else ()
        return Completed(None if killed_by else status, stdout, stderr, killed_by, hit, time.monotonic() - began)


class DockerSandbox(BorrowedDocker):
    """The owner's handle."""

    def __init__(
        self, client: Any, user: str, home: LeaseHome, token: str, release: Callable[[LeaseHome], None]
    ) -> None:
        super().__init__(client, user, home)
        self._token = token
        self._release = release

    def access(self) -> SandboxAccess:
        """See `Sandbox.access`."""
        descriptor = {"sandbox_id": self.sandbox_id, "token": self._token}
        return SandboxAccess(connection=DirectSandbox(self._home.lease.provider, descriptor), workdir=WORKDIR)

    async def stop(self) -> None:
        """See `Sandbox.stop`."""
        await asyncio.shield(self._stop())

    async def _stop(self) -> None:
        self._home.forbid()
        await self.disconnect()
        await asyncio.to_thread(self._release, self._home)


def _put(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    file.chmod(0o644)
