"""The layers for third-party ASGI apps: the path, the flag, the context, and its end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from toprope.correlation.context import current_rollout_id, rollout_context
from toprope.http.app import Route as OurRoute
from toprope.http.app import build_app
from toprope.http.asgi import AsgiApp, Message, Receive, Scope, Send
from toprope.http.client import Client
from toprope.http.reply import json_reply
from toprope.http.rollout_layer import RolloutContextMiddleware, RolloutContextPeekMiddleware

PREFIX = "/ng-rollout/4-2/training-token-capture"


async def look(request: Request) -> JSONResponse:
    child = await asyncio.create_task(asyncio.to_thread(current_rollout_id))
    return JSONResponse(
        {
            "id": current_rollout_id(),
            "child": child,
            "capture": request.scope["state"].get("training_token_capture"),
            "path": request.scope["path"],
            "raw_path": request.scope["raw_path"].decode(),
        }
    )


async def get(app: AsgiApp, path: str) -> Any:
    async with Client(inline={"app": app}) as client:
        return (await client.peer("inline://app", None).request("GET", path)).json()


async def call(app: AsgiApp, **scope: Any) -> list[Message]:
    """The app called bare, as a server that gives only what ASGI requires would."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"} if scope["type"] == "websocket" else {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app({"headers": [], **scope}, receive, send)
    return sent


@pytest.mark.promise("ID-4")
async def test_the_middleware_strips_the_prefix_and_publishes_key_and_flag() -> None:
    app = RolloutContextMiddleware(Starlette(routes=[Route("/v1/look", look)]))
    seen = await get(app, f"{PREFIX}/v1/look")
    assert seen == {"id": "4-2", "child": "4-2", "capture": True, "path": "/v1/look", "raw_path": "/v1/look"}
    seen = await get(app, "/v1/look")
    assert (seen["id"], seen["child"], seen["capture"]) == (None, None, False)


@pytest.mark.promise("ID-4")
async def test_the_peek_middleware_publishes_the_id_and_leaves_both_paths_alone() -> None:
    app = RolloutContextPeekMiddleware(Starlette(routes=[Route("/{rest:path}", look)]))
    path = "/ng-rollout/x-a3/v1/a%20b"
    seen = await get(app, path)
    assert seen == {"id": "x-a3", "child": "x-a3", "capture": False, "path": path.replace("%20", " "), "raw_path": path}
    assert (await get(app, "/plain"))["id"] is None


@pytest.mark.promise("ID-4")
@pytest.mark.parametrize("layer", [RolloutContextMiddleware, RolloutContextPeekMiddleware])
async def test_the_context_ends_with_the_request_also_when_the_app_raises(
    layer: type[RolloutContextMiddleware],
) -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(current_rollout_id())
        raise KeyError("the app fails")

    with rollout_context("outer-1"):
        for path in ("/ng-rollout/4-2/x", "/x"):
            with pytest.raises(KeyError):
                await call(layer(app), type="http", method="GET", path=path, raw_path=path.encode())
            assert current_rollout_id() == "outer-1"
    assert seen == ["4-2", None]
    assert current_rollout_id() is None


async def test_the_servers_own_scope_is_not_written_to() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["mine"] = 1

    scope: Scope = {"type": "http", "method": "GET", "path": "/ng-rollout/4-2/x", "headers": [], "state": {"a": 1}}
    before = {**scope, "state": dict(scope["state"])}

    async def nothing(*_: Any) -> Any:
        return None

    await RolloutContextMiddleware(app)(scope, nothing, nothing)
    assert scope == before


@pytest.mark.parametrize("layer", [RolloutContextMiddleware, RolloutContextPeekMiddleware])
async def test_a_malformed_prefix_is_a_typed_400_and_the_app_is_not_called(
    layer: type[RolloutContextMiddleware],
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        pytest.fail("the app was called")

    path = "/ng-rollout/%2e%2e/x"
    start, body = await call(layer(app), type="http", method="GET", path="/ng-rollout/../x", raw_path=path.encode())
    assert start["status"] == 400
    assert b'"kind":"bad_request"' in body["body"]
    assert b"%2e%2e" in body["body"]


async def test_websockets_are_bound_too_and_refused_before_they_are_accepted() -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((current_rollout_id(), scope["path"]))

    layer = RolloutContextMiddleware(app)
    await call(layer, type="websocket", path="/ng-rollout/4-2/ws", raw_path=b"/ng-rollout/4-2/ws")
    assert seen == [("4-2", "/ws")]
    (closed,) = await call(layer, type="websocket", path="/ng-rollout/a/b/../x", raw_path=b"/ng-rollout/../x")
    assert (closed["type"], closed["code"]) == ("websocket.close", 1008)


@pytest.mark.parametrize("raw", [None, b"/ng-rollout/4-2/v1/x?query=1"])
async def test_servers_without_a_raw_path_or_with_the_query_in_it_are_understood(raw: bytes | None) -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((current_rollout_id(), scope["path"], scope["raw_path"]))

    scope: dict[str, Any] = {} if raw is None else {"raw_path": raw}
    await call(RolloutContextMiddleware(app), type="http", method="GET", path="/ng-rollout/4-2/v1/x", **scope)
    assert seen == [("4-2", "/v1/x", b"/v1/x")]


async def test_inside_a_mount_the_prefix_follows_the_mount_path() -> None:
    inner = RolloutContextMiddleware(Starlette(routes=[Route("/v1/look", look)]))
    app = Starlette(routes=[Mount("/api", app=inner)])
    seen = await get(app, "/api/ng-rollout/4-2/v1/look")
    assert (seen["id"], seen["path"]) == ("4-2", "/api/v1/look")


async def test_a_layer_round_a_server_of_ours_does_not_hide_the_rollout_from_it() -> None:
    async def who(request: Any) -> Any:
        return json_reply([current_rollout_id(), request.rollout.capture])

    ours = build_app(name="m", role="model", routes=[OurRoute("GET", "/who", who)])
    for layer in (RolloutContextMiddleware, RolloutContextPeekMiddleware):
        assert await get(layer(ours), f"{PREFIX}/who") == ["4-2", True]


async def test_other_scopes_pass_untouched() -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    await call(RolloutContextMiddleware(app), type="lifespan", state={})
    assert seen == [{"type": "lifespan", "headers": [], "state": {}}]
