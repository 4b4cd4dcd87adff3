"""Which settings shape a prompt: every field of OpenAI's two APIs is looked at, and what shapes none is no obstacle."""

from __future__ import annotations

import json
import typing

import numpy as np
import pytest
from tests.unit.model.required import PATH, converse, required_before, required_on_vllm

from toprope.dialects.chat_request import request_from_chat
from toprope.servers.model.engines.base import NextTurn
from toprope.servers.model.engines.prompt_settings import place_effort, sent_settings, shaping, template_kwargs
from toprope.testing.vllm_stand_in import VllmStandIn

HARMLESS = {
    "chat/completions": {
        "modalities": ["text"],
        "prediction": {"type": "content", "content": "x"},
        "web_search_options": {},
        "moderation": {"model": "x"},
        "prompt_cache_options": {"ttl": "24h"},
        "audio": {"voice": "x", "format": "wav"},
        "provider": {"order": ["x"]},
        "usage": {"include": True},
        "best_of": 1,
        "guided_decoding_backend": "x",
        "guided_whitespace_pattern": "x",
        "kv_transfer_params": {"do_remote_prefill": False},
        "reasoning": {"effort": "high"},
    },
    "responses": {
        "context_management": [{"type": "compaction", "compact_threshold": 100}],
        "prompt_cache_options": {"ttl": "24h"},
        "moderation": {"model": "x"},
        "access_programs": ["x"],
        "background_options": {"completion_window": "2h"},
        "image": {"detail": "low"},
        "reasoning": {"effort": "medium", "summary": "auto", "exclude": True},
    },
}


def test_a_new_field_of_openais_apis_is_noticed():
    """What is left may shape a prompt: it is read by name, carried, or refused. Add a new field where it belongs."""
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    def left(fields):
        return set(shaping(dict.fromkeys(typing.get_type_hints(fields), "set")))

    steered = {"tool_choice", "response_format"}
    assert left(CompletionCreateParamsBase) == {
        *steered, "messages", "reasoning_effort", "functions", "function_call", "modalities",
    }  # fmt: skip
    assert left(ResponseCreateParamsBase) == {"tool_choice", "input", "instructions", "reasoning"}


@pytest.mark.promise("MS-12")
@pytest.mark.parametrize(("dialect", "name"), [(dialect, name) for dialect in HARMLESS for name in HARMLESS[dialect]])
async def test_a_field_that_shapes_no_prompt_of_text_is_no_obstacle(dialect, name):
    async with required_on_vllm("hello") as (peer, store):
        path = PATH.replace("chat/completions", dialect)
        replies = await converse(peer, path, {name: HARMLESS[dialect][name]}, 2)
        assert [reply.status for reply in replies] == [200, 200], replies[-1].body
        before, after = await store.open_entries("r", 0)
    whole = [*before.prompt_token_ids.tolist(), *before.generation_token_ids.tolist()]
    assert after.prompt_token_ids.tolist()[: len(whole)] == whole


@pytest.mark.parametrize(
    ("field", "shapes"),
    [
        ({"modalities": ["text"]}, False),
        ({"modalities": ["text", "audio"]}, True),
        ({"modalities": "text"}, True),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, False),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, True),
        ({"kv_transfer_params": "x"}, True),
        ({"add_generation_prompt": True}, False),
        ({"add_generation_prompt": 1}, True),
        ({"add_special_tokens": True}, True),
        ({"guided_anything": 1}, False),
        ({"truncate_prompt_tokens": 9}, True),
    ],
)
def test_some_settings_shape_a_prompt_by_what_they_are_set_to(field, shapes):
    assert shaping(field) == (field if shapes else {})


@pytest.mark.parametrize(
    ("settings", "named", "made"),
    [
        ({"reasoning_effort": "low"}, {}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False},
            {"reasoning_effort": "low"},
        ),
    ],
)
def test_an_effort_switches_thinking_unless_the_request_does(settings, named, made):
    assert template_kwargs(settings) == (named, made)


def test_a_routers_effort_is_placed_for_clients_that_cannot_say_it_themselves():
    for dialect, placed in (("responses", {"reasoning_effort": "low"}), ("chat", {})):
        body = {"reasoning": {"effort": "low"}}
        place_effort(body, dialect)
        assert body == {"reasoning": {"effort": "low"}, **placed}


@pytest.mark.parametrize("tools", [None, [], [{"type": "function", "function": {"name": "f"}}]])
def test_a_choice_among_no_tools_is_not_sent(tools):
    body = {"model": "m", "messages": [], "tools": tools, "tool_choice": "auto", "user": None}
    none = np.array([], np.uint32)
    turn = NextTurn(
        request_from_chat({**body, "messages": [{"role": "user", "content": "hi"}]}),
        (),
        0,
        none,
        none,
        "chat",
        body,
        (),
    )
    assert sent_settings(turn) == ({"model": "m", "tools": tools, "tool_choice": "auto"} if tools else {"model": "m"})


class ReadsReasoning(VllmStandIn):
    """A server whose template is told of a router's `reasoning`."""

    def prompt_of(self, body):
        ids = super().prompt_of(body)
        return [*ids, 7] if "reasoning" in body and "kv_transfer_params" not in body else ids


@pytest.mark.promise("MS-12")
async def test_a_server_that_reads_a_routers_reasoning_is_found_out():
    async with required_before(ReadsReasoning()) as (peer, _, _):
        replies = await converse(peer, PATH, {"reasoning": {"effort": "high"}}, 2)
        assert [reply.status for reply in replies] == [200, 422]
        assert "sets reasoning to other ids" in json.loads(replies[-1].body)["error"]["message"]


class ReadsEffort(VllmStandIn):
    """A server whose template writes the effort, told of it by a call or by `/tokenize`."""

    def prompt_of(self, body):
        ids = super().prompt_of(body)
        told = {**(body.get("chat_template_kwargs") or {}), **body}.get("reasoning_effort")
        headed = body.get("add_generation_prompt", True) and "kv_transfer_params" not in body
        return [*ids, *f"<{told}>".encode()] if told is not None and headed else ids


@pytest.mark.promise("MS-12")
async def test_an_effort_beside_a_routers_own_fields_is_carried():
    async with required_before(ReadsEffort()) as (peer, store, _):
        path = PATH.replace("chat/completions", "responses")
        replies = await converse(peer, path, {"reasoning": {"effort": "low", "exclude": True}}, 2)
        assert [reply.status for reply in replies] == [200, 200], replies[-1].body
        prompts = [bytes(entry.prompt_token_ids.tolist()) for entry in await store.open_entries("r", 0)]
    assert [prompt.count(b"assistant:<low>") for prompt in prompts] == [1, 2]
