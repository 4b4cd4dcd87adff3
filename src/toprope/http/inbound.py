"""Reading a request's body off ASGI, within a limit, before any handler runs."""

from __future__ import annotations

import asyncio

from toprope.errors.tree import BadRequest
from toprope.http.asgi import Receive
from toprope.http.encoding import decode_content, too_large
from toprope.http.headers import Headers, whole_number

_THREAD_FROM = 1 << 20  # a compressed megabyte may take tens of ms to expand: off the loop


class ClientLeft(Exception):
    """The client went away before its request was whole."""


async def read_body(receive: Receive, headers: Headers, limit: int) -> bytes:
    """The whole body, content encoding undone. Raises `TooLarge` naming the limit, or `ClientLeft`."""
    what = "the request body"
    declared = headers.get("content-length")
    if declared is not None:
        size = whole_number(declared)
        if size is None:
            raise BadRequest(f"content-length {declared[:40]!r} is no number", status=400)
        if size > limit:
            raise too_large(what, limit)
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientLeft
    body = bytes(message.get("body", b""))
    if message.get("more_body", False) or len(body) > limit:
        body = await _read_rest(receive, body, limit, what)
    encoding = headers.get("content-encoding")
    if encoding is None or not body:
        return body
    if len(body) >= _THREAD_FROM:
        return await asyncio.to_thread(decode_content, body, encoding, limit=limit, what=what)
    return decode_content(body, encoding, limit=limit, what=what)


async def _read_rest(receive: Receive, first: bytes, limit: int, what: str) -> bytes:
    pieces, size, more = [first], len(first), True
    while more:
        if size > limit:
            raise too_large(what, limit)
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        piece = message.get("body", b"")
        pieces.append(piece)
        size += len(piece)
        more = message.get("more_body", False)
    if size > limit:
        raise too_large(what, limit)
    return b"".join(pieces)
