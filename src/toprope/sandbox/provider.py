"""The interface: a provider makes sandboxes, their owner runs code in them and stops them, a borrower only lets go.

Left to others: how (`bubblewrap`, `docker`; `plain`, which isolates nothing), under which terms (`desk`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from toprope.errors.tree import ConfigError
from toprope.protocol.grants import SandboxAccess
from toprope.sandbox.spec import Aspect, Completed, Report, SandboxSpec

if TYPE_CHECKING:
    from toprope.sandbox.gate import Gate, GateKeys  # with aiohttp, which servers in one process need not load

log = logging.getLogger("toprope.sandbox")

KEEP_BYTES = 256 * 1024
"""Bytes kept of each output stream unless the caller says otherwise: more than any model reads at once."""

MAX_FILE_BYTES = 64 * 2**20
"""Bytes that `read_file` returns at most unless the caller says otherwise."""


class BorrowedSandbox(Protocol):
    """A sandbox in the hands of somebody who does not own it."""

    @property
    def sandbox_id(self) -> str:
        """Unique on this machine."""

    @property
    def workdir(self) -> str:
        """The work directory as code inside sees it."""

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
        """Run a program in the work directory; on return it has ended and its output is read.

        `env` is added to what the sandbox gives; nothing of the host's environment comes in. `timeout_s` can only
        shorten `limits.wall_s`. `output_limit`: bytes kept of each stream. `model_url`: the one URL that is reachable
        from inside, under `inside_url(model_url)`; or `gate`, an open gate of this handle that the caller made, which
        says where it is reached. A cancelled call kills the run. Raises `SandboxLost` when the
        sandbox is gone, `SandboxUnavailable` when the run could not be started for a reason that is not the program's.
        """

    def inside_url(self, model_url: str) -> str:
        """The URL under which code inside reaches `model_url` while a run has it."""

    def gate(self, model_url: str, *, keys: GateKeys | None = None) -> Gate:
        """A gate to `model_url` for runs of this handle, to be used as an async context around them.

        Raises `Forbidden` where the sandbox may not reach it, `ConfigError` for what is no URL of a server.
        """

    async def write_file(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """On return the file holds `data`; its directories are made. Raises `OutsideWorkdir`: no link is followed."""

    async def read_file(self, path: str, *, limit: int = MAX_FILE_BYTES) -> bytes:
        """The content of a regular file of the work directory.

        Raises `FileNotFoundError`, `OutsideWorkdir` (no link is followed), `FileTooLarge` beyond `limit` bytes;
        `SandboxLost`, and never one of these, where the sandbox went away meanwhile.
        """

    async def disconnect(self) -> None:
        """On return the runs started through this handle have ended. The sandbox stays as it is. Idempotent."""


class Sandbox(BorrowedSandbox, Protocol):
    """A sandbox in the hands of its owner."""

    def access(self) -> SandboxAccess:
        """What to give a borrower, who passes `connection.descriptor` to `attach` of a provider of the same name."""

    async def stop(self) -> None:
        """On return every process in it is dead and its files are gone, a borrower's runs included. Idempotent."""


class SandboxProvider(Protocol):
    """Makes sandboxes of one kind."""

    @property
    def name(self) -> str:
        """The `provider_config_ref` of its sandboxes."""

    async def enforces(self) -> Report:
        """What its sandboxes hold back and by which mechanism, found by trying, once. Every `Aspect` has a line."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """On return the sandbox exists under a lease of this process.

        Raises `SandboxUnavailable`, and `SandboxLost` for one that was reaped while it was made.
        """

    async def attach(self, descriptor: Mapping[str, Any]) -> BorrowedSandbox:
        """Borrow. Raises `SandboxLost` for one that is gone, `Forbidden` for a descriptor that does not fit it."""

    async def reap(self) -> tuple[str, ...]:
        """On return no sandbox of this kind is left whose owner is dead or whose lease is over; their ids."""


@asynccontextmanager
async def reaping(provider: SandboxProvider, *, every_s: float = 30.0) -> AsyncIterator[None]:
    """Inside, `provider.reap()` is called at once and then every `every_s` seconds; a failure is logged."""

    async def keep_on() -> None:
        while True:
            try:
                if ids := await provider.reap():
                    log.info("sandboxes reaped: %s", ", ".join(ids))
            except Exception as error:  # the engine, a file: the next round tries again
                log.warning("sandboxes by %s could not all be reaped: %s", provider.name, error)
            await asyncio.sleep(every_s)

    task = asyncio.create_task(keep_on())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def require_limits(provider: SandboxProvider, wanted: Iterable[str] = tuple(Aspect)) -> Report:
    """The provider's report, if it enforces all of `wanted`.

    Raises `ConfigError` naming each aspect that is not enforced, with the reason, and for a name that is no aspect.
    """
    names = list(wanted)
    unknown = [name for name in names if name not in set(Aspect)]
    if unknown:
        raise ConfigError(
            f"require_limits: {', '.join(map(repr, unknown))} is nothing that a sandbox limits; accepted: "
            f"{', '.join(Aspect)}"
        )
    report = await provider.enforces()
    missing = [report[Aspect(name)] for name in names if report[Aspect(name)].mechanism is None]
    if missing:
        reasons = "; ".join(f"{each.aspect} ({each.note or 'no mechanism'})" for each in missing)
        raise ConfigError(
            f"sandbox provider {provider.name!r} does not enforce what require_limits asks for: {reasons}. Use another "
            "provider or machine, or take these out of require_limits if the code that runs is trusted"
        )
    return report
