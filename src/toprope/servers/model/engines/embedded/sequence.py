"""One generation on its way: what it said so far, what the next pass must be fed, and when it is over.

Pure: no threads, no cache, no clock. The batch asks `feed()` what to compute and gives the logits to `take()` until
`done`. Ids that a grammar forces are appended at once and scored by the pass that follows, so that a run of them costs
one pass.
"""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from toprope.servers.model.engines.embedded.grammar import Constraint
from toprope.servers.model.engines.embedded.sampling import Sampler, raw_logprob
from toprope.servers.model.engines.embedded.tokenizer import STOP_IDS, Vocabulary

CHUNK = 512
"""Most prompt ids in one pass: about a second for this model, which is how long others wait."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a generation ends besides at a stop id: so many ids (at least 1), or one of these texts."""

    ids: int
    stop: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Feed:
    """What to compute next: `ids` to append to the cache, and how many of the last logits are wanted."""

    ids: Values[int]
    keep: int


class Sequence:
    """The state of one generation. `fed` is how many of prompt + ids are in the cache."""

    def __init__(
        self,
        prompt: Values[int],
        sampler: Sampler,
        limits: Limits,
        vocabulary: Vocabulary,
        constraint: Constraint | None = None,
    ) -> None:
        self.prompt = list(prompt)
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.forced: list[bool] = []
        self.fed = 0
        self.finish: Literal["stop", "length"] | None = None
        self._sampler = sampler
        self._limits = limits
        self._vocabulary = vocabulary
        self._constraint = constraint
        self._text = bytearray()
        self._cut: int | None = None
        self._add_forced()

    @property
    def constrained(self) -> bool:
        """Whether a grammar runs on this sequence."""
        return self._constraint is not None

    @property
    def done(self) -> bool:
        """Whether every id is there and scored."""
        return self.finish is not None and len(self.logprobs) == len(self.ids)

    @property
    def text(self) -> str:
        """What was said, without special tokens, up to a stop text if one ended it."""
        return bytes(self._text[: self._cut]).decode("utf-8", "replace")

    def settled(self, start: int) -> bytes:
        """The bytes of the text from `start` on that no later id changes: none that may begin a stop text."""
        if self._cut is not None or self.finish is not None:
            return bytes(self._text[start : self._cut])
        return bytes(self._text[start : len(self._text) - self._stop_text_begun()])

    def _stop_text_begun(self) -> int:
        return max((_overlap(self._text, stop) for stop in self._limits.stop), default=0)

    def feed(self) -> Feed:
        """The next pass. A prompt goes in chunks of two ids or more, because a lone id is computed by other kernels and
        would differ in the last bits: so a prompt's cache is the same bits however much of it was reused."""
        left = len(self.prompt) - self.fed
        if left > CHUNK:
            return Feed(self.prompt[self.fed : self.fed + min(CHUNK, left - 2)], 1)
        ids = self.prompt[self.fed :] + self.ids if left > 0 else self.ids[-left:]
        unscored = len(self.ids) - len(self.logprobs)
        return Feed(ids[:-1], unscored) if self.finish else Feed(ids, unscored + 1)

    def take(self, feed: Feed, logits: NDArray[np.float32]) -> None:
        """Takes the logits (feed.keep, vocabulary) of a pass: scores forced ids, then samples one unless it is over."""
        self.fed += len(feed.ids)
        if self.fed < len(self.prompt):
            return
        for row in logits[: len(self.ids) - len(self.logprobs)]:
            self.logprobs.append(raw_logprob(row, self.ids[len(self.logprobs)]))
        if self.finish:
            return
        legal = None if self._constraint is None else self._constraint.legal()
        token, logprob = self._sampler.pick(logits[-1], legal)
        if self._constraint is not None:
            self._constraint.accept(token)
        self._add(token, forced=legal is not None and int(legal.sum()) == 1)
        self.logprobs.append(logprob)
        self._add_forced()

    def _add_forced(self) -> None:
        if self._constraint is None or self.finish:
            return
        for token in self._constraint.forced():
            if self.finish is None:
                self._add(token, forced=True)

    def _add(self, token: int, *, forced: bool) -> None:
        self.ids.append(token)
        self.forced.append(forced)
        self._text += (said := self._vocabulary.bytes_of(token))
        if token in STOP_IDS or (said and self._stop_text_in(len(said))):
            self.finish = "stop"
        elif len(self.ids) >= self._limits.ids:
            self.finish = "length"

    def _stop_text_in(self, new: int) -> bool:
        """Whether a stop text ends within the last `new` bytes; the earliest one cuts the text."""
        found = []
        for stop in self._limits.stop:
            at = self._text.find(stop, max(0, len(self._text) - new - len(stop) + 1))
            if at >= 0:
                found.append(at)
        self._cut = min(found, default=None)
        return bool(found)


def _overlap(text: bytearray, stop: bytes) -> int:
    """How many last bytes of `text` are the beginning of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
