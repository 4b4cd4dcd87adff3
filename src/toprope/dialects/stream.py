"""Streams of the three dialects: deltas in, the bytes of events out.

A writer says at once what was sampled; whatever the finish gives rise to (done events of the last item, finish reason,
usage, the terminal event) comes from `finish` alone, so that a server can make the turn durable before its end is seen.
Left to others: when bytes leave, and what happens when they cannot (the model server and the http kit).
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

from toprope.dialects.deltas import Delta
from toprope.dialects.emitted import StreamContradiction as StreamContradiction
from toprope.dialects.pivot import PivotReply
from toprope.dialects.stream_chat import ChatStream
from toprope.dialects.stream_messages import MessagesStream
from toprope.dialects.stream_responses import ResponsesStream
from toprope.wire.responses import ResponsesRequest

Dialect: TypeAlias = Literal["chat", "responses", "messages"]


class StreamWriter(Protocol):
    """The events of one reply, in order: `open` once, then `delta`s, then `finish` once. Pure; holds what it said."""

    def open(self) -> bytes:
        """The first event or events: the reply's name and model, nothing sampled."""

    def delta(self, delta: Delta) -> bytes:
        """The events of one delta, maybe none. An item that ended because the next one begins is closed here.

        Raises `StreamContradiction` for a delta that cannot follow what was sent.
        """

    def finish(self, reply: PivotReply) -> bytes:
        """What was not yet sent of the reply, then the last item's done events, finish reason, usage, the end.

        Raises `StreamContradiction` if the reply does not continue what was sent; nothing may be sent then.
        """

    def keep_alive(self) -> bytes:
        """What a client reads as no event, or as a ping; allowed between any two others."""


def open_stream(
    dialect: Dialect,
    request: ResponsesRequest,
    *,
    reply_id: str,
    model: str,
    created: int,
    include_usage: bool = False,
) -> StreamWriter:
    """A writer for one reply of `dialect`. `reply_id` and `created` are those of the `PivotReply` at its end, so that
    streamed item ids equal the recorded ones. `include_usage` is a Chat client's wish; the other dialects always say.
    """
    if dialect == "responses":
        return ResponsesStream(request, reply_id=reply_id, model=model, created=created)
    if dialect == "messages":
        return MessagesStream(reply_id=reply_id, model=model)
    return ChatStream(reply_id=reply_id, model=model, created=created, include_usage=include_usage)
