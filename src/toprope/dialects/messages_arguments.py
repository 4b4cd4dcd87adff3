"""The argument strings of calls that came back as objects, restored from our own record of those calls.

A Messages client returns a call's input as an object, and some programs write argument strings anew: the bytes that
were sampled stand in the record only. They are put back where the value is the same. What has no record is said, never
guessed: such a turn cannot be matched with what was sampled. Pure; the record is asked through a function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toprope.canonical.json import NotJson, loads
from toprope.dialects.messages_reply import arguments_object
from toprope.wire.responses import Item, ResponsesRequest

_EXACT = 2**53
"""JavaScript carries numbers as doubles: integers beyond this come back rounded."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A request whose calls have the argument strings that were sampled; `unmatched` names, in order, the call ids of
    those without a record of that value, whose turns cannot be prefix-matched."""

    request: ResponsesRequest
    unmatched: tuple[str, ...]


def called_ids(request: ResponsesRequest) -> tuple[str, ...]:
    """The call ids of the calls in a request's history, each once, in order: what a record will be asked for."""
    return tuple(dict.fromkeys(item["call_id"] for item in request.input if _is_call(item)))


def restore_arguments(request: ResponsesRequest, recorded: Callable[[str], str | Sequence[str] | None]) -> Restored:
    """The request with recorded argument strings.

    `recorded` gives the string that was sampled under a call id, or all of them, oldest first, where the id repeats:
    the n-th call of the history is then looked for at the n-th place, and else anywhere.
    """
    items: list[Item] = []
    unmatched: list[str] = []
    seen: Counter[str] = Counter()
    for item in request.input:
        if _is_call(item):
            call_id = item["call_id"]
            known = recorded(call_id)
            sampled = _sampled(item.get("arguments"), [known] if isinstance(known, str) else known or (), seen[call_id])
            seen[call_id] += 1
            if sampled is None:
                unmatched.append(call_id)
            elif sampled != item["arguments"]:
                item = {**item, "arguments": sampled}
        items.append(item)
    return Restored(replace(request, input=tuple(items)), tuple(unmatched))


def _sampled(written: Any, known: Sequence[str], place: int) -> str | None:
    """The string of `known` that `written` stands for, the one at `place` first."""
    likely = known[place : place + 1]
    return next((each for each in (*likely, *known) if same_arguments(written, each)), None)


def same_arguments(written: Any, sampled: str) -> bool:
    """Whether `written` is `sampled` as a Messages client returns it: the same object, however spelled."""
    if written == sampled:
        return True
    try:
        value = loads(written) if isinstance(written, str) else written
    except NotJson:
        return False
    return _same(value, arguments_object(sampled))


def _same(one: Any, other: Any) -> bool:
    stack = [(one, other)]
    while stack:
        a, b = stack.pop()
        if isinstance(a, dict) and isinstance(b, dict):
            if a.keys() != b.keys():
                return False
            stack += [(value, b[name]) for name, value in a.items()]
        elif isinstance(a, list) and isinstance(b, list):
            if len(a) != len(b):
                return False
            stack += zip(a, b, strict=True)
        elif not _same_leaf(a, b):
            return False
    return True


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool) or not (isinstance(a, int | float) and isinstance(b, int | float)):
        return type(a) is type(b) and bool(a == b)
    if a == b:
        return True
    try:
        return abs(a) > _EXACT and abs(b) > _EXACT and float(a) == float(b)
    except OverflowError:
        return False


def _is_call(item: Item) -> bool:
    return item.get("type") == "function_call" and isinstance(item.get("call_id"), str)
