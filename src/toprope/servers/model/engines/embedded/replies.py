"""Turns generated text into Responses items: messages, and calls where the model wrote one.

The arguments of a call are the very text that was generated. What does not parse stays text: nothing is repaired. Left
to others: the ids of items, which the model server gives, the same to a stream and to the record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from uuid import uuid4

from toprope.servers.model.engines.embedded.template import CALL_CLOSE, CALL_OPEN
from toprope.wire.responses import Item

_BLOCK = re.compile(re.escape(CALL_OPEN) + r"(.*?)" + re.escape(CALL_CLOSE), re.DOTALL)
_SPACE = re.compile(r"[ \t\r\n]*")


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse)


class CallIds:
    """The ids of one reply's calls by the place of their items, each made when it is first asked for."""

    def __init__(self) -> None:
        self._made: dict[int, str] = {}

    def of(self, index: int) -> str:
        """The id of the call at `index`."""
        return self._made.setdefault(index, f"call_{uuid4().hex}")


def output_items(text: str, *, calls: bool, complete: bool, call_ids: CallIds | None = None) -> tuple[Item, ...]:
    """The items of one reply in order, at least one. `calls` False leaves call blocks in the text."""
    ids = call_ids or CallIds()
    items: list[Item] = []
    at = 0
    for block in _BLOCK.finditer(text) if calls else ():
        call = parse_call(block[1])
        if call is None:
            continue
        if text[at : block.start()].strip():
            items.append(_message(text[at : block.start()], complete))
        items.append(_function_call(*call, ids.of(len(items))))
        at = block.end()
    if text[at:].strip() or not items:
        items.append(_message(text[at:], complete))
    return tuple(items)


def parse_call(block: str) -> tuple[str, str] | None:
    """(name, text of the arguments) of a JSON object with both, or None if it is not one."""
    try:
        members = dict(_members(block.strip()))
        name, arguments = _JSON.decode(members["name"]), _JSON.decode(members["arguments"])
    except (ValueError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, members["arguments"]


def _members(text: str) -> Iterator[tuple[str, str]]:
    """(key, text of the value) of a JSON object, each value exactly as written. Raises ValueError if it is not one."""
    at = _expect(text, 0, "{")
    while True:
        key, end = _JSON.raw_decode(text, at)
        if not isinstance(key, str):
            raise ValueError("a key is not a string")
        start = _expect(text, end, ":")
        _, end = _JSON.raw_decode(text, start)
        yield key, text[start:end]
        at = _skip(text, end)
        if text[at : at + 1] == "}" and at + 1 == len(text):
            return
        at = _expect(text, at, ",")


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _expect(text: str, at: int, mark: str) -> int:
    at = _skip(text, at)
    if text[at : at + 1] != mark:
        raise ValueError(f"no {mark!r} at {at}")
    return _skip(text, at + 1)


def _message(text: str, complete: bool) -> Item:
    return {
        "type": "message",
        "role": "assistant",
        "status": "completed" if complete else "incomplete",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def _function_call(name: str, arguments: str, call_id: str) -> Item:
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": "completed",
    }
