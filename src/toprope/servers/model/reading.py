"""A request read into a `ModelCall`: parsed once, tied to its rollout, argument bytes put back from the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from toprope.capture.recorder import Recorder
from toprope.correlation.context import current_rollout
from toprope.dialects.incremental import RequestMemory
from toprope.dialects.messages_reply import count_tokens_reply
from toprope.dialects.messages_request import request_from_messages
from toprope.http.reply import Reply, json_reply
from toprope.http.request import Request
from toprope.protocol.headers import CLIENT_SESSION, INCLUDE
from toprope.servers.model.arguments import SampledArguments
from toprope.servers.model.call import ModelCall
from toprope.servers.model.engines.base import Dialect, Engine
from toprope.servers.model.weights import WeightVersions
from toprope.tokens.asked import Asked
from toprope.tokens.items import item_digests
from toprope.wire.fields import read_object, refuse, write_object
from toprope.wire.responses import Item, ResponsesRequest

_READ_WHOLE: dict[Dialect, Callable[[dict[str, Any]], ResponsesRequest]] = {"messages": request_from_messages}
"""Dialects whose requests are not read as what they add: arguments are put into their history from the record."""

_SINGLE: dict[str, tuple[object, str]] = {
    "n": (1, "1: one call makes one reply, so send as many calls as replies are wanted"),
    "best_of": (1, "1 in a captured call: what is sampled and thrown away would be in no record"),
    "use_beam_search": (False, "false in a captured call: what a beam search returns was not sampled from the policy"),
    "echo": (False, "false in a captured call: the prompt is not the model's"),
    "truncate_prompt_tokens": (None, "no value in a captured call: a prompt without its beginning is another prompt"),
}
"""Fields that ask for more than one sampled reply to the whole prompt: their one accepted value, and why."""
_OWN_PROMPT = "kv_transfer_params", "prompt_token_ids"
"""Where vLLM takes a prompt of ids, which then stands in place of the messages."""
_MAX_COUNT_DIGITS = 9
"""Digits of a retry count that is believed. No library comes near, and stores keep 64 bits."""

ESTIMATE = "x-toprope-estimate"
"""A reply header: what the body counts was estimated."""


@runtime_checkable
class CountsTokens(Protocol):
    """Optional: an engine that can say how many tokens a prompt has."""

    async def count_tokens(self, request: ResponsesRequest) -> int:
        """The number of prompt tokens that `request` is rendered to."""


class CallReader:
    """Reads the calls of one server. `return_token_ids` gives every caller the token triple."""

    def __init__(self, recorder: Recorder | None, weights: WeightVersions, *, return_token_ids: bool) -> None:
        self._weights = weights
        self._arguments = SampledArguments(recorder)
        self._memory = RequestMemory(_marked)
        if recorder is not None:
            recorder.forget_listeners.append(self._memory.forget)
        self._return_token_ids = return_token_ids

    async def read(self, dialect: Dialect, request: Request, call_id: str, started: float) -> ModelCall:
        """The call. Raises `BadRequest` for a body that is no request of the dialect, naming the field; also for one
        that asks for several replies, or, captured, for anything but one reply that was sampled as it is returned."""
        data = await request.body()
        bound = current_rollout()
        key = None if bound is None else bound.key
        captured = bound is not None and bound.capture
        read = self._memory.read(dialect, key if captured else None, data, _READ_WHOLE.get(dialect))
        client_session = request.headers.get(CLIENT_SESSION)
        asked = request.headers.get(INCLUDE)
        _require_one_reply(read.body, captured)
        call = ModelCall(
            call_id=call_id,
            dialect=dialect,
            request=read.request,
            body=read.body,
            request_digest=read.digest,
            media=read.media,
            asked=read.carried,
            rollout_id=key,
            captured=captured,
            session=client_session or key,
            client_session_id=client_session,
            include_tokens=self._return_token_ids or (asked is not None and "token_ids" in _words(asked)),
            retry_count=_retry_count(request.headers.get("x-stainless-retry-count", "")),
            idempotency_key=request.headers.get("idempotency-key", "").strip() or None,
            began_under=self._weights.current,
            weight_changes=self._weights.changes,
            started=started,
        )
        return await self._arguments.restore(call) if dialect == "messages" else call

    async def count_tokens(self, request: Request, engine: Engine) -> Reply:
        """The prompt tokens of a Messages body: the engine's count, or an estimate that a header marks as one.

        Raises `BadRequest` as `read`.
        """
        body = read_object(await request.body())
        pivot = request_from_messages(body)
        if isinstance(engine, CountsTokens):
            return json_reply(count_tokens_reply(await engine.count_tokens(pivot)))
        return json_reply(count_tokens_reply(max(1, len(write_object(body)) // 4)), headers={ESTIMATE: "true"})


def _require_one_reply(body: Mapping[str, Any], captured: bool) -> None:
    for name in _SINGLE if captured else ("n",):
        value, (only, accepted) = body.get(name), _SINGLE[name]
        if value is not None and (value != only or isinstance(value, bool) != isinstance(only, bool)):
            raise refuse(name, value, accepted)
    outer, inner = _OWN_PROMPT
    given = body.get(outer)
    if captured and isinstance(given, Mapping) and given.get(inner) is not None:
        raise refuse(
            f"{outer}.{inner}", given[inner], "no ids in a captured call: its record says that the messages were asked"
        )


def _retry_count(told: str) -> int | None:
    """The count of a client library, None where it is none: the call is unmarked then."""
    return int(told) if told.isascii() and told.isdigit() and len(told) <= _MAX_COUNT_DIGITS else None


def _marked(before: Asked | None, items: Sequence[Item]) -> Asked:
    return (before or Asked()).extended(item_digests(items))


def _words(value: str) -> set[str]:
    return {word.strip() for word in value.split(",")}
