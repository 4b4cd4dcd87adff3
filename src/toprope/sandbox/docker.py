"""Sandboxes by a container engine, through the Docker SDK (extra `docker`).

One container for the life of a sandbox, which does nothing but sleep until its lease is over: it ends by itself when
nobody is left to stop it. Each run is an exec in it. What a run leaves behind (files anywhere in the container,
daemons) stays until the sandbox is stopped. An exec cannot be killed through the API, so a run that passes a limit
costs the container all its processes: it is killed and started again, its files stay.

The engine must be on this host: `inside.py`, input files and the model's socket reach the container by a bind mount.
Left to others: leases (`leases`), the model's URL (`gate`).
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
from typing import Any

from toprope.errors.tree import ConfigError
from toprope.protocol.grants import DirectSandbox, SandboxAccess
from toprope.sandbox import docker_files, inside
from toprope.sandbox.docker_exec import Exec
from toprope.sandbox.execute import WATCH_S
from toprope.sandbox.gate import INSIDE_PORT, Gate, GateKeys, allowed_url, check_url, inside_url
from toprope.sandbox.leases import Lease, LeaseDirectory, LeaseHome, read_descriptor
from toprope.sandbox.provider import KEEP_BYTES, MAX_FILE_BYTES
from toprope.sandbox.runs import Runs
from toprope.sandbox.spec import (
    WORKDIR,
    Aspect,
    Completed,
    Enforcement,
    Report,
    SandboxBusy,
    SandboxLost,
    SandboxSpec,
    SandboxUnavailable,
    check_run,
)

RUN = "/run/toprope"
_ORDERS = "TOPROPE_ORDERS"
_KILLED = 128 + 9
_SIGNALS = {128 + 24: Aspect.CPU.value, 128 + 25: "file_size"}  # SIGXCPU, SIGXFSZ


class Docker:
    """The provider. `engine`: URL of the engine (`unix:///...`, `tcp://...`), None for what the environment says.

    `image`: what sandboxes are made of unless their spec says otherwise; it needs `sh` and `sleep`, and `python3` for
    runs with a model URL. It is not pulled. `user`: `uid:gid` inside.
    """

    kind = "docker"

    def __init__(
        self,
        lease_dir: Path,
        *,
        name: str = "docker",
        engine: str | None = None,
        image: str | None = None,
        user: str = "1000:1000",
    ) -> None:
        self.name = name
        self._leases = LeaseDirectory(lease_dir)
        self._engine = engine
        self._image = image
        self._user = user
        self._connected: Any = None

    async def enforces(self) -> Report:
        """See `SandboxProvider.enforces`: what the engine says of itself."""
        try:
            facts = await asyncio.to_thread(lambda: self._client().info())
        except SandboxUnavailable as error:
            return {aspect: Enforcement(aspect, None, error.message) for aspect in Aspect}
        except Exception as error:  # the SDK's own, and those of the libraries below it: the engine does not answer
            return {aspect: Enforcement(aspect, None, f"the engine does not answer: {error}") for aspect in Aspect}
        engine = f"container engine {facts.get('ServerVersion', '?')}"
        unable = "the engine says that its kernel cannot"
        memory = f"{engine}, memory limit" if facts.get("MemoryLimit") else None
        processes = f"{engine}, pids limit" if facts.get("PidsLimit") else None
        lines = (
            Enforcement(Aspect.FILES, f"{engine}, file system of the container; no capabilities, user {self._user}"),
            Enforcement(Aspect.NETWORK, f"{engine}, network none; one URL through a unix socket, judged outside"),
            Enforcement(Aspect.CPU, "RLIMIT_CPU for each process"),
            Enforcement(Aspect.MEMORY, memory, "" if memory else unable),
            Enforcement(Aspect.PROCESSES, processes, "" if processes else unable),
            Enforcement(Aspect.OUTPUT, "counted by the owner while it reads"),
            Enforcement(Aspect.WALL_TIME, "the owner's clock; the container itself ends with its lease"),
        )
        return {line.aspect: line for line in lines}

    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        """See `SandboxProvider.create`."""
        if spec.read_only:
            raise ConfigError("sandbox read_only: docker sandboxes see no tree of the host; put it into the image")
        if spec.model_url is not None:
            check_url(spec.model_url)
        image = spec.image or self._image
        if image is None:
            raise ConfigError("sandbox image: docker sandboxes need one; name an image that the engine has")
        return await asyncio.to_thread(self._make, spec, image)

    async def attach(self, descriptor: Mapping[str, Any]) -> BorrowedDocker:
        """See `SandboxProvider.attach`."""
        sandbox_id, token = read_descriptor(descriptor)
        home = await asyncio.to_thread(self._leases.borrow, sandbox_id, token, self.name, self.kind)
        return BorrowedDocker(await asyncio.to_thread(self._client), self._user, home)

    async def reap(self) -> tuple[str, ...]:
        """See `SandboxProvider.reap`."""
        return await asyncio.to_thread(self._leases.reap, self.kind, self._free)

    def _make(self, spec: SandboxSpec, image: str) -> DockerSandbox:
        client = self._client()
        self._leases.reap_if_due(self.kind, self._free)
        engine = [self._engine] if self._engine else []
        home, token = self._leases.open(
            self.name,
            self.kind,
            spec,
            lambda sandbox_id: {"containers": [f"toprope-{sandbox_id}"], "engine": engine},
        )
        try:
            (home.inside / "inside.py").write_text(Path(inside.__file__).read_text("utf-8"))
            (home.inside / "inside.py").chmod(0o644)
            home.inside.chmod(0o755)
            container = client.containers.create(image, **self._settings(spec, home))
            container.put_archive("/", docker_files.tar_of_workdir(self._user))
            container.start()
        except BaseException as error:
            self._release(home)
            if isinstance(error, Exception):  # the SDK's errors have no common root that is only theirs
                raise _refusal(error)(f"docker: no sandbox from image {image!r}: {error}") from error
            raise
        return DockerSandbox(client, self._user, home, token, self._release)

    def _settings(self, spec: SandboxSpec, home: LeaseHome) -> dict[str, Any]:
        types = importlib.import_module("docker.types")
        limits = spec.limits
        cpu = max(1, int(limits.cpu_s + 0.999))
        return {
            "name": home.lease.resources["containers"][0],
            "command": ["sleep", str(int(spec.lease_s) + 1)],
            "entrypoint": [],
            "init": True,
            "user": self._user,
            "working_dir": WORKDIR,
            "environment": {"HOME": WORKDIR, "LANG": "C.UTF-8", **spec.env},
            "network_mode": "none",
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            "mem_limit": limits.memory_bytes,
            "memswap_limit": limits.memory_bytes,
            "pids_limit": limits.processes,
            "ulimits": [
                types.Ulimit(name="cpu", soft=cpu, hard=cpu),
                types.Ulimit(name="fsize", soft=limits.file_bytes, hard=limits.file_bytes),
                types.Ulimit(name="core", soft=0, hard=0),
            ],
            "tmpfs": {"/tmp": f"size={min(limits.memory_bytes // 4, limits.file_bytes)},mode=1777"},
            "volumes": {str(home.inside): {"bind": RUN, "mode": "ro"}},
            "labels": {"toprope.sandbox": home.lease.sandbox_id, "toprope.deadline": str(int(home.lease.deadline))},
        }

    def _release(self, home: LeaseHome) -> None:
        self._leases.release(home, self._free)

    def _free(self, lease: Lease) -> None:
        errors = importlib.import_module("docker.errors")
        for name in lease.resources.get("containers", ()):
            try:
                self._client().api.remove_container(name, force=True, v=True)
            except errors.NotFound:
                continue  # it was never made, or somebody else was here first

    def _client(self) -> Any:
        if self._connected is None:
            try:
                sdk = importlib.import_module("docker")
            except ImportError:
                raise SandboxUnavailable(
                    "docker sandboxes need the extra `docker`: pip install 'toprope[docker]'"
                ) from None
            try:
                self._connected = sdk.DockerClient(base_url=self._engine) if self._engine else sdk.from_env()
            except sdk.errors.DockerException as error:
                raise SandboxBusy(f"docker: no engine answers: {error}") from None
        return self._connected


def _refusal(error: Exception) -> type[SandboxUnavailable]:
    """Whether the engine says that it cannot be done (4xx: no such image, a setting that it does not take)."""
    errors = importlib.import_module("docker.errors")
    return SandboxUnavailable if isinstance(error, errors.APIError) and error.is_client_error() else SandboxBusy


def reap(lease_dir: Path) -> tuple[str, ...]:
    """End every container below `lease_dir` whose owner is dead or whose lease is over, at the engine that made it.

    Their ids. Blocks. Raises `SandboxUnavailable` where an engine does not answer.
    """

    def free(lease: Lease) -> None:
        engine = lease.resources.get("engine", ())
        Docker(lease_dir, engine=engine[0] if engine else None)._free(lease)

    return LeaseDirectory(lease_dir).reap(Docker.kind, free)


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
        self._runs.require()
        await asyncio.to_thread(
            docker_files.write, self._api, self._container, path, data, user=self._user, executable=executable
        )

    async def read_file(self, path: str, *, limit: int = MAX_FILE_BYTES) -> bytes:
        """See `BorrowedSandbox.read_file`."""
        self._runs.require()
        return await asyncio.to_thread(docker_files.read, self._api, self._container, path, limit)

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
        self._runs.require()
        async with contextlib.AsyncExitStack() as stack:
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
