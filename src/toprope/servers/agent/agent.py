"""What an agent author subclasses: one coroutine from a Responses request to a Responses object.

    class Echo(Agent):
        async def respond(self, activation):
            return await activation.model.responses(activation.request)

Left to others: sessions, activations, joining and replaying (`server`); tools (`toprope.tools.access`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from toprope.errors.kinds import Kind
from toprope.errors.tree import PeerError
from toprope.http.client import Peer
from toprope.protocol.sessions import AgentObservations
from toprope.sandbox.spec import SandboxSpec
from toprope.tools.access import ToolAccess, ToolResult

if TYPE_CHECKING:
    from toprope.sandbox.provider import BorrowedSandbox

MAX_RECORDS = 10_000


class Observations:
    """What the agent saw itself do, as records and gaps. Bounded: what passes the bound is counted in a gap."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._records: list[dict[str, Any]] = []
        self._gaps: list[str] = []
        self._dropped = 0

    @property
    def source(self) -> str:
        """The name of the agent's server."""
        return self._source

    def record(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Add a record of `kind` (invocation, tool_call, sandbox, context_compaction); fields may be set later."""
        record = {"kind": kind, **fields}
        if len(self._records) < MAX_RECORDS:
            self._records.append(record)
        else:
            self._dropped += 1
        return record

    def gap(self, text: str) -> None:
        """Say what could not be observed."""
        self._gaps.append(text)

    def snapshot(self) -> AgentObservations:
        """What was seen so far."""
        dropped = [f"{self._dropped} records beyond {MAX_RECORDS} were dropped"] if self._dropped else []
        return AgentObservations(self._source, [dict(record) for record in self._records], self._gaps + dropped)


class ModelAccess:
    """The agent's model server. Calls carry the rollout and, where the activation asked for it, capture.

    `over_http` is the same server as programs of others reach it, `api_key` the key that it asks for.
    """

    def __init__(self, peer: Peer, *, over_http: Peer | None = None, api_key: str | None = None) -> None:
        self._peer = peer
        self._over_http = over_http or peer
        self.api_key = api_key
        self.calls = 0

    async def responses(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """One model call. Raises `PeerError` with the model server's kind, `TransportError` where no answer came."""
        self.calls += 1
        reply = (await self._peer.request("POST", "/v1/responses", body=body)).require("model call")
        value = reply.json()
        if not isinstance(value, dict) or not isinstance(value.get("output"), list):
            raise PeerError(
                f"model call: {reply.url} answered with no Responses object (an `output` list is needed); it begins "
                f"with {reply.text[:200]!r}",
                kind=Kind.BAD_REPLY,
                retryable=False,
            )
        return value

    def url(self) -> str:
        """The stamped base URL, for clients of others that take one."""
        return self._over_http.url("/v1")

    def root_url(self) -> str:
        """The stamped URL above `/v1`: all that a program of this rollout needs of the model server is below it."""
        return self._over_http.url()


@dataclass(slots=True)
class Activation:
    """One request to the agent, and what it may use.

    `max_steps` bounds the model calls (None: the agent's own bound). `partial` gives what the agent has so far, as a
    Responses object: it is asked by the session's close if the activation never ends. `extended` says that the
    caller reads fields beyond the Responses format. `sandbox` is there for an agent that wants one (`Agent.sandbox`).
    `invocation` is this activation's own record among the observations: an agent may add to it.
    """

    request: dict[str, Any]
    model: ModelAccess
    tools: ToolAccess
    observations: Observations
    number: int = 1
    max_steps: int | None = None
    extended: bool = False
    partial: Callable[[], dict[str, Any]] | None = None
    session_id: str | None = None
    sandbox: BorrowedSandbox | None = None
    invocation: dict[str, Any] = field(default_factory=dict)

    async def call_tool(self, call: Mapping[str, Any]) -> ToolResult:
        """Run one `function_call` item over the session's grants, and record it. Raises `ToolUnavailable`."""
        offered = frozenset(
            tool["name"]
            for tool in self.request.get("tools") or ()
            if tool.get("type", "function") == "function" and isinstance(tool.get("name"), str)
        )
        name, arguments = str(call.get("name")), call.get("arguments")
        record = self.observations.record("tool_call", name=name, call_id=call.get("call_id"), ok=False)
        if name in offered:
            record.update(self.tools.reached(name))
        began = time.monotonic()
        try:
            text = arguments if isinstance(arguments, str) else ""
            result = await self.tools.call(name, text, offered=offered)
            record["ok"] = not result.is_error
            if result.left_out:
                record["left_out_chars"] = result.left_out
            return result
        except BaseException as error:
            record["error"] = type(error).__name__
            raise
        finally:
            record["duration_s"] = round(time.monotonic() - began, 6)


class Agent:
    """The base of every agent. Keyword arguments of the subclass's `__init__` are the `config` of its server."""

    sandbox: SandboxSpec | None = None
    """The sandbox that a session gets which was lent none by the environment. None: the agent uses none."""

    needs_http_model: ClassVar[bool] = False
    """Whether programs outside this process call the model server, so that it must listen on a socket."""

    async def respond(self, activation: Activation) -> dict[str, Any]:
        """The Responses object for `activation.request`: every output item, in order.

        A typed error that it lets through (of the model, of a tool) becomes the failure of the episode. Cancelling
        it must end it: a deadline or a close is behind that.
        """
        raise TypeError(f"{type(self).__name__} does not define respond(activation)")
