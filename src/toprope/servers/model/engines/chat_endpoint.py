"""One OpenAI-compatible endpoint: `POST <base_url>/chat/completions`, plain and streamed, tried again within bounds.

    before the first delta     429 and 5xx are sent again within one counter, Retry-After honoured; the rest is terminal
    after it                   whatever ends the stream early is a `StreamDied`: nothing can be repeated

A streamed completion is read to its end into the same value as a plain one, so that ids, logprobs and faults are judged
alike. Left to others: what is asked for (`openai`, `vllm`), what a provider's error means (`provider_errors`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import msgspec

from toprope.dialects.chat_stream_reader import ChatStreamReader
from toprope.dialects.deltas import Delta
from toprope.errors.kinds import Delivery
from toprope.errors.tree import ConfigError, EngineError, EngineUnavailable, PeerError, TransportError
from toprope.http.client import Client
from toprope.http.peer import MAX_REPLY_BYTES
from toprope.http.replystream import StreamedReply
from toprope.servers.model.engines.base import Emit, StreamDied
from toprope.servers.model.engines.provider_errors import event_error, provider_error
from toprope.wire.chat import BadChatReply, ChatReply, TellsError, read_chat_reply, tells_error
from toprope.wire.fields import write_object
from toprope.wire.sse import SseEvent, SseReader, SseTooLarge

log = logging.getLogger(__name__)

T = TypeVar("T")

_PATH = "/chat/completions"
_GIVEN_UP = frozenset({"abort", "error"})
"""Finish reasons of engines for a generation that was stopped from outside, by new weights for one."""
_SETTLE_S = 0.05
"""Seconds that the end of a finished stream's body is waited for, so that its connection can be used again."""


@dataclass(frozen=True, slots=True)
class EndpointBounds:
    """What one call may take: attempts and seconds for sending it again, seconds in all and without a byte, bytes.

    None is no bound. Raises `ConfigError` for what cannot be one.
    """

    max_attempts: int = 3
    retry_budget_s: float = 60.0
    timeout_s: float | None = None
    idle_timeout_s: float | None = 600.0
    max_reply_bytes: int = MAX_REPLY_BYTES

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigError(f"max_attempts {self.max_attempts}: expected at least 1")
        for name in ("timeout_s", "idle_timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} {value}: expected seconds above 0, or null for no bound")
        if not self.retry_budget_s >= 0:
            raise ConfigError(f"retry_budget_s {self.retry_budget_s}: expected seconds, 0 or more")
        if self.max_reply_bytes < 1:
            raise ConfigError(f"max_reply_bytes {self.max_reply_bytes}: expected at least 1")


class ChatEndpoint:
    """The endpoint at `base_url` (with its `/v1`). Raises `ConfigError` for a base URL that is none."""

    def __init__(
        self,
        *,
        client: Client,
        base_url: str,
        api_key: str | None,
        bounds: EndpointBounds,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        try:
            self.peer = client.peer(self.base_url, None, api_key=api_key)
        except ValueError as error:
            raise ConfigError(f"base_url: {error}") from error
        # vLLM's own routes are beside its /v1.
        self._root = client.peer(self.base_url.removesuffix("/v1"), None, api_key=api_key)
        self._bounds = bounds
        self._pause = pause

    async def models(self) -> list[dict[str, Any]] | None:
        """The entries of `/models`, None where it has no such route. Raises `EngineError` naming the URL."""
        try:
            reply = await self.peer.request("GET", "/models", timeout_s=10.0)
        except TransportError as error:
            raise EngineUnavailable(f"the engine at {self.base_url} cannot be reached: {error.message}") from error
        except PeerError as error:
            raise self._unusable(error) from error
        if reply.status in (404, 405, 501):  # not every endpoint lists its models; one that answers is alive
            return None
        if reply.status >= 400:
            raise provider_error(reply)
        try:
            body = reply.json()
        except PeerError as error:
            raise self._unusable(error) from error
        data = body.get("data") if isinstance(body, dict) else None
        return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []

    async def tokenize(self, body: dict[str, Any]) -> list[int]:
        """The ids of vLLM's `POST /tokenize`. Raises `EngineError` with the provider's words, or naming the URL."""
        try:
            reply = await self._root.request("POST", "/tokenize", body=write_object(body), timeout_s=30.0)
        except TransportError as error:
            raise self._unanswered(error) from error
        except PeerError as error:
            raise self._unusable(error) from error
        if reply.status >= 400:
            raise provider_error(reply)
        try:
            told = reply.json()
        except PeerError as error:
            raise self._unusable(error) from error
        ids = told.get("tokens") if isinstance(told, dict) else None
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            raise EngineUnavailable(f"{self.base_url}: /tokenize answered without a list of token ids")
        return ids

    async def complete(
        self, body: dict[str, Any], headers: Mapping[str, str], *, keep_logprobs: bool = False
    ) -> ChatReply:
        """One completion, whole. Raises `EngineError` with the provider's words once the bounds are reached."""
        data = write_object(body)
        bounds = self._bounds

        async def attempt() -> ChatReply | EngineError:
            try:
                reply = await self.peer.request(
                    "POST",
                    _PATH,
                    body=data,
                    headers=headers,
                    timeout_s=bounds.timeout_s,
                    max_bytes=bounds.max_reply_bytes,
                )
            except TransportError as error:
                raise self._unanswered(error) from error
            except PeerError as error:
                raise self._unusable(error) from error
            if reply.status >= 400:
                return provider_error(reply)
            try:
                return _finished(read_chat_reply(reply.body, keep_logprobs=keep_logprobs), reply.url)
            except TellsError:
                return event_error(reply.body, reply.url)
            except (BadChatReply, RecursionError) as error:
                raise no_completion(reply.url, error) from error

        return await self._within_bounds(attempt)

    async def stream(
        self,
        body: dict[str, Any],
        headers: Mapping[str, str],
        *,
        call_id: str,
        emit: Emit,
        keep_logprobs: bool = False,
    ) -> ChatReply:
        """One completion whose deltas went to `emit` as they came. Raises as `complete`, and `StreamDied`.

        An endpoint that answers whole although a stream was asked for is right too.
        """
        data = write_object(body)
        bounds = self._bounds
        reading = _Reading(emit, keep_logprobs, bounds.max_reply_bytes)

        async def attempt() -> ChatReply | EngineError:
            try:
                async with self.peer.stream(
                    "POST",
                    _PATH,
                    body=data,
                    headers=headers,
                    timeout_s=bounds.timeout_s,
                    idle_timeout_s=bounds.idle_timeout_s,
                    max_bytes=bounds.max_reply_bytes,
                ) as reply:
                    if reply.status >= 400:
                        return provider_error(await reply.whole())
                    return await reading.read(reply, call_id)
            except TransportError as error:
                if reading.begun:
                    raise StreamDied(
                        f"the engine at {self.base_url} died in mid-stream: {error.message}",
                        delivery=Delivery.DELIVERED,
                    ) from error
                raise self._unanswered(error) from error
            except PeerError as error:  # of the head: a redirect, an error's endless words
                raise self._unusable(error) from error
            except EngineError as error:
                if reading.begun:
                    raise StreamDied(error.message, kind=error.kind, upstream_status=error.upstream_status) from error
                if error.upstream_status is None:  # not the provider's word: the client's turn, as for a plain reply
                    raise
                return error

        return await self._within_bounds(attempt)

    def _unanswered(self, error: TransportError) -> EngineUnavailable:
        # Whether it was delivered is unknown or was tried again already: the client's turn, not ours.
        return EngineUnavailable(
            f"the engine at {self.base_url} did not answer: {error.message}", delivery=error.delivery
        )

    def _unusable(self, error: PeerError) -> EngineUnavailable:
        # A redirect elsewhere, a reply over the limit, a page in place of JSON: the same again would give the same.
        return EngineUnavailable(f"the engine at {self.base_url} cannot be used: {error.message}", retryable=False)

    async def _within_bounds(self, attempt: Callable[[], Awaitable[T | EngineError]]) -> T:
        deadline = time.monotonic() + self._bounds.retry_budget_s
        count = 0
        while True:
            count += 1
            outcome = await attempt()
            if not isinstance(outcome, EngineError):
                return outcome
            delay = _delay(outcome, count)
            again = outcome.retryable and count < self._bounds.max_attempts and time.monotonic() + delay <= deadline
            if count == 1:  # said at once: a run that waits for an ailing provider should not look idle
                then = f"again in {delay:.1f} s" if again else "not sent again"
                log.warning("%s [%s]; %s", outcome, outcome.kind, then)
            if not again:
                raise outcome
            await self._pause(delay)


class _Reading:
    """One call's stream, over all its attempts; `begun` once a delta was given."""

    def __init__(self, emit: Emit, keep_logprobs: bool, limit: int) -> None:
        self.begun = False
        self._emit = emit
        self._keep_logprobs = keep_logprobs
        self._limit = limit

    async def read(self, reply: StreamedReply, call_id: str) -> ChatReply:
        """The completion. Raises `EngineError` for an error event, for garbage and for an end without a finish."""
        kind = reply.headers.get("content-type", "")
        try:
            if kind.partition(";")[0].strip().lower() == "application/json":
                whole = await reply.whole()
                return _finished(read_chat_reply(whole.body, keep_logprobs=self._keep_logprobs), reply.url)
            reader = ChatStreamReader(call_id)
            if not await self._read_events(reply, reader) and reader.finish_reason is None:
                raise EngineUnavailable(f"{reply.url}: the stream ended without a finish reason and without [DONE]")
            return _finished(reader.reply(keep_logprobs=self._keep_logprobs), reply.url)
        except TellsError as told:
            raise event_error(whole.body, reply.url) from told
        except (BadChatReply, SseTooLarge, RecursionError) as error:  # what is nested so deeply cannot be told either
            raise no_completion(reply.url, error) from error
        except PeerError as error:  # over the limit, or an encoding that cannot be read
            raise EngineUnavailable(error.message, retryable=False) from error

    async def _read_events(self, reply: StreamedReply, reader: ChatStreamReader) -> bool:
        """Read to the end; whether `[DONE]` said so."""
        events = SseReader(self._limit)
        async for piece in reply:
            if self._take(events.feed(piece), reader, reply.url):
                await reply.settle(_SETTLE_S)
                return True
        return self._take(events.end(), reader, reply.url)

    def _take(self, events: list[SseEvent], reader: ChatStreamReader, url: str) -> bool:
        """Take in the events that came together; whether `[DONE]` was among them, which is the last then."""
        chunks = [b"" if event.event else event.data for event in events]  # what has a name is no plain chunk
        at = 0
        while at < len(events):
            if not self._keep_logprobs:
                deltas: list[Delta] = []
                at = reader.feed_plain(chunks, at, deltas)
                self._give(deltas)
            if at < len(events):
                event = events[at]
                at += 1
                data = event.data.strip()
                if data == b"[DONE]":
                    return True
                if event.event == "error":
                    raise event_error(data, url)
                if not data:  # a keep-alive of servers that do not know of comments
                    continue
                chunk = _parsed(data)
                if isinstance(chunk, dict) and tells_error(chunk.get("error")):
                    raise event_error(data, url)
                self._give(reader.feed(chunk))
        return False

    def _give(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.begun = True
            self._emit(delta)


def no_completion(url: str, why: Exception) -> EngineUnavailable:
    """The error for a 200 that cannot be used."""
    return EngineUnavailable(f"{url} answered 200 with what is no chat completion: {why}")


def _finished(completion: ChatReply, url: str) -> ChatReply:
    """The completion, unless the engine says that it gave up on it: what is there then is no turn of the model's."""
    if completion.finish_reason in _GIVEN_UP:
        raise EngineUnavailable(f"{url} gave up on this generation (finish reason {completion.finish_reason!r})")
    return completion


def _parsed(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return json.loads(data)  # takes the bare NaN and the lone surrogates that engines write
    except (ValueError, RecursionError) as error:
        raise BadChatReply(f"an event is not JSON: {error}") from error


def _delay(error: EngineError, attempt: int) -> float:
    """Seconds until the next try: what the provider asks for, as seconds or as a date, else 0.5, 1, 2 ..."""
    told = error.headers.get("retry-after", "")
    try:
        seconds = float(told)
    except ValueError:
        try:
            seconds = max(0.0, parsedate_to_datetime(told).timestamp() - time.time())
        except (ValueError, OverflowError):
            seconds = -1.0
    return seconds if 0.0 <= seconds < math.inf else 0.5 * 2.0 ** (attempt - 1)
