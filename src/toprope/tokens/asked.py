"""The marks of a request, sharing their beginning with the request that it continues. Pure.

A conversation is sent again with every call. What its model-authored items say is digested once (`tokens.items`); here
stands how a request knows what it has in common with one before it, without holding or walking that again.
"""

from __future__ import annotations

from collections.abc import Iterable


class Asked:
    """The marks of one request's model-authored items, in order. A value: nothing of it changes.

    `count` is the number of all marks, those of `before` first, then `new`.
    """

    __slots__ = ("before", "count", "new")

    def __init__(self, new: Iterable[str] = (), before: Asked | None = None) -> None:
        self.new = tuple(new)
        self.before = before
        self.count: int = len(self.new) + (before.count if before is not None else 0)

    def extended(self, new: Iterable[str]) -> Asked:
        """These marks and then `new`; this very value where there is nothing new."""
        added = tuple(new)
        return Asked(added, self) if added else self

    def since(self, earlier: Asked) -> tuple[str, ...] | None:
        """The marks after those of `earlier`; None for a request that was not made from it by `extended`."""
        parts: list[tuple[str, ...]] = []
        at: Asked | None = self
        while at is not None and at.count >= earlier.count:
            if at is earlier:
                return _joined(parts)
            parts.append(at.new)
            at = at.before
        return None

    def all(self) -> tuple[str, ...]:
        """Every mark. Walks the whole conversation."""
        parts: list[tuple[str, ...]] = []
        at: Asked | None = self
        while at is not None:
            parts.append(at.new)
            at = at.before
        return _joined(parts)


def _joined(parts: list[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(mark for part in reversed(parts) for mark in part)
