"""In which order a stream said what its message holds in none of its own: thoughts, texts, refusals, parts and calls.

A message has a place for each kind. Where a stream said them otherwise, what left already must stay where it is, so
that the items are made in the order that came. Left to others: the pieces (`chat_stream_items`), what becomes of an
order (`chat_reply.output_from_chat`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from toprope.dialects.chat_parts import CALL_PARTS, is_foreign, thought_of_part
from toprope.dialects.chat_stream_items import GrowingCall, GrowingPiece
from toprope.dialects.chat_turn import call_of_part, thought_of_message
from toprope.wire.chat import THOUGHT_FIELDS, Said

Entry = GrowingPiece | GrowingCall

_RANK = {"reasoning": 0, "message": 1, "refusal": 1, "function_call": 2, "part_call": 3}
"""The order of a message's items where nothing else is said."""


def in_usual_order(line: Sequence[Entry]) -> bool:
    """Whether nothing but thought, text, refusal and calls was said, and that in a message's order: nearly always."""
    ranks = [_RANK.get(entry.kind, -1) for entry in line]
    return -1 not in ranks and ranks == sorted(ranks)


def order_of(line: Sequence[Entry], message: Mapping[str, Any]) -> tuple[Said, ...]:
    """What was said in `line`, which makes up `message`, in its order; empty where that is a message's own.

    What a plain reading of the message counts once, or not at all, stands here as often: a thought that parts or blocks
    tell again, the older spelling of a call beside the newer, a part that copies a call.
    """
    said = tuple(_said(line, message))
    ranks = [_RANK[kind] for kind, _ in said]
    return () if ranks == sorted(ranks) else said


def _said(line: Sequence[Entry], message: Mapping[str, Any]) -> Iterator[Said]:
    calls = message.get("tool_calls") or ()
    known = [call["id"] for call in calls]
    for entry in line:
        if isinstance(entry, GrowingCall):
            yield "function_call", ""
        elif entry.kind == "blocks":
            if not thought_of_message(message):
                yield "reasoning", entry.text.whole()
        elif entry.kind == "legacy":
            if not calls and isinstance(message.get("function_call"), Mapping):
                yield "function_call", ""
        elif entry.kind == "parts":
            yield from _of_parts(entry.parts, message, known)
        else:
            yield entry.kind, entry.text.whole()


def _of_parts(told: Sequence[Any], message: Mapping[str, Any], known: Sequence[str]) -> Iterator[Said]:
    said = {message[name] for name in THOUGHT_FIELDS if isinstance(message.get(name), str) and message[name]}
    content = message.get("content")
    is_copy = bool(said) and thought_of_message({"content": content}) in said
    for part in parts_of(told):
        if not is_foreign(part):
            yield "message", part
        elif part["type"] not in CALL_PARTS:
            if not is_copy and (thought := thought_of_part(part)):
                yield "reasoning", thought
        elif call_of_part(part)["id"] not in known:
            yield "part_call", ""


def parts_of(told: Sequence[Any]) -> list[Any]:
    """Parts in the order in which they came; the texts between them, which came in pieces, each as one."""
    parts: list[Any] = []
    for is_text, run in groupby(told, lambda each: isinstance(each, str)):
        these = list(run)
        parts += [{"type": "text", "text": "".join(these)}] if is_text else these
    return parts
