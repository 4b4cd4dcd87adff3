"""Sandboxes by a container engine, through the Docker SDK (extra `docker`).

One container for the life of a sandbox, which does nothing but sleep until its lease is over: it ends by itself when
nobody is left to stop it. Each run is an exec in it. What a run leaves behind (files anywhere in the container,
daemons) stays until the sandbox is stopped.

The engine must be on this host: `inside.py`, input files and the model's socket reach the container by a bind mount.
Left to others: what can be done with a sandbox (`docker_handles`), how long it lives (`leases`).
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toprope.errors.tree import ConfigError
from toprope.sandbox import docker_files, inside
from toprope.sandbox.docker_handles import RUN, BorrowedDocker, DockerSandbox
from toprope.sandbox.gate import check_url
from toprope.sandbox.leases import Lease, LeaseDirectory, LeaseHome, read_descriptor
from toprope.sandbox.spec import (
    WORKDIR,
    Aspect,
    Enforcement,
    Report,
    SandboxBusy,
    SandboxLost,
    SandboxSpec,
    SandboxUnavailable,
)

_CONFLICT = 409
_REMOVAL_S = 10.0
"""Seconds that another one's removal of a container may take, as long as the engine itself waits for its processes."""


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
            with home.making():
                (home.inside / "inside.py").write_text(Path(inside.__file__).read_text("utf-8"))
                (home.inside / "inside.py").chmod(0o644)
                home.inside.chmod(0o755)
                container = client.containers.create(image, **self._settings(spec, home))
                container.put_archive("/", docker_files.tar_of_workdir(self._user))
                container.start()
        except BaseException as error:
            self._release(home)
            if isinstance(error, SandboxLost) or not isinstance(error, Exception):
                raise
            # The SDK's errors have no common root that is only theirs.
            raise _refusal(error)(f"docker: no sandbox from image {image!r}: {error}") from error
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
        engine = next(iter(lease.resources.get("engine", ())), None)
        if engine == self._engine:
            self._remove(lease)
            return
        maker = Docker(self._leases.path, engine=engine)  # another engine's: ours would say that there is no such one
        try:
            maker._remove(lease)
        finally:
            maker._close()

    def _remove(self, lease: Lease) -> None:
        api = self._client().api
        errors = importlib.import_module("docker.errors")
        for name in lease.resources.get("containers", ()):
            try:
                api.remove_container(name, force=True, v=True)
            except errors.NotFound:
                continue  # it was never made, or somebody else was here first
            except errors.APIError as error:
                if error.status_code != _CONFLICT or not _goes(api, name):
                    raise

    def _close(self) -> None:
        if self._connected is not None:
            self._connected.close()

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
    provider = Docker(lease_dir)
    try:
        return provider._leases.reap(Docker.kind, provider._free)
    finally:
        provider._close()


def _goes(api: Any, name: str) -> bool:
    """Whether the container goes away, as it does where somebody else's removal of it is under way. Blocks."""
    errors = importlib.import_module("docker.errors")
    end = time.monotonic() + _REMOVAL_S
    while time.monotonic() < end:
        try:
            api.inspect_container(name)
        except errors.NotFound:
            return True
        time.sleep(0.05)
    return False
