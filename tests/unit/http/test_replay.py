"""What is sent again, how often, for how long, and what the error says at the end. Real sockets, a clock of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from toprope.errors.kinds import Delivery, Kind
from toprope.errors.tree import CapacityReached, SessionLost, TransportError
from toprope.http.app import Route, build_app
from toprope.http.client import Client
from toprope.http.exchange import Exchange, Origin, failure
from toprope.http.replay import BEFORE_DELIVERY, DEDUPLICATED, SAFE, ReplayBounds, Replayer, ReplayPolicy
from toprope.http.reply import Reply, json_reply
from toprope.http.request import Request


class Clock:
    """Time that passes only while a replayer pauses."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def client(clock: Clock) -> AsyncIterator[Client]:
    replayer = Replayer(ReplayBounds(4, 15.0), clock=clock, pause=clock.pause, jitter=lambda: 1.0)
    async with Client(replayer=replayer) as client:
        yield client


async def failing(client: Client, url: str, policy: ReplayPolicy, **arguments: Any) -> TransportError:
    with pytest.raises(TransportError) as caught:
        await client.peer(url, "resources").request("POST", "/seed", body={}, policy=policy, **arguments)
    return caught.value


@pytest.mark.parametrize("policy", list(ReplayPolicy))
async def test_a_refused_port_is_bounded_and_logged_at_once_with_url_and_kind(
    client: Client, clock: Clock, policy: ReplayPolicy, caplog: pytest.LogCaptureFixture, peers: Any
) -> None:
    url = peers.refused_url()
    caplog.set_level(logging.WARNING, "toprope.http")
    error = await failing(client, url, policy)
    assert (error.kind, error.delivery) == (Kind.TRANSPORT_UNREACHABLE, Delivery.NOT_SENT)
    assert (error.url, error.attempts) == (f"{url}/seed", 4)
    assert error.elapsed_s == pytest.approx(sum(clock.pauses)) == pytest.approx(3.5)
    assert f"{url}/seed: connection refused (4 attempts in 3.5 s)" in error.message
    (record,) = [record for record in caplog.records if record.name == "toprope.http"]
    assert f"{url}/seed: connection refused [transport_unreachable]; attempt 1 of 4" in record.getMessage()


async def test_the_first_failure_is_logged_before_the_first_pause(
    clock: Clock, caplog: pytest.LogCaptureFixture, peers: Any
) -> None:
    logged: list[int] = []

    async def pause(seconds: float) -> None:
        logged.append(len([record for record in caplog.records if record.name == "toprope.http"]))

    caplog.set_level(logging.WARNING, "toprope.http")
    async with Client(replayer=Replayer(ReplayBounds(2, 15.0), pause=pause)) as client:
        await failing(client, peers.refused_url(), BEFORE_DELIVERY)
    assert logged == [1]


async def test_a_name_that_does_not_resolve_says_so(client: Client) -> None:
    error = await failing(client, "http://nowhere.invalid:1", BEFORE_DELIVERY)
    assert (error.kind, error.delivery) == (Kind.TRANSPORT_UNREACHABLE, Delivery.NOT_SENT)
    assert "does not resolve" in error.message


async def test_an_inline_server_that_is_not_there_names_those_that_are(client: Client) -> None:
    client.register("inline://model", build_app(name="model", role="model", routes=[]))
    error = await failing(client, "inline://modle", BEFORE_DELIVERY)
    assert (error.kind, error.attempts) == (Kind.TRANSPORT_UNREACHABLE, 4)
    assert "known are: model" in error.message


@pytest.mark.promise("EP-8")
@pytest.mark.parametrize(
    ("behaviour", "kind", "delivery"),
    [
        ("drop", Kind.TRANSPORT_DROPPED, Delivery.POSSIBLY_DELIVERED),
        ("reset", Kind.TRANSPORT_DROPPED, Delivery.POSSIBLY_DELIVERED),
        ("cut_body", Kind.TRANSPORT_DROPPED, Delivery.DELIVERED),
        ("never", Kind.TRANSPORT_TIMEOUT, Delivery.POSSIBLY_DELIVERED),
    ],
)
async def test_a_post_that_was_executed_is_seen_once_or_at_most_the_attempt_bound(
    client: Client, behaviour: str, kind: Kind, delivery: Delivery, peers: Any
) -> None:
    for policy, seen in ((BEFORE_DELIVERY, 1), (DEDUPLICATED, 4), (SAFE, 4)):
        async with peers.raw_peer(getattr(peers, behaviour)) as peer:
            error = await failing(client, peer.url, policy, timeout_s=0.05 if behaviour == "never" else 20)
            assert (error.kind, error.delivery, error.attempts) == (kind, delivery, seen)
            assert len(peer.requests) == seen


async def test_what_is_no_http_is_not_asked_again(client: Client, peers: Any) -> None:
    async with peers.raw_peer(peers.nonsense) as peer:
        error = await failing(client, peer.url, DEDUPLICATED)
        assert (error.kind, error.attempts, len(peer.requests)) == (Kind.BAD_REPLY, 1, 1)


async def test_a_peer_that_comes_up_during_the_pauses_is_reached_once(clock: Clock, peers: Any) -> None:
    url = peers.refused_url()
    served: list[asyncio.Server] = []
    peer = peers.RawPeer(peers.answer_ok)

    async def pause(seconds: float) -> None:
        if not served:
            served.append(await asyncio.start_server(peer.handle, "127.0.0.1", int(url.rpartition(":")[2])))

    async with Client(replayer=Replayer(ReplayBounds(4, 15.0), clock=clock, pause=pause)) as client:
        reply = await client.peer(url, "resources").request("POST", "/seed", body={})
    assert (reply.status, reply.attempts, len(peer.requests)) == (200, 2, 1)
    served[0].close()


async def test_time_bounds_the_loop_where_attempts_do_not(clock: Clock, peers: Any) -> None:
    replayer = Replayer(ReplayBounds(1000, 15.0), clock=clock, pause=clock.pause, jitter=lambda: 0.0)
    async with Client(replayer=replayer) as client:
        error = await failing(client, peers.refused_url(), BEFORE_DELIVERY)
    assert error.elapsed_s < 15.0
    assert 4 < error.attempts < 10


async def test_jitter_halves_a_pause_at_most(clock: Clock, peers: Any) -> None:
    for jitter, expected in ((0.0, [0.25, 0.5, 1.0]), (1.0, [0.5, 1.0, 2.0])):
        clock.pauses.clear()
        replayer = Replayer(ReplayBounds(4, 15.0), clock=clock, pause=clock.pause, jitter=partial(float, jitter))
        async with Client(replayer=replayer) as client:
            await failing(client, peers.refused_url(), BEFORE_DELIVERY)
        assert clock.pauses == pytest.approx(expected)


@pytest.mark.parametrize("bad", [{"attempts": 0}, {"budget_s": 0.0}, {"budget_s": -1.0}, {"budget_s": float("nan")}])
def test_bounds_that_bound_nothing_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        ReplayBounds(**bad)


# Statuses


class Answers:
    """A handler that goes through a list of replies or errors and stays at the last."""

    def __init__(self, *answers: Reply | Exception) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def __call__(self, request: Request) -> Reply:
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if isinstance(answer, Exception):
            raise answer
        return answer


async def ask(client: Client, handler: Answers, policy: ReplayPolicy) -> Reply:
    client.register("inline://r", build_app(name="r", role="resources", routes=[Route("POST", "/seed", handler)]))
    return await client.peer("inline://r", "resources").request("POST", "/seed", policy=policy)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
async def test_deduplicated_calls_repeat_retryable_statuses_and_give_the_last_reply(
    client: Client, status: int
) -> None:
    handler = Answers(Reply(status, b"busy"))
    reply = await ask(client, handler, DEDUPLICATED)
    assert (reply.status, reply.attempts, handler.asked) == (status, 4, 4)


async def test_before_delivery_calls_repeat_no_status(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    handler = Answers(Reply(503))
    assert (await ask(client, handler, BEFORE_DELIVERY)).attempts == handler.asked == 1


async def test_a_later_success_is_the_reply(client: Client) -> None:
    handler = Answers(Reply(502), CapacityReached("full"), json_reply({"ok": True}))
    reply = await ask(client, handler, SAFE)
    assert (reply.json(), reply.attempts) == ({"ok": True}, 3)


@pytest.mark.parametrize(
    "answer",
    [
        Reply(400),
        Reply(404),
        Reply(409),
        SessionLost("gone"),
        ZeroDivisionError("a bug of ours: typed, not retryable"),
        Reply(503, b"", {"x-should-retry": "false"}),
    ],
    ids=["400", "404", "409", "typed 404", "typed 500", "x-should-retry"],
)
async def test_terminal_answers_are_not_repeated(client: Client, answer: Reply | Exception) -> None:
    handler = Answers(answer)
    assert (await ask(client, handler, DEDUPLICATED)).attempts == handler.asked == 1


async def test_retry_after_is_waited_for_and_one_beyond_the_budget_ends_the_loop(client: Client, clock: Clock) -> None:
    handler = Answers(CapacityReached("full", retry_after_s=5), CapacityReached("full", retry_after_s=60))
    reply = await ask(client, handler, DEDUPLICATED)
    assert (reply.status, reply.attempts) == (429, 2)
    assert clock.pauses == [5.0]


async def test_one_ambiguous_attempt_makes_the_whole_call_possibly_delivered(clock: Clock, peers: Any) -> None:
    """The last attempt was refused, but the first was executed: the record must not say not_sent."""
    peer = peers.RawPeer(peers.drop)
    server = await asyncio.start_server(peer.handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def pause(seconds: float) -> None:
        server.close()

    async with Client(replayer=Replayer(ReplayBounds(2, 15.0), clock=clock, pause=pause)) as client:
        error = await failing(client, url, DEDUPLICATED)
    assert (error.kind, error.delivery) == (Kind.TRANSPORT_UNREACHABLE, Delivery.POSSIBLY_DELIVERED)


async def test_a_connection_of_a_later_attempt_is_not_waited_for_beyond_the_budget(clock: Clock) -> None:
    waits: list[float] = []

    class Nowhere:
        async def send(self, exchange: Exchange) -> Reply:
            waits.append(exchange.connect_timeout_s)
            raise failure(Kind.TRANSPORT_TIMEOUT, exchange, Delivery.NOT_SENT, "no connection")

    replayer = Replayer(ReplayBounds(4, 3.0), clock=clock, pause=clock.pause, jitter=lambda: 1.0)
    exchange = Exchange("GET", Origin("http", "127.0.0.1:9"), "/", [], None, None, 5.0, 100)
    with pytest.raises(TransportError):
        await replayer.send(Nowhere(), exchange, SAFE)  # type: ignore[arg-type]
    assert waits == pytest.approx([5.0, 2.9, 2.7, 2.3])


@pytest.mark.promise("EP-7")
@pytest.mark.parametrize("overrun", [0.0, 1e-6, 10.0])
async def test_nothing_is_sent_after_a_pause_that_took_longer_than_what_was_left(clock: Clock, overrun: float) -> None:
    sent: list[float] = []

    class Nowhere:
        async def send(self, exchange: Exchange) -> Reply:
            sent.append(clock.now)
            raise failure(Kind.TRANSPORT_UNREACHABLE, exchange, Delivery.NOT_SENT, "refused")

    async def pause(seconds: float) -> None:
        clock.now = 1003.0 + overrun if len(sent) == 2 else clock.now + seconds

    replayer = Replayer(ReplayBounds(4, 3.0), clock=clock, pause=pause, jitter=lambda: 1.0)
    exchange = Exchange("GET", Origin("http", "127.0.0.1:9"), "/", [], None, None, 5.0, 100)
    with pytest.raises(TransportError) as caught:
        await replayer.send(Nowhere(), exchange, SAFE)  # type: ignore[arg-type]
    assert sent == pytest.approx([1000.0, 1000.1]), "the budget was over when the second pause was"
    assert caught.value.attempts == 2
