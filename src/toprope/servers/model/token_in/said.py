"""What a conversation says, in a form that two requests can be compared by.

The ids that a call is given are ours, so they prove nothing about its history: the match is made here, on items. What
users, tools and systems said, field by field, the tools offered and whatever else shapes the prompt must be equal (a
null is an absent field, a text alone is a list of one); what the model said may differ in ways that clients make, and
each way is counted:

    dropped_thinking    a thought that was sampled is not sent back
    argument_spelling   a call's arguments are the same value, spelled otherwise
    rechunked_text      a text comes in other pieces

Pure. Left to others: which recorded call is meant (`record`), what is made of it (`supply`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from toprope.dialects.pivot import request_items
from toprope.servers.model.engines.prompt_settings import shaping
from toprope.tokens.items import TOOL_RESULTS, content_of, item_digests, value_mark
from toprope.tokens.sent import SentItems
from toprope.wire.message_fields import without_nulls
from toprope.wire.responses import Item, ResponsesRequest

DROPPED_THINKING = "dropped_thinking"
ARGUMENT_SPELLING = "argument_spelling"
RECHUNKED_TEXT = "rechunked_text"

_NOT_SAID = frozenset(("id", "status", "cache_control"))
"""Fields of an item that are no part of what it says."""
_CALLED = (
    "name", "input", "arguments", "server_label", "action", "actions", "operation", "code", "queries",
)  # fmt: skip
"""What any kind of call does. Its other fields are about it; clients leave them out, as those of a function call."""
_EMPTY: tuple[object, ...] = ("", [], {})
"""What a part's field holds where there is nothing (`annotations` of a text)."""


@dataclass(frozen=True, slots=True)
class Said:
    """One thing that a model said, thoughts apart: `content` is equal where it means the same, `form` where it is
    spelled the same."""

    kind: str
    content: str
    form: str


@dataclass(frozen=True, slots=True)
class Segment:
    """What a model said between two things that others said: `thoughts`, `said` in order, `ids` that clients echo."""

    said: tuple[Said, ...]
    thoughts: tuple[str, ...] = ()
    ids: frozenset[str] = frozenset()

    def as_json(self) -> list[Any]:
        """For the record; read by `segment_from_json`."""
        return [[[each.kind, each.content, each.form] for each in self.said], list(self.thoughts), sorted(self.ids)]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request as alternating blocks of others' words and segments of the model's.

    `blocks` has one entry more than `segments`; the first and the last may be empty. `root` stands for all that shapes
    the prompt beside the items. `tail` is the index of the first item after the last segment. `steering` are the marks
    of what was set of `prompt_settings.STEERING`, which shapes the prompts of few engines and changes between turns.
    """

    root: str
    blocks: tuple[tuple[str, ...], ...]
    segments: tuple[Segment, ...]
    tail: int
    steering: Mapping[str, str] = field(default_factory=dict)

    def skeleton(self, segments: int) -> str:
        """What others said before the model's segment of that index (0-based), and where the model spoke."""
        told = "|".join(" ".join(block) for block in self.blocks[: segments + 1])
        return hashlib.sha256(f"{self.root}|{told}".encode()).hexdigest()[:32]


class Reader:
    """Reads the requests of one rollout; what a recent one began with is not digested again."""

    def __init__(self) -> None:
        self._recent: list[tuple[SentItems, list[tuple[bool, Any]]]] = []

    def conversation(self, request: ResponsesRequest) -> Conversation:
        """The request's conversation."""
        said = _arranged(_root(request), self._read(request_items(request)))
        return replace(said, steering=_steering(request))

    def _read(self, items: tuple[Item, ...]) -> list[tuple[bool, Any]]:
        begun, known = SentItems(), list[tuple[bool, Any]]()
        for sent, read in sorted(self._recent, key=lambda each: -len(each[0].items)):
            if sent.begin(items):
                begun, known = sent, read
                break
        done = [*known, *map(_read_item, items[len(known) :])]
        self._recent = [*self._recent[-3:], (begun.continued(items), done)]
        return done


def segment_of(output: Iterable[Item]) -> Segment:
    """The segment that a reply's items are."""
    return _segment([_read_item(item)[1] for item in output])


def segment_from_json(value: Sequence[Any]) -> Segment:
    """The inverse of `Segment.as_json`. Raises `ValueError` or `TypeError` for what is none."""
    said, thoughts, ids = value
    return Segment(tuple(Said(*each) for each in said), tuple(thoughts), frozenset(ids))


def forgiven(recorded: Sequence[Segment], given: Sequence[Segment]) -> Counter[str] | None:
    """What must be forgiven for `given` to be what was `recorded`, counted; None where it is something else."""
    if len(recorded) != len(given):
        return None
    counts: Counter[str] = Counter()
    for ours, theirs in zip(recorded, given, strict=True):
        if ours is theirs:
            continue
        dropped = _missing_thoughts(ours.thoughts, theirs.thoughts)
        alike = [(each.kind, each.content) for each in ours.said] == [(e.kind, e.content) for e in theirs.said]
        if dropped is None or not alike:
            return None
        counts[DROPPED_THINKING] += dropped
        for left, right in zip(ours.said, theirs.said, strict=True):
            if left.form != right.form:
                counts[RECHUNKED_TEXT if left.kind == "message" else ARGUMENT_SPELLING] += 1
    return +counts


def _missing_thoughts(recorded: Sequence[str], given: Sequence[str]) -> int | None:
    """How many thoughts were dropped; None where one was changed, moved or added."""
    left = iter(recorded)
    if not all(thought in left for thought in given):
        return None
    return len(recorded) - len(given)


def _arranged(root: str, read: Sequence[tuple[bool, Any]]) -> Conversation:
    blocks: list[tuple[str, ...]] = []
    segments: list[Segment] = []
    block: list[str] = []
    run: list[Any] = []
    tail = 0
    for index, (ours, what) in enumerate(read):
        if ours:
            if not run:
                blocks.append(tuple(block))
                block = []
            run.append(what)
            tail = index + 1
        else:
            if run:
                segments.append(_segment(run))
                run = []
            block.append(what)
    if run:
        segments.append(_segment(run))
    return Conversation(root, (*blocks, tuple(block)), tuple(segments), tail)


@dataclass(frozen=True, slots=True)
class _Uttered:
    """One model-authored item as read: `texts` of a message, else `content` and `form`."""

    kind: str
    content: str
    form: str
    texts: tuple[str, ...]
    ids: tuple[str, ...]


def _segment(run: Sequence[_Uttered]) -> Segment:
    said: list[Said] = []
    texts: list[str] = []
    thoughts: list[str] = []

    def end_of_text() -> None:
        if texts:
            whole = "".join(texts)
            said.append(Said("message", _short(whole), _short("\x00".join(texts))))
            texts.clear()

    for each in run:
        if each.kind == "reasoning":
            if each.content:
                thoughts.append(each.content)
        elif each.kind == "message" and not each.content:
            texts.extend(each.texts)
        else:
            end_of_text()
            said.append(Said(each.kind, each.content, each.form))
    end_of_text()
    return Segment(tuple(said), tuple(thoughts), frozenset(one for each in run for one in each.ids))


def _read_item(item: Item) -> tuple[bool, Any]:
    """Whether the model said it, and what it says: an `_Uttered`, or the digest of somebody else's item."""
    kind = str(item.get("type") or ("message" if "role" in item else "unknown"))
    ids = tuple(str(item[name]) for name in ("call_id", "id") if item.get(name))
    if kind == "message":
        if item.get("role") not in ("assistant", "model"):
            return False, _others(kind, item, "content")
        parts = _parts(item.get("content"))
        if all(isinstance(part, str) for part in parts):
            return True, _Uttered(kind, "", "", tuple(part for part in parts if part), ids)
        return True, _Uttered(kind, value_mark(parts), "", (), ids)
    if kind == "reasoning":
        text = "".join(map(str, _parts(item.get("content")) or _parts(item.get("summary"))))
        return True, _Uttered(kind, _short(text) if text else "", "", (), ids)
    if kind == "function_call":
        form = _short(f"{item.get('name')}\x00{item.get('arguments')}")
        return True, _Uttered(kind, content_of(item_digests([item])[0]), form, (), ids)
    if kind in TOOL_RESULTS:
        return False, _others(kind, item, "output")
    told = without_nulls({key: value for key, value in item.items() if key not in ("call_id", "id", "status", "type")})
    done = value_mark({name: told[name] for name in _CALLED if name in told} or told)
    return True, _Uttered(kind, done, done, (), ids)


def _others(kind: str, item: Item, says: str) -> str:
    """The digest of an item that the model did not say: all its fields; `says` is the one that holds its parts."""
    told = {name: value for name, value in item.items() if name not in (says, "type") and name not in _NOT_SAID}
    return value_mark([kind, without_nulls(told), _parts(item.get(says), whole=True)])


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` without those that are null."""
    return {name: value for name, value in fields.items() if value is not None}


def _parts(content: Any, *, whole: bool = False) -> list[Any]:
    """A content's parts: texts as strings, others as they are, without the marks of a provider's cache.

    `whole`: a text that comes with more than its kind is not told by the text alone.
    """
    if content is None or content == "":
        return []
    if not isinstance(content, list | tuple):
        return [content]
    parts: list[Any] = []
    for part in content:
        if isinstance(part, Mapping):
            text = part.get("text", part.get("refusal"))
            kind = str(part.get("type", "text"))
            part = without_nulls({name: value for name, value in part.items() if name != "cache_control"})
            if isinstance(text, str) and (kind.endswith("text") or kind == "refusal"):
                said = "text" if "text" in part else "refusal"
                more = {
                    name: value for name, value in part.items() if name not in ("type", said) and value not in _EMPTY
                }
                parts.append([text, more] if whole and more else text)
                continue
        parts.append(part)
    return parts


def _root(request: ResponsesRequest) -> str:
    shapes = shaping(request.extra, ("response_format",))
    tools = [_present(tool) for tool in request.tools]
    return value_mark([tools, request.model, request.tool_choice == "none", shapes])


def _steering(request: ResponsesRequest) -> dict[str, str]:
    text = request.extra.get("text")
    shape = (text.get("format") if isinstance(text, Mapping) else None) or request.extra.get("response_format")
    plain = isinstance(shape, Mapping) and shape.get("type") == "text"
    choice = None if request.tool_choice == "auto" else request.tool_choice
    told = {"tool_choice": choice, "response_format": None if plain else shape}
    return {name: value_mark(value) for name, value in told.items() if value is not None}


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:32]
