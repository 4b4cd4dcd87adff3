"""The HTTP transport against real sockets: no cap of a library's choosing, stale connections, silent peers."""

from __future__ import annotations

import asyncio
import socket
import warnings
from collections.abc import AsyncIterator
from typing import Any

import pytest

from toprope.errors.kinds import Delivery, Kind
from toprope.errors.tree import PeerError, TransportError
from toprope.http.app import Route, build_app
from toprope.http.client import Client, Peer
from toprope.http.overhttp import KEEP_ALIVE_S, HttpTransport, _socket_with_keepalive
from toprope.http.replay import BEFORE_DELIVERY, DEDUPLICATED
from toprope.http.reply import Reply, text_reply
from toprope.http.request import Request
from toprope.http.serve import KEEP_ALIVE_S as SERVER_KEEP_ALIVE_S
from toprope.http.serve import serve


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with Client(transport_budget_s=1.0) as client:
        yield client


async def test_128_calls_are_128_in_flight_at_once(client: Client) -> None:
    everyone = asyncio.Barrier(128)

    async def handler(request: Request) -> Reply:
        await everyone.wait()  # opens when all 128 are here, never with fewer
        return text_reply("")

    bound = await serve(build_app(name="u", role="model", routes=[Route("POST", "/x", handler)]))
    peer = client.peer(bound.url, "model")
    replies = await asyncio.wait_for(asyncio.gather(*(peer.request("POST", "/x") for _ in range(128))), 30)
    assert [reply.status for reply in replies] == [200] * 128
    await bound.close()


async def test_a_call_without_a_timeout_has_none_of_the_librarys() -> None:
    """(aiohttp: 300 s in all by default.) The session is asked, since 300 s are not waited for here."""
    session = HttpTransport()._open()
    assert (session.timeout.total, session.timeout.sock_read) == (None, None)
    assert session.connector is not None
    assert (session.connector.limit, session.connector.limit_per_host) == (0, 0)
    await session.close()


async def test_a_connection_that_the_peer_closed_while_idle_is_replaced_without_an_error_or_a_second_execution(
    client: Client, peers: Any
) -> None:
    async def answer_then_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(peers.OK)
        await writer.drain()
        writer.close()

    async with peers.raw_peer(answer_then_close) as peer:
        for policy in (BEFORE_DELIVERY, DEDUPLICATED, BEFORE_DELIVERY):
            peer.closed.clear()
            reply = await client.peer(peer.url, "environment").request("POST", "/run", body={}, policy=policy)
            assert (reply.status, reply.attempts) == (200, 1)
            await peer.closed.wait()
        assert (peer.connections, len(peer.requests)) == (3, 3)


async def test_a_connection_is_reused_while_it_lives(client: Client, peers: Any) -> None:
    async with peers.raw_peer(peers.answer_ok) as peer:
        for _ in range(5):
            assert (await client.peer(peer.url, None).request("POST", "/x", body={})).status == 200
        assert (peer.connections, len(peer.requests)) == (1, 5)


def test_clients_give_up_idle_connections_before_servers_do() -> None:
    assert KEEP_ALIVE_S < 5 < SERVER_KEEP_ALIVE_S  # 5 s is the common default of strangers' servers


async def test_a_peer_that_reads_and_never_answers_is_a_timeout_and_no_lost_connection(
    client: Client, peers: Any
) -> None:
    async with peers.raw_peer(peers.never) as peer:
        with pytest.raises(TransportError, match=r"no complete reply within 0\.05 s") as caught:
            await client.peer(peer.url, "environment").request("POST", "/run", body={}, timeout_s=0.05)
        assert caught.value.kind == Kind.TRANSPORT_TIMEOUT
        await asyncio.wait_for(peer.closed.wait(), 10)  # and our end of it is closed


async def test_a_host_that_never_accepts_is_a_connect_timeout_within_its_bound() -> None:
    """A listener whose backlog is full lets the handshake hang, as a host behind a silent firewall does."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
            fillers.append(filler)
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        async with Client(connect_timeout_s=0.1, transport_attempts=2, transport_budget_s=1.0) as client:
            with pytest.raises(TransportError, match=r"no connection within 0\.1 s") as caught:
                await client.peer(url, "model").request("POST", "/x", body={})
        for filler in fillers:
            filler.close()
    assert (caught.value.kind, caught.value.delivery, caught.value.attempts) == ("transport_timeout", "not_sent", 2)


async def test_a_machine_without_descriptors_is_named_as_such(
    client: Client, peers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: Any) -> socket.socket:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("toprope.http.overhttp.socket.socket", exhausted)
    with pytest.raises(TransportError) as caught:
        await client.peer("http://127.0.0.1:9", "model").request("POST", "/x", body={})
    assert (caught.value.kind, caught.value.delivery) == (Kind.TRANSPORT_RESOURCE, "not_sent")


def test_tcp_keep_alive_is_on() -> None:
    with _socket_with_keepalive((socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 0))) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60


async def test_cancelling_closes_the_connection_and_repeats_leave_none_behind(client: Client, peers: Any) -> None:
    async with peers.raw_peer(peers.never) as peer:
        for _ in range(20):
            peer.closed.clear()
            call = asyncio.create_task(client.peer(peer.url, None).request("POST", "/x", body={}))
            await peer.arrived.acquire()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.wait_for(peer.closed.wait(), 10)
        assert peer.connections == 20


async def test_a_compressed_reply_counts_as_what_comes_out(client: Client, peers: Any) -> None:
    import gzip

    packed = gzip.compress(b"x" * 100_000)

    async def bomb(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed) + packed)

    async with peers.raw_peer(bomb) as peer:
        target = client.peer(peer.url, None)
        assert len((await target.request("GET", "/x", max_bytes=100_000)).body) == 100_000
        with pytest.raises(PeerError, match="99999 bytes"):
            await target.request("GET", "/x", max_bytes=99_999)


async def test_bodies_of_megabytes_are_sent_without_a_warning_and_with_their_length(client: Client, peers: Any) -> None:
    async with peers.raw_peer(peers.answer_ok) as peer:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            body = b"ab" * 2**20
            assert (await client.peer(peer.url, None).request("POST", "/x", body=body)).status == 200
        head, _, received = peer.requests[0].partition(b"\r\n\r\n")
        assert received == body
        assert b"content-length: 2097152" in head.lower()
        assert b"chunked" not in head.lower()


async def test_a_foreign_peer_gets_nothing_that_is_ours(client: Client, peers: Any) -> None:
    from toprope.correlation.context import rollout_context

    async with peers.raw_peer(peers.answer_ok) as peer:
        with rollout_context("4-2", capture=True):
            await client.peer(peer.url + "/v1", None, api_key="k1").request("POST", "/chat", body={"a": None})
        line, *head = peer.requests[0].partition(b"\r\n\r\n")[0].decode().split("\r\n")
        assert line == "POST /v1/chat HTTP/1.1"
        names = {field.partition(":")[0].lower() for field in head}
        assert names == {"host", "user-agent", "authorization", "content-type", "content-length"}
        assert peer.requests[0].endswith(b'{"a":null}')


async def test_a_closed_client_says_so_instead_of_opening_connections_again() -> None:
    client = Client(inline={"m": build_app(name="m", role="model", routes=[])})
    known = [client.peer(url, "model") for url in ("http://127.0.0.1:9", "inline://m")]
    await client.close()
    await client.close()
    for peer in known:
        with pytest.raises(RuntimeError, match="closed"):
            await peer.request("GET", "/livez")
    with pytest.raises(RuntimeError, match="closed"):
        client.peer("http://127.0.0.1:10", "model")


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.promise("MS-3")
@pytest.mark.parametrize("leaving", ["before_the_head", "in_the_head", "in_the_body", "by_an_error", "cancelled"])
async def test_fifty_streams_that_are_left_leave_no_connection_open(client: Client, peers: Any, leaving: str) -> None:
    open_now = 0
    none_open, opened = asyncio.Event(), asyncio.Event()

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now
        open_now += 1
        none_open.clear()
        opened.set()
        if leaving != "before_the_head":
            writer.write(HEAD + b"9\r\ndata: 1\n\n\r\n")
        await reader.read()  # until the client closes
        open_now -= 1
        if open_now == 0:
            none_open.set()
        writer.close()

    async def read(peer: Peer) -> None:
        async with peer.stream("POST", "/x", body={}, max_bytes=4 if leaving == "by_an_error" else 99) as reply:
            if leaving in ("in_the_body", "by_an_error", "cancelled"):
                await anext(reply)
            if leaving == "cancelled":
                await anext(reply)

    async with peers.raw_peer(stream) as raw:
        peer = client.peer(raw.url, None)
        for _ in range(50):
            opened.clear()
            task = asyncio.create_task(read(peer))
            await opened.wait()
            if leaving in ("before_the_head", "cancelled"):
                task.cancel()
            await asyncio.wait([task])
            if leaving == "by_an_error":
                assert isinstance(task.exception(), PeerError)
        await asyncio.wait_for(none_open.wait(), 10)
        assert open_now == 0


async def test_fifty_streams_that_are_read_whole_share_one_connection(client: Client, peers: Any) -> None:
    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"9\r\ndata: 1\n\n\r\n0\r\n\r\n")

    async with peers.raw_peer(stream) as raw:
        for _ in range(50):
            async with client.peer(raw.url, None).stream("POST", "/x", body={}) as reply:
                assert (await reply.whole()).body == b"data: 1\n\n"
        assert raw.connections == 1


async def test_a_refused_connection_of_a_stream_is_tried_again_and_a_begun_one_never(
    client: Client, peers: Any
) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"9\r\ndata: 1\n\n\r\n")
        writer.close()

    with pytest.raises(TransportError) as caught:
        async with client.peer(peers.refused_url(), None).stream("POST", "/x"):
            pass
    assert (caught.value.kind, caught.value.delivery) == (Kind.TRANSPORT_UNREACHABLE, Delivery.NOT_SENT)
    assert caught.value.attempts > 1
    async with peers.raw_peer(cut) as raw:
        with pytest.raises(TransportError, match="cut off"):
            async with client.peer(raw.url, None).stream("POST", "/x", policy=DEDUPLICATED) as reply:
                await reply.whole()
        assert len(raw.requests) == 1


async def test_an_error_status_of_a_stream_is_repeated_as_its_policy_says(client: Client, peers: Any) -> None:
    answers = [b"HTTP/1.1 503 X\r\ncontent-length: 2\r\n\r\nno", peers.OK]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop(0))

    async with (
        peers.raw_peer(answer) as raw,
        client.peer(raw.url, None).stream("POST", "/x", policy=DEDUPLICATED) as reply,
    ):
        assert (reply.status, reply.attempts, (await reply.whole()).body) == (200, 2, b"{}")
