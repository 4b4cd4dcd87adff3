"""What an assistant message of a Chat history says in fields that its items do not show. Pure.

Programs send back more than text, thought and calls: what a provider added, copies of the thought under other names, a
library's own notes. An upstream that speaks Chat gets all of it, and its template may read any field. So lineage has to
know which of it says something of its own. Left to others: the items themselves (`chat_history`), what is done with
what is found (`tokens.items`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toprope.canonical.json import NotJson, loads
from toprope.dialects.chat_parts import plain_text
from toprope.dialects.pivot import CALLS, without_token_fields
from toprope.wire.chat import THOUGHT_FIELDS
from toprope.wire.message_fields import ABOUT_A_CALL, ABOUT_A_MESSAGE, MOVED_FIELDS, says_something
from toprope.wire.responses import Item

_READ = ABOUT_A_MESSAGE | {"tool_calls"}
_CALL_FIELDS = frozenset(("id", "type", "function", "custom", "index"))
_FUNCTION_FIELDS = frozenset(("name", "arguments", "parsed_arguments", "input"))
_HOW_IT_IS_WRITTEN = frozenset(("type", "id", "index", "format", "signature"))
"""Fields inside an unread one that say what kind of thing it is, or prove whose: no words of a model."""


def unread_of(message: Mapping[str, Any], turn: Sequence[Item]) -> dict[str, Any]:
    """The fields of `message` that say something which `turn`, its items, does not: by name, as they are. Those of its
    calls stand on their items."""
    said = frozenset(_texts(turn))
    unread = _adding(without_token_fields(dict(message)), said, _READ)
    moved = unread.get(MOVED_FIELDS)
    if isinstance(moved, Mapping):
        unread[MOVED_FIELDS] = _adding(moved, said, _READ)
    return unread


def without_copies(turn: Sequence[Item]) -> list[Item]:
    """`turn` without the fields of its calls of functions that say again what its items say."""
    said = frozenset(_texts(turn))
    return [_without_copies(item, said) if item["type"] == "function_call" else item for item in turn]


def _without_copies(call: Item, said: frozenset[str]) -> Item:
    if call.keys() <= ABOUT_A_CALL:
        return call
    unread = _adding(call, said, ABOUT_A_CALL)
    moved = unread.get(MOVED_FIELDS)
    if isinstance(moved, Mapping):
        unread[MOVED_FIELDS] = _adding(moved, said, ABOUT_A_CALL)
    return {**{name: value for name, value in call.items() if name in ABOUT_A_CALL}, **unread}


def _adding(fields: Mapping[str, Any], said: frozenset[str], read: frozenset[str]) -> dict[str, Any]:
    found = {name: value for name, value in fields.items() if name not in read and _adds(value, said)}
    blocks = found.get("thinking_blocks")
    if isinstance(blocks, list) and _thoughts_of(blocks) in said:
        del found["thinking_blocks"]
    if "parsed" in found and found["parsed"] in [_value_of(text) for text in said]:
        del found["parsed"]  # the public library reads an answer of JSON, and sends both back
    return found


def _value_of(text: str) -> Any:
    try:
        return loads(text)
    except (NotJson, RecursionError):
        return None


def may_hold_more(message: Mapping[str, Any]) -> bool:
    """Whether `unread_of` may find anything; nearly always not, and that is told at a look."""
    thoughts = 0
    for name, value in message.items():
        if not value or name in _READ:
            continue
        if name not in THOUGHT_FIELDS or not isinstance(value, str):
            return True
        thoughts += 1
    return thoughts > 1 or any(map(_beside_call, message.get("tool_calls") or ()))


def _beside_call(call: Mapping[str, Any]) -> list[Any]:
    """The values of a call's fields that its item does not have."""
    function = call.get("function") or call.get("custom")
    inner = function if isinstance(function, Mapping) else {}
    if call.keys() <= _CALL_FIELDS and inner.keys() <= _FUNCTION_FIELDS:
        return []
    rest = [value for name, value in call.items() if name not in _CALL_FIELDS]
    return rest + [value for name, value in inner.items() if name not in _FUNCTION_FIELDS]


def _texts(turn: Sequence[Item]) -> Iterator[str]:
    """Every text that stands in these items, whole."""
    for item in turn:
        if item["type"] in CALLS:
            yield from (item["call_id"], item["name"], str(item.get("arguments", item.get("input"))))
            continue
        for parts in (item.get("content"), item.get("summary")):
            yield plain_text(parts)
            if isinstance(parts, list):
                yield from (plain_text([part]) for part in parts if isinstance(part, dict))


def _adds(value: Any, said: frozenset[str]) -> bool:
    """Whether a value holds text or numbers that are not said already."""
    rest = [value]
    while rest:
        each = rest.pop()
        if isinstance(each, Mapping):
            rest.extend(inner for name, inner in each.items() if name not in _HOW_IT_IS_WRITTEN)
        elif isinstance(each, list | tuple):
            rest.extend(each)
        elif says_something(each) and not (isinstance(each, str) and each in said):
            return True
    return False


def _thoughts_of(blocks: Sequence[Any]) -> str | None:
    """The thought that stands in pieces in these blocks; None where something else does too."""
    pieces = []
    for block in blocks:
        thought = block.get("thinking") if isinstance(block, Mapping) else None
        if not isinstance(thought, str) or _adds({**block, "thinking": None}, frozenset()):
            return None
        pieces.append(thought)
    return "".join(pieces)
