"""What a Messages client gets: the message made from the pivot, counts of tokens, models, errors.

A block's `input` is an object there: the argument string itself stays in the call's record, from where the next turn
restores it (`messages_arguments`). Left to others: events (`stream_messages`).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from toprope.canonical.json import NotJson, loads
from toprope.dialects.chat_parts import is_text, plain_text, reasoning_text
from toprope.dialects.losses import loss_name
from toprope.dialects.pivot import CALLS, PivotReply
from toprope.wire.fields import write_object
from toprope.wire.message_fields import says_something
from toprope.wire.messages import Block, StopReason
from toprope.wire.responses import FinishReason, Item, Usage

RAW_ARGUMENTS = "raw_arguments"
"""The one key of a tool input whose argument string is no JSON object: the string itself, for the tool to refuse."""

_STOP: dict[FinishReason, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_SIGNED = b"toprope:"


def messages_reply(reply: PivotReply) -> dict[str, Any]:
    """A complete message. `reply.tokens` stand beside its content for a caller that asked."""
    return {
        **message_begun(reply_id=reply.reply_id, model=reply.model),
        "content": blocks_from_items(reply.output),
        **stopped(reply),
        "usage": messages_usage(reply.usage),
        **(reply.tokens or {}),
    }


def message_begun(*, reply_id: str, model: str) -> dict[str, Any]:
    """A message of which nothing was sampled yet. Its counts are 0 for now: clients demand integers there."""
    return {
        "id": f"msg_{reply_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": messages_usage(Usage()),
    }


def blocks_from_items(output: Sequence[Item]) -> list[Block]:
    """Output items as content blocks, in order. Text that says nothing makes no block: the API refuses empty ones."""
    blocks: list[Block] = []
    for item in output:
        kind = item.get("type")
        if kind == "reasoning":
            blocks.extend(thought_blocks(item))
        elif kind == "message" and (text := plain_text(item.get("content"))):
            blocks.append({"type": "text", "text": text, "citations": None})
        elif kind in CALLS:
            blocks.append(tool_block(item, arguments_object(arguments_of(item))))
    return blocks


_CARRIED: Mapping[str, frozenset[str]] = {
    "message": frozenset(("type", "id", "status", "role", "content", "phase")),
    "function_call": frozenset(("type", "id", "status", "call_id", "name", "arguments")),
    "custom_tool_call": frozenset(("type", "id", "status", "call_id", "name", "input")),
}


def lost_in_messages(output: Sequence[Item]) -> tuple[str, ...]:
    """What of a reply a Messages client is not told, each name once: `reply.<kind of item>`, or what of the item:
    `reply.message.images`, `reply.message.input_image` (a part), `reply.message.annotations` (those of a text)."""
    lost: dict[str, None] = {}
    for item in output:
        kind = str(item.get("type"))
        if kind == "reasoning":
            continue
        if kind not in _CARRIED:
            lost[loss_name("reply", kind)] = None
            continue
        if not item.keys() <= _CARRIED[kind]:
            names = [name for name, value in item.items() if name not in _CARRIED[kind] and says_something(value)]
            lost.update((loss_name("reply", kind, name), None) for name in names)
        parts = item.get("content") if kind == "message" else ()
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and part.get("type") != "refusal":
                if not is_text(part):
                    lost[loss_name("reply", kind, part.get("type"))] = None
                elif part.get("annotations"):
                    lost[loss_name("reply", kind, "annotations")] = None
    return tuple(lost)


def thought_blocks(item: Item) -> list[Block]:
    """A reasoning item as a thinking block, or as a redacted one where only its sealed form is known; else none."""
    text = reasoning_text(item)
    if text:
        return [{"type": "thinking", "thinking": text, "signature": signature_of(item)}]
    if isinstance(item.get("encrypted_content"), str):
        return [{"type": "redacted_thinking", "data": item["encrypted_content"]}]
    return []


def arguments_of(call: Item) -> str:
    """The argument string of a call. What a custom tool is given is any text, which stands under `RAW_ARGUMENTS`."""
    if call["type"] == "custom_tool_call":
        return write_object({RAW_ARGUMENTS: str(call.get("input") or "")}).decode()
    return str(call.get("arguments") or "")


def tool_block(item: Item, value: dict[str, Any]) -> Block:
    """A call as a tool_use block."""
    return {"type": "tool_use", "id": item.get("call_id"), "name": item.get("name") or "", "input": value}


def arguments_object(arguments: Any) -> dict[str, Any]:
    """The object that an argument string stands for; `""` is an empty one.

    What is no JSON object (cut short, a list) stands whole under `RAW_ARGUMENTS`, so that the tool refuses it and the
    model reads why.
    """
    text = arguments if isinstance(arguments, str) else ""
    if not text.strip():
        return {}
    try:
        value = loads(text)
    except (NotJson, RecursionError):
        return {RAW_ARGUMENTS: text}
    return value if isinstance(value, dict) else {RAW_ARGUMENTS: text}


def stopped(reply: PivotReply) -> dict[str, Any]:
    """`stop_reason` and `stop_sequence`: why the message ended, and at which stop string where the engine said it.

    A turn with calls that ended by itself waits for their results, whatever it was called.
    """
    reason, met = _STOP[reply.finish_reason], reply.extra.get("stop_sequence")
    if reply.finish_reason == "stop" and any(item.get("type") in CALLS for item in reply.output):
        reason = "tool_use"
    if reason == "end_turn" and isinstance(met, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": met}
    return {"stop_reason": reason, "stop_sequence": None}


def messages_usage(usage: Usage) -> dict[str, Any]:
    """Counts as integers, unknown ones 0. As in the API, tokens read from a cache are not among `input_tokens`."""
    cached = usage.cached_tokens or 0
    counts: dict[str, Any] = {
        "input_tokens": max((usage.input_tokens or 0) - cached, 0),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.output_tokens or 0,
    }
    if usage.reasoning_tokens is not None:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts


def signature_of(item: Item) -> str:
    """The signature of a thinking block: one that a provider gave, else the item's own id, sealed.

    Clients send it back (some drop a block without one), and it tells which thought of ours the block is.
    """
    given = item.get("signature")
    return given if isinstance(given, str) and given else base64.b64encode(_SIGNED + str(item["id"]).encode()).decode()


def signed_id(signature: Any) -> str | None:
    """The item id that a signature of ours holds, None for any other."""
    if not isinstance(signature, str):
        return None
    try:
        data = base64.b64decode(signature, validate=True)
        return data.removeprefix(_SIGNED).decode() or None if data.startswith(_SIGNED) else None
    except ValueError:
        return None


def count_tokens_reply(input_tokens: int) -> dict[str, int]:
    """The answer of `POST /v1/messages/count_tokens`."""
    return {"input_tokens": input_tokens}
