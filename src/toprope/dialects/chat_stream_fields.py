"""Fields of a streamed message that nobody here reads, in pieces: put together as the public Chat libraries do.

Texts go on, objects field by field, and of a list the entries that have an `index`: those with the same one are one
entry (`reasoning_details` come so, an entry in pieces under its index, beside pieces of others). Whatever else stands
in a list comes after what did, and any other value takes the place of the one before. What a thing is called, and of
what kind it is, is said with every piece by some and stays one word. Time is linear in the pieces, and no value that
came is changed. Left to others: which fields these are (`chat_stream_reader`), and what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_KINDS = frozenset(("type", "index"))
_NAMES = frozenset(("id", "name", "format"))


class _Text:
    __slots__ = ("length", "pieces")

    def __init__(self, *pieces: str) -> None:
        self.pieces, self.length = list(pieces), sum(map(len, pieces))

    def add(self, piece: str) -> _Text:
        self.pieces.append(piece)
        self.length += len(piece)
        return self


class _Object:
    __slots__ = ("fields",)

    def __init__(self, first: dict[str, Any]) -> None:
        self.fields = dict(first)

    def add(self, more: dict[str, Any]) -> _Object:
        fields = self.fields
        for name, value in more.items():
            known = fields.get(name)
            if name in _KINDS and value is not None:
                fields[name] = value
            elif name not in _NAMES or known != value:
                fields[name] = grown(known, value)
        return self


class _List:
    """Entries as they came; `places` are those of the entries that have an index, by it."""

    __slots__ = ("entries", "places")

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.places: dict[int, int] = {}

    def add(self, more: Sequence[Any]) -> _List:
        for entry in more:
            index = entry.get("index") if isinstance(entry, dict) else None
            new = len(self.entries)
            place = self.places.setdefault(index, new) if type(index) is int else new
            if place == new:
                self.entries.append(entry)
            else:
                self.entries[place] = grown(self.entries[place], entry)
        return self

    def whole(self) -> list[Any]:
        if len(self.places) < len(self.entries):
            return [whole(entry) for entry in self.entries]
        return [whole(self.entries[place]) for _, place in sorted(self.places.items())]


def grown(old: Any, new: Any) -> Any:
    """What `old` is with the piece `new`: None before the first piece, then what this gave before. Null adds nothing.

    For `whole` and `is_told` alone to look into, and not to be used after it was given here again.
    """
    if new is None:
        return old
    if isinstance(new, list):
        if isinstance(old, _List):
            return old.add(new)
        return _List().add(old).add(new) if isinstance(old, list) else _List().add(new)
    if isinstance(new, str):
        if isinstance(old, _Text):
            return old.add(new)
        return _Text(old, new) if isinstance(old, str) else new
    if isinstance(new, dict):
        if isinstance(old, _Object):
            return old.add(new)
        return _Object(old).add(new) if isinstance(old, dict) else new
    return new


def whole(value: Any) -> Any:
    """The value that pieces made up (`grown`)."""
    if isinstance(value, _Text):
        return "".join(value.pieces)
    if isinstance(value, _Object):
        return {name: whole(inner) for name, inner in value.fields.items()}
    return value.whole() if isinstance(value, _List) else value


def is_told(value: Any, told: Any) -> bool:
    """Whether the pieces of `value` make up `told`; of a growing text that is known by its length nearly always."""
    if isinstance(value, _Text):
        return isinstance(told, str) and len(told) == value.length and whole(value) == told
    if isinstance(value, _Object):
        if not isinstance(told, dict) or told.keys() != value.fields.keys():
            return False
        return all(is_told(inner, told[name]) for name, inner in value.fields.items())
    if isinstance(value, _List):
        return isinstance(told, list) and len(told) == len(value.entries) and value.whole() == told
    return bool(value == told)
