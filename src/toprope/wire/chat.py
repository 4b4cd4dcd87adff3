"""The Chat Completions format: what a request's messages look like, and how an upstream's reply is read.

A reply is decoded once, typed: token ids and logprobs go straight into arrays (60 KB with 4,300 ids: 0.2 ms, a
quarter of what a general parse with conversion takes). What the strict decoder refuses (a bare `NaN`, a lone
surrogate, an id list with holes, a count that is none) is read again leniently, so that the agent keeps its text and
the fault is named.
Left to others: what messages mean (`toprope.dialects`), whether ids may be trained on (`toprope.tokens`).
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from toprope.canonical.json import NotJson, check_finite
from toprope.wire.responses import TOKEN_FIELDS, FinishReason, Usage

Said: TypeAlias = tuple[str, Any]
"""What a stream said: `reasoning`, `message` or `refusal` with its text, `message` with a part of the content as it
came, `function_call` (the next one) or `part_call` (the next one of those that stand among the parts)."""

FINISH_REASONS: Mapping[str | None, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}
"""What engines say of an end that is known, in our words."""

THOUGHT_FIELDS = ("reasoning_content", "reasoning")
"""The fields of a message, or of a delta, that hold its thought as one text; vLLM renamed the first to the second."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class BadChatReply(ValueError):
    """An upstream's 200 that is no chat completion; the message says what is missing."""


class TellsError(BadChatReply):
    """An upstream's 200 that tells an error."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One upstream completion, as it came.

    `message` and `logprobs` are the wire's objects (`logprobs` only when asked for). Shapes: `prompt_ids` (P,) and
    `token_ids` (G,) uint32, `log_probs` (L,) float64 in nats with NaN for a missing or unreadable value, each None
    where the reply does not have it. `order` is what a stream said in another order than `message` can hold; empty for
    thought, text, calls. `token_fault` says why the ids are not to be trusted: a list or a count that cannot be read,
    ids that are told twice and differ, no finish reason that is known.
    """

    message: dict[str, Any]
    finish_reason: str | None
    id: str | None
    model: str | None
    created: int | None
    usage: Usage
    prompt_ids: NDArray[np.uint32] | None
    token_ids: NDArray[np.uint32] | None
    log_probs: NDArray[np.float64] | None
    logprobs: Mapping[str, Any] | None
    extra: Mapping[str, Any]
    token_fault: str | None = None
    order: tuple[Said, ...] = ()


class _TokenLogprob(msgspec.Struct, gc=False):  # hundreds a reply, which would wake the collector every other reply
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


_MOST = 1 << 53  # beyond it a count is not the same number in every reader of JSON
_Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]


class _PromptDetails(msgspec.Struct):
    cached_tokens: _Count | None = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class _Choice(msgspec.Struct):
    message: dict[str, Any]
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    stop_reason: Any = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    id: str | None = None
    model: str | None = None
    created: int | None = None
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None
    system_fingerprint: str | None = None
    service_tier: str | None = None
    error: Any = None


class _KeptChoice(msgspec.Struct):
    logprobs: dict[str, Any] | None = None


class _KeptLogprobs(msgspec.Struct):
    choices: list[_KeptChoice]


_reply_decoder = msgspec.json.Decoder(_Reply)
_kept_decoder = msgspec.json.Decoder(_KeptLogprobs)


def tells_error(value: Any) -> bool:
    """Whether the `error` field of a reply says anything: gateways leave `{"message": ""}` beside good choices."""
    parts = value.values() if isinstance(value, dict) else (value,)
    return any(part.strip() if isinstance(part, str) else part for part in parts)


def read_chat_reply(data: bytes, *, keep_logprobs: bool = False) -> ChatReply:
    """Read a chat completion. `keep_logprobs` also keeps the choice's `logprobs` object for a client that asked.

    Raises `BadChatReply` for what is no completion with exactly one choice, `TellsError` where it says why.
    """
    try:
        reply = _reply_decoder.decode(data)
        if tells_error(reply.error):
            return _read_leniently(data, keep_logprobs)
        kept = _kept_decoder.decode(data).choices if keep_logprobs else []
        choice = _only(reply.choices)
        prompt_ids, token_ids = _ids(reply.prompt_token_ids or choice.prompt_token_ids), _ids(choice.token_ids)
    except (msgspec.DecodeError, OverflowError, RecursionError):
        return _read_leniently(data, keep_logprobs)
    log_probs = None
    if choice.logprobs is not None and choice.logprobs.content is not None:
        log_probs = np.array([entry.logprob for entry in choice.logprobs.content], dtype=np.float64)
    parts = _from_message(choice.message) if token_ids is None else None
    fault = _contradiction(reply.prompt_token_ids, choice.prompt_token_ids, choice.token_ids, choice.message)
    return ChatReply(
        message=choice.message,
        finish_reason=choice.finish_reason,
        id=reply.id,
        model=reply.model,
        created=reply.created,
        usage=_usage(reply.usage),
        prompt_ids=parts.prompt if parts else prompt_ids,
        token_ids=parts.generation if parts else token_ids,
        log_probs=parts.log_probs if parts else log_probs,
        logprobs=_only(kept).logprobs if kept else None,
        extra=_present(
            system_fingerprint=reply.system_fingerprint,
            service_tier=reply.service_tier,
            stop_sequence=_stop_string(choice.finish_reason, choice.stop_reason),
        ),
        token_fault=(parts.fault if parts else None) or fault or _endless(choice.finish_reason),
    )


def _read_leniently(data: bytes, keep_logprobs: bool) -> ChatReply:
    """The slow road: the standard parser takes NaN and lone surrogates; each token list is then judged by itself."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadChatReply(f"not JSON: {error}") from error
    if isinstance(body, dict) and tells_error(body.get("error")):
        raise TellsError("it tells an error")
    return read_chat_object(body, keep_logprobs=keep_logprobs)


def read_chat_object(
    body: Any, *, keep_logprobs: bool = False, order: tuple[Said, ...] = (), fault: str | None = None
) -> ChatReply:
    """`read_chat_reply` for a completion that is parsed already, as one put together from a stream is, with the order
    in which that said it and the fault that its reader found."""
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list):
        raise BadChatReply("an object with `choices` is expected")
    choice = _only(choices)
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        raise BadChatReply("choices[0].message is not an object")
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    prompt = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
    parts = _lenient_tokens(prompt, choice.get("token_ids"), content)
    if parts.generation is None and parts.fault is None:
        parts = _from_message(message) or parts
    usage, uncounted = _lenient_usage(body.get("usage"))
    finish_reason = _text(choice.get("finish_reason"))
    fault = fault or _contradiction(
        body.get("prompt_token_ids"), choice.get("prompt_token_ids"), choice.get("token_ids"), message
    )
    return ChatReply(
        message=finite_or_null({k: v for k, v in message.items() if k not in TOKEN_FIELDS}),
        finish_reason=finish_reason,
        id=_text(body.get("id")),
        model=_text(body.get("model")),
        created=_count(body.get("created")),
        usage=usage,
        prompt_ids=parts.prompt,
        token_ids=parts.generation,
        log_probs=parts.log_probs,
        logprobs=finite_or_null(logprobs) if keep_logprobs and isinstance(logprobs, dict) else None,
        extra=_present(
            system_fingerprint=finite_or_null(body.get("system_fingerprint")),
            service_tier=finite_or_null(body.get("service_tier")),
            stop_sequence=_stop_string(choice.get("finish_reason"), choice.get("stop_reason")),
        ),
        token_fault=parts.fault or fault or uncounted or _endless(finish_reason),
        order=order,
    )


@dataclass(frozen=True, slots=True)
class _Tokens:
    prompt: NDArray[np.uint32] | None
    generation: NDArray[np.uint32] | None
    log_probs: NDArray[np.float64] | None
    fault: str | None = None


def _from_message(message: Mapping[str, Any]) -> _Tokens | None:
    """NeMo Gym's triple on the message itself, or None if none of it is there."""
    prompt, generation = message.get("prompt_token_ids"), message.get("generation_token_ids")
    log_probs = message.get("generation_log_probs")
    if prompt is None and generation is None and log_probs is None:
        return None
    entries = [{"logprob": value} for value in log_probs] if isinstance(log_probs, list) else log_probs
    return _lenient_tokens(prompt, generation, entries)


def _lenient_tokens(prompt: Any, generation: Any, content: Any) -> _Tokens:
    try:
        for ids in (prompt, generation):
            if isinstance(ids, list) and bool in set(map(type, ids)):
                raise TypeError("true or false stands among them")
        return _Tokens(_ids(prompt), _ids(generation), _lenient_log_probs(content))
    except (TypeError, OverflowError, ValueError) as error:
        return _Tokens(None, None, None, f"no_token_ids: a list of token ids cannot be read ({error})")


def _contradiction(prompt: Any, of_choice: Any, token_ids: Any, message: Mapping[str, Any]) -> str | None:
    """The fault of a reply that tells its ids, or its thought, in two places, and not the same ones."""
    prompts = [ids for ids in (prompt, of_choice, message.get("prompt_token_ids")) if ids]
    if len(prompts) > 1 and any(ids != prompts[0] for ids in prompts[1:]):
        return "no_token_ids: the prompt ids are told twice and differ"
    told = message.get("generation_token_ids")
    if told is not None and token_ids is not None and told != token_ids:
        return "no_token_ids: the generated ids are told twice and differ"
    thoughts = {thought for name in THOUGHT_FIELDS if (thought := message.get(name)) and isinstance(thought, str)}
    if len(thoughts) > 1:
        return "no_token_ids: two thoughts stand under two names, and nobody knows in which order they were sampled"
    return None


def _endless(finish_reason: str | None) -> str | None:
    """The fault of a reply of which nobody knows whether it was cut."""
    if finish_reason in FINISH_REASONS:
        return None
    if not finish_reason:
        return "no_token_ids: the reply has no finish reason, so that it may have been cut"
    return f"no_token_ids: finish reason {finish_reason[:40]!r} is not known, so that the reply may have been cut"


def _lenient_log_probs(content: Any) -> NDArray[np.float64] | None:
    if content is None:
        return None
    if not isinstance(content, list):
        raise TypeError("logprobs.content is not a list")
    values = [entry.get("logprob") if isinstance(entry, dict) else None for entry in content]
    number = [float(v) if isinstance(v, int | float) and not isinstance(v, bool) else float("nan") for v in values]
    return np.array(number, dtype=np.float64)


def _ids(values: list[int] | None) -> NDArray[np.uint32] | None:
    """`array` refuses what is no u32 and is eight times as fast as numpy on a list (`fromlist`: its constructor takes
    twice the time)."""
    if values is None:
        return None
    if not values:
        return np.zeros(0, dtype=np.uint32)
    packed = array("I")
    packed.fromlist(values)
    ids = np.frombuffer(packed, dtype=np.uint32)
    ids.flags.writeable = False  # nobody else has the buffer: whoever keeps the ids need not copy them
    return ids


def finite_or_null(value: Any) -> Any:
    """`value` with every NaN and infinity as null, which is all that JSON can say of them to a client."""
    try:
        check_finite(value)
    except NotJson:
        return _nulled(value)
    return value


def _nulled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _nulled(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_nulled(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _only(choices: list[Any]) -> Any:
    if len(choices) != 1:
        raise BadChatReply(f"{len(choices)} choices; exactly one is expected")
    return choices[0]


def _usage(usage: _Usage | None) -> Usage:
    if usage is None:
        return Usage()
    prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
    return Usage(
        usage.prompt_tokens,
        usage.completion_tokens,
        prompt.cached_tokens if prompt else None,
        completion.reasoning_tokens if completion else None,
    )


def _lenient_usage(value: Any) -> tuple[Usage, str | None]:
    """The counts that can be read, and the fault of those that cannot: what they would contradict is unknown."""
    if value is None:
        return Usage(), None
    if not isinstance(value, dict):
        return Usage(), "length_mismatch: usage is not an object"
    faults: list[str] = []

    def count(name: str) -> int | None:
        told = value.get(name)
        found = _lenient_count(told)
        if found is None and told is not None:
            faults.append(f"length_mismatch: usage.{name} is no count")
        return found

    def detail(name: str, kind: str) -> int | None:
        details = value.get(name)
        return _lenient_count(details.get(kind)) if isinstance(details, dict) else None

    usage = Usage(
        count("prompt_tokens"),
        count("completion_tokens"),
        detail("prompt_tokens_details", "cached_tokens"),
        detail("completion_tokens_details", "reasoning_tokens"),
    )
    return usage, faults[0] if faults else None


def _lenient_count(value: Any) -> int | None:
    """A count, also one spelled `9.0` or `"9"`, None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        return int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST else None


def _stop_string(finish_reason: Any, stop_reason: Any) -> str | None:
    """The stop string that ended a generation. vLLM says it as `stop_reason`, where a number is a stop token's id."""
    return stop_reason if finish_reason == "stop" and isinstance(stop_reason, str) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _present(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
