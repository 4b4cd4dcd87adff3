"""A reply that is sent piece by piece, while its handler's work still goes on.

    handler --> streaming_reply(chunks)      headers leave at once, then each chunk at once
    chunks ends                              the body ends at once
    chunks raises, the server stops          the connection is CUT: the client never takes half a body for a whole one
    the client leaves                        chunks is cancelled where it waits

In every case `chunks` is closed (`aclose`) exactly once, before the call counts as ended. Left to others: what the
chunks hold (`wire.sse`, `dialects`), work that goes on after the client left (`ServerApp.detach`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from toprope.http.asgi import Send
from toprope.http.headers import EMPTY, Headers, RawHeaders
from toprope.http.reply import Reply

log = logging.getLogger("toprope.http")

_BREATH = 32
"""Chunks after which the loop gets its turn: an iterator that never waits would not let anyone see its client leave."""


def streaming_reply(
    chunks: AsyncIterator[bytes],
    *,
    media_type: str = "text/event-stream",
    status: int = 200,
    headers: Mapping[str, str] = EMPTY,
    cookies: Mapping[str, str] | None = None,
) -> Reply:
    """A reply whose body is what `chunks` gives, each piece sent as it comes; empty pieces send nothing.

    Give a class with `aclose` where work was begun before the reply: an async generator that never started runs none of
    its code when it is closed. `chunks` runs in the request's own task, not in the handler's context. Raises
    `ValueError` for headers that HTTP cannot carry.
    """
    fields = Headers(
        ((b"content-type", media_type.encode()), (b"cache-control", b"no-cache"), *Headers.of(headers).raw)
    )
    return Reply(status, b"", fields, cookies, stream=chunks)


async def send_stream(reply: Reply, fields: RawHeaders, method: str, send: Send) -> None:
    """Send a streamed reply to its end, or to its iterator's error, which comes out; the iterator is closed then."""
    stream = reply.stream
    assert stream is not None
    try:
        await send({"type": "http.response.start", "status": reply.status, "headers": fields})
        if method != "HEAD":
            sent = 0
            async for chunk in stream:
                if chunk:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                sent += 1
                if sent % _BREATH == 0:
                    await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})
    finally:
        await close_stream(stream)


async def close_stream(stream: AsyncIterator[bytes]) -> None:
    """Close an iterator that will not be read any further. What its clean-up raises is logged."""
    close: Any = getattr(stream, "aclose", None)
    if close is None:
        return
    try:
        await close()
    except Exception:  # the client has what it got; a fault of the clean-up is the log's
        log.exception("closing a streamed reply failed")
