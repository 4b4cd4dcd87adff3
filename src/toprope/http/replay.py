"""When a call is sent again: declared by the call, never guessed, and bounded on every branch.

    policy          sent again after
    BEFORE_DELIVERY evidence that nothing was delivered: DNS, refused, connect timeout
    DEDUPLICATED    the same; dropped, reset, cut body, timeout; 408, 425, 429, 5xx (the receiver knows the key)
    SAFE            as DEDUPLICATED: the call changes nothing

Attempts are bounded by number, and no attempt begins later than the budget after the first failure (where that failure
was one of connecting, the budget counts from when that attempt began). A single attempt lasts as long as its own
timeout says. A typed body's `retryable: false` and `x-should-retry: false` end the loop at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from toprope.errors.body import status_is_retryable
from toprope.errors.kinds import Delivery, Kind
from toprope.errors.tree import TransportError
from toprope.http.exchange import Exchange, Transport
from toprope.http.reply import Reply

log = logging.getLogger("toprope.http")


class ReplayPolicy(StrEnum):
    """Which outcomes permit sending the same call again; see the module's table."""

    BEFORE_DELIVERY = "before_delivery"
    DEDUPLICATED = "deduplicated"
    SAFE = "safe"


BEFORE_DELIVERY = ReplayPolicy.BEFORE_DELIVERY
DEDUPLICATED = ReplayPolicy.DEDUPLICATED
SAFE = ReplayPolicy.SAFE


@dataclass(frozen=True, slots=True)
class ReplayBounds:
    """`attempts` in all (1 means never again), `budget_s` seconds from the first failure."""

    attempts: int = 4
    budget_s: float = 15.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"transport_attempts {self.attempts!r}: expected at least 1")
        if not self.budget_s > 0:
            raise ValueError(f"transport_budget_s {self.budget_s!r}: expected seconds above 0")


class Replayer:
    """Sends an exchange until it has an answer, or until policy or bounds say stop."""

    def __init__(
        self,
        bounds: ReplayBounds,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._bounds = bounds
        self._clock = clock
        self._pause = pause
        self._jitter = jitter

    async def send(self, transport: Transport, exchange: Exchange, policy: ReplayPolicy) -> Reply:
        """The peer's reply, `attempts` set: also a retryable status once the bounds are reached.

        Raises `TransportError` with attempts, seconds since the call began, last kind and delivery (the worst over
        all attempts: one that may have been delivered makes the call possibly delivered).
        """
        began = self._clock()
        try:
            reply = await transport.send(exchange)
        except TransportError as error:
            return await _Loop(self, transport, exchange, policy, began).after(error)
        if reply.status < 400 or not _may_repeat_status(reply, policy):
            return reply
        return await _Loop(self, transport, exchange, policy, began).after(reply)


class _Loop:
    """What happens after a first failure. Times in seconds of the replayer's clock."""

    def __init__(
        self, owner: Replayer, transport: Transport, exchange: Exchange, policy: ReplayPolicy, began: float
    ) -> None:
        self.owner = owner
        self.transport = transport
        self.exchange = exchange
        self.policy = policy
        self.began = began
        self.attempt = 1
        self.delivery = Delivery.NOT_SENT

    async def after(self, outcome: Reply | TransportError) -> Reply:
        owner, bounds = self.owner, self.owner._bounds
        connecting = isinstance(outcome, TransportError) and outcome.delivery is Delivery.NOT_SENT
        deadline = (self.began if connecting else owner._clock()) + bounds.budget_s
        first = True
        while True:
            self._note(outcome)
            delay = self._delay(outcome)
            left = deadline - owner._clock()
            again = self._may_repeat(outcome) and self.attempt < bounds.attempts and delay < left
            if first:
                first = False
                self._log_first(outcome, delay if again else None, left)
            if not again:
                return self._give_up(outcome)
            await owner._pause(delay)
            left = deadline - owner._clock()
            if left <= 0:  # the pause took longer than asked
                return self._give_up(outcome)
            self.attempt += 1
            outcome = await self._once(left)
            if isinstance(outcome, Reply) and not _may_repeat_status(outcome, self.policy):
                return self._counted(outcome)

    async def _once(self, left: float) -> Reply | TransportError:
        exchange = self.exchange
        bounded = Exchange(
            exchange.method,
            exchange.origin,
            exchange.target,
            exchange.headers,
            exchange.body,
            exchange.timeout_s,
            min(exchange.connect_timeout_s, left),
            exchange.max_bytes,
        )
        try:
            return await self.transport.send(bounded)
        except TransportError as error:
            return error

    def _may_repeat(self, outcome: Reply | TransportError) -> bool:
        if isinstance(outcome, Reply):
            return _may_repeat_status(outcome, self.policy)
        if outcome.delivery is Delivery.NOT_SENT:
            return True
        return self.policy is not BEFORE_DELIVERY and outcome.kind != Kind.BAD_REPLY

    def _delay(self, outcome: Reply | TransportError) -> float:
        """Exponential from a thirtieth of the budget, jittered over its upper half; Retry-After is a floor."""
        step: float = self.owner._bounds.budget_s / 30 * 2 ** (self.attempt - 1)
        delay = step * (0.5 + 0.5 * self.owner._jitter())
        if isinstance(outcome, Reply):
            delay = max(delay, _retry_after_s(outcome))
        return delay

    def _note(self, outcome: Reply | TransportError) -> None:
        delivery = Delivery.DELIVERED if isinstance(outcome, Reply) else outcome.delivery
        order = [Delivery.NOT_SENT, Delivery.POSSIBLY_DELIVERED, Delivery.DELIVERED]
        if delivery is not None and order.index(delivery) > order.index(self.delivery):
            self.delivery = delivery

    def _log_first(self, outcome: Reply | TransportError, delay: float | None, left: float) -> None:
        if isinstance(outcome, Reply):
            what = f"{self.exchange.method} {self.exchange.shown_url}: answered {outcome.status}"
        else:
            what = f"{outcome.message} [{outcome.kind}]"
        if delay is None:
            log.warning("%s; not sent again (%s)", what, self.policy)
        else:
            limit = self.owner._bounds.attempts
            log.warning("%s; attempt 1 of %d, again in %.2f s, for %.1f s at most", what, limit, delay, left)

    def _give_up(self, outcome: Reply | TransportError) -> Reply:
        if isinstance(outcome, Reply):
            return self._counted(outcome)
        elapsed = self.owner._clock() - self.began
        tried = "1 attempt" if self.attempt == 1 else f"{self.attempt} attempts"
        raise TransportError(
            f"{outcome.message} ({tried} in {elapsed:.1f} s)",
            kind=Kind(outcome.kind),
            url=outcome.url,
            delivery=self.delivery,
            attempts=self.attempt,
            elapsed_s=elapsed,
        ) from outcome

    def _counted(self, reply: Reply) -> Reply:
        return Reply(reply.status, reply.body, reply.headers, reply.cookies, reply.url, self.attempt)


def _may_repeat_status(reply: Reply, policy: ReplayPolicy) -> bool:
    if policy is BEFORE_DELIVERY or not status_is_retryable(reply.status):
        return False
    return reply.headers.get("x-should-retry") != "false" and reply.error_info().retryable


def _retry_after_s(reply: Reply) -> float:
    """Seconds that the peer asks for; 0 where it does not, or gives a date (our servers give seconds)."""
    try:
        return max(0.0, float(reply.headers.get("retry-after", "0")))
    except ValueError:
        return 0.0
