"""A provider under the terms of its configuration: who asks the desk gets a sandbox within them, or borrows one.

The desk bounds what is asked for (limits, network, life), refuses to open where the machine cannot hold what is
required, and reaps as long as it is open. Left to others: how sandboxes are made (`provider`), which desk serves whom
(`launch`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from toprope.errors.kinds import Kind
from toprope.errors.tree import ConfigError, TopropeError
from toprope.protocol.grants import SandboxAccess
from toprope.sandbox.provider import BorrowedSandbox, Sandbox, SandboxProvider, reaping, require_limits
from toprope.sandbox.spec import NO_ROOM, Limits, Report, SandboxBusy, SandboxSpec

Network = Literal["none", "model"]


@dataclass(frozen=True, slots=True)
class Terms:
    """What sandboxes of one provider may be.

    `limits`: the most that any may use. `network`: `none`, or `model` for the one URL of a model server. `lease_s`:
    the longest life; None: as long as the session that has it may live. `require`: aspects that must be held for the
    desk to open. `env`, `read_only`, `hidden`: given to every sandbox beside its own. `image`: for one that names none.
    """

    limits: Limits = field(default_factory=Limits)
    network: Network = "model"
    lease_s: float | None = None
    require: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    read_only: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    image: str | None = None
    reap_every_s: float = 30.0


class SandboxDesk:
    """One provider under its terms. Use it between `open` and `close`."""

    def __init__(self, provider: SandboxProvider, terms: Terms | None = None) -> None:
        self._provider = provider
        self._terms = terms or Terms()
        self._open = contextlib.AsyncExitStack()

    @property
    def name(self) -> str:
        """The `provider_config_ref` of its sandboxes."""
        return self._provider.name

    @property
    def terms(self) -> Terms:
        """What it was configured to allow."""
        return self._terms

    async def open(self) -> None:
        """On return what the terms require is held here, and sandboxes of dead owners are being reaped.

        Raises `ConfigError` naming each required aspect that is not held.
        """
        await require_limits(self._provider, self._terms.require)
        await self._open.enter_async_context(reaping(self._provider, every_s=self._terms.reap_every_s))

    async def close(self) -> None:
        """On return it reaps no more. Sandboxes are their owners' to stop."""
        await self._open.aclose()

    async def enforces(self) -> Report:
        """The provider's report."""
        return await self._provider.enforces()

    async def make(self, spec: SandboxSpec, *, lease_s: float) -> Sandbox:
        """A sandbox as `spec` says, within the terms, which lives `lease_s` seconds at most.

        Each limit is the smaller of the two. Raises as `SandboxProvider.create`, and `SandboxBusy` where the machine
        has no room for it.
        """
        try:
            return await self._provider.create(within(spec, self._terms, lease_s))
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise SandboxBusy(f"sandbox provider {self.name!r}: no room for one more: {error}") from error

    async def attach(self, access: SandboxAccess) -> BorrowedSandbox:
        """Borrow. Raises as `SandboxProvider.attach`."""
        return await self._provider.attach(access.connection.descriptor)


def within(spec: SandboxSpec, terms: Terms, lease_s: float) -> SandboxSpec:
    """`spec` cut to `terms`."""
    limits = {
        each.name: min(getattr(spec.limits, each.name), getattr(terms.limits, each.name))
        for each in dataclasses.fields(Limits)
    }
    if spec.model_url is not None and terms.network == "none":
        raise ConfigError("sandbox model_url: this provider's sandboxes have `network: none`; accepted: none")
    return dataclasses.replace(
        spec,
        limits=Limits(**limits),
        lease_s=lease_s if terms.lease_s is None else min(lease_s, terms.lease_s),
        network="none" if terms.network == "none" else spec.network,
        env={**terms.env, **spec.env},
        read_only=tuple(dict.fromkeys((*terms.read_only, *spec.read_only))),
        hidden=tuple(dict.fromkeys((*terms.hidden, *spec.hidden))),
        image=spec.image or terms.image,
    )


async def borrow(desks: Mapping[str, SandboxDesk], access: SandboxAccess) -> BorrowedSandbox:
    """The sandbox of a grant. Raises kind grant_unavailable (terminal) where no desk has the provider's name."""
    ref = access.connection.provider_config_ref
    if ref not in desks:
        known = ", ".join(sorted(desks)) or "none"
        raise TopropeError(
            f"sandbox_access: this server knows no sandbox provider {ref!r} (known: {known}); it must be configured "
            "under the same name, with the same lease directory, as on the resources server",
            kind=Kind.GRANT_UNAVAILABLE,
            status=422,
            retryable=False,
        )
    return await desks[ref].attach(access)
