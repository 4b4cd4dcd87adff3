"""Marks of conversation items: how lineage knows again what a policy wrote when a client sends it back.

A mark names one model-authored item by digest of what it says (text, or tool name and the parsed argument value, since
many programs re-serialise arguments), by the item id that clients echo, and by a digest of each field that we do not
read: a thought may stand in any. The id of a tool call is in no mark: clients number calls anew, and we make ids of
places. Items are counted, not text blocks: a message in three parts is one item. Which of these vouches for what is
decided in docs/decisions/0007-what-an-id-vouches-for.md. Pure.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from toprope.canonical.digest import digest_value
from toprope.canonical.json import NotJson, loads
from toprope.wire.message_fields import (
    ABOUT_A_CALL,
    ABOUT_A_CUSTOM_CALL,
    ABOUT_A_MESSAGE,
    MOVED_FIELDS,
    says_something,
    without_nulls,
)

_TEXT_PARTS = frozenset({"output_text", "input_text", "text", "reasoning_text", "summary_text", "refusal"})
_VOLATILE = frozenset(("call_id", "id", "status"))
_CALLS = {"function_call": ABOUT_A_CALL, "custom_tool_call": ABOUT_A_CUSTOM_CALL}
"""The fields that are read, or are about the call, of calls whose other fields are marked apart."""
THOUGHT = "reasoning:"
"""How the mark of a thought begins."""
_SEALED = "reasoning:-"
"""How the mark of a thought without readable text begins: only its id, or a sealed form, came back."""
_REFERENCE = "item_reference:"
_FIELD = "+"

_OTHERS = ("user", "system", "developer", "tool", "function")
"""Whose messages no policy wrote. Whoever speaks in a role that we do not know may be one."""

TOOL_RESULTS = frozenset(
    (
        "function_call_output", "custom_tool_call_output", "computer_call_output", "local_shell_call_output",
        "shell_call_output", "apply_patch_call_output", "tool_search_output", "mcp_approval_response",
    )
)  # fmt: skip
"""The kinds of items that are results of tools, or of people, and no policy's."""

_ABOUT_A_PART = frozenset(("type", "text", "refusal", "id", "index", "logprobs", "cache_control", "citations"))
_USUAL_PART = _ABOUT_A_PART | {"annotations"}


def is_model_authored(item: Mapping[str, Any]) -> bool:
    """Whether a policy may have sampled this item.

    Messages by role; results of tools are not; whatever kind or role we do not know is, since an uncaptured turn may
    hide in it. A message that says nothing, in its content or in any field that we do not read, is none.
    """
    kind = _kind(item)
    return _words_of(item) is not None if kind == "message" else kind not in TOOL_RESULTS


def item_digests(items: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """One mark for each model-authored item, in order: `<kind>:<digest of content>:<digests joined by ,>`.

    The last part are digests of the item id, and of fields of a message or call that are not read, each with a `+`
    before it. The content of a thought without text begins with `-`. Equal items have equal marks in every dialect once
    converted. Use `CountedMarks` to compare.
    """
    return tuple(mark for item in items if (mark := _mark(item)) is not None)


def said_by_all(items: Iterable[Mapping[str, Any]], marks: Iterable[str]) -> tuple[str, ...]:
    """One digest for each item, in order, whoever wrote it: role and words, and no ids.

    `marks` are the `item_digests` of `items`; the digest of a model-authored item is its mark without the item's id.
    """
    left = iter(marks)
    return tuple([_without_id(next(left)) if is_model_authored(item) else _said_by_other(item) for item in items])


def is_mark(digest: str) -> bool:
    """Whether a digest of `said_by_all` is that of a model-authored item."""
    return ":" in digest


def _without_id(mark: str) -> str:
    content, _, names = mark.rpartition(":")
    if _FIELD not in names:
        return content
    return f"{content}:{','.join(each for each in names.split(',') if each.startswith(_FIELD))}"


def _said_by_other(item: Mapping[str, Any]) -> str:
    return value_mark([_kind(item), item.get("role"), _said(item.get("content")), _said(item.get("output"))])


class CountedMarks:
    """A bag of marks that answers whether other marks all stand in it, each counted once.

    Content is matched first and ids after, so that an item which keeps its id cannot stand in for a second one. Only
    the id of what was `sampled` vouches, for a reference or a thought that came back without its text; never for
    words or calls, which may be others than were recorded. What was only `shown` stands by content. A field that is
    not read stands where an equal one does; one that is left out lacks nothing.
    """

    __slots__ = ("_by_content", "_by_id", "_fields")

    def __init__(self, shown: Iterable[str] = (), sampled: Iterable[str] = ()) -> None:
        self._by_content: dict[str, int] = {}
        self._by_id: dict[str, list[str]] = {}
        self._fields: Counter[str] = Counter()
        self.add(shown, sampled)

    def add(self, shown: Iterable[str], sampled: Iterable[str]) -> None:
        """Put marks in: those that a request showed, and those of what a recorded call sampled."""
        for mark in shown:
            self._count(mark)
        for mark in sampled:
            content = self._count(mark)
            for each in _split(mark)[1]:
                if not each.startswith(_FIELD):
                    self._by_id.setdefault(each, []).append(content)

    def _count(self, mark: str) -> str:
        content, names = _split(mark)
        self._by_content[content] = self._by_content.get(content, 0) + 1
        for each in names:
            if each.startswith(_FIELD):
                self._fields[each] += 1
        return content

    def missing(self, marks: Sequence[str]) -> tuple[str, ...]:
        """The marks of another origin: those that stand here neither by content nor by id."""
        used: Counter[str] = Counter()
        unmatched = []
        for mark in marks:
            content, names = _split(mark)
            if not self._hold_fields(names, used):
                unmatched.append((mark, False))
            elif used[content] < self._by_content.get(content, 0):
                used[content] += 1
            else:
                unmatched.append((mark, True))
        return tuple(mark for mark, open_ in unmatched if not (open_ and self._stands_by_id(mark, used)))

    def _hold_fields(self, names: Sequence[str], used: Counter[str]) -> bool:
        fields = [name for name in names if name.startswith(_FIELD)]
        used.update(fields)
        return all(used[each] <= self._fields[each] for each in fields)

    def _stands_by_id(self, mark: str, used: Counter[str]) -> bool:
        content, names = _split(mark)
        for each in names:
            for held in self._by_id.get(each, ()):
                if _vouches(held, content) and used[held] < self._by_content[held]:
                    used[held] += 1
                    return True
        return False


def _vouches(held: str, content: str) -> bool:
    """Whether what was sampled as `held` may come back, under its id, as `content`, which is something else."""
    # A reply and the thought before it may share an id; the one does not vouch for the other.
    return content.startswith(_REFERENCE) or (content.startswith(_SEALED) and held.startswith(THOUGHT))


class MarkBags:
    """Many bags of marks, asked whether one of them holds so many marks, by content; others are not looked at."""

    __slots__ = ("_bags", "_places")

    def __init__(self) -> None:
        self._bags: dict[tuple[str, ...], CountedMarks] = {}
        self._places: dict[str, list[CountedMarks]] = {}  # by content

    def add(self, marks: tuple[str, ...]) -> None:
        """Put a bag in; one that is there already changes nothing."""
        if marks in self._bags:
            return
        bag = self._bags[marks] = CountedMarks(marks)
        for content in set(map(content_of, marks)):
            self._places.setdefault(content, []).append(bag)

    def holds(self, marks: Sequence[str]) -> bool:
        """Whether all of `marks`, of which there is one at least, stand in one bag."""
        rarest = min((self._places.get(content_of(mark), []) for mark in marks), key=len)
        return any(not bag.missing(marks) for bag in rarest)


def content_of(mark: str) -> str:
    """The part of a mark that stands for kind and content, ids left out."""
    return _split(mark)[0]


def _split(mark: str) -> tuple[str, tuple[str, ...]]:
    content, _, ids = mark.rpartition(":")
    return content, tuple(ids.split(",")) if ids else ()


def _mark(item: Mapping[str, Any]) -> str | None:
    """The mark of an item, None for one that no policy wrote."""
    kind = _kind(item)
    unread: list[tuple[str, Any]] = []
    if kind == "message":
        words = _words_of(item)
        if words is None:
            return None
        said, unread = words
        digest = value_mark(said)
    elif kind in TOOL_RESULTS:
        return None
    else:
        digest = _content_digest(kind, item)
        read = _CALLS.get(kind)
        if read is not None and not item.keys() <= read:
            unread = list(_saying(item, read))
    fields = [_FIELD + value_mark(without_nulls(field))[:16] for field in unread]
    ids = [_short(str(item["id"]))] if item.get("id") else []
    return f"{kind}:{digest}:{','.join(ids + fields)}"


def _words_of(message: Mapping[str, Any]) -> tuple[list[Any], list[tuple[str, Any]]] | None:
    """What a message says, and its unread fields that say something; None for one that no policy wrote."""
    if message.get("role") in _OTHERS:
        return None
    said, unread = _said(message.get("content")), _unread(message)
    return (said, unread) if said or unread else None


def _content_digest(kind: str, item: Mapping[str, Any]) -> str:
    if kind == "reasoning":
        said = _said(item.get("content")) or _said(item.get("summary"))
        return value_mark(said) if said else "-" + value_mark([item.get("encrypted_content")])
    if kind == "function_call":
        return value_mark([item.get("name"), _argument_value(item.get("arguments"))])
    if kind == "custom_tool_call":
        return value_mark([item.get("name"), item.get("input")])
    if kind == "item_reference":
        return value_mark(item.get("id"))  # it says nothing else: two of them are not the same
    return value_mark(without_nulls({key: value for key, value in item.items() if key not in _VOLATILE}))


def _said(content: Any) -> list[Any]:
    """What a content field says: its text parts joined into one, other parts as they are; empty if nothing."""
    if not isinstance(content, list | tuple):
        return [content] if content else []
    texts: list[str] = []
    others: list[Any] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and _is_text(part):
            texts.append(str(part.get("text") or part.get("refusal") or ""))
        else:
            others.append(without_nulls(part))
    text = "".join(texts)
    return ([text] if text else []) + others


def _unread(item: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The fields of a message and of its text parts, by name and value, that are not read and say something."""
    content = item.get("content")
    found = [] if item.keys() <= ABOUT_A_MESSAGE else list(_saying(item, ABOUT_A_MESSAGE))
    for part in content if isinstance(content, list | tuple) else ():
        if isinstance(part, Mapping) and _is_text(part):
            if part.get("annotations") or not part.keys() <= _USUAL_PART:
                found.extend(_saying(part, _ABOUT_A_PART))
            if "refusal" in part and part.get("text") and part["refusal"]:
                found.append(("refusal", part["refusal"]))  # only the text of such a part is read
    return found


def _is_text(part: Mapping[str, Any]) -> bool:
    kind = part.get("type", "text")
    return isinstance(kind, str) and kind in _TEXT_PARTS


def _saying(fields: Mapping[str, Any], read: frozenset[str]) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if name == MOVED_FIELDS and isinstance(value, Mapping):
            yield from _saying(value, read)
        elif name not in read and says_something(value):
            yield name, value


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
