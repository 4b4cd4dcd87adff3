"""A Responses stream: the full sequence of events of every item, numbered.

Programs act on different events of the same fact (Codex on `output_item.done`, opencode on `added` and deltas, the
public library on `created` and `completed`), so all of them are sent. Left to others: the Response object itself
(`responses`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toprope.dialects.chat_parts import text_part
from toprope.dialects.deltas import Delta, ToolCallDelta
from toprope.dialects.emitted import (
    COMMENT,
    PIECE,
    Emitted,
    OpenItem,
    StreamContradiction,
    around,
    check_same,
    data_event,
    rest_of,
)
from toprope.dialects.pivot import PivotReply
from toprope.dialects.responses import UNCOUNTED, output_with_tokens, response_begun, responses_reply
from toprope.wire.responses import Item, ResponsesRequest

Event = dict[str, Any]

_TEXT_EVENTS = {
    "output_text": ("response.output_text", "text"),
    "reasoning_text": ("response.reasoning_text", "text"),
    "refusal": ("response.refusal", "refusal"),
}
"""Parts that grow: the stem of their events, and the field that the finished text stands in."""


class ResponsesStream:
    """One Responses stream for `request`."""

    def __init__(self, request: ResponsesRequest, *, reply_id: str, model: str, created: int) -> None:
        self._request = request
        self._begun = response_begun(request, reply_id=reply_id, model=model, created=created)
        self._emitted = Emitted(reply_id)
        self._number = 0
        self._more: tuple[bytes, bytes, bytes] | None = None  # the event of a piece, around its number and the piece

    def open(self) -> bytes:
        """`response.created` and `response.in_progress`."""
        kinds = ("response.created", "response.in_progress")
        return self._write({"type": kind, "response": self._begun} for kind in kinds)

    def delta(self, delta: Delta) -> bytes:
        """The delta, after the done events of the item before it and the item's own `added` where it is new."""
        if (more := self._more) is not None and (piece := self._emitted.grow(delta)) is not None:
            if not piece:
                return b""
            number, self._number = self._number, self._number + 1
            return b"%b%d%b%b%b" % (more[0], number, more[1], piece, more[2])
        before = self._emitted.last
        item, opened = self._emitted.take(delta)
        out = self._write(self._events(delta, item, before if opened else None, opened))
        self._more = None
        if (found := around(_numbered(0, _piece_of(item, PIECE)))) is not None:
            head, _, rest = found[0].partition(b"0")  # the number stands first, after the type
            self._more = (head, rest, found[1])
        return out

    def _events(self, delta: Delta, item: OpenItem, before: OpenItem | None, opened: bool) -> Iterator[Event]:
        if before is not None:
            yield from _ended(before, _made(before), 0)
        if opened:
            yield from _begun(item.index, _made(item, begun=True))
            if item.kind != "function_call":
                yield _part_added(item.index, item.id, 0, _made_part(item, ""))
        piece = delta.arguments if isinstance(delta, ToolCallDelta) else delta.text
        if piece:
            yield _piece_of(item, piece)

    def finish(self, reply: PivotReply) -> bytes:
        """The rest of every item, done events, and `response.completed` or `response.incomplete`."""
        response = responses_reply(reply, self._request)
        if response["usage"] is None:
            response["usage"] = UNCOUNTED
        return self._write(self._last_events(reply, response))

    def _last_events(self, reply: PivotReply, response: Mapping[str, Any]) -> Iterator[Event]:
        output, sent = output_with_tokens(reply), self._emitted.items
        if len(sent) > len(output):
            raise StreamContradiction(f"{len(sent)} items were sent, {len(output)} were finished")
        for item, final in zip(sent, output, strict=False):
            check_same(item, final, by_id=True)
            rest = rest_of(item.text, _text_of(item, final), f"item {item.index}")
            if item is not sent[-1]:
                if rest or len(final.get("content") or ()) > 1:
                    raise StreamContradiction(f"item {item.index} has ended, and the finished one says more")
                for part in final.get("content") or ():
                    yield from _annotated(item.index, item.id, 0, part)
                continue
            if rest:
                yield _piece_of(item, rest)
            yield from _ended(item, final, int(item.kind != "function_call"))
        for index in range(len(sent), len(output)):
            yield from _whole(index, output[index])
        yield {"type": f"response.{response['status']}", "response": response}

    def keep_alive(self) -> bytes:
        """A comment."""
        return COMMENT

    def _write(self, events: Any) -> bytes:
        out = []
        for event in events:
            out.append(_numbered(self._number, event))
            self._number += 1
        return b"".join(out)


def _numbered(number: int, event: Event) -> bytes:
    kind = event["type"]
    return data_event({"type": kind, "sequence_number": number, **event}, kind)


def _made(item: OpenItem, *, begun: bool = False) -> Item:
    """The item as its deltas alone tell it: what it is before the finish is known."""
    text = "" if begun else item.text
    status = "in_progress" if begun else "completed"
    if item.kind == "function_call":
        call = {"type": "function_call", "call_id": item.call_id, "name": item.name, "arguments": text}
        return {**call, "id": item.id, "status": status}
    parts = [] if begun else [_made_part(item, text)]
    if item.kind == "reasoning":
        return {"type": "reasoning", "summary": [], "content": parts, "id": item.id, "status": status}
    return {"type": "message", "role": "assistant", "content": parts, "id": item.id, "status": status}


def _made_part(item: OpenItem, text: str) -> dict[str, Any]:
    return text_part(text, "reasoning_text" if item.kind == "reasoning" else "output_text")


def _piece_of(item: OpenItem, piece: str) -> Event:
    """The event of one more piece of an item that deltas opened."""
    if item.kind == "function_call":
        return _arguments("delta", item.index, item.id, delta=piece)
    return _part_delta(item.index, item.id, 0, _made_part(item, "")["type"], piece)


def _text_of(item: OpenItem, final: Item) -> str:
    """What the deltas of `item` are pieces of: the arguments, or the text of the first part."""
    if item.kind == "function_call":
        return str(final.get("arguments") or "")
    parts = final.get("content")
    first = parts[0] if isinstance(parts, list) and parts else None
    if not isinstance(first, dict) or first.get("type") != _made_part(item, "")["type"]:
        raise StreamContradiction(f"item {item.index}: a {item.kind} with text was sent, one without was finished")
    return str(first.get("text") or "")


def _ended(item: OpenItem, final: Item, new_from: int) -> Iterator[Event]:
    """The done events of an item that deltas opened; parts from `new_from` on, if any, were not yet sent."""
    if item.kind == "function_call":
        yield _arguments("done", item.index, item.id, arguments=final.get("arguments") or "", name=item.name)
    else:
        parts = final["content"]
        yield from _part_done(item.index, item.id, 0, parts[0])
        for place in range(1, len(parts) if new_from else 1):
            yield from _whole_part(item.index, item.id, place, parts[place])
        if new_from and item.kind == "reasoning":
            yield from _whole_summary(item.index, final)
    yield {"type": "response.output_item.done", "output_index": item.index, "item": final}


def _whole(index: int, item: Item) -> Iterator[Event]:
    """All events of an item of which nothing left before."""
    kind, item_id = item.get("type"), item["id"]
    parts = item.get("content") if kind in ("message", "reasoning") else None
    hollow = {name: value for name, value in item.items() if name not in _TRIPLE}
    if kind == "function_call":
        hollow["arguments"] = ""
    elif kind == "custom_tool_call":
        hollow["input"] = ""
    elif kind in ("message", "reasoning"):
        hollow.update({name: [] for name in ("content", "summary") if name in item})
    yield from _begun(index, {**hollow, "status": "in_progress"})
    for place, part in enumerate(parts if isinstance(parts, list) else ()):
        yield from _whole_part(index, item_id, place, part)
    if kind == "reasoning":
        yield from _whole_summary(index, item)
    elif kind == "function_call":
        arguments = item.get("arguments") or ""
        yield _arguments("delta", index, item_id, delta=arguments)
        yield _arguments("done", index, item_id, arguments=arguments, name=item.get("name") or "")
    elif kind == "custom_tool_call":
        head = {"output_index": index, "item_id": item_id}
        yield {"type": "response.custom_tool_call_input.delta", **head, "delta": item.get("input") or ""}
        yield {"type": "response.custom_tool_call_input.done", **head, "input": item.get("input") or ""}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


_TRIPLE = frozenset(("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts"))


def _begun(index: int, item: Item) -> Iterator[Event]:
    yield {"type": "response.output_item.added", "output_index": index, "item": item}


def _whole_part(index: int, item_id: str, place: int, part: Any) -> Iterator[Event]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_EVENTS:
        yield _part_added(index, item_id, place, part)
        yield {
            "type": "response.content_part.done",
            "output_index": index,
            "item_id": item_id,
            "content_index": place,
            "part": part,
        }
        return
    name = _TEXT_EVENTS[kind][1]
    text = part.get(name) or ""
    hollow = {**part, name: ""}
    yield _part_added(index, item_id, place, {**hollow, "annotations": []} if part.get("annotations") else hollow)
    if text:
        yield _part_delta(index, item_id, place, kind, text)
    yield from _part_done(index, item_id, place, part)


def _whole_summary(index: int, item: Item) -> Iterator[Event]:
    summary = item.get("summary")
    for place, part in enumerate(summary if isinstance(summary, list) else ()):
        head = {"output_index": index, "item_id": item["id"], "summary_index": place}
        text = part.get("text") or "" if isinstance(part, dict) else ""
        hollow = {"type": "summary_text", "text": ""}
        yield {"type": "response.reasoning_summary_part.added", **head, "part": hollow}
        yield {"type": "response.reasoning_summary_text.delta", **head, "delta": text}
        yield {"type": "response.reasoning_summary_text.done", **head, "text": text}
        yield {"type": "response.reasoning_summary_part.done", **head, "part": part}


def _part_added(index: int, item_id: str, place: int, part: Any) -> Event:
    head = {"output_index": index, "item_id": item_id, "content_index": place}
    return {"type": "response.content_part.added", **head, "part": part}


def _part_delta(index: int, item_id: str, place: int, kind: str, piece: str) -> Event:
    head = {"output_index": index, "item_id": item_id, "content_index": place}
    extra: Event = {"logprobs": []} if kind == "output_text" else {}
    return {"type": f"{_TEXT_EVENTS[kind][0]}.delta", **head, "delta": piece, **extra}


def _part_done(index: int, item_id: str, place: int, part: Mapping[str, Any]) -> Iterator[Event]:
    head = {"output_index": index, "item_id": item_id, "content_index": place}
    stem, name = _TEXT_EVENTS[str(part["type"])]
    extra: Event = {"logprobs": []} if part["type"] == "output_text" else {}
    yield from _annotated(index, item_id, place, part)
    yield {"type": f"{stem}.done", **head, name: part.get(name) or "", **extra}
    yield {"type": "response.content_part.done", **head, "part": part}


def _annotated(index: int, item_id: str, place: int, part: Mapping[str, Any]) -> Iterator[Event]:
    """The events of a part's annotations, which are known at the finish, when its item may have ended."""
    kind, head = "response.output_text.annotation.added", {"output_index": index, "item_id": item_id}
    for number, each in enumerate(part.get("annotations") or ()):
        yield {"type": kind, **head, "content_index": place, "annotation_index": number, "annotation": each}


def _arguments(step: str, index: int, item_id: str, **fields: str) -> Event:
    kind = f"response.function_call_arguments.{step}"
    return {"type": kind, "output_index": index, "item_id": item_id, **fields}
