"""What of a reply has left already: the items that deltas opened, and what the finished reply adds to them.

Every writer of items in order (Responses, Messages) keeps one `Emitted`. Left to others: how an event is spelled (the
writers), and what Chat does, which has no items (`stream_chat`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from toprope.canonical.json import dumps
from toprope.dialects.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from toprope.dialects.pivot import item_id
from toprope.wire.fields import write_object
from toprope.wire.responses import Item

Kind: TypeAlias = Literal["message", "reasoning", "function_call"]

_KIND: Mapping[type, Kind] = {TextDelta: "message", ReasoningDelta: "reasoning", ToolCallDelta: "function_call"}


class StreamContradiction(ValueError):
    """What left already and what comes now are not of one reply; the message says where. The stream must be cut."""


@dataclass(slots=True)
class OpenItem:
    """An item that deltas opened: position, kind, id, for a call its name and call id, and the text that left."""

    index: int
    kind: Kind
    id: str
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All that left of this item: text, thought or arguments."""
        return "".join(self.pieces)


class Emitted:
    """The items of one stream so far, each begun when the one before it had ended."""

    def __init__(self, reply_id: str) -> None:
        self.reply_id = reply_id
        self.items: list[OpenItem] = []
        self._call_ids: set[str] = set()

    @property
    def last(self) -> OpenItem | None:
        """The item that is still open: the newest one."""
        return self.items[-1] if self.items else None

    def take(self, delta: Delta) -> tuple[OpenItem, bool]:
        """The item that `delta` belongs to, its piece put in, and whether the delta opened it.

        Raises `StreamContradiction` for a delta to an item that has ended, one that leaves an item out, one of another
        kind than its item, and a call that begins without a name.
        """
        kind, count = _KIND[type(delta)], len(self.items)
        if delta.index == count:
            item = self._opened(delta, kind)
        elif delta.index == count - 1:
            item = self.items[-1]
        else:
            raise StreamContradiction(f"a delta of item {delta.index} comes where item {count - 1} is open")
        if item.kind != kind:
            raise StreamContradiction(f"a delta of a {kind} comes for item {item.index}, which is a {item.kind}")
        opened = delta.index == count
        piece = delta.arguments if isinstance(delta, ToolCallDelta) else delta.text
        if piece:
            item.pieces.append(piece)
        return item, opened

    def grow(self, delta: Delta) -> bytes | None:
        """The piece that `delta` adds to the open item, put in, as the JSON of a string; b"" for no piece.

        None, and nothing done, for a delta that opens an item or contradicts: that is for `take`.
        """
        item = self.items[-1] if self.items else None
        if item is None or delta.index != item.index or _KIND[type(delta)] != item.kind:
            return None
        piece = delta.arguments if isinstance(delta, ToolCallDelta) else delta.text
        if not piece:
            return b""
        item.pieces.append(piece)
        return _string(piece)

    def said(self, kind: Kind) -> str:
        """All that left of the items of one kind."""
        return "".join(item.text for item in self.items if item.kind == kind)

    def _opened(self, delta: Delta, kind: Kind) -> OpenItem:
        item = OpenItem(delta.index, kind, item_id(kind, self.reply_id, delta.index))
        if isinstance(delta, ToolCallDelta):
            if delta.name is None:
                raise StreamContradiction(f"the call at item {delta.index} begins without a name")
            given = delta.call_id
            item.name = delta.name
            item.call_id = given if given and given not in self._call_ids else f"call_{self.reply_id}_{delta.index}"
            self._call_ids.add(item.call_id)
        self.items.append(item)
        return item


def rest_of(said: str, final: str, what: str) -> str:
    """What `final` adds to `said`. Raises `StreamContradiction` if it does not continue it."""
    if not final.startswith(said):
        at = next((i for i, (a, b) in enumerate(zip(said, final, strict=False)) if a != b), len(final))
        raise StreamContradiction(f"{what}: what was sent and what was finished differ at character {at}")
    return final[len(said) :]


def check_same(item: OpenItem, final: Item, *, by_id: bool) -> None:
    """Raise `StreamContradiction` unless `final` is the item that was opened: kind, call id and name, and its id."""
    facts: list[tuple[str, str]] = [("type", item.kind)]
    if item.kind == "function_call":
        facts += [("call_id", item.call_id), ("name", item.name)]
    if by_id:
        facts.append(("id", item.id))
    for name, sent in facts:
        if final.get(name) != sent:
            raise StreamContradiction(f"item {item.index}: {name} {sent!r} was sent, {final.get(name)!r} was finished")


def data_event(value: Mapping[str, Any], event: str | None = None) -> bytes:
    """One server-sent event. Line ends of Unicode that JSON leaves raw are escaped: some clients split at them."""
    data = _escaped(write_object(value))
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


PIECE = "\ue000piece\ue000"
"""What stands for the piece in an event that is to be told again and again with another one (`around`)."""


def around(event: bytes) -> tuple[bytes, bytes] | None:
    """What stands before and after `PIECE` in `event`, so that only the piece needs to be written every time.

    None if it is not there exactly once: then the event is to be made anew each time.
    """
    parts = event.split(_string(PIECE))
    return (parts[0], parts[1]) if len(parts) == 2 else None


def _string(text: str) -> bytes:
    try:
        data = _encode(text)
    except UnicodeEncodeError:
        data = dumps(text)  # lone surrogates
    return _escaped(data)


_encode = msgspec.json.Encoder().encode
_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def _escaped(data: bytes) -> bytes:
    if not data.isascii():
        for raw, escaped in _LINE_ENDS:
            data = data.replace(raw, escaped)
    return data


COMMENT = b": keep-alive\n\n"
"""What every reader of events skips."""
