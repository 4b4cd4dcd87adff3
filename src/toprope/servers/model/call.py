"""One model call as its server, its hooks and its record see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toprope.servers.model.engines.base import Dialect
from toprope.servers.model.retries import request_tag
from toprope.tokens.asked import Asked
from toprope.wire.responses import ResponsesRequest


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call that was read and identified, before anything went upstream.

    `request` is the pivot form and `body` what the client sent; both come from one parse. `rollout_id` is the capture
    key, None without identity. `session` is the `X-Session-ID` to use upstream, `client_session_id` the client's own.
    `want_tokens` says that ids are needed, `include_tokens` that the caller asked to get them; `request_digest` is the
    SHA-256 of the body's bytes; `retry_count` is the client library's, None where it does not count, and
    `idempotency_key` the client's own. `began_under` is the version of the weights at that moment, `losses` what was
    lost of the request while it was read. `media` says whether the request holds images, sound or files, `asked` are
    the marks of its items where they are known. Nothing in `request` or `body` may be changed: the next request of the
    conversation shares them. `started` is in seconds since 1970.
    """

    call_id: str
    dialect: Dialect
    request: ResponsesRequest
    body: Mapping[str, Any]
    request_digest: str
    media: bool = False
    asked: Asked | None = None
    rollout_id: str | None = None
    captured: bool = False
    session: str | None = None
    client_session_id: str | None = None
    include_tokens: bool = False
    retry_count: int | None = None
    idempotency_key: str | None = None
    began_under: str | None = None
    weight_changes: int = 0
    losses: tuple[str, ...] = ()
    started: float = 0.0

    @property
    def want_tokens(self) -> bool:
        """Whether the engine must return ids and logprobs."""
        return self.captured or self.include_tokens

    @property
    def stream(self) -> bool:
        """Whether the client reads a stream."""
        return self.request.stream

    @property
    def tag(self) -> str:
        """What a repeat of this request is known by."""
        return request_tag(self.request_digest, self.dialect, self.idempotency_key)

    @property
    def reply_id(self) -> str:
        """The part of the call's id that its reply, items and tool calls are named after."""
        return self.call_id.removeprefix("call-")
