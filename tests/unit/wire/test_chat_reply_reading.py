"""Reading an upstream's completion: exact when it is well formed, the text kept and the fault named when it is not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from toprope.testing.upstream import completion
from toprope.wire.chat import BadChatReply, read_chat_reply
from toprope.wire.responses import Usage


def test_ids_and_logprobs_come_out_bit_exact():
    log_probs = [-0.1, -1e-300, -3.141592653589793, 0.0]
    reply = read_chat_reply(
        completion(prompt_token_ids=[1, 2**32 - 1], token_ids=[5, 6, 7, 2], log_probs=log_probs).body
    )
    assert reply.prompt_ids is not None
    assert reply.prompt_ids.dtype == np.uint32
    assert reply.prompt_ids.tolist() == [1, 2**32 - 1]
    assert reply.token_ids is not None
    assert reply.token_ids.tolist() == [5, 6, 7, 2]
    assert reply.log_probs is not None
    assert reply.log_probs.tolist() == log_probs
    assert reply.usage == Usage(2, 4)
    assert reply.token_fault is None


@pytest.mark.parametrize("bare", ["NaN", "-Infinity", "null"])
def test_a_logprob_that_is_no_number_costs_the_logprob_and_not_the_text(bare):
    body = completion(prompt_token_ids=[1], token_ids=[5, 6, 2], log_probs=[-0.1, -0.5, -0.3]).body
    reply = read_chat_reply(body.replace(b"-0.5", bare.encode()), keep_logprobs=True)
    assert reply.message["content"] == "hello"
    assert reply.log_probs is not None
    assert np.isfinite(reply.log_probs).tolist() == [True, False, True]
    assert reply.logprobs is not None
    json.dumps(reply.logprobs, allow_nan=False)


def test_an_id_outside_u32_is_a_fault_and_not_a_wrapped_number():
    reply = read_chat_reply(completion(prompt_token_ids=[2**32], token_ids=[5], log_probs=[-0.1]).body)
    assert reply.prompt_ids is None
    assert reply.token_ids is None
    assert reply.token_fault is not None
    assert reply.token_fault.startswith("no_token_ids")


def test_a_reply_with_a_lone_surrogate_is_read_whole():
    body = completion(
        {"role": "assistant", "content": "XY"}, prompt_token_ids=[1], token_ids=[5], log_probs=[-0.1]
    ).body
    reply = read_chat_reply(body.replace(b"XY", b"\\ud835"))
    assert reply.message["content"] == "\ud835"
    assert reply.token_ids is not None
    assert reply.token_ids.tolist() == [5]


def test_the_triple_of_a_nemo_gym_model_server_is_found_on_the_message():
    message = {
        "role": "assistant",
        "content": "x",
        "prompt_token_ids": [1, 2],
        "generation_token_ids": [3],
        "generation_log_probs": [-0.25],
    }
    reply = read_chat_reply(completion(message).body)
    assert reply.prompt_ids is not None
    assert reply.prompt_ids.tolist() == [1, 2]
    assert reply.log_probs is not None
    assert reply.log_probs.tolist() == [-0.25]


def test_a_client_that_asked_gets_the_whole_logprobs_object():
    body = completion(prompt_token_ids=[1], token_ids=[5], log_probs=[-0.1]).body
    assert read_chat_reply(body).logprobs is None
    kept = read_chat_reply(body, keep_logprobs=True).logprobs
    assert kept is not None
    assert kept["content"][0]["token"] == "token_id:5"


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{}]}', b'{"choices": [{"message": "x"}]}'],
)
def test_what_is_no_completion_is_said_to_be_none(body):
    with pytest.raises(BadChatReply):
        read_chat_reply(body)


def test_odd_usage_is_unknown_and_never_zero():
    assert read_chat_reply(completion(usage={"prompt_tokens": "7"}).body).usage == Usage(None, None)
    assert read_chat_reply(completion().body).usage == Usage(None, None)
