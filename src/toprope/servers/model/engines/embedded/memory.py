"""Remembers which ids were sampled for an assistant turn, so that the next prompt continues them and not their text.

The key is the session, the prompt that the turn answered, and the turn as the template writes it. Anything that is not
remembered is tokenised like any other text. Bounded; the oldest turn goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np


class TurnMemory:
    """Sampled ids by (session, prompt ids, text). Used from one thread."""

    def __init__(self, turns: int = 8192) -> None:
        self._turns = turns
        self._known: OrderedDict[tuple[str, bytes, str], tuple[int, ...]] = OrderedDict()

    def put(self, session: str, prompt: Sequence[int], text: str, ids: Sequence[int]) -> None:
        """The turn is known on return; a turn with the same text after the same prompt is replaced."""
        key = (session, _digest(prompt), text)
        self._known[key] = tuple(ids)
        self._known.move_to_end(key)
        if len(self._known) > self._turns:
            self._known.popitem(last=False)

    def get(self, session: str, prompt: Sequence[int], text: str) -> tuple[int, ...] | None:
        """The ids sampled for this turn of this session, or None if they are not known (any more)."""
        key = (session, _digest(prompt), text)
        ids = self._known.get(key)
        if ids is not None:
            self._known.move_to_end(key)
        return ids


def _digest(ids: Sequence[int]) -> bytes:
    return blake2b(np.asarray(ids, dtype="<u4").tobytes(), digest_size=16).digest()
