"""The sandbox providers that a configuration names: built, opened with the servers, closed after them.

Left to others: what a provider does (`sandbox`), who makes and who borrows sandboxes (the servers).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from toprope.errors.tree import ConfigError
from toprope.launch.config import Configuration
from toprope.launch.server_settings import SandboxConfig
from toprope.launch.strict import Where
from toprope.sandbox.desk import SandboxDesk, Terms
from toprope.sandbox.leases import LeaseDirectory, default_directory
from toprope.sandbox.provider import SandboxProvider
from toprope.sandbox.spec import Aspect, Limits


class Desks(Mapping[str, SandboxDesk]):
    """The desks of one configuration, by provider name."""

    def __init__(self, configuration: Configuration) -> None:
        self._where = Where(configuration.file).at("sandboxes")
        self._desks = {
            name: SandboxDesk(_provider(name, config, configuration.directory), _terms(config, self._where.at(name)))
            for name, config in configuration.sandboxes.items()
        }

    def __getitem__(self, name: str) -> SandboxDesk:
        return self._desks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._desks)

    def __len__(self) -> int:
        return len(self._desks)

    async def open(self) -> None:
        """On return each holds what is required of it, and what dead owners left is being reaped.

        Raises `ConfigError` naming the first that does not; nothing is open then.
        """
        try:
            for name, desk in self._desks.items():
                try:
                    await desk.open()
                except ConfigError as error:
                    raise ConfigError(f"{self._where.at(name)}: {error.message}") from error
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """On return none of them reaps any more."""
        await asyncio.gather(*(desk.close() for desk in self._desks.values()))


def _provider(name: str, config: SandboxConfig, directory: Path) -> SandboxProvider:
    leases = default_directory() if config.leases is None else directory / Path(config.leases).expanduser()
    if config.kind == "docker":
        from toprope.sandbox.docker import Docker

        return Docker(leases, name=name, engine=config.engine, image=config.image)
    if config.kind == "directory":
        from toprope.sandbox.plain import PlainDirectory

        return PlainDirectory(leases, name=name, control_groups=config.control_groups)
    from toprope.sandbox.bubblewrap import Bubblewrap

    return Bubblewrap(leases, name=name, control_groups=config.control_groups)


def _terms(config: SandboxConfig, where: Where) -> Terms:
    wanted = config.require_limits
    if wanted is None:
        wanted = config.kind != "directory"
    require = (tuple(Aspect) if wanted else ()) if isinstance(wanted, bool) else tuple(wanted)
    try:
        limits = Limits(**msgspec.structs.asdict(config.limits))
    except ConfigError as error:
        raise ConfigError(f"{where.at('limits')}: {error.message}") from error
    return Terms(
        limits=limits,
        network=config.network,
        lease_s=config.lease_s,
        require=require,
        env=config.env,
        read_only=tuple(config.read_only),
        hidden=tuple(config.hidden),
        image=config.image,
        reap_every_s=config.reap_every_s,
    )


@dataclass(frozen=True, slots=True)
class Living:
    """A sandbox that a sweep left: its owner (a process of this host) lives, and `ends_s` seconds are left to it."""

    sandbox_id: str
    kind: str
    provider: str
    owner: int
    ends_s: float


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep of `leases` did: the ids that were reaped, and what is left."""

    leases: Path
    reaped: tuple[str, ...]
    living: tuple[Living, ...]


def sweep(directory: Path | None = None) -> Swept:
    """End every sandbox below the lease directory whose owner is dead or whose lease is over. Blocks.

    Raises the first failure (`SandboxUnavailable` where a container engine that holds one does not answer, or a lease
    cannot be read) when all the others are reaped.
    """
    from toprope.sandbox import bubblewrap, docker, plain

    path = directory or default_directory()
    reaped: list[str] = []
    failure: Exception | None = None
    for reap in (bubblewrap.reap, plain.reap, docker.reap):
        try:
            reaped += reap(path)
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    now = time.time()
    living = tuple(
        Living(each.sandbox_id, each.kind, each.provider, each.owner.pid, each.deadline - now)
        for each in LeaseDirectory(path).leases()
    )
    return Swept(path, tuple(reaped), living)
