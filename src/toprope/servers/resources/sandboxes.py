"""The sandboxes of the sessions of one environment: made with the session, stopped with it.

Left to others: what a sandbox is and who bounds it (`sandbox.desk`), the life of a session (`servers.sessions`).
"""

from __future__ import annotations

from toprope.errors.tree import ConfigError
from toprope.protocol.grants import SandboxAccess
from toprope.sandbox.desk import SandboxDesk
from toprope.sandbox.provider import Sandbox
from toprope.sandbox.spec import SandboxSpec
from toprope.servers.resources.environment import Environment

GRACE_S = 60.0
"""Seconds that a sandbox's lease outlives its session's, whose end stops it: the lease is for a dead owner."""


class SessionSandboxes:
    """One sandbox a session. Raises `ConfigError` where the environment wants them and `desk` is None."""

    def __init__(self, name: str, environment: Environment, desk: SandboxDesk | None) -> None:
        if environment.sandbox is not None and desk is None:
            raise ConfigError(
                f"{name}: {type(environment).__name__} runs code in a sandbox and needs `sandbox`; accepted: the name "
                "of a provider under `sandboxes`"
            )
        self._desk = desk
        self._environment = environment
        self._open: dict[str, Sandbox] = {}

    @property
    def wanted(self) -> SandboxSpec | None:
        """The sandbox that each session gets, if any."""
        return self._environment.sandbox

    async def make(self, session_id: str, *, life_s: float) -> Sandbox:
        """The sandbox of a new session that lives at most `life_s` seconds unattended."""
        assert self._desk is not None
        assert self.wanted is not None
        sandbox = await self._desk.make(self.wanted, lease_s=life_s + GRACE_S)
        self._open[session_id] = sandbox
        return sandbox

    def access(self, session_id: str) -> SandboxAccess | None:
        """What the agent is given to borrow it; None where the environment does not lend it."""
        sandbox = self._open.get(session_id)
        return sandbox.access() if sandbox is not None and self._environment.lends_sandbox else None

    async def stop(self, session_id: str) -> None:
        """On return the session's sandbox is gone; there need be none."""
        sandbox = self._open.get(session_id)
        if sandbox is not None:
            await sandbox.stop()
            self._open.pop(session_id, None)

    async def stop_all(self) -> None:
        """On return none is left, also of sessions whose own release failed."""
        for session_id in list(self._open):
            await self.stop(session_id)
