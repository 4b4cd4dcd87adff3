"""A server on a socket: who picks the port, who may be reached, how it ends."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from toprope.correlation.context import current_rollout_id, rollout_context
from toprope.errors.tree import ConfigError
from toprope.http.app import Limits, Route, ServerApp, build_app
from toprope.http.client import Client
from toprope.http.reply import Reply, json_reply, text_reply
from toprope.http.request import Request
from toprope.http.serve import serve


def server(name: str = "model", **settings: Any) -> ServerApp:
    async def who(request: Request) -> Reply:
        return json_reply(current_rollout_id())

    return build_app(name=name, role="model", routes=[Route("GET", "/who", who)], **settings)


async def raw(url: str, request: bytes) -> bytes:
    """One exchange on a bare socket; the server closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


async def test_the_binder_picks_the_port_so_that_many_start_at_once_and_none_collides() -> None:
    bound = await asyncio.gather(*(serve(server(f"s{number}")) for number in range(24)))
    assert len({one.port for one in bound}) == 24
    async with Client() as client:
        for number, one in enumerate(bound):
            about = (await client.peer(one.url, "model").request("GET", "/readyz")).json()
            assert about["name"] == f"s{number}"
    await asyncio.gather(*(one.close() for one in bound))


async def test_a_port_that_somebody_else_took_ends_the_start_with_the_servers_name() -> None:
    started = []

    async def startup() -> None:
        started.append(1)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"judge: cannot bind 127.0.0.1:{port}"):
            await serve(server("judge", startup=startup), port=port)
    assert not started


@pytest.mark.parametrize("port", [-1, 65536, 10**12])
async def test_a_port_that_is_none_is_a_config_error(port: int) -> None:
    with pytest.raises(ConfigError, match="cannot bind"):
        await serve(server(), port=port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com", ""])
async def test_a_server_without_a_key_is_bound_to_this_machine_only(host: str) -> None:
    with pytest.raises(ConfigError, match="api_key"):
        await serve(server(), host=host)


async def test_with_a_key_other_hosts_are_allowed() -> None:
    bound = await serve(server(api_key="k" * 20), host="0.0.0.0")
    async with Client() as client:
        assert (await client.peer(bound.url, "model").request("GET", "/who")).status == 401
        assert (await client.peer(bound.url, "model", api_key="k" * 20).request("GET", "/who")).status == 200
    await bound.close()


async def test_a_startup_that_fails_comes_out_and_leaves_no_socket() -> None:
    attempts = []

    async def startup() -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("the weights are missing")

    app = server(startup=startup)
    probe = socket.socket()
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
    probe.close()
    with pytest.raises(OSError, match="weights"):
        await serve(app, port=port)
    bound = await serve(app, port=port)  # the port is free again, and start may be repeated
    assert bound.port == port
    await bound.close()


async def test_close_frees_the_port_closes_idle_connections_and_may_be_repeated() -> None:
    bound = await serve(server())
    reader, writer = await asyncio.open_connection("127.0.0.1", bound.port)
    writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b"200" in await reader.readline()
    await asyncio.gather(bound.close(), bound.close())
    assert b'"ok"' in await reader.read()  # to the end: the server closed it
    writer.close()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", bound.port)
    await bound.close()


async def test_close_lets_a_detached_call_finish_and_deliver_its_reply() -> None:
    began, release = asyncio.Event(), asyncio.Event()

    async def work(request: Request) -> Reply:
        began.set()
        await release.wait()
        return text_reply("x" * 300_000)

    app = build_app(name="m", role="model", routes=[Route("POST", "/x", work, detached=True)])
    bound = await serve(app)
    async with Client() as client:
        call = asyncio.create_task(client.peer(bound.url, "model").request("POST", "/x"))
        await began.wait()
        closing = asyncio.create_task(bound.close())
        await asyncio.sleep(0)
        release.set()
        assert len((await call).body) == 300_000
        await closing


async def test_a_server_that_was_started_inside_a_rollout_does_not_hand_it_to_its_requests() -> None:
    with rollout_context("4-2"):
        bound = await serve(server())
    async with Client() as client:
        assert (await client.peer(bound.url, None).request("GET", "/who")).json() is None
    await bound.close()


@pytest.mark.promise("ID-1")
@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"/ng-rollout/4-2/who", 200),
        (b"http://other.host/ng-rollout/4-2/who", 200),
        (b"/ng-rollout/%2e%2e/who", 400),
        (b"/ng-rollout/../who", 400),
        (b"/ng-rollout/4-2%0a/who", 400),
        (b"/ng-rollout/4%2f2/who", 400),
        (b"//ng-rollout/4-2/who", 400),
        (b"/x/../ng-rollout/4-2/who", 400),
        (b"/ng-rollout/4-2/%2e%2e/who", 400),
        (b"/ng-rollout/\xff/who", 400),
        (b"/%6eg-rollout/4-2/who", 400),
        (b"/ng-rollout/4-2", 400),
        (b"/nowhere", 404),
    ],
)
async def test_paths_that_no_client_library_would_send_are_judged_as_they_stand(target: bytes, status: int) -> None:
    bound = await serve(server())
    answer = await raw(bound.url, b"GET " + target + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    if status == 200:
        assert answer.endswith(b'"4-2"')
    await bound.close()


async def test_a_bad_length_and_half_a_body_never_reach_a_handler() -> None:
    ran = []

    async def handler(request: Request) -> Reply:
        ran.append(await request.body())
        return text_reply("")

    app = build_app(name="m", role="model", routes=[Route("POST", "/x", handler)], limits=Limits(max_body_bytes=2**20))
    bound = await serve(app)
    for length in (b"abc", b"-1", b"1" * 30):
        answer = await raw(
            bound.url, b"POST /x HTTP/1.1\r\nconnection: close\r\ncontent-length: " + length + b"\r\n\r\n"
        )
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 413"))
    _, writer = await asyncio.open_connection("127.0.0.1", bound.port)
    writer.write(b"POST /x HTTP/1.1\r\ncontent-length: 10\r\n\r\nhalf")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    chunked = (
        b"POST /x HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    assert (await raw(bound.url, chunked)).startswith(b"HTTP/1.1 200")
    assert ran == [b"abcde"]
    await bound.close()


async def test_a_chunked_body_without_end_is_stopped_at_the_limit() -> None:
    async def handler(request: Request) -> Reply:
        pytest.fail("the handler ran")

    app = build_app(name="m", role="model", routes=[Route("POST", "/x", handler)], limits=Limits(max_body_bytes=1000))
    bound = await serve(app)
    reader, writer = await asyncio.open_connection("127.0.0.1", bound.port)
    writer.write(b"POST /x HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(3):
        writer.write(b"200\r\n" + b"x" * 512 + b"\r\n")
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"1000 bytes" in answer
    writer.close()
    await bound.close()


async def test_whoever_stops_a_server_may_shorten_its_drain_but_not_lengthen_it() -> None:
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def work(request: Request) -> Reply:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return text_reply("")

    for limit, bound in ((100_000.0, 0.0), (0.0, 100_000.0)):
        routes = [Route("POST", "/x", work, detached=True)]
        server = await serve(build_app(name="m", role="model", routes=routes, limits=Limits(drain_s=limit)))
        async with Client() as client:
            call = asyncio.create_task(client.peer(server.url, "model").request("POST", "/x"))
            await began.wait()
            await server.close(drain_s=bound)
            assert cancelled.is_set()
            assert (await call).status == 503
        began.clear()
        cancelled.clear()
