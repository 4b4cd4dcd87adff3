"""Marks of conversation items: how lineage knows again what a policy wrote when a client sends it back.

A mark names one model-authored item by digest of what it says (text, or tool name and the parsed argument value, since
many programs re-serialise arguments) and by the ids that clients echo (tool-call id, item id). Two marks mean the same
item when either agrees. Items are counted, not text blocks: a message in three parts is one item. Pure.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toprope.canonical.digest import digest_value
from toprope.canonical.json import NotJson, loads

_TEXT_PARTS = frozenset({"output_text", "input_text", "text", "reasoning_text", "summary_text", "refusal"})
_ID_FIELDS = ("call_id", "id")
_THOUGHT = "reasoning:"


def is_model_authored(item: Mapping[str, Any]) -> bool:
    """Whether a policy may have sampled this item.

    Messages by role; results of tools (`*_output`) are not; whatever kind we do not know is, since an uncaptured
    turn may hide in it. An assistant message that says nothing is none.
    """
    kind = _kind(item)
    if kind == "message":
        return item.get("role") in ("assistant", "model") and bool(_said(item.get("content")))
    return not kind.endswith(("_output", "_approval_response"))


def item_digests(items: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """One mark for each model-authored item, in order: `<kind>:<digest of content>:<digests of ids, joined by ,>`.

    Equal items have equal marks in every dialect once converted. Use `CountedMarks` to compare.
    """
    return tuple(_mark(item) for item in items if is_model_authored(item))


class CountedMarks:
    """A bag of marks that answers whether other marks all stand in it, each counted once.

    Content is matched first and ids after, so that an item which keeps its id cannot stand in for a second one.
    """

    __slots__ = ("_by_content", "_by_id")

    def __init__(self, marks: Iterable[str] = ()) -> None:
        self._by_content: dict[str, int] = {}
        self._by_id: dict[str, list[str]] = {}
        self.add(marks)

    def add(self, marks: Iterable[str]) -> None:
        """Put marks in."""
        counts = self._by_content
        for mark in marks:
            content, ids = _split(mark)
            counts[content] = counts.get(content, 0) + 1
            for each in ids:
                self._by_id.setdefault(each, []).append(content)

    def missing(self, marks: Sequence[str]) -> tuple[str, ...]:
        """The marks of another origin: those that stand here neither by content nor by id."""
        used: Counter[str] = Counter()
        unmatched = []
        for mark in marks:
            content, _ = _split(mark)
            if used[content] < self._by_content.get(content, 0):
                used[content] += 1
            else:
                unmatched.append(mark)
        return tuple(mark for mark in unmatched if not self._stands_by_id(mark, used))

    def _stands_by_id(self, mark: str, used: Counter[str]) -> bool:
        thought = mark.startswith(_THOUGHT)
        for each in _split(mark)[1]:
            for content in self._by_id.get(each, ()):
                # A reply and the reasoning before it may share an id; the one does not vouch for the other.
                if content.startswith(_THOUGHT) == thought and used[content] < self._by_content[content]:
                    used[content] += 1
                    return True
        return False


class MarkBags:
    """Many bags of marks, asked whether one of them holds so many marks; bags that cannot are not looked at."""

    __slots__ = ("_bags", "_places")

    def __init__(self) -> None:
        self._bags: dict[tuple[str, ...], CountedMarks] = {}
        self._places: dict[str, list[CountedMarks]] = {}  # by content and by id

    def add(self, marks: tuple[str, ...]) -> None:
        """Put a bag in; one that is there already changes nothing."""
        if marks in self._bags:
            return
        bag = self._bags[marks] = CountedMarks(marks)
        for name in {name for mark in marks for name in _names(mark)}:
            self._places.setdefault(name, []).append(bag)

    def holds(self, marks: Sequence[str]) -> bool:
        """Whether all of `marks`, of which there is one at least, stand in one bag."""
        found = [[self._places.get(name, []) for name in _names(mark)] for mark in marks]
        rarest = min(found, key=lambda places: sum(map(len, places)))
        return any(not bag.missing(marks) for place in rarest for bag in place)


def content_of(mark: str) -> str:
    """The part of a mark that stands for kind and content, ids left out."""
    return _split(mark)[0]


def _split(mark: str) -> tuple[str, tuple[str, ...]]:
    content, _, ids = mark.rpartition(":")
    return content, tuple(ids.split(",")) if ids else ()


def _names(mark: str) -> tuple[str, ...]:
    """All by which a mark is known again."""
    content, ids = _split(mark)
    return (content, *ids)


def _mark(item: Mapping[str, Any]) -> str:
    kind = _kind(item)
    ids = ",".join(_short(str(item[name])) for name in _ID_FIELDS if item.get(name))
    return f"{kind}:{_content_digest(kind, item)}:{ids}"


def _content_digest(kind: str, item: Mapping[str, Any]) -> str:
    if kind == "message":
        return value_mark(_said(item.get("content")))
    if kind == "reasoning":
        content = item.get("content")
        return value_mark(_said(content) or _said(item.get("summary")) or [item.get("encrypted_content")])
    if kind == "function_call":
        return value_mark([item.get("name"), _argument_value(item.get("arguments"))])
    volatile = {*_ID_FIELDS, "status"}
    return value_mark({key: value for key, value in item.items() if key not in volatile})


def _said(content: Any) -> list[Any]:
    """What a content field says: its text parts joined into one, other parts as they are; empty if nothing."""
    if not isinstance(content, list | tuple):
        return [content] if content else []
    texts: list[str] = []
    others: list[Any] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type", "text") in _TEXT_PARTS:
            texts.append(str(part.get("text") or part.get("refusal") or ""))
        else:
            others.append(part)
    text = "".join(texts)
    return ([text] if text else []) + others


def _argument_value(arguments: Any) -> Any:
    """The value that an argument string stands for; `""` is an empty object; no JSON stays the string it is."""
    if not isinstance(arguments, str):
        return {} if arguments is None else _plain_numbers(arguments)
    if not arguments.strip():
        return {}
    try:
        return _plain_numbers(loads(arguments))
    except (NotJson, RecursionError):
        return arguments


def _plain_numbers(value: Any) -> Any:
    """`value` with whole floats as integers: a JavaScript client sends 1.0 back as 1 and 1e2 as 100."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain_numbers(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain_numbers(each) for key, each in value.items()}
    return value


def value_mark(value: Any) -> str:
    """The digest of a value, also of one that is no JSON, in 128 bits: marks are compared within one rollout only."""
    try:
        return digest_value(value)[:32]
    except NotJson:
        return hashlib.sha256(repr(value).encode("utf-8", "backslashreplace")).hexdigest()[:32]


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _kind(item: Mapping[str, Any]) -> str:
    kind = item.get("type")
    if isinstance(kind, str):
        return kind
    return "message" if "role" in item else "unknown"
