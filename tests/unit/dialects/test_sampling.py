"""What is recorded of how a call sampled, and whether raw logprobs are then those of the policy."""

from __future__ import annotations

import pytest

from toprope.dialects.chat_request import request_from_chat
from toprope.dialects.messages_request import request_from_messages
from toprope.dialects.pivot import sampling_of
from toprope.dialects.responses import request_from_responses
from toprope.tokens.behaviour import differing

USER = [{"role": "user", "content": "x"}]
READ = {
    "chat": lambda more: request_from_chat({"messages": USER, **more}),
    "responses": lambda more: request_from_responses({"input": "x", **more}),
    "messages": lambda more: request_from_messages({"messages": USER, "max_tokens": 9, **more}),
}


@pytest.mark.parametrize("dialect", READ)
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"min_p": 0.1}, "min_p 0.1"),
        ({"typical_p": 0.5}, "typical_p 0.5"),
        ({"frequency_penalty": 0.5}, "frequency_penalty 0.5"),
        ({"presence_penalty": -1}, "presence_penalty -1"),
        ({"repetition_penalty": 1.2}, "repetition_penalty 1.2"),
        ({"min_tokens": 4}, "min_tokens 4"),
        ({"logit_bias": {"5": -100, "6": 1}}, "logit_bias of length 2"),
        ({"bad_words": ["no"]}, "bad_words of length 1"),
        ({"allowed_token_ids": [1, 2, 3]}, "allowed_token_ids of length 3"),
    ],
)
def test_whatever_shapes_the_distribution_makes_raw_logprobs_differ(dialect, setting, said):
    sampling = sampling_of(READ[dialect](setting))
    assert differing(sampling, "raw") == (said,)
    assert differing(sampling, "processed") == ()


@pytest.mark.parametrize("dialect", READ)
@pytest.mark.parametrize(
    "settings",
    [
        {"min_p": 0, "typical_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0},
        {"min_tokens": 0, "logit_bias": {}, "bad_words": [], "allowed_token_ids": None, "min_p": None},
        {"min_p": "x", "frequency_penalty": True, "repetition_penalty": 10**400, "min_tokens": float("inf")},
    ],
    ids=["neutral", "empty", "no settings at all"],
)
def test_what_changes_nothing_or_is_no_setting_is_not_named(dialect, settings):
    sampling = sampling_of(READ[dialect](settings))
    assert differing(sampling, "raw") == ()
    assert all(abs(value) < 10 for value in sampling.values())
