"""One conformance list for both transports: whatever holds over a socket holds in process, byte for byte."""

from __future__ import annotations

import asyncio
import contextvars
import gzip
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
import zstandard

from toprope.correlation.context import current_rollout_id, rollout_context
from toprope.errors.kinds import Delivery, Kind
from toprope.errors.tree import Conflict, PeerError, TransportError
from toprope.http.app import Limits, Route, ServerApp, build_app
from toprope.http.client import Client, Peer, Role
from toprope.http.cookies import merge_cookies
from toprope.http.headers import Headers
from toprope.http.reply import Reply, json_reply, text_reply
from toprope.http.request import Request
from toprope.http.serve import serve
from toprope.http.streaming import streaming_reply

outside: contextvars.ContextVar[str] = contextvars.ContextVar("outside", default="unset")


class Reach:
    """Puts routes behind a server and gives a peer that reaches it over the transport under test."""

    def __init__(self, over: str, client: Client, stack: AsyncExitStack) -> None:
        self.over = over
        self.client = client
        self.stack = stack
        self.apps: list[ServerApp] = []

    async def __call__(self, routes: Sequence[Route], role: Role | None = "model", **settings: Any) -> Peer:
        name = f"server-{len(self.apps)}"
        app = build_app(name=name, role=str(role), routes=routes, **settings)
        self.apps.append(app)
        if self.over == "inline":
            await app.start()
            self.stack.push_async_callback(app.stop)
            self.client.register(f"inline://{name}", app)
            return self.client.peer(f"inline://{name}", role)
        bound = await serve(app, host=self.over)
        self.stack.push_async_callback(bound.close)
        return self.client.peer(bound.url, role)


@pytest.fixture(params=["inline", "127.0.0.1", "localhost"])
async def reach(request: pytest.FixtureRequest) -> AsyncIterator[Reach]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(transport_budget_s=2.0))
        yield Reach(request.param, client, stack)


async def who(request: Request) -> Reply:
    return json_reply({"id": current_rollout_id(), "capture": request.rollout is not None and request.rollout.capture})


async def echo(request: Request) -> Reply:
    shown = {
        "method": request.method,
        "path": request.path,
        "raw_path": request.scope["raw_path"].decode(),
        "query": dict(request.query),
        "headers": {name: request.headers[name] for name in request.headers if name not in ("host", "accept")},
        "body": (await request.body()).decode("latin-1"),
        "cookies": dict(request.cookies),
    }
    return json_reply(shown)


# Identity


@pytest.mark.promise("ID-2")
async def test_inside_a_rollout_an_unprefixed_call_sees_none(reach: Reach) -> None:
    foreign = await reach([Route("POST", "/who", who)], None)
    with rollout_context("4-2", capture=True):
        assert (await foreign.request("POST", "/who")).json() == {"id": None, "capture": False}


async def test_nothing_else_of_the_callers_context_is_seen_either(reach: Reach) -> None:
    async def look(request: Request) -> Reply:
        return text_reply(outside.get())

    peer = await reach([Route("GET", "/look", look)])
    outside.set("the caller's")
    # (Over a socket this would be the context in which the server was started: also not the caller's.)
    assert (await peer.request("GET", "/look")).text == "unset"


@pytest.mark.promise("ID-2")
@pytest.mark.parametrize("role", ["model", "agent", "resources"])
async def test_the_stamp_arrives_and_is_gone_from_the_path(reach: Reach, role: Role) -> None:
    peer = await reach([Route("POST", "/v1/echo", echo), Route("POST", "/who", who)], role)
    with rollout_context("4-2"):
        seen = (await peer.request("POST", "/v1/echo?x=1&y=%20")).json()
        assert (await peer.request("POST", "/who")).json() == {"id": "4-2", "capture": False}
    assert seen["path"] == seen["raw_path"] == "/v1/echo"
    assert seen["query"] == {"x": "1", "y": " "}
    assert seen["headers"]["x-toprope-protocol"] == "1"
    assert (await peer.request("POST", "/who")).json() == {"id": None, "capture": False}


async def test_the_capture_flag_goes_to_models_by_itself_and_elsewhere_only_when_asked(reach: Reach) -> None:
    model = await reach([Route("POST", "/who", who)], "model")
    agent = await reach([Route("POST", "/who", who)], "agent")
    with rollout_context("4-2", capture=True):
        assert (await model.request("POST", "/who")).json()["capture"] is True
        assert (await model.request("POST", "/who", capture=False)).json()["capture"] is False
        assert (await agent.request("POST", "/who")).json()["capture"] is False
        assert (await agent.request("POST", "/who", capture=True)).json()["capture"] is True


@pytest.mark.promise("ID-2")
async def test_a_thousand_interleaved_requests_see_only_their_own_rollout(reach: Reach) -> None:
    everyone = asyncio.Barrier(1000)

    async def slow_who(request: Request) -> Reply:
        before = current_rollout_id()
        await everyone.wait()
        child = await asyncio.create_task(asyncio.to_thread(current_rollout_id))
        return json_reply([before, child, current_rollout_id()])

    peer = await reach([Route("POST", "/who", slow_who)])

    async def one(number: int) -> bool:
        if number % 10 == 0:
            return bool((await peer.request("POST", "/who")).json() == [None] * 3)
        with rollout_context(f"r-{number}"):
            return bool((await peer.request("POST", "/who")).json() == [f"r-{number}"] * 3)

    assert all(await asyncio.gather(*(one(number) for number in range(1000))))


@pytest.mark.promise("ID-1")
@pytest.mark.parametrize(
    "path",
    [
        "/ng-rollout/%2e%2e/who",
        "/ng-rollout/4%2f2/who",
        "/ng-rollout/4-2%0a/who",
        "/ng-rollout/.a/who",
        "/ng-rollout/x-a1-a2/who",
        "/ng-rollout/" + "a" * 201 + "/who",
        "/%6eg-rollout/4-2/who",
        "/x/../ng-rollout/4-2/who",
        "/ng-rollout/4-2/ng-rollout/4-3/who",
    ],
)
async def test_a_malformed_prefix_is_a_typed_400_and_no_handler_runs(reach: Reach, path: str) -> None:
    ran = []

    async def handler(request: Request) -> Reply:
        ran.append(request.path)
        return text_reply("")

    peer = await reach([Route("POST", "/who", handler), Route("POST", "/{rest:path}", handler)], None)
    reply = await peer.request("POST", path, body={})
    assert reply.status == 400
    assert reply.json()["error"]["kind"] == "bad_request"
    assert not ran


# Bytes


async def test_method_body_headers_and_cookies_arrive_as_they_were_sent(reach: Reach) -> None:
    peer = await reach([Route("PUT", "/v1/{rest:path}", echo)])
    seen = (
        await peer.request(
            "PUT",
            "/v1/a b/c%2Fd/é?q=1",
            body=b"\x00\xff\n",
            headers={"X-Mixed-Case": "Välue", "Content-Type": "application/octet-stream"},
            cookies={"s": '"1"', "t": "a=b"},
        )
    ).json()
    assert seen["method"] == "PUT"
    assert seen["raw_path"] == "/v1/a%20b/c%2Fd/%C3%A9"
    assert seen["path"] == "/v1/a b/c/d/é"
    assert seen["body"] == "\x00\xff\n"
    assert seen["cookies"] == {"s": '"1"', "t": "a=b"}
    headers = seen["headers"]
    assert headers["x-mixed-case"] == "Välue"
    assert headers["content-type"] == "application/octet-stream"
    assert headers["content-length"] == "3"
    assert headers["user-agent"] == "toprope"


async def test_both_transports_send_the_same_header_fields(reach: Reach) -> None:
    peer = await reach([Route("POST", "/v1/echo", echo)])
    seen = (await peer.request("POST", "/v1/echo", body={"a": 1})).json()
    assert seen["headers"] == {
        "user-agent": "toprope",
        "x-toprope-protocol": "1",
        "content-type": "application/json",
        "content-length": "7",
    }


async def test_status_headers_cookies_and_bytes_come_back(reach: Reach) -> None:
    async def odd(request: Request) -> Reply:
        return Reply(418, b"\x00\xfe", {"X-Thing": "1", "Content-Type": "x/y"}, {"session": "abc.def"})

    reply = await (await reach([Route("GET", "/odd", odd)])).request("GET", "/odd")
    assert (reply.status, reply.body) == (418, b"\x00\xfe")
    assert reply.headers.get("x-thing") == "1" == reply.headers["X-THING"]
    assert reply.headers.get("x-toprope-protocol") == "1"
    assert [(cookie.name, cookie.value) for cookie in reply.set_cookies] == [("session", "abc.def")]
    assert reply.url.endswith("/odd")


@pytest.mark.parametrize("status", [204, 304])
async def test_a_status_without_body_has_none(reach: Reach, status: int) -> None:
    async def handler(request: Request) -> Reply:
        return Reply(status)

    reply = await (await reach([Route("GET", "/x", handler)])).request("GET", "/x")
    assert (reply.status, reply.body) == (status, b"")


async def test_head_is_get_without_its_body(reach: Reach) -> None:
    reply = await (await reach([Route("GET", "/who", who)])).request("HEAD", "/who")
    assert (reply.status, reply.body) == (200, b"")
    assert int(reply.headers["content-length"]) > 10


async def test_a_header_that_http_cannot_carry_is_a_500_and_not_a_split_response(reach: Reach) -> None:
    async def handler(request: Request) -> Reply:
        return Reply(200, b"", {"x-bad": "a\r\nset-cookie: stolen=1"})

    reply = await (await reach([Route("GET", "/x", handler)])).request("GET", "/x")
    assert reply.status == 500
    assert "x-bad" in reply.json()["error"]["message"]
    assert not reply.set_cookies


async def test_a_request_header_that_http_cannot_carry_is_refused_before_it_is_sent(reach: Reach) -> None:
    peer = await reach([Route("GET", "/who", who)])
    with pytest.raises(ValueError, match="x-bad"):
        await peer.request("GET", "/who", headers={"x-bad": "a\r\nb: c"})


async def test_compressed_bodies_are_read_in_both_directions(reach: Reach) -> None:
    async def handler(request: Request) -> Reply:
        return Reply(200, gzip.compress(await request.body() * 2), {"content-encoding": "gzip"})

    peer = await reach([Route("POST", "/x", handler)])
    for encoding, packed in (("gzip", gzip.compress(b"abc")), ("zstd", zstandard.compress(b"abc"))):
        reply = await peer.request("POST", "/x", body=packed, headers={"content-encoding": encoding})
        assert reply.body == b"abcabc"


@pytest.mark.promise("EP-16")
async def test_cookies_merge_so_that_a_middle_reply_without_any_keeps_the_session(reach: Reach) -> None:
    async def seed(request: Request) -> Reply:
        return json_reply({}, cookies={"s": "1"})

    async def tool(request: Request) -> Reply:
        return json_reply({})

    async def verify(request: Request) -> Reply:
        return json_reply({"session": request.cookies.get("s")})

    peer = await reach([Route("POST", f"/{f.__name__}", f) for f in (seed, tool, verify)], "resources")
    cookies: dict[str, str] = {}
    for path in ("/seed", "/tool", "/verify"):
        reply = await peer.request("POST", path, body={}, cookies=cookies)
        cookies = merge_cookies(cookies, reply)
    assert reply.json() == {"session": "1"}


@pytest.mark.promise("EP-16")
async def test_the_client_itself_remembers_no_cookie(reach: Reach) -> None:
    async def seed(request: Request) -> Reply:
        return json_reply(dict(request.cookies), cookies={"s": "1"})

    first, second = await reach([Route("POST", "/seed", seed)]), await reach([Route("POST", "/seed", seed)])
    for peer in (first, second, first):
        assert (await peer.request("POST", "/seed")).json() == {}


# Limits


@pytest.mark.parametrize("detached", [False, True])
async def test_a_body_over_the_limit_is_a_413_that_names_it(reach: Reach, detached: bool) -> None:
    peer = await reach([Route("POST", "/echo", echo, detached=detached)], limits=Limits(max_body_bytes=100_000))
    assert (await peer.request("POST", "/echo", body=b"x" * 100_000)).status == 200
    for body, headers in (
        (b"x" * 100_001, {}),
        (b"x" * 3_000_000, {}),
        (gzip.compress(b"x" * 100_001), {"content-encoding": "gzip"}),
    ):
        reply = await peer.request("POST", "/echo", body=body, headers=headers)
        assert reply.status == 413
        error = reply.json()["error"]
        assert "100000 bytes" in error["message"]
        assert error["retryable"] is False
        assert reply.headers.get("x-should-retry") == "false"


async def test_sixty_megabytes_pass_both_ways(reach: Reach) -> None:
    async def back(request: Request) -> Reply:
        return Reply(200, await request.body())

    peer = await reach([Route("POST", "/back", back)])
    body = b"0123456789abcdef" * (60 * 2**16)
    assert (await peer.request("POST", "/back", body=body)).body == body


async def test_a_reply_over_the_callers_limit_is_a_peer_error_that_names_it(reach: Reach) -> None:
    async def big(request: Request) -> Reply:
        return Reply(200, b"x" * 5000)

    peer = await reach([Route("GET", "/big", big)])
    assert len((await peer.request("GET", "/big", max_bytes=5000)).body) == 5000
    with pytest.raises(PeerError, match="4999 bytes"):
        await peer.request("GET", "/big", max_bytes=4999)


# Failures


async def test_an_unknown_exception_is_a_typed_500_with_type_and_text(
    reach: Reach, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(request: Request) -> Reply:
        raise ZeroDivisionError("the verifier divides")

    reply = await (await reach([Route("POST", "/x", handler)])).request("POST", "/x")
    assert reply.status == 500
    error = reply.json()["error"]
    assert error == {"kind": "internal", "message": "ZeroDivisionError: the verifier divides", "retryable": False}
    assert any(record.exc_info and record.exc_info[0] is ZeroDivisionError for record in caplog.records)


async def test_an_error_of_ours_keeps_kind_status_and_words_through_a_hop(reach: Reach) -> None:
    async def inner(request: Request) -> Reply:
        raise Conflict("the session has another payload")

    far = await reach([Route("POST", "/x", inner)], "resources")

    async def outer(request: Request) -> Reply:
        return (await far.request("POST", "/x")).require("seed")

    reply = await (await reach([Route("POST", "/y", outer)], "environment")).request("POST", "/y")
    error = reply.json()["error"]
    assert reply.status == 502
    assert error["kind"] == "conflict"
    assert error["upstream_status"] == 409
    assert error["retryable"] is False
    assert "the session has another payload" in error["message"]
    assert far.url("/x") in error["message"]


async def test_a_status_is_a_reply_and_never_an_exception(reach: Reach) -> None:
    peer = await reach([Route("POST", "/x", echo)])
    assert (await peer.request("POST", "/nowhere")).status == 404
    wrong = await peer.request("GET", "/x")
    assert (wrong.status, wrong.headers.get("allow")) == (405, "POST")
    assert wrong.json()["error"]["kind"] == "bad_request"


async def test_an_answer_that_does_not_come_is_a_timeout_and_reaches_the_callee(reach: Reach) -> None:
    ended = asyncio.Event()

    async def hang(request: Request) -> Reply:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return text_reply("")

    peer = await reach([Route("POST", "/hang", hang)])
    with pytest.raises(TransportError, match=r"0\.05 s") as caught:
        await peer.request("POST", "/hang", timeout_s=0.05)
    assert caught.value.kind == Kind.TRANSPORT_TIMEOUT
    assert caught.value.delivery == Delivery.POSSIBLY_DELIVERED
    assert caught.value.url == peer.url("/hang")
    await asyncio.wait_for(ended.wait(), 10)


async def test_a_handler_whose_own_wait_was_cancelled_is_a_500_and_no_cancelled_caller(reach: Reach) -> None:
    async def handler(request: Request) -> Reply:
        stray = asyncio.get_running_loop().create_future()
        stray.cancel()
        await stray
        return text_reply("")

    for detached in (False, True):
        peer = await reach([Route("POST", "/x", handler, detached=detached)])
        reply = await peer.request("POST", "/x")
        assert reply.status == 500
        assert "cancelled" in reply.json()["error"]["message"]


# Leaving


class Watched:
    """A handler that tells when it began and how it ended."""

    def __init__(self) -> None:
        self.began, self.ended, self.release = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.outcome = "running"

    async def __call__(self, request: Request) -> Reply:
        self.began.set()
        try:
            await self.release.wait()
            self.outcome = "finished"
        except asyncio.CancelledError:
            self.outcome = "cancelled"
            raise
        finally:
            self.ended.set()
        return text_reply(self.outcome)


async def leave(peer: Peer, handler: Watched) -> None:
    call = asyncio.create_task(peer.request("POST", "/x", body={}))
    await handler.began.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_cancelling_the_caller_reaches_the_callee_as_a_disconnect(reach: Reach) -> None:
    handler = Watched()
    await leave(await reach([Route("POST", "/x", handler)]), handler)
    await asyncio.wait_for(handler.ended.wait(), 10)
    assert handler.outcome == "cancelled"


async def test_a_detached_handler_outlives_its_caller(reach: Reach) -> None:
    handler = Watched()
    peer = await reach([Route("POST", "/x", handler, detached=lambda request: request.method == "POST")])
    await leave(peer, handler)
    assert (await peer.request("GET", "/livez")).status == 200  # a round trip later it still runs
    assert handler.outcome == "running"
    handler.release.set()
    await asyncio.wait_for(handler.ended.wait(), 10)
    assert handler.outcome == "finished"


async def test_leaving_cascades_through_a_hop(reach: Reach) -> None:
    handler = Watched()
    far = await reach([Route("POST", "/x", handler)])

    async def forward(request: Request) -> Reply:
        return await far.request("POST", "/x")

    near = await reach([Route("POST", "/x", forward)])
    await leave(near, handler)
    await asyncio.wait_for(handler.ended.wait(), 10)
    assert handler.outcome == "cancelled"


async def test_leaving_before_the_body_was_read_starts_no_handler(reach: Reach) -> None:
    handler = Watched()
    peer = await reach([Route("POST", "/x", handler), Route("POST", "/who", who)])
    call = asyncio.create_task(peer.request("POST", "/x", body=b"x" * 30_000_000))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await peer.request("POST", "/who")).status == 200
    assert not handler.began.is_set()


async def test_a_handler_may_clean_up_after_its_caller_left(reach: Reach) -> None:
    order: list[str] = []
    began, done = asyncio.Event(), asyncio.Event()

    async def close(request: Request) -> Reply:
        order.append("closed")
        return text_reply("")

    far = await reach([Route("POST", "/close", close)])

    async def run(request: Request) -> Reply:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await far.request("POST", "/close")
            order.append("unwound")
            done.set()
        return text_reply("")

    near = await reach([Route("POST", "/run", run)])
    call = asyncio.create_task(near.request("POST", "/run"))
    await began.wait()
    call.cancel()
    await asyncio.wait_for(done.wait(), 10)
    assert order == ["closed", "unwound"]


# Streams


class Piped:
    """A streamed body that the test feeds, and that tells how it ended. Not a generator: it sees every `aclose`."""

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        self.waiting, self.closed = asyncio.Event(), asyncio.Event()
        self.closes = 0
        self.cancelled = False

    def feed(self, *pieces: bytes | BaseException | None) -> None:
        for piece in pieces:
            self.pieces.put_nowait(piece)

    def __aiter__(self) -> Piped:
        return self

    async def __anext__(self) -> bytes:
        self.waiting.set()
        try:
            piece = await self.pieces.get()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if piece is None:
            raise StopAsyncIteration
        if isinstance(piece, BaseException):
            raise piece
        return piece

    async def aclose(self) -> None:
        self.closes += 1
        self.closed.set()

    async def __call__(self, request: Request) -> Reply:
        return streaming_reply(self, headers={"x-thing": "1"}, cookies={"s": "1"})


async def test_a_streamed_reply_has_its_headers_cookies_and_every_piece(reach: Reach) -> None:
    pipe = Piped()
    pipe.feed(b"data: 1\n\n", b"", b"data: 2\n\n", None)
    reply = await (await reach([Route("POST", "/x", pipe)])).request("POST", "/x")
    assert (reply.status, reply.body) == (200, b"data: 1\n\ndata: 2\n\n")
    assert reply.headers["content-type"] == "text/event-stream"
    assert reply.headers["x-thing"] == reply.headers["x-toprope-protocol"] == "1"
    assert "content-length" not in reply.headers
    assert [(cookie.name, cookie.value) for cookie in reply.set_cookies] == [("s", "1")]
    assert (pipe.closes, pipe.cancelled) == (1, False)


async def test_a_stream_that_fails_is_cut_and_never_ends_cleanly(
    reach: Reach, caplog: pytest.LogCaptureFixture
) -> None:
    for fault in (ZeroDivisionError("mid-stream"), Conflict("mid-stream")):
        pipe = Piped()
        pipe.feed(b"data: 1\n\n", fault)
        peer = await reach([Route("POST", "/x", pipe)])
        with pytest.raises(TransportError, match="cut off") as caught:
            await peer.request("POST", "/x")
        assert (caught.value.kind, caught.value.delivery) == (Kind.TRANSPORT_DROPPED, Delivery.DELIVERED)
        assert pipe.closes == 1
    assert "mid-stream" in caplog.text


@pytest.mark.parametrize("detached", [False, True])
async def test_a_client_that_leaves_a_stream_closes_its_iterator_once(reach: Reach, detached: bool) -> None:
    pipe = Piped()
    pipe.feed(b"data: 1\n\n")
    peer = await reach([Route("POST", "/x", pipe, detached=detached)])
    call = asyncio.create_task(peer.request("POST", "/x"))
    await pipe.waiting.wait()
    call.cancel()
    await asyncio.wait_for(pipe.closed.wait(), 10)
    assert pipe.cancelled
    await reach.apps[0].stop()  # everything of the call is over
    assert pipe.closes == 1


async def test_head_of_a_stream_has_no_body_and_closes_it_unread(reach: Reach) -> None:
    pipe = Piped()
    reply = await (await reach([Route("GET", "/x", pipe)])).request("HEAD", "/x")
    assert (reply.status, reply.body) == (200, b"")
    await asyncio.wait_for(pipe.closed.wait(), 10)
    assert (pipe.closes, pipe.waiting.is_set()) == (1, False)


async def test_a_stream_with_a_cookie_that_http_cannot_carry_is_a_500_and_is_closed(reach: Reach) -> None:
    pipe = Piped()

    async def handler(request: Request) -> Reply:
        return streaming_reply(pipe, cookies={"s": "a\r\nb: c"})

    reply = await (await reach([Route("POST", "/x", handler)])).request("POST", "/x")
    assert (reply.status, pipe.closes) == (500, 1)


async def test_stop_cuts_an_attached_stream_at_once(reach: Reach) -> None:
    pipe = Piped()
    pipe.feed(b"data: 1\n\n")
    peer = await reach([Route("POST", "/x", pipe)])
    call = asyncio.create_task(peer.request("POST", "/x"))
    await pipe.waiting.wait()
    await reach.apps[0].stop()
    assert (pipe.closes, pipe.cancelled) == (1, True)
    with pytest.raises(TransportError, match="cut off"):
        await call


async def test_stop_lets_the_stream_of_a_detached_call_end_within_the_drain_bound(reach: Reach) -> None:
    patient, hanging = Piped(), Piped()
    routes = [Route("POST", f"/{n}", pipe, detached=True) for n, pipe in enumerate((patient, hanging))]
    peer = await reach(routes, limits=Limits(drain_s=0.2))
    calls = [asyncio.create_task(peer.request("POST", f"/{n}")) for n in (0, 1)]
    await patient.waiting.wait()
    await hanging.waiting.wait()
    stop = asyncio.create_task(reach.apps[0].stop())
    await asyncio.sleep(0)
    patient.feed(b"data: 1\n\n", None)
    assert (await calls[0]).body == b"data: 1\n\n"
    await stop
    assert (hanging.closes, hanging.cancelled) == (1, True)
    with pytest.raises(TransportError, match="cut off"):
        await calls[1]


async def test_work_that_a_handler_hands_over_outlives_its_client_and_stop_waits_for_it(reach: Reach) -> None:
    release, ended = asyncio.Event(), asyncio.Event()
    seen: list[str | None] = []
    pipe = Piped()

    async def drain_upstream() -> str:
        await release.wait()
        seen.append(current_rollout_id())
        ended.set()
        return "recorded"

    class Leaving(Piped):
        async def aclose(self) -> None:
            reach.apps[0].detach(drain_upstream(), "draining a call whose client left")
            await super().aclose()

    pipe = Leaving()
    peer = await reach([Route("POST", "/x", pipe)])
    with rollout_context("4-2"):
        call = asyncio.create_task(peer.request("POST", "/x"))
    await pipe.waiting.wait()
    call.cancel()
    await asyncio.wait_for(pipe.closed.wait(), 10)
    stop = asyncio.create_task(reach.apps[0].stop())
    assert (await peer.request("GET", "/livez")).status == 200
    assert not ended.is_set()
    release.set()
    await stop
    assert ended.is_set()
    assert seen == ["4-2"]


async def test_work_that_was_handed_over_is_cancelled_at_the_drain_bound(reach: Reach) -> None:
    outcome: list[str] = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            outcome.append("cancelled")
            raise

    async def handler(request: Request) -> Reply:
        reach.apps[0].detach(endless(), "endless")
        return text_reply("")

    peer = await reach([Route("POST", "/x", handler)], limits=Limits(drain_s=0.05))
    assert (await peer.request("POST", "/x")).status == 200
    await reach.apps[0].stop()
    assert outcome == ["cancelled"]


# Reading a stream


async def test_each_piece_is_read_before_the_next_one_is_sent(reach: Reach) -> None:
    pipe = Piped()
    peer = await reach([Route("POST", "/x", pipe)])
    async with peer.stream("POST", "/x", body={}) as reply:
        assert (reply.status, reply.headers["x-thing"], reply.attempts) == (200, "1", 1)
        assert reply.url == peer.url("/x")
        pieces = aiter(reply)
        for number in range(5):  # the head came before the first piece, each piece before the next
            pipe.feed(b"data: %d\n\n" % number)
            assert await anext(pieces) == b"data: %d\n\n" % number
        pipe.feed(None)
        assert [piece async for piece in reply] == []
    assert (pipe.closes, pipe.cancelled) == (1, False)


@pytest.mark.promise("MS-9")
async def test_128_streams_are_128_open_at_once(reach: Reach) -> None:
    everyone = asyncio.Barrier(128)

    async def handler(request: Request) -> Reply:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"first"
            await everyone.wait()  # opens when all 128 sent their first piece, never with fewer
            yield b"last"

        return streaming_reply(pieces())

    peer = await reach([Route("POST", "/x", handler)])

    async def read() -> bytes:
        async with peer.stream("POST", "/x") as reply:
            return b"".join([piece async for piece in reply])

    assert await asyncio.wait_for(asyncio.gather(*(read() for _ in range(128))), 30) == [b"firstlast"] * 128


async def test_the_stamp_and_the_caller_apply_to_streams_as_to_calls(reach: Reach) -> None:
    peer = await reach([Route("POST", "/who", who), Route("POST", "/v1/echo", echo)])
    with rollout_context("4-2", capture=True):
        async with peer.stream("POST", "/who", body={}) as reply:
            assert (await reply.whole()).json() == {"id": "4-2", "capture": True}
    plain = (await peer.request("POST", "/v1/echo", body={"a": 1}, cookies={"s": "1"})).json()
    async with peer.stream("POST", "/v1/echo", body={"a": 1}, cookies={"s": "1"}) as reply:
        assert (await reply.whole()).json() == plain


@pytest.mark.parametrize("status", [204, 400, 503])
async def test_an_error_status_is_a_reply_with_its_words_and_not_an_exception(reach: Reach, status: int) -> None:
    async def refuse(request: Request) -> Reply:
        return Reply(status, b"" if status == 204 else gzip.compress(b"no"), {"content-encoding": "gzip"})

    peer = await reach([Route("POST", "/x", refuse)])
    async with peer.stream("POST", "/x") as reply:
        assert (await reply.whole()).text == ("" if status == 204 else "no")
        assert reply.status == status


async def test_a_stream_in_gzip_is_unpacked_as_it_comes(reach: Reach) -> None:
    pipe = Piped()

    async def handler(request: Request) -> Reply:
        return streaming_reply(pipe, headers={"content-encoding": request.query["as"]})

    peer = await reach([Route("POST", "/x", handler)])
    packer = zlib.compressobj(wbits=31)
    async with peer.stream("POST", "/x?as=gzip") as reply:
        for text in (b"first", b"second" * 500_000):
            pipe.feed(packer.compress(text) + packer.flush(zlib.Z_SYNC_FLUSH))
            got = b""
            while len(got) < len(text):
                got += await anext(reply)
            assert got == text
        pipe.feed(None)
        with pytest.raises(PeerError, match="inside its compressed data"):
            await anext(reply)
    for encoding, why in (("br", "'br'"), ("gzip", "does not decompress")):
        pipe.feed(b"junk", None)
        async with peer.stream("POST", f"/x?as={encoding}") as reply:
            with pytest.raises(PeerError, match=why):
                await anext(reply)


async def test_a_stream_that_is_cut_says_so_after_what_came(reach: Reach) -> None:
    pipe = Piped()
    peer = await reach([Route("POST", "/x", pipe)])
    async with peer.stream("POST", "/x") as reply:
        pipe.feed(b"data: 1\n\n")
        assert await anext(reply) == b"data: 1\n\n"
        pipe.feed(ConnectionError("the engine died"))
        with pytest.raises(TransportError, match="cut off") as caught:
            await anext(reply)
    assert (caught.value.kind, caught.value.delivery) == (Kind.TRANSPORT_DROPPED, Delivery.DELIVERED)


@pytest.mark.parametrize("pieces", [0, 1])
async def test_leaving_a_stream_reaches_the_callee_at_any_point(reach: Reach, pieces: int) -> None:
    pipe = Piped()
    peer = await reach([Route("POST", "/x", pipe)])
    async with peer.stream("POST", "/x") as reply:
        await pipe.waiting.wait()
        for _ in range(pieces):
            pipe.feed(b"data: 1\n\n")
            await anext(reply)
    await asyncio.wait_for(pipe.closed.wait(), 10)
    assert (pipe.closes, pipe.cancelled) == (1, True)


async def test_cancelling_whoever_waits_for_the_head_or_a_piece_reaches_the_callee(reach: Reach) -> None:
    handler, pipe = Watched(), Piped()
    peer = await reach([Route("POST", "/head", handler), Route("POST", "/piece", pipe)])

    async def read(path: str) -> None:
        async with peer.stream("POST", path) as reply:
            await anext(reply)

    for path, began, ended in (("/head", handler.began, handler.ended), ("/piece", pipe.waiting, pipe.closed)):
        reading = asyncio.create_task(read(path))
        await began.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await asyncio.wait_for(ended.wait(), 10)
    assert (handler.outcome, pipe.cancelled) == ("cancelled", True)


async def test_a_stream_that_pauses_too_long_or_never_begins_is_a_timeout(reach: Reach) -> None:
    handler, pipe = Watched(), Piped()
    peer = await reach([Route("POST", "/head", handler), Route("POST", "/piece", pipe)])
    with pytest.raises(TransportError, match=r"no byte for 0\.05 s") as caught:
        async with peer.stream("POST", "/head", idle_timeout_s=0.05):
            pass
    assert (caught.value.kind, caught.value.delivery) == (Kind.TRANSPORT_TIMEOUT, Delivery.POSSIBLY_DELIVERED)
    async with peer.stream("POST", "/piece", idle_timeout_s=0.4) as reply:
        with pytest.raises(TransportError, match=r"no byte for 0\.4 s") as caught:
            await anext(reply)
    assert (caught.value.kind, caught.value.delivery) == (Kind.TRANSPORT_TIMEOUT, Delivery.DELIVERED)
    async with peer.stream("POST", "/piece", timeout_s=0.4) as reply:
        with pytest.raises(TransportError, match=r"no complete reply within 0\.4 s") as caught:
            await anext(reply)
    assert (caught.value.kind, caught.value.delivery) == (Kind.TRANSPORT_TIMEOUT, Delivery.DELIVERED)
    await asyncio.wait_for(handler.ended.wait(), 10)


async def test_a_stream_over_the_callers_limit_is_a_peer_error_that_names_it(reach: Reach) -> None:
    async def endless(request: Request) -> Reply:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 1000

        return streaming_reply(pieces())

    peer = await reach([Route("POST", "/x", endless)])
    async with peer.stream("POST", "/x", max_bytes=100_000) as reply:
        with pytest.raises(PeerError, match="100000 bytes"):
            await reply.whole()


async def test_a_reader_that_waits_makes_the_sender_wait(reach: Reach) -> None:
    sent = 0
    full = asyncio.Event()

    async def endless(request: Request) -> Reply:
        async def pieces() -> AsyncIterator[bytes]:
            nonlocal sent
            while True:
                sent += 1
                asyncio.get_running_loop().call_later(0.05, check, sent)
                yield b"x" * 100_000

        return streaming_reply(pieces())

    def check(then: int) -> None:
        if sent == then:  # nothing was taken since
            full.set()

    peer = await reach([Route("POST", "/x", endless)])
    async with peer.stream("POST", "/x"):
        await asyncio.wait_for(full.wait(), 20)
        assert sent < 400  # 40 MB: what sockets hold, not what was offered


async def test_a_redirect_of_a_stream_is_followed_on_the_same_origin(reach: Reach) -> None:
    async def moved(request: Request) -> Reply:
        return Reply(307, b"", {"location": "/who"})

    peer = await reach([Route("POST", "/old", moved), Route("POST", "/who", who)])
    with rollout_context("4-2"):
        async with peer.stream("POST", "/old") as reply:
            assert (await reply.whole()).json()["id"] == "4-2"


# Redirects


@pytest.mark.parametrize("location", ["/v1/echo?x=1", "{origin}/v1/echo?x=1"])
async def test_a_redirect_on_the_same_origin_keeps_the_prefix_and_the_body(reach: Reach, location: str) -> None:
    places: list[str] = []

    async def moved(request: Request) -> Reply:
        return Reply(307, b"", {"location": places[0]})

    peer = await reach([Route("POST", "/old", moved), Route("POST", "/v1/echo", echo), Route("POST", "/who", who)])
    places.append(location.format(origin=peer.origin))
    with rollout_context("4-2", capture=True):
        seen = (await peer.request("POST", "/old", body=b"abc")).json()
        assert (seen["path"], seen["body"], seen["query"]) == ("/v1/echo", "abc", {"x": "1"})
        places[0] = "/who"
        assert (await peer.request("POST", "/old")).json() == {"id": "4-2", "capture": True}


@pytest.mark.parametrize(
    ("status", "location", "why"),
    [
        (307, "http://192.0.2.1/x", "another origin"),
        (307, "https://127.0.0.1/x", "another origin"),
        (303, "/who", "GET"),
        (307, "/old", "in a row"),
        (308, "x", "not absolute"),
    ],
)
async def test_other_redirects_are_refused(reach: Reach, status: int, location: str, why: str) -> None:
    async def moved(request: Request) -> Reply:
        return Reply(status, b"", {"location": location})

    peer = await reach([Route("POST", "/old", moved), Route("GET", "/who", who)])
    with pytest.raises(PeerError, match=why):
        await peer.request("POST", "/old")


# Life


async def test_stop_waits_for_detached_work_and_refuses_what_is_new(reach: Reach) -> None:
    handler = Watched()
    stopped = asyncio.Event()

    async def shutdown() -> None:
        assert handler.outcome == "finished"
        stopped.set()

    peer = await reach([Route("POST", "/x", handler, detached=True)], shutdown=shutdown)
    call = asyncio.create_task(peer.request("POST", "/x"))
    await handler.began.wait()
    stop = asyncio.create_task(reach.apps[0].stop())
    await asyncio.sleep(0)
    refused = await peer.request("POST", "/x")
    assert (refused.status, refused.json()["error"]["retryable"]) == (503, True)
    assert (await peer.request("GET", "/readyz")).status == 503
    assert (await peer.request("GET", "/livez")).status == 200
    assert not stopped.is_set()
    handler.release.set()
    assert (await call).text == "finished"
    await asyncio.gather(stop, reach.apps[0].stop())
    assert stopped.is_set()


async def test_stop_cancels_attached_calls_at_once_and_detached_ones_at_the_drain_bound(reach: Reach) -> None:
    attached, detached = Watched(), Watched()
    routes = [Route("POST", "/a", attached), Route("POST", "/d", detached, detached=True)]
    peer = await reach(routes, limits=Limits(drain_s=0.05))
    calls = [asyncio.create_task(peer.request("POST", path)) for path in ("/a", "/d")]
    await attached.began.wait()
    await detached.began.wait()
    await reach.apps[0].stop()
    assert (attached.outcome, detached.outcome) == ("cancelled", "cancelled")
    for reply in await asyncio.gather(*calls):
        assert reply.status == 503
        assert "shutting down" in reply.json()["error"]["message"]


async def test_a_server_with_a_key_wants_it_and_its_health_is_free(reach: Reach) -> None:
    key = "k-" + "1" * 20
    peer = await reach([Route("POST", "/who", who)], api_key=key)
    for right in ({"authorization": f"Bearer {key}"}, {"Authorization": f"bearer  {key}"}, {"x-api-key": key}):
        assert (await peer.request("POST", "/who", headers=right)).status == 200
    for wrong in ({}, {"authorization": f"Basic {key}"}, {"x-api-key": key + "1"}, {"authorization": "Bearer ü"}):
        reply = await peer.request("POST", "/who", headers=wrong)
        assert (reply.status, reply.json()["error"]["kind"]) == (401, "forbidden")
        assert key not in reply.text
        assert (await peer.request("POST", "/nowhere", headers=wrong)).status == 401
        assert (await peer.request("GET", "/readyz", headers=wrong)).status == 200
    keyed = reach.client.peer(str(peer.origin), "model", api_key=key)
    assert (await keyed.request("POST", "/who")).status == 200


def test_headers_compare_without_case_and_show_no_values() -> None:
    headers = Headers.of({"Authorization": "secret", "X-A": "1"})
    assert "AUTHORIZATION" in headers
    assert "secret" not in repr(headers)
