"""Reading an upstream's completion: exact when it is well formed, the text kept and the fault named when it is not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from toprope.dialects.chat_reply import output_from_chat
from toprope.testing.upstream import completion
from toprope.wire.chat import BadChatReply, read_chat_object, read_chat_reply
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


@pytest.mark.promise("MS-7")
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
@pytest.mark.parametrize("odd", ["x", True, -2, 1.5, [], {}, 1 << 70, "1" * 30, "\u0665"])
def test_a_count_that_cannot_be_read_is_unknown_and_a_fault_and_costs_no_other(name, odd):
    counts = {"prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    reply = read_chat_reply(
        completion(prompt_token_ids=[1], token_ids=[5, 6], log_probs=[-0.1] * 2, usage={**counts, name: odd}).body
    )
    told = {"prompt_tokens": 1, "completion_tokens": 2, name: None}
    assert reply.usage == Usage(told["prompt_tokens"], told["completion_tokens"], 1)
    assert reply.token_fault == f"length_mismatch: usage.{name} is no count"


@pytest.mark.parametrize("spelled", ["9", 9.0])
def test_a_count_of_another_spelling_is_that_count(spelled):
    reply = read_chat_reply(completion(usage={"prompt_tokens": spelled, "completion_tokens": spelled}).body)
    assert (reply.usage, reply.token_fault) == (Usage(9, 9), None)


def test_no_usage_is_unknown_and_never_zero():
    assert read_chat_reply(completion().body).usage == Usage(None, None)
    assert read_chat_object({**json.loads(completion().body), "usage": None}).token_fault is None
    assert read_chat_reply(completion(usage=[]).body).token_fault == "length_mismatch: usage is not an object"


IDS = {"prompt_token_ids": [1, 2], "token_ids": [5, 6], "log_probs": [-0.1, -0.2]}


@pytest.mark.promise("MS-7")
@pytest.mark.parametrize(
    ("of_choice", "of_message", "fault"),
    [
        ({"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [1, 2], "generation_token_ids": [5, 6]}, None),
        ({"prompt_token_ids": [9]}, {}, "prompt ids"),
        ({}, {"prompt_token_ids": [9]}, "prompt ids"),
        ({"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [9]}, "prompt ids"),
        ({}, {"generation_token_ids": [5]}, "generated ids"),
        ({"token_ids": None}, {"prompt_token_ids": [9], "generation_token_ids": [5]}, "prompt ids"),
        ({"token_ids": [True, False]}, {}, "true or false"),
        ({"prompt_token_ids": [True, 2]}, {}, "true or false"),
    ],
    ids=["alike", "choice", "message's prompt", "message's prompt alone", "message's generation", "a whole triple",
         "booleans", "in a prompt"],
)  # fmt: skip
@pytest.mark.parametrize("parsed", [False, True], ids=["read", "parsed already"])
def test_ids_that_are_told_twice_and_differ_are_a_fault(of_choice, of_message, fault, parsed):
    body = json.loads(completion(**IDS).body)
    body["choices"][0].update(of_choice)
    body["choices"][0]["message"].update(of_message)
    if fault == "true or false" and "prompt_token_ids" in of_choice:
        del body["prompt_token_ids"]
    reply = read_chat_object(body) if parsed else read_chat_reply(json.dumps(body).encode())
    assert reply.token_fault is None if fault is None else fault in reply.token_fault
    assert reply.message["content"] == "hello"


@pytest.mark.parametrize("parsed", [False, True], ids=["read", "parsed already"])
def test_two_thoughts_under_two_names_are_a_fault_and_both_reach_the_client(parsed):
    def read(**thoughts):
        body = json.loads(completion({"role": "assistant", "content": "x", **thoughts}, **IDS).body)
        reply = read_chat_object(body) if parsed else read_chat_reply(json.dumps(body).encode())
        thought, _ = output_from_chat(reply.message, "r1")
        return thought["content"][0]["text"], reply.token_fault

    assert read(reasoning="t", reasoning_content="t") == ("t", None)
    assert read(reasoning="t", reasoning_content="") == ("t", None)
    for thoughts, whole in (
        ({"reasoning": "u", "reasoning_content": "t"}, "ut"),
        ({"reasoning_content": "t", "reasoning": "u"}, "tu"),
    ):  # in the order in which the message has them, as a stream's chunk is read
        text, fault = read(**thoughts)
        assert text == whole
        assert fault is not None
        assert fault.startswith("no_token_ids: two thoughts")


def test_prompt_ids_at_the_choice_are_prompt_ids():
    body = json.loads(completion(**IDS).body)
    body["choices"][0]["prompt_token_ids"] = body.pop("prompt_token_ids")
    for reply in (read_chat_reply(json.dumps(body).encode()), read_chat_object(body)):
        assert reply.prompt_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("told", "fault"),
    [
        (None, "no finish reason"),
        ("", "no finish reason"),
        ("banana", "'banana' is not known"),
        ("stop", None),
        ("length", None),
        ("tool_calls", None),
    ],
)
def test_an_end_that_nobody_knows_is_a_fault(told, fault):
    for extra in ({}, {"usage": {"prompt_tokens": 2.0, "completion_tokens": 2}}):  # the fast road and the slow one
        found = read_chat_reply(completion(**IDS, finish_reason=told, **extra).body).token_fault
        assert found is None if fault is None else fault in found


@pytest.mark.parametrize(("finish", "met"), [("stop", "END"), ("length", None), (None, None)])
def test_a_stop_string_is_told_only_of_a_reply_that_stopped(finish, met):
    body = json.loads(completion(**IDS, finish_reason=finish).body)
    body["choices"][0]["stop_reason"] = "END"
    for reply in (read_chat_reply(json.dumps(body).encode()), read_chat_object(body)):
        assert reply.extra.get("stop_sequence") == met
