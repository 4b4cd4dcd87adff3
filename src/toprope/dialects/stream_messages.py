"""A Messages stream: blocks that start, grow and stop, and a message around them.

Every event has its `event:` line and every count is there, because programs stop or go round for ever without them.
Left to others: the message itself (`messages_reply`).
"""

from __future__ import annotations

from typing import Any, Literal

from toprope.dialects.chat_parts import plain_text, reasoning_text
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
from toprope.dialects.messages_reply import (
    arguments_object,
    arguments_of,
    message_begun,
    messages_usage,
    signature_of,
    stopped,
    thought_blocks,
    tool_block,
)
from toprope.dialects.pivot import PivotReply
from toprope.wire.fields import write_object
from toprope.wire.messages import Block
from toprope.wire.responses import Item


class MessagesStream:
    """One Messages stream."""

    def __init__(self, *, reply_id: str, model: str) -> None:
        self._begun = message_begun(reply_id=reply_id, model=model)
        self._emitted = Emitted(reply_id)
        self._started = False
        self._blocks = 0
        self._in_block = False
        self._more: tuple[bytes, bytes] | None = None  # the event that lets the open block grow, around its piece
        self._arguments: Literal["blank", "object", "odd"] = "blank"

    def open(self) -> bytes:
        """`message_start`."""
        self._started = True
        return _event("message_start", message=self._begun)

    def delta(self, delta: Delta) -> bytes:
        """The block's start where it is new, after the stop of the one before, and its piece; nothing for no text."""
        if (more := self._more) is not None and (piece := self._emitted.grow(delta)) is not None:
            return more[0] + piece + more[1] if piece else b""
        before = self._emitted.last
        item, opened = self._emitted.take(delta)
        out = self._stop(before) if opened and before is not None else b""
        if isinstance(delta, ToolCallDelta):
            head = self._start(_call_block(item)) if opened else b""
            out += head + self._argue(item, delta.arguments)
        elif delta.text:
            out += self._grow(item, delta.text)
        if self._in_block and (item.kind != "function_call" or self._arguments == "object"):
            self._more = around(self._grow(item, PIECE))
        return out

    def finish(self, reply: PivotReply) -> bytes:
        """The rest of every block, the stop of the last one, `message_delta` with reason and counts, `message_stop`."""
        sent, output = self._emitted.items, reply.output
        if len(sent) > len(output):
            raise StreamContradiction(f"{len(sent)} items were sent, {len(output)} were finished")
        out = []
        for item, final in zip(sent, output, strict=False):
            check_same(item, final, by_id=item.kind == "reasoning")  # whose id is in the signature
            rest = rest_of(item.text, _text_of(final), f"item {item.index}")
            if item is sent[-1]:
                out += [self._rest(item, rest), self._stop(item, final)]
            elif rest:
                raise StreamContradiction(f"item {item.index} has ended, and the finished one says more")
        out += [self._whole(index, output[index]) for index in range(len(sent), len(output))]
        delta = {**stopped(reply), **(reply.tokens or {})}
        out.append(_event("message_delta", delta=delta, usage=messages_usage(reply.usage)))
        out.append(_event("message_stop"))
        return b"".join(out)

    def keep_alive(self) -> bytes:
        """A ping, before the message's start a comment."""
        return _event("ping") if self._started else COMMENT

    def _whole(self, index: int, final: Item) -> bytes:
        """A block of which nothing left before; one that says nothing is none."""
        kind = final.get("type")
        if kind == "reasoning" and not reasoning_text(final):
            return b"".join(self._start(block) + self._stop(None) for block in thought_blocks(final))
        if kind == "custom_tool_call":  # a Messages client knows one kind of calls
            kind, final = "function_call", {**final, "type": "function_call", "arguments": arguments_of(final)}
        if kind not in ("message", "reasoning", "function_call"):
            return b""
        item = OpenItem(index, kind, str(final.get("id")))
        text = _text_of(final)
        if kind == "function_call":
            return self._start(tool_block(final, {})) + self._rest(item, text) + self._stop(item, final)
        return self._grow(item, text) + self._stop(item, final) if text else b""

    def _start(self, block: Block) -> bytes:
        self._in_block = True
        return _event("content_block_start", index=self._blocks, content_block=block)

    def _rest(self, item: OpenItem, text: str) -> bytes:
        if not text:
            return b""
        item.pieces.append(text)
        return self._argue(item, text) if item.kind == "function_call" else self._grow(item, text)

    def _argue(self, item: OpenItem, piece: str) -> bytes:
        """The delta of a piece of arguments, once they begin as an object.

        Of anything else the public library makes an error, so it waits for the block's stop.
        """
        if self._arguments == "blank" and piece.strip():
            self._arguments = "object" if piece.lstrip().startswith("{") else "odd"
            piece = item.text
        return self._grow(item, piece) if piece and self._arguments == "object" else b""

    def _grow(self, item: OpenItem, piece: str) -> bytes:
        """One delta of the open block; the first text of an item starts its block."""
        if item.kind == "function_call":
            start, delta = b"", {"type": "input_json_delta", "partial_json": piece}
        elif item.kind == "reasoning":
            start = b"" if self._in_block else self._start({"type": "thinking", "thinking": "", "signature": ""})
            delta = {"type": "thinking_delta", "thinking": piece}
        else:
            start = b"" if self._in_block else self._start({"type": "text", "text": "", "citations": None})
            delta = {"type": "text_delta", "text": piece}
        return start + _event("content_block_delta", index=self._blocks, delta=delta)

    def _stop(self, item: OpenItem | None, final: Item | None = None) -> bytes:
        """The end of the open block, if there is one; a thought is signed before, what is no object is told as one."""
        if not self._in_block:
            return b""
        out = b""
        if item is not None and item.kind == "function_call" and self._arguments != "object":
            value = arguments_object(item.text)
            out = self._grow(item, write_object(value).decode() if value else "")
        if item is not None and item.kind == "reasoning":
            signed = {"type": "signature_delta", "signature": signature_of(final or {"id": item.id})}
            out = _event("content_block_delta", index=self._blocks, delta=signed)
        out += _event("content_block_stop", index=self._blocks)
        self._in_block, self._more = False, None
        self._arguments = "blank"
        self._blocks += 1
        return out


def _call_block(item: OpenItem) -> Block:
    return tool_block({"call_id": item.call_id, "name": item.name}, {})


def _text_of(final: Item) -> str:
    """What the deltas of an item are pieces of."""
    if final.get("type") == "function_call":
        return str(final.get("arguments") or "")
    return reasoning_text(final) if final.get("type") == "reasoning" else plain_text(final.get("content"))


def _event(kind: str, **fields: Any) -> bytes:
    return data_event({"type": kind, **fields}, kind)
