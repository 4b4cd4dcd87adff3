"""Messages of the two participants: seeds, closes, observations, verify."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

from toprope.protocol.grants import Grant, SandboxAccess
from toprope.protocol.ids import EpisodeId, TaskId

CloseOutcome = Literal["closed", "already_closed"]


MAX_HANDLE = 512


def is_handle(value: object) -> bool:
    """Whether `value` can name what an episode uses: a printable text that people read and search for, not too long."""
    return isinstance(value, str) and 0 < len(value) <= MAX_HANDLE and value.isprintable()


def session_name(session_id: str) -> str:
    """What a session is called where others may read it: always the same, and of no use to who wants its tools.

    The id itself names the session in a call, so that whoever knows it can call tools; it stands in no listing.
    """
    return f"sha256:{hashlib.sha256(session_id.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


class ResourcesSeedSessionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /seed_session` on a resources server; the id is minted by the caller."""

    resources_session_id: str
    episode_id: EpisodeId
    task_id: TaskId
    task_data: dict[str, Any]


class ResourcesTools(msgspec.Struct, frozen=True):
    """NeMo Gym's offer of an MCP server in a seed reply; `headers` carry the session."""

    server_name: str
    url_path: str = "/mcp"
    transport: str = "http"
    headers: dict[str, str] = {}


class ResourcesSeedSessionResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """The seed reply. `env_session_id` is ours: sent only to a caller that speaks our protocol."""

    resources_session_id: str
    resources_tools: ResourcesTools | None = None
    sandbox_access: SandboxAccess | None = None
    env_session_id: str | None = None


class ResourcesCloseSessionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /close_session`; the close token travels in a header."""

    resources_session_id: str
    episode_id: EpisodeId


class ResourcesCloseSessionResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """`outcome` is ours."""

    resources_session_id: str
    outcome: CloseOutcome | None = None


class AgentSeedSessionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/agent_sessions`; the id is minted by the caller."""

    agent_session_id: str
    episode_id: EpisodeId
    task_id: TaskId
    tool_accesses: list[Grant] = []
    sandbox_access: SandboxAccess | None = None


class AgentSeedSessionResponse(msgspec.Struct, frozen=True):
    """The agent's seed reply."""

    agent_session_id: str


class AgentCloseSessionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/agent_sessions/close`."""

    agent_session_id: str
    episode_id: EpisodeId


class AgentObservations(msgspec.Struct, frozen=True):
    """What an agent saw itself do. Records are of kind invocation, tool_call, sandbox, context_compaction.

    Never guessed: what could not be observed is named in `gaps`.
    """

    source: str
    records: list[dict[str, Any]] = []
    gaps: list[str] = []


class AgentCloseSessionResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """`outcome` and `partial_response` are ours."""

    agent_session_id: str
    agent_observations: AgentObservations | None = None
    resources_cookies: dict[str, str] | None = None
    outcome: CloseOutcome | None = None
    partial_response: dict[str, Any] | None = None
