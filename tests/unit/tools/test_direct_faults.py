"""What a server of others says to a direct call, over a socket: whose trouble it is, by status and by kind."""

from __future__ import annotations

import asyncio
import json

import pytest

from toprope.http.client import Client
from toprope.protocol.grants import DirectHttpGrant
from toprope.tools.access import ToolAccess
from toprope.tools.outcome import ToolResult, ToolUnavailable


async def told(status: int, body: bytes) -> ToolResult:
    """What a call gives that is answered so, by a server which speaks nothing of ours."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        writer.write(head.encode() + b"connection: close\r\n\r\n" + body)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, Client(transport_attempts=1) as client:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        access = await ToolAccess.open([DirectHttpGrant("theirs", url)], client)
        return await access.call("add", "{}", offered=frozenset({"add"}))


def of_kind(kind: str) -> bytes:
    return json.dumps({"error": {"kind": kind, "message": "no more", "retryable": True}}).encode()


@pytest.mark.promise("EP-19")
@pytest.mark.parametrize("status", [401, 407, 408, 425, 429, 500, 502, 503, 504, 599])
async def test_a_status_of_the_infrastructure_is_trouble_and_never_text(status: int) -> None:
    with pytest.raises(ToolUnavailable) as caught:
        await told(status, b'{"detail": "no more"}')
    assert (caught.value.kind, caught.value.upstream_status, caught.value.retryable) == (
        "tool_unavailable",
        status,
        True,
    )


@pytest.mark.promise("EP-19")
@pytest.mark.parametrize(
    "kind", ["session_lost", "session_expired", "forbidden", "conflict", "capacity", "tool_unavailable"]
)
async def test_a_kind_of_the_infrastructure_is_trouble_under_any_status(kind: str) -> None:
    for status in (400, 403, 404, 409, 422):
        with pytest.raises(ToolUnavailable):
            await told(status, of_kind(kind))


@pytest.mark.parametrize("status", [400, 403, 404, 405, 409, 413, 422])
async def test_what_else_a_server_of_others_refuses_is_for_the_model(status: int) -> None:
    result = await told(status, b"n must be a number")
    assert (result.is_error, result.text) == (True, "n must be a number")
