"""The high-water mark of a rollout's attempts: what keeps an old worker from bringing an ended attempt back.

One row per rollout id (not per capture key) that outlives payloads and tombstones. It only speaks where nothing stands
under a key: an attempt below the highest that was seen, or one whose tombstone was swept, can not begin again.
"""

from __future__ import annotations

from dataclasses import dataclass

from toprope.correlation.ids import parse_capture_key


@dataclass(frozen=True, slots=True)
class Fence:
    """`seen`: the highest attempt that ever wrote. `swept`: the highest whose tombstone is gone (-1: none)."""

    seen: int = -1
    swept: int = -1

    def keeps_out(self, attempt: int) -> bool:
        """Whether an absent key of this attempt may not be written."""
        return attempt < self.seen or attempt <= self.swept

    def seen_up_to(self, attempt: int) -> Fence:
        return Fence(max(self.seen, attempt), self.swept)

    def swept_to(self, attempt: int) -> Fence:
        return Fence(max(self.seen, attempt), max(self.swept, attempt))


def fence_key(key: str) -> tuple[str, int]:
    """The rollout id and attempt of a capture key. One that does not parse is its own rollout."""
    try:
        parsed = parse_capture_key(key)
    except ValueError:
        return key, 0
    return parsed.rollout_id, parsed.attempt
