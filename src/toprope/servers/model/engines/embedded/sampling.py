"""Chooses the next id from logits, and says what the model itself gave it.

A logprob is always that of the model's own distribution, in nats: no temperature, no top-k or top-p, no grammar in it.
Seeded sampling depends on the seed, the logits and the number of draws only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toprope.errors.tree import ModelRejected
from toprope.wire.responses import ResponsesRequest

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Knobs:
    """How to sample. `top_k` 0 is off; `seed` None draws a seed from the operating system."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


def read_knobs(request: ResponsesRequest) -> Knobs:
    """The request's knobs, absent ones at their defaults. Raises `ModelRejected` naming a value out of range."""
    temperature = 1.0 if request.temperature is None else request.temperature
    top_p = 1.0 if request.top_p is None else request.top_p
    top_k = 0 if request.top_k is None else max(0, request.top_k)
    if not 0 <= temperature <= 100:
        raise ModelRejected(f"temperature is {temperature}; the embedded engine takes 0 (greedy) to 100.")
    if not 0 < top_p <= 1:
        raise ModelRejected(f"top_p is {top_p}; it must be above 0 and at most 1.")
    return Knobs(temperature, top_p, top_k, request.seed)


def raw_logprob(logits: Logits, token: int) -> float:
    """log softmax(logits)[token] in nats; logits (vocabulary,). At most 0."""
    top = logits.max()
    total = np.exp(logits - top).sum(dtype=np.float64)
    return min(0.0, float(np.float64(logits[token]) - np.float64(top) - np.log(total)))


class Sampler:
    """One sequence's draws."""

    def __init__(self, knobs: Knobs) -> None:
        self._knobs = knobs
        # Any integer is a seed; the generator takes those from 0 up.
        seed = None if knobs.seed is None else knobs.seed % 2**128
        self._random = np.random.Generator(np.random.PCG64(seed))

    def pick(self, logits: Logits, legal: NDArray[np.bool_] | None = None) -> tuple[int, float]:
        """(id, its raw logprob) from logits (vocabulary,); only ids where `legal` is True can come out."""
        masked = logits if legal is None else np.where(legal, logits, np.float32(-np.inf))
        token = self._draw(masked)
        return token, raw_logprob(logits, token)

    def _draw(self, logits: Logits) -> int:
        if self._knobs.temperature == 0:
            return int(logits.argmax())
        top = logits.max()
        scaled = (logits - top) / np.float32(self._knobs.temperature)
        weights = np.exp(scaled)
        if 0 < self._knobs.top_k < len(weights):
            floor = np.partition(weights, -self._knobs.top_k)[-self._knobs.top_k]
            weights[weights < floor] = 0
        if self._knobs.top_p < 1:
            weights = _nucleus(weights, self._knobs.top_p)
        upto = np.cumsum(weights, dtype=np.float64)
        # random() < 1, so the place found is before the end and on an id of weight above 0.
        return int(np.searchsorted(upto, self._random.random() * upto[-1], side="right"))


def _nucleus(weights: Logits, top_p: float) -> Logits:
    """The likeliest ids whose share reaches top_p, the one that reaches it included (Holtzman et al. 2019)."""
    order = np.argsort(-weights, kind="stable")
    upto = np.cumsum(weights[order], dtype=np.float64)
    size = int(np.searchsorted(upto, top_p * upto[-1])) + 1
    kept = np.zeros_like(weights)
    kept[order[:size]] = weights[order[:size]]
    return kept
