"""A Chat completion: an upstream's read into the pivot, and the one that a Chat client gets made from the pivot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toprope.dialects.chat_parts import (
    Part,
    annotation_to_chat,
    is_text,
    parts_from_chat,
    reasoning_text,
    reply_part,
    text_part,
)
from toprope.dialects.chat_turn import call_to_chat, items_from_assistant
from toprope.dialects.pivot import CALLS, PivotReply
from toprope.wire.chat import FINISH_REASONS, Said
from toprope.wire.responses import FinishReason, Item, Usage

_ITEM_FIELDS = frozenset(("type", "id", "status", "role", "content", "phase"))
_CALL_FIELDS = frozenset(("type", "id", "status", "call_id", "name", "arguments", "input"))


def output_from_chat(message: Mapping[str, Any], call_id: str, order: Sequence[Said] = ()) -> tuple[Item, ...]:
    """An upstream's message as output items, never none at all: thought, text, calls in this order, or in `order`,
    which a reader of its stream gives where it came otherwise."""
    items = items_from_assistant(message, "choices[0].message", id_seed=call_id)
    if not order:
        return tuple(items)
    messages = [item for item in items if item["type"] == "message"]
    calls = [item for item in items if item["type"] not in ("message", "reasoning")]
    first = sum(kind == "function_call" for kind, _ in order)  # those among the parts stand after them in a message
    next_of = {"function_call": iter(calls[:first]), "part_call": iter(calls[first:])}
    said: list[Item] = []
    for kind, told in order:
        if kind in next_of:
            said.append(next(next_of[kind]))
        elif kind == "reasoning":
            said.append({"type": "reasoning", "summary": [], "content": [text_part(told, "reasoning_text")]})
        else:
            if not said or said[-1]["type"] != "message":
                said.append({"type": "message", "role": "assistant", "content": []})
            said[-1]["content"] += _parts(kind, told)
    return _with_fields(said, messages)


def _parts(kind: str, told: Any) -> list[Part]:
    if kind == "refusal":
        return [{"type": "refusal", "refusal": told}]
    return parts_from_chat([told], "output_text", "choices[0].message.content")


def _with_fields(said: Sequence[Item], messages: Sequence[Item]) -> tuple[Item, ...]:
    """What was said, with the fields of the message that nobody reads on its last text: the one that left last."""
    last = max((at for at, item in enumerate(said) if item["type"] == "message"), default=None)
    if last is None or not messages:
        return (*said, *messages)
    return (*said[:last], {**messages[0], "content": said[last]["content"]}, *said[last + 1 :])


def finish_from_chat(reason: str | None, output: Sequence[Item]) -> FinishReason:
    """The finish reason in our words.

    An engine that says nothing, or a word of its own, may have ended by itself: the client is told so, and the reply
    has a `token_fault`, since nobody knows whether it was cut.
    """
    if reason in FINISH_REASONS:
        return FINISH_REASONS[reason]
    return "tool_calls" if any(item.get("type") in CALLS for item in output) else "stop"


def chat_message(output: Sequence[Item]) -> dict[str, Any]:
    """Output items as one assistant message. Fields of a message or a call that Responses does not know are kept.

    Empty text is null beside a thought or calls. The content is a string, or where a part is no text the list of parts.
    """
    text: str | None = None
    thought = ""
    refusal: str | None = None
    odd = False
    annotations: list[Any] = []
    calls: list[dict[str, Any]] = []
    rest: dict[str, Any] = {}
    for item in output:
        kind = item.get("type")
        if kind == "reasoning":
            thought += reasoning_text(item)
        elif kind == "message":
            content = item.get("content") or ()
            for part in (content,) if isinstance(content, str) else content:
                if type(part) is not dict:
                    text = (text or "") + part
                elif part.get("type") == "refusal":
                    refusal = (refusal or "") + part["refusal"]
                else:
                    said, marks = part.get("text"), part.get("annotations")
                    odd = odd or not is_text(part)
                    text = (text or "") + (said if type(said) is str else "")
                    annotations += marks or ()
            rest.update({k: v for k, v in item.items() if k not in _ITEM_FIELDS})
        elif kind in CALLS:
            call = call_to_chat(item)
            more = {k: v for k, v in item.items() if k not in _CALL_FIELDS and k not in call}
            calls.append({**more, **call})
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text or (None if thought or calls else text),
        "refusal": rest.get("refusal") if refusal is None else refusal,
    }
    if odd:
        message["content"] = _content(output)
    elif annotations:
        beside = rest.get("annotations")
        own = [annotation_to_chat(each) for each in annotations]
        message["annotations"] = [*own, *beside] if isinstance(beside, list) else own
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return {**rest, **message}


def _content(output: Sequence[Item]) -> list[Part]:
    """The content in parts, without refusals, which have a field of their own."""
    contents = [item.get("content") for item in output if item.get("type") == "message"]
    parts = [part for content in contents for part in parts_from_chat(content, "output_text", "content")]
    return [reply_part(part) for part in parts if part.get("type") != "refusal"]


def chat_reply(reply: PivotReply) -> dict[str, Any]:
    """A complete Chat completion. `reply.tokens` stand on the message for a caller that asked."""
    message = chat_message(reply.output)
    if reply.tokens:
        message.update(reply.tokens)
    choice = {"index": 0, "message": message, "logprobs": reply.logprobs, "finish_reason": reply.finish_reason}
    return {
        **reply.extra,
        "id": f"chatcmpl-{reply.reply_id}",
        "object": "chat.completion",
        "created": reply.created,
        "model": reply.model,
        "choices": [choice],
        "usage": chat_usage(reply.usage),
    }


def chat_usage(usage: Usage) -> dict[str, Any] | None:
    """A Chat usage object; null where the engine did not say."""
    if usage.input_tokens is None or usage.output_tokens is None:
        return None
    out: dict[str, Any] = {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }
    if usage.cached_tokens is not None:
        out["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if usage.reasoning_tokens is not None:
        out["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return out
