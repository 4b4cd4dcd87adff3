"""Whether captured logprobs are those of the policy that sampled. Pure.

Engines report logprobs of the model's distribution (`raw`) or of the one after temperature, top-p, penalties and the
like (`processed`). Raw ones are the behaviour policy's only where those settings change nothing; an importance ratio
that is made from others is biased.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "temperature": (None, 1),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_tokens": (None, 0),
    "logit_bias": (None,),
    "bad_words": (None,),
    "allowed_token_ids": (None,),
}


def differing(sampling: Mapping[str, Any], logprobs_mode: str) -> tuple[str, ...]:
    """The settings that make raw logprobs differ (`temperature 0.7`, ...); none for processed ones.

    A setting that the request left out is the engine's default, which is not known here and not judged.
    """
    if logprobs_mode != "raw":
        return ()
    return tuple(f"{name} {sampling[name]}" for name, neutral in _NEUTRAL.items() if sampling.get(name) not in neutral)
