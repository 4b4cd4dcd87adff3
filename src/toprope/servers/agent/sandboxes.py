"""The sandboxes of one agent's sessions: lent by the environment and only let go, or its own and stopped.

Left to others: what a sandbox is and who bounds it (`sandbox.desk`), what runs in it (the agent).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toprope.errors.kinds import Kind
from toprope.errors.tree import TopropeError
from toprope.protocol.grants import SandboxAccess
from toprope.sandbox.desk import SandboxDesk, borrow
from toprope.sandbox.provider import BorrowedSandbox, Sandbox
from toprope.servers.agent.agent import Agent, Observations

GRACE_S = 60.0
"""Seconds that the lease of an own sandbox outlives its session's, whose end stops it."""


@dataclass(slots=True)
class SessionSandbox:
    """The sandbox of one session. `owned` is it again where it is the agent's own, None where it was lent."""

    handle: BorrowedSandbox
    owned: Sandbox | None
    record: dict[str, Any]

    async def end(self) -> None:
        """On return no run of the agent's goes on; its own sandbox is gone, a lent one stays. Idempotent."""
        if self.owned is not None:
            await self.owned.stop()
        else:
            await self.handle.disconnect()
        self.record["ended"] = "disconnected" if self.owned is None else "stopped"


class AgentSandboxes:
    """`desks`: the providers that this server knows, by name; `own`: the one of these that makes its own sandboxes."""

    def __init__(self, name: str, agent: Agent, desks: Mapping[str, SandboxDesk], own: SandboxDesk | None) -> None:
        self._name = name
        self._agent = agent
        self._desks = desks
        self._own = own

    async def open(
        self, access: SandboxAccess | None, observations: Observations, *, life_s: float
    ) -> SessionSandbox | None:
        """The sandbox of a session that lives at most `life_s` seconds unattended; None for an agent that needs none.

        One that was lent is used rather than an own one. Raises kind grant_unavailable (terminal) where there is
        neither, or the lent one is of a provider that is not known here.
        """
        spec = self._agent.sandbox
        if spec is None:
            if access is not None:
                observations.gap("a sandbox was lent, and this agent uses none")
            return None
        if access is not None:
            handle = await borrow(self._desks, access)
            return SessionSandbox(
                handle, None, self._record(observations, handle, access.connection.provider_config_ref)
            )
        if self._own is None:
            raise TopropeError(
                f"{self._name}: this agent runs a program in a sandbox, the environment lends none, and the agent "
                "server has no `sandbox`; accepted: one of the two",
                kind=Kind.GRANT_UNAVAILABLE,
                status=422,
                retryable=False,
            )
        owned = await self._own.make(spec, lease_s=life_s + GRACE_S)
        return SessionSandbox(owned, owned, self._record(observations, owned, self._own.name, lent=False))

    def _record(
        self, observations: Observations, handle: BorrowedSandbox, provider: str, *, lent: bool = True
    ) -> dict[str, Any]:
        return observations.record(
            "sandbox", sandbox_id=handle.sandbox_id, provider=provider, lent=lent, workdir=handle.workdir
        )
