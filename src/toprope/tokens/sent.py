"""The items of a request, kept to know the next one of its conversation by: it begins with the same. Pure.

Whoever reads requests keeps what it made of the items beside them, and makes it of the new ones alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Items: TypeAlias = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class SentItems:
    """`items` in their order; `exacting` are the places of those for which `==` is not enough: 1, 1.0 and True are
    equal and say other things."""

    items: Items = ()
    exacting: tuple[int, ...] = ()

    def begin(self, request: Items) -> bool:
        """Whether `request` begins with these items, one at least, each value of the same type."""
        size = len(self.items)
        # The last item first: it tells most conversations apart without a look at what they begin with.
        return (
            0 < size <= len(request)
            and request[size - 1] == self.items[-1]
            and request[:size] == self.items
            and all(repr(request[at]) == repr(self.items[at]) for at in self.exacting)
        )

    def continued(self, request: Items) -> SentItems:
        """The items of `request`, which begins with these. Looks at the new ones."""
        new = range(len(self.items), len(request))
        return SentItems(request, (*self.exacting, *(at for at in new if not _all_text(request[at]))))


def _all_text(item: Mapping[str, Any]) -> bool:
    """Whether the leaves of an item are strings or null, so that what equals it says the same."""
    rest: list[Any] = [item]
    while rest:
        value = rest.pop()
        if type(value) is dict:
            rest.extend(value.values())
        elif type(value) is list:
            rest.extend(value)
        elif value is not None and type(value) is not str:
            return False
    return True
