"""The in-process transport where a socket would show it by itself: who hears what, and when."""

from __future__ import annotations

import asyncio
from typing import Any

from toprope.http.app import Limits, Route, build_app
from toprope.http.client import Client
from toprope.http.reply import Reply
from toprope.http.request import Request


async def test_a_callee_that_already_waits_hears_that_its_caller_left() -> None:
    waiting, heard = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.request"
        waiting.set()
        if (await receive())["type"] == "http.disconnect":
            heard.set()

    async with Client(inline={"callee": app}) as client:
        call = asyncio.create_task(client.peer("inline://callee", None).request("POST", "/x", body={}))
        await waiting.wait()
        call.cancel()
        await asyncio.wait_for(heard.wait(), 10)


async def test_a_body_that_says_it_is_too_long_is_refused_before_a_byte_of_it_is_read() -> None:
    async def never(request: Request) -> Reply:
        raise AssertionError("the handler ran")

    app = build_app(name="m", role="model", routes=[Route("POST", "/x", never)], limits=Limits(max_body_bytes=10))
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/x",
        "raw_path": b"/x",
        "query_string": b"",
        "headers": [(b"content-length", b"11")],
    }
    await app(scope, receive, send)
    assert sent[0]["status"] == 413
