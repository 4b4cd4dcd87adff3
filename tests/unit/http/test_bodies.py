"""JSON in and out, encodings, cookies: the values that requests and replies are made of."""

from __future__ import annotations

import gzip
import math
import subprocess
import sys
import zlib
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from toprope.canonical.json import NotJson
from toprope.correlation.context import rollout_context
from toprope.errors.tree import BadRequest, PeerError, TooLarge
from toprope.http.app import Limits, Route, build_app
from toprope.http.client import Client
from toprope.http.cookies import (
    CookieSigner,
    SetCookie,
    merge_cookies,
    read_cookies,
    read_set_cookies,
    set_cookie_header,
)
from toprope.http.encoding import decode_content
from toprope.http.headers import Headers
from toprope.http.jsonbody import decode_any, decode_as, encode
from toprope.http.reply import Reply, json_reply, text_reply
from toprope.http.request import Request
from toprope.protocol.ids import EpisodeId
from toprope.protocol.sessions import ResourcesSeedSessionRequest


class Inner(msgspec.Struct):
    score: float | None = None


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    inner: Inner
    free: dict[str, Any] = {}


def request(body: bytes, **fields: Any) -> Request:
    return Request({"method": "POST", "path": "/x", "headers": [], **fields}, body)


# JSON


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, {"b": float("nan")}]}, "$.a[1].b"),
        ([float("inf")], "$[0]"),
        (Outer("n", Inner(float("nan"))), "$.inner.score"),
        ({"x": Outer("n", Inner(), {"y": [0.5, float("-inf")]})}, "$.x.free.y[1]"),
        ({"logprobs": [-0.5] * 300 + [float("nan")]}, "$.logprobs[300]"),
        (float("nan"), "$"),
        (Outer("\ud800", Inner(float("nan"))), "$.inner.score"),
    ],
)
def test_a_number_that_json_cannot_carry_is_refused_with_its_place(value: Any, where: str) -> None:
    with pytest.raises(NotJson) as caught:
        encode(value)
    assert where + " is" in str(caught.value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=12,
    )
)
def test_every_json_value_comes_back_as_it_was(value: Any) -> None:
    assert decode_any(encode(value)) == value


def all_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(all_finite, value.values()))
    return (
        all(map(all_finite, value))
        if isinstance(value, list)
        else not (isinstance(value, float) and not math.isfinite(value))
    )


@given(
    st.recursive(
        st.none()
        | st.sampled_from([math.nan, math.inf, -math.inf])
        | st.floats()
        | st.integers()
        | st.text("\u02ff\x7f"),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab"), inner, max_size=4),
        max_leaves=6,
    )
)
def test_no_such_number_passes_and_nothing_is_taken_for_one(value: Any) -> None:
    beside = [None, value]  # what holds no null cannot hold one
    if all_finite(value):
        assert decode_any(encode(beside)) == beside
    else:
        with pytest.raises(NotJson, match="JSON cannot carry"):
            encode(beside)


@pytest.mark.parametrize(
    "text",
    [
        '"\\ud800"',
        '{"\\udfff": 1}',
        "36893488147419103233",
        "9" * 4_300,
        "-" + "9" * 4_300,
        "-0.0",
        "1e308",
        "[" * 300 + "]" * 300,
    ],
)
def test_lone_surrogates_big_integers_and_deep_nesting_survive(text: str) -> None:
    value = decode_any(text.encode())
    assert decode_any(encode(value)) == value


@pytest.mark.parametrize(
    "text", ["NaN", "[Infinity]", "1e400", "{", "", "{} x", "'a'", "[1,]", "\xff", "[" * 100_000, "1" * 4_301]
)
async def test_a_body_that_is_no_json_is_a_422(text: str) -> None:
    for read in (lambda: request(text.encode("latin-1")).json(), lambda: request(text.encode("latin-1")).decode(Outer)):
        with pytest.raises(BadRequest) as caught:
            await read()
        assert caught.value.status == 422


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"name": 1, "inner": {}}', "`$.name`"),
        (b'{"name": "n"}', "`inner`"),
        (b'{"name": "n", "inner": {}, "nmae": 1}', "`nmae`"),
        (b'{"name": "n", "inner": {"score": "0.5"}}', "Expected `float | null`, got `str` - at `$.inner.score`"),
        (b'{"name": "n", "inner": {"score": true}}', "`$.inner.score`"),
        (b"[]", "object"),
        (b'{"name": "\\ud800", "inner": {"score": "x"}}', "$.inner.score"),
    ],
)
async def test_a_body_of_the_wrong_shape_is_a_422_naming_the_field(body: bytes, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        await request(body).decode(Outer)
    assert says in caught.value.message
    assert caught.value.status == 422


@pytest.mark.promise("ID-1")
@pytest.mark.parametrize("rollout", ["a/b", "x-a1", "", ".a", "a\n", "%2e%2e", "a" * 201])
async def test_an_id_that_is_none_is_a_422_in_every_body(rollout: str) -> None:
    body = encode({"rollout_id": rollout, "attempt": 0})
    with pytest.raises(BadRequest, match="rollout id"):
        await request(body).decode(EpisodeId)
    seed = {"resources_session_id": "s", "episode_id": {"rollout_id": rollout, "attempt": 0}}
    seed |= {"task_id": {"taskset": "t", "task_id": "1"}, "task_data": {}}
    with pytest.raises(BadRequest, match="rollout id"):
        await request(encode(seed)).decode(ResourcesSeedSessionRequest)


def test_a_lone_surrogate_takes_the_slow_road_through_a_typed_decode() -> None:
    value = decode_as(b'{"name": "\\ud800", "inner": {"score": 0.5}, "free": {"n": 36893488147419103233}}', Outer)
    assert (value.name, value.free["n"]) == ("\ud800", 36893488147419103233)


def test_a_reply_that_is_not_what_the_protocol_says_names_the_peer_the_field_and_its_words() -> None:
    reply = Reply(200, b'{"name": 7}', url="http://h:1/verify")
    with pytest.raises(PeerError) as caught:
        reply.decode(Outer)
    message = caught.value.message
    assert "http://h:1/verify" in message
    assert "$.name" in message
    assert '{"name": 7}' in message
    with pytest.raises(PeerError, match="no JSON"):
        Reply(200, b"<html>").json()


def test_require_reads_typed_bodies_foreign_ones_and_none() -> None:
    typed = b'{"error": {"kind": "session_lost", "message": "gone", "retryable": true, "upstream_status": 404}}'
    with pytest.raises(PeerError) as caught:
        Reply(502, typed, url="inline://r/verify").require("verify")
    error = caught.value
    assert (error.kind, error.retryable, error.upstream_status, error.status) == ("session_lost", True, 404, 502)
    assert error.message == "verify: inline://r/verify answered 502: gone"
    with pytest.raises(PeerError) as caught:
        Reply(503, b"<html>" + b"x" * 9000).require("verify")
    error = caught.value
    assert (error.kind, error.retryable, error.upstream_status) == ("bad_reply", True, 503)
    assert len(error.message) < 1000
    with pytest.raises(PeerError, match="empty body"):
        Reply(400).require("verify")
    ok = Reply(201)
    assert ok.require("verify") is ok


# Encodings


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "deflate", "identity", "", "GZIP", "identity, gzip"])
def test_known_encodings_are_undone(encoding: str) -> None:
    plain = b"hello " * 1000
    lowered = encoding.lower()
    packed = (
        gzip.compress(plain, mtime=0) if "gzip" in lowered else zlib.compress(plain) if lowered == "deflate" else plain
    )
    assert decode_content(packed, encoding, limit=6000, what="x") == plain


def test_raw_deflate_several_gzip_members_and_two_layers_are_read() -> None:
    raw = zlib.compressobj(wbits=-15)
    assert decode_content(raw.compress(b"abc") + raw.flush(), "deflate", limit=9, what="x") == b"abc"
    assert (
        decode_content(gzip.compress(b"ab", mtime=0) + gzip.compress(b"c", mtime=0), "gzip", limit=9, what="x")
        == b"abc"
    )
    assert decode_content(gzip.compress(zlib.compress(b"abc")), "deflate, gzip", limit=99, what="x") == b"abc"


def test_a_bomb_is_stopped_at_the_limit_that_the_error_names() -> None:
    bomb = gzip.compress(b"\0" * 50_000_000, mtime=0)
    with pytest.raises(TooLarge, match="1000000 bytes"):
        decode_content(bomb, "gzip", limit=1_000_000, what="the body")
    with pytest.raises(TooLarge):
        decode_content(
            gzip.compress(b"a" * 600, mtime=0) + gzip.compress(b"a" * 600, mtime=0), "gzip", limit=1000, what="x"
        )


@pytest.mark.parametrize(
    "data", [gzip.compress(b"abc" * 99, mtime=0)[:-9], b"junk", gzip.compress(b"abc", mtime=0) + b"tail", b"\x1f\x8b"]
)
def test_damaged_data_is_a_400(data: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_content(data, "gzip", limit=1000, what="the body")
    assert caught.value.status == 400


def test_an_encoding_that_is_not_known_is_a_415_that_names_the_known_ones() -> None:
    with pytest.raises(BadRequest, match="gzip, deflate, zstd, identity") as caught:
        decode_content(b"x", "br", limit=10, what="the body")
    assert caught.value.status == 415


def test_zstd_is_undone_frame_by_frame_within_the_limit() -> None:
    packed = zstandard.compress(b"abc" * 1000) + zstandard.compress(b"d")
    assert decode_content(packed, "zstd", limit=3001, what="x") == b"abc" * 1000 + b"d"
    with pytest.raises(TooLarge, match="3000 bytes"):
        decode_content(packed, "zstd", limit=3000, what="x")
    with pytest.raises(TooLarge):
        decode_content(zstandard.compress(b"\0" * 50_000_000), "zstd", limit=1_000_000, what="x")


@pytest.mark.parametrize("cut", [1, 3, 10, 21, -1])
def test_zstd_data_that_were_cut_short_are_a_400_and_never_half_a_body(cut: int) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_content(zstandard.compress(b"abcdefgh" * 4)[:cut], "zstd", limit=1000, what="the body")
    assert caught.value.status == 400


def test_zstd_without_a_library_is_a_415_that_names_the_extra() -> None:
    probe = """
import sys
sys.modules["zstandard"] = sys.modules["compression.zstd"] = None
from toprope.errors.tree import BadRequest
from toprope.http.encoding import decode_content
try:
    decode_content(b"x", "zstd", limit=10, what="the body")
except BadRequest as error:
    print(error.status, error)
"""
    said = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    assert said.startswith("415 ")
    assert "toprope[zstd]" in said


# Cookies


def cookie_reply(*fields: str) -> Reply:
    return Reply(200, b"", Headers([(b"set-cookie", field.encode()) for field in fields]))


def test_merging_keeps_adds_replaces_and_deletes() -> None:
    current = {"s": "1", "old": "x", "gone": "y", "past": "z"}
    reply = cookie_reply(
        "s=2; Path=/; HttpOnly",
        "new=a=b",
        "gone=; Max-Age=0",
        "past=; Expires=Thu, 01 Jan 1970 00:00:00 GMT",
        "future=1; Expires=Fri, 01-Jan-2100 00:00:00 GMT; Max-Age=oops",
        "=nameless",
    )
    assert merge_cookies(current, reply) == {"s": "2", "old": "x", "new": "a=b", "future": "1"}
    assert current == {"s": "1", "old": "x", "gone": "y", "past": "z"}
    assert merge_cookies(current, text_reply("")) == current


def test_a_cookie_that_nobody_could_send_back_is_skipped() -> None:
    fields = ["a=1", "b=\x01", "c\x7f=2", "d=3; HttpOnly\n"]
    assert [(cookie.name, cookie.value) for cookie in read_set_cookies(fields)] == [("a", "1"), ("d", "3")]


def test_max_age_wins_over_expires_whatever_the_order() -> None:
    past = "Expires=Thu, 01 Jan 1970 00:00:00 GMT"
    assert merge_cookies({}, cookie_reply(f"a=1; {past}; Max-Age=60", f"b=1; Max-Age=60; {past}")) == {
        "a": "1",
        "b": "1",
    }
    assert merge_cookies({"a": "0"}, cookie_reply("a=1; Max-Age=-1; Expires=Fri, 01 Jan 2100 00:00:00 GMT")) == {}


def test_a_handlers_cookies_show_on_its_reply_too() -> None:
    assert json_reply({}, cookies={"s": "1"}).set_cookies == (SetCookie("s", "1"),)


@pytest.mark.parametrize(
    ("name", "value"), [("a b", "1"), ("", "1"), ("a", "1;2"), ("a", "1\r\nx: y"), ("a", 'q"'), ("a", "é")]
)
def test_a_cookie_that_would_break_its_header_is_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match="cookie"):
        set_cookie_header(name, value)


def test_request_cookies_are_read_leniently() -> None:
    assert read_cookies(['a=1; b="x y"; a=2;; junk; c=']) == {"a": "1", "b": '"x y"', "c": ""}


def test_a_signed_cookie_verifies_with_its_key_only_and_not_when_changed() -> None:
    signer = CookieSigner(b"k" * 32)
    value = signer.sign("s-1.2")
    assert signer.verify(value) == "s-1.2"
    assert CookieSigner(b"K" * 32).verify(value) is None
    for broken in (value[:-1], value + "0", value.replace("s-1", "s-2"), "s-1.2", "", ".", "é.é", value.upper()):
        assert signer.verify(broken) is None
    assert set_cookie_header("session", value)
    with pytest.raises(ValueError, match="16 bytes"):
        CookieSigner(b"short")


# Peers and the kit


def test_a_peers_url_is_stamped_as_a_call_would_be_and_never_twice() -> None:
    client = Client()
    model = client.peer("http://h:1/", "model")
    agent = client.peer("inline://agent/base", "agent")
    assert model.url("/v1") == "http://h:1/v1"
    with rollout_context("x-a2", capture=True):
        assert model.url("v1") == "http://h:1/ng-rollout/x-a2/training-token-capture/v1"
        assert model.url("/v1", capture=False) == "http://h:1/ng-rollout/x-a2/v1"
        assert model.url() == "http://h:1/ng-rollout/x-a2/training-token-capture"
        assert agent.url("/y") == "inline://agent/ng-rollout/x-a2/base/y"
        grant = client.peer("http://h:2/ng-rollout/x-a2", "resources")
        assert grant.url("/tool") == "http://h:2/ng-rollout/x-a2/tool"
        assert client.peer("http://h:3", "environment").url("/run") == "http://h:3/run"
        assert client.peer("http://h:3", None).url("/run") == "http://h:3/run"


@pytest.mark.parametrize("url", ["h:1", "ftp://h", "http://", "", "http://h/?q=1", "http://h#f", "http://me:pass@h:1"])
def test_a_base_url_that_is_none_is_refused_without_showing_its_password(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        Client().peer(url, "model")
    assert "pass@" not in str(caught.value)


def test_inline_names_are_registered_once() -> None:
    app, other = (build_app(name="m", role="model", routes=[]) for _ in range(2))
    client = Client()
    client.register("inline://m", app)
    client.register("m", app)
    with pytest.raises(ValueError, match="taken"):
        client.register("inline://m", other)
    with pytest.raises(ValueError, match="inline://name"):
        client.register("http://h:1", other)


async def nothing(request: Request) -> Reply:
    return text_reply("")


def test_routes_given_twice_or_over_a_health_route_are_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        build_app(name="m", role="model", routes=[Route("POST", "/x", nothing), Route("post", "/x", nothing)])
    with pytest.raises(ValueError, match="health route"):
        build_app(name="m", role="model", routes=[Route("GET", "/readyz", nothing)])


async def test_path_parameters_are_converted_and_exact_paths_go_first() -> None:
    async def show(request: Request) -> Reply:
        return json_reply(dict(request.path_params))

    routes = [Route("GET", "/s/{id}", show), Route("GET", "/s/{n:int}/x", show), Route("GET", "/s/me", nothing)]
    async with Client(inline={"m": build_app(name="m", role="model", routes=routes)}) as client:
        peer = client.peer("inline://m", "model")
        assert (await peer.request("GET", "/s/a%20b")).json() == {"id": "a b"}
        assert (await peer.request("GET", "/s/7/x")).json() == {"n": 7}
        assert (await peer.request("GET", "/s/me")).text == ""
        assert (await peer.request("POST", "/s/me")).headers["allow"] == "GET"
        assert (await peer.request("GET", "/s/seven/x")).status == 404


async def test_readiness_says_why_not_and_nothing_is_served_before_the_start() -> None:
    reason: list[str | None] = ["the weights are loading"]
    life: list[str] = []

    async def startup() -> None:
        life.append("up")

    async def shutdown() -> None:
        life.append("down")

    app = build_app(
        name="m",
        role="model",
        routes=[Route("GET", "/x", nothing)],
        ready=lambda: reason[0],
        startup=startup,
        shutdown=shutdown,
    )
    async with Client(inline={"m": app}) as client:
        peer = client.peer("inline://m", "model")
        assert (await peer.request("GET", "/x")).status == 503
        await app.start()
        await app.start()
        unready = await peer.request("GET", "/readyz")
        assert (unready.status, unready.json()["error"]["message"]) == (503, "the weights are loading")
        for path in ("/livez", "/health", "/"):
            assert (await peer.request("GET", path)).status == 200
        reason[0] = None
        assert (await peer.request("GET", "/readyz")).status == 200
        assert (await peer.request("GET", "/x")).status == 200
        await app.stop()
        await app.stop()
    assert life == ["up", "down"]


async def test_a_server_may_render_errors_in_its_own_shape_also_for_a_malformed_prefix() -> None:
    def render(error: Any, request: Request | None) -> Reply:
        return json_reply({"mine": error.message}, error.status)

    app = build_app(name="m", role="model", routes=[], render_error=render, limits=Limits(max_body_bytes=1))
    async with Client(inline={"m": app}) as client:
        peer = client.peer("inline://m", None)
        for path, status in (("/x", 404), ("/ng-rollout/%2e/x", 400)):
            reply = await peer.request("GET", path)
            assert (reply.status, list(reply.json())) == (status, ["mine"])


async def test_a_rendering_that_fails_still_gives_a_typed_error() -> None:
    def render(error: Any, request: Request | None) -> Reply:
        raise KeyError("render")

    async with Client(inline={"m": build_app(name="m", role="model", routes=[], render_error=render)}) as client:
        reply = await client.peer("inline://m", None).request("GET", "/x")
    assert (reply.status, reply.json()["error"]["kind"]) == (404, "bad_request")


async def test_the_lifespan_protocol_starts_and_stops_and_reports_a_failed_start() -> None:
    async def startup() -> None:
        raise OSError("no weights")

    good = build_app(name="m", role="model", routes=[])
    bad = build_app(name="m", role="model", routes=[], startup=startup)
    for app, expected in (
        (good, ["lifespan.startup.complete", "lifespan.shutdown.complete"]),
        (bad, ["lifespan.startup.failed"]),
    ):
        inbox = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
        sent: list[Any] = []

        async def receive(inbox: list[Any] = inbox) -> Any:
            return inbox.pop(0)

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        await app({"type": "lifespan"}, receive, send)
        assert [message["type"] for message in sent] == expected
    assert sent[0]["message"] == "no weights"
