"""What one call sampled, as the engine gave it and before anybody judged it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The ids of one call, exactly as the engine saw and sampled them.

    Shapes: `prompt_token_ids` (P,) uint32; `generation_token_ids` (G,) uint32; `generation_log_probs` (G,) float64 in
    nats; `grammar_forced` (G,) bool, True where a grammar left exactly one legal id, or None where no grammar ran.
    Values are what the engine gave: judging them (finite, in range, equal lengths) is the recorder's work.
    """

    prompt_token_ids: NDArray[np.uint32]
    generation_token_ids: NDArray[np.uint32]
    generation_log_probs: NDArray[np.float64]
    grammar_forced: NDArray[np.bool_] | None = None
