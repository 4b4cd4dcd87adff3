"""Who says what follows a recorded turn: vLLM's `/tokenize`, the package `renderers`, the embedded model's ChatML."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.unit.model.required import PATH, required_on_vllm

from toprope.errors.tree import ConfigError, EngineUnavailable
from toprope.http.client import Client
from toprope.servers.model.engines.base import CannotContinue, EngineRequest, NextTurn
from toprope.servers.model.engines.embedded.engine import EmbeddedEngine
from toprope.servers.model.engines.prompt_settings import sent_settings
from toprope.servers.model.engines.vllm import VllmEngine
from toprope.servers.model.engines.vllm_turns import TurnTails
from toprope.servers.model.token_in.library import LibraryRenderer
from toprope.testing.upstream import UpstreamReply, serving
from toprope.testing.vllm_stand_in import EOS, VllmStandIn
from toprope.wire.responses import ResponsesRequest

START, END = 1, 2
ASKED = {"type": "message", "role": "user", "content": "hi"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]}
THEN = {"type": "message", "role": "user", "content": "why?"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "3"}
CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}


def turn(items, tail, sampled, changed=(), **more):
    request = ResponsesRequest(tuple(items), **more)
    prompt, ids = np.array([START], dtype=np.uint32), np.array(sampled, dtype=np.uint32)
    return NextTurn(request, tuple(items), tail, prompt, ids, changed=changed)


class Tails:
    """The tails of an engine whose `/tokenize` and calls both have `template`."""

    def __init__(self, template):
        self.template = template
        self._tails = TurnTails(template, template.call, "reasoning")

    async def after(self, turn):
        return await self._tails.after(turn, sent_settings(turn))


class Template:
    """ChatML over bytes. `thinks`: a last turn gets a thought, an answered one none; `signs`: every turn is signed with
    the number of messages, so that nothing of it stays; `open_calls`: a last turn that calls is left open; `end` is
    what closes a turn. The head of a reply names the template's settings, as sorted JSON. `reads` are settings that a
    call's template gets and `/tokenize` does not; `ignores_effort` is an older vLLM."""

    def __init__(self, *, thinks=False, signs=False, open_calls=False, end=(END, 10), reads=(), ignores_effort=False):
        self.thinks, self.signs, self.open_calls, self.end = thinks, signs, open_calls, end
        self.reads, self.ignores_effort = reads, ignores_effort
        self.calls, self.bodies, self.sent = 0, [], []

    async def call(self, body):
        """The prompt ids of a call of Chat, as vLLM 0.32 renders it."""
        self.sent.append(body)
        variables = dict(body.get("chat_template_kwargs") or {})
        if body.get("documents") is not None:
            variables["documents"] = body["documents"]
        if body.get("reasoning_effort") is not None and not self.ignores_effort:
            variables.setdefault("enable_thinking", body["reasoning_effort"] != "none")
            variables["reasoning_effort"] = body["reasoning_effort"]
        read = {name: body[name] for name in self.reads if name in body}
        return self.render({**body, "add_generation_prompt": True, "chat_template_kwargs": {**variables, **read}})

    async def __call__(self, body):
        self.calls += 1
        self.bodies.append(body)
        return self.render(body)

    def render(self, body):
        messages, ids = body["messages"], []
        for index, message in enumerate(messages):
            text = message["content"] or ""
            if message["role"] == "assistant" and self.thinks and index == len(messages) - 1:
                text = f"<think>{message.get('reasoning') or ''}</think>{text}"
            ids += [START, *f"{message['role']}\n{text}".encode(), *([99, len(messages)] * self.signs)]
            if not (self.open_calls and message.get("tool_calls") and index == len(messages) - 1):
                ids += self.end
        variables = json.dumps(body["chat_template_kwargs"], sort_keys=True) if body.get("chat_template_kwargs") else ""
        head = [START, *b"assistant\n", *variables.encode()]
        return [*ids, *head] if body["add_generation_prompt"] else ids


WHY = [START, *b"user\nwhy?", END, 10, START, *b"assistant\n"]


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(("sampled", "closing"), [([65, END], [10]), ([65, 66], [END, 10])])
async def test_tokenize_tells_what_follows_a_stop_and_what_follows_a_cut(thinks, sampled, closing):
    template = Template(thinks=thinks)
    tails = Tails(template)
    for _ in range(2):
        assert await tails.after(turn([ASKED, THOUGHT, SAID, THEN], 3, sampled)) == [*closing, *WHY]
    # What closes a turn is asked for once, and whether a call is rendered so.
    assert template.calls == 3 + 2 * (4 if thinks else 2)
    assert len(template.sent) == 1


@pytest.mark.promise("MS-12")
@pytest.mark.parametrize(
    ("sampled", "closing"),
    [
        ([65, 10], [END, 10]),  # max_tokens fell on a newline of the text, or stop: ["\n"]
        ([10], [END, 10]),
        ([], [END, 10]),
        ([65, 10, 10], [END, 10]),
        ([END], [10]),
        ([65, 10, END], [10]),
        ([65, END], [10]),  # the end was sampled, whatever is said of it
        ([65, END, 10], []),
        ([65, END, 65], [END, 10]),
    ],
)
async def test_a_turn_is_closed_but_for_what_of_its_end_was_sampled(sampled, closing):
    told = await Tails(Template()).after(turn([ASKED, SAID, THEN], 2, sampled))
    assert told == [*closing, *WHY]


async def test_an_end_that_holds_one_id_twice_is_overlapped_as_far_as_it_goes():
    template, after = Template(end=(10, END, 10)), [START, *b"user\nwhy?", 10, END, 10, START, *b"assistant\n"]
    cases = (([65, 10], [END, 10]), ([65, 10, END], [10]), ([65, 10, END, 10], []), ([65], [10, END, 10]))
    for sampled, closing in cases:
        told = await Tails(template).after(turn([ASKED, SAID, THEN], 2, sampled))
        assert told == [*closing, *after]


async def test_the_template_is_asked_with_the_tools_and_settings_of_the_request():
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    settings = {"chat_template": "{{ messages }}", "chat_template_kwargs": {"enable_thinking": False}}
    template = Template(thinks=True)
    tails = Tails(template)
    told = turn([ASKED, THOUGHT, SAID, THEN], 3, [65, END], tools=(tool,), extra={**settings, "min_p": 0.1})
    assert await tails.after(told) == [10, *WHY, *b'{"enable_thinking": false}']
    assert template.calls == 7
    for body in [*template.bodies, *template.sent]:
        (sent,) = body["tools"]
        assert sent["function"]["name"] == "add"
        assert {name: body[name] for name in settings} == settings
        assert "min_p" not in body
    assert all(body["add_special_tokens"] is False for body in template.bodies)
    await tails.after(turn([ASKED, THOUGHT, SAID, THEN], 3, [65, END]))
    assert template.calls == 7 + 7  # without them it is another template, whose end of a turn is asked for again
    assert not any({"tools", *settings} & body.keys() for body in template.bodies[7:])


@pytest.mark.promise("MS-12")
@pytest.mark.parametrize(
    ("extra", "variables"),
    [
        ({"reasoning": {"effort": "none"}}, {"enable_thinking": False, "reasoning_effort": "none"}),
        ({"reasoning": {"effort": "low"}}, {"enable_thinking": True, "reasoning_effort": "low"}),
        (
            {"reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True, "reasoning_effort": "none"},
        ),
        ({"documents": [{"title": "a"}]}, {"documents": [{"title": "a"}]}),
        ({"documents": [], "chat_template_kwargs": {"documents": [1]}}, {"documents": []}),
        ({"documents": [{"title": "a"}], "chat_template_kwargs": {"x": 1}}, {"documents": [{"title": "a"}], "x": 1}),
    ],
)
async def test_what_vllm_hands_its_template_of_other_settings_is_handed_to_it_here(extra, variables):
    told = await Tails(Template()).after(turn([ASKED, SAID, THEN], 2, [65, END], extra=extra))
    assert told == [10, *WHY, *json.dumps(variables, sort_keys=True).encode()]


HARMLESS = {
    "frequency_penalty": 1, "logit_bias": {"1": 1}, "logprobs": True, "top_logprobs": 2, "min_tokens": 1,
    "metadata": {"a": 1}, "user": "u", "store": False, "prompt_cache_key": "k", "include": [], "truncation": "auto",
    "text": {"verbosity": "low"}, "structured_outputs": {"regex": "a"}, "add_generation_prompt": True,
    "continue_final_message": False, "add_special_tokens": False, "previous_response_id": "",
}  # fmt: skip
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 1, "max_output_tokens": 9, "stop": ("x",)}
LOST = {
    "truncate_prompt_tokens": 9, "mm_processor_kwargs": {"a": 1}, "media_io_kwargs": {"a": 1}, "thinking": True,
    "add_special_tokens": True, "kv_transfer_params": {"prompt_token_ids": [1]}, "something_new": 0,
    "function_call": "auto",
}  # fmt: skip


async def test_settings_that_never_shape_a_prompt_are_not_asked_about():
    template = Template()
    tails = Tails(template)
    plain = await tails.after(turn([ASKED, SAID, THEN], 2, [65, END]))
    assert await tails.after(turn([ASKED, SAID, THEN], 2, [65, END], extra=HARMLESS, **SAMPLING)) == plain
    assert len(template.sent) == 1


@pytest.mark.promise("MS-12")
@pytest.mark.parametrize("name", LOST)
async def test_a_setting_that_may_shape_the_prompt_and_is_not_carried_is_refused_by_name(name):
    with pytest.raises(CannotContinue, match=f"sets {name}, which") as refused:
        await Tails(Template()).after(turn([ASKED, SAID, THEN], 2, [65, END], extra={**HARMLESS, name: LOST[name]}))
    assert refused.value.reason == "settings_not_carried"


async def test_variables_of_a_template_that_are_no_object_are_refused():
    with pytest.raises(CannotContinue, match="no object"):
        await Tails(Template()).after(turn([ASKED, SAID, THEN], 2, [65], extra={"chat_template_kwargs": "x"}))


TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
FORCED = {"tools": (TOOL,), "tool_choice": "required"}
SHAPED = {"extra": {"text": {"format": {"type": "json_object"}}}}


@pytest.mark.promise("MS-12")
@pytest.mark.parametrize(("name", "steered"), [("tool_choice", FORCED), ("response_format", SHAPED)])
async def test_a_choice_or_format_is_no_obstacle_unless_the_engines_template_reads_it(name, steered):
    """Kimi K3's does, and `/tokenize` cannot be told: nor may the parent have had another one."""
    items, plain, reads = [ASKED, SAID, THEN], [10, *WHY], Template(reads=(name,))
    assert await Tails(Template()).after(turn(items, 2, [65, END], **steered)) == plain
    assert await Tails(Template()).after(turn(items, 2, [65, END], changed=(name,))) == plain
    assert await Tails(reads).after(turn(items, 2, [65, END])) == plain
    for told in (turn(items, 2, [65, END], **steered), turn(items, 2, [65, END], changed=(name,))):
        with pytest.raises(CannotContinue, match=f"sets .*{name}.* to other ids than its /tokenize") as refused:
            await Tails(reads).after(told)
        assert refused.value.reason == "settings_not_carried"


@pytest.mark.promise("MS-12")
async def test_a_version_that_renders_calls_otherwise_than_it_is_told_here_is_found_out():
    tails = Tails(Template(ignores_effort=True))
    assert await tails.after(turn([ASKED, SAID, THEN], 2, [65, END])) == [10, *WHY]
    with pytest.raises(CannotContinue, match="sets reasoning_effort to other ids"):
        await tails.after(turn([ASKED, SAID, THEN], 2, [65, END], extra={"reasoning": {"effort": "none"}}))


async def test_a_chat_clients_own_body_is_what_is_looked_at():
    """`functions` are tools to us, and nothing to vLLM, which is sent them as they are."""
    request = ResponsesRequest((ASKED, SAID, THEN), tools=(TOOL,))
    prompt, ids = np.array([START], dtype=np.uint32), np.array([65, END], dtype=np.uint32)
    body = {"messages": [{"role": "user", "content": "hi"}], "functions": [{"name": "add"}], "temperature": None}
    with pytest.raises(CannotContinue, match="sets functions, which"):
        await Tails(Template()).after(NextTurn(request, request.input, 2, prompt, ids, "chat", body))


async def test_a_template_without_an_end_of_turns_is_refused():
    with pytest.raises(CannotContinue, match="nothing after a turn") as refused:
        await Tails(Template(end=())).after(turn([ASKED, SAID, THEN], 2, [65]))
    assert refused.value.reason == "turns_have_no_end"


async def test_a_turn_that_the_template_leaves_open_while_it_is_the_last_is_closed_once():
    told = await Tails(Template(open_calls=True)).after(turn([ASKED, CALL, RESULT], 2, [65, END]))
    assert told == [10, START, *b"tool\n3", END, 10, START, *b"assistant\n"]


async def test_a_template_that_writes_turns_anew_each_time_is_refused():
    with pytest.raises(CannotContinue, match="cannot be told apart") as refused:
        await Tails(Template(signs=True)).after(turn([ASKED, SAID, THEN], 2, [65, END]))
    assert refused.value.reason == "template_rewrites_history"


async def test_a_result_after_a_call_is_what_follows_a_call():
    told = await Tails(Template()).after(turn([ASKED, CALL, RESULT], 2, [65, END]))
    assert told == [10, START, *b"tool\n3", END, 10, START, *b"assistant\n"]


@pytest.mark.promise("MS-12")
@pytest.mark.parametrize("stream", [False, True])
async def test_stock_vllm_is_given_the_sampled_ids_and_the_rest_by_its_own_tokeniser(stream):
    async with required_on_vllm("hello") as (peer, store):
        messages = [{"role": "user", "content": "hi"}]
        for _ in range(3):
            body = {"model": "m", "messages": messages, "stream": stream, "max_tokens": 3 + len(messages)}
            assert (await peer.request("POST", PATH, body=json.dumps(body).encode())).status == 200
            said = (await store.open_entries("r", 0))[-1].output_items[0]["content"][0]["text"]
            messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "so?"}]
    first, second, third = await store.open_entries("r", 0)
    ask = [3, *b"user:so?", EOS, 10, 3, *b"assistant:"]
    for before, after in ((first, second), (second, third)):
        cut = before.finish_reason == "length"
        closing = [EOS, 10] if cut else [10]
        whole = [*before.prompt_token_ids.tolist(), *before.generation_token_ids.tolist()]
        assert after.prompt_token_ids.tolist() == [*whole, *closing, *ask]
    assert [entry.finish_reason for entry in (first, second)] == ["length", "stop"]


class Thinks(VllmStandIn):
    """Writes an empty thought at the head of replies where thinking is off, as Qwen3's template does on vLLM 0.32."""

    def prompt_of(self, body):
        ids = super().prompt_of(body)
        variables = dict(body.get("chat_template_kwargs") or {})
        if body.get("reasoning_effort") is not None:
            variables.setdefault("enable_thinking", body["reasoning_effort"] != "none")
        given = "prompt_token_ids" in (body.get("kv_transfer_params") or {})
        off = variables.get("enable_thinking") is False and body.get("add_generation_prompt", True)
        return [*ids, *b"<nothink>"] if off and not given else ids


EFFORTS = {
    "chat/completions": {"reasoning_effort": "none"},
    "responses": {"reasoning": {"effort": "none", "summary": "auto"}},
    "messages": {"output_config": {"effort": "none"}, "max_tokens": 99, "thinking": {"type": "disabled"}},
}


@pytest.mark.promise("MS-12")
@pytest.mark.parametrize("dialect", EFFORTS)
async def test_a_second_turn_without_thoughts_begins_without_one_as_the_first_did(dialect):
    async with required_on_vllm("hello", Thinks) as (peer, store):
        history = [{"role": "user", "content": "hi"}]
        for _ in range(3):
            items = {"input" if dialect == "responses" else "messages": history}
            body = json.dumps({"model": "m", **items, **EFFORTS[dialect]}).encode()
            reply = await peer.request("POST", PATH.replace("chat/completions", dialect), body=body)
            assert reply.status == 200, reply.body
            history = [*history, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "so?"}]
    prompts = [bytes(entry.prompt_token_ids.tolist()) for entry in await store.open_entries("r", 0)]
    assert [prompt.count(b"assistant:<nothink>") for prompt in prompts] == [1, 2, 3]
    assert all(prompt.endswith(b"assistant:<nothink>") for prompt in prompts)


@pytest.mark.promise("MS-12")
async def test_required_refuses_a_setting_that_is_not_carried_and_names_it():
    async with required_on_vllm("hello") as (peer, store):
        messages = [{"role": "user", "content": "hi"}]
        for status in (200, 422):
            body = {"model": "m", "messages": messages, "mm_processor_kwargs": {"fps": 1}}
            reply = await peer.request("POST", PATH, body=json.dumps(body).encode())
            assert reply.status == status
            messages = [*messages, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "so?"}]
        assert "sets mm_processor_kwargs" in json.loads(reply.body)["error"]["message"]
        assert len(await store.open_entries("r", 0)) == 1


async def test_the_tokeniser_is_asked_for_the_model_that_the_call_names():
    upstream = VllmStandIn()
    upstream.closes_turns = True
    entries = [{"id": name, "object": "model", "owned_by": "vllm"} for name in ("m", "other")]
    upstream.models = UpstreamReply(json.dumps({"object": "list", "data": entries}).encode())
    async with serving(upstream) as url, Client() as outside:
        engine = VllmEngine(client=outside, base_url=f"{url}/v1")
        await engine.next_turn(turn([ASKED, SAID, THEN], 2, [65, EOS], model="other"))
        asked = [request.json() for request in upstream.requests]
        assert [body["model"] for body in asked] == ["other"] * len(asked)
        upstream.drops = {"prompt_token_ids"}
        with pytest.raises(EngineUnavailable, match="without the ids of its prompt"):
            await engine.next_turn(turn([ASKED, SAID, THEN], 2, [65, EOS], model="m"))


@pytest.mark.promise("MS-12")
async def test_a_turn_that_a_limit_cuts_at_a_newline_is_closed_on_stock_vllm():
    async with required_on_vllm("ab\ncd") as (peer, store):
        messages = [{"role": "user", "content": "hi"}]
        for limit in (3, 9):
            body = {"model": "m", "messages": messages, "max_tokens": limit}
            reply = await peer.request("POST", PATH, body=json.dumps(body).encode())
            said = json.loads(reply.body)["choices"][0]["message"]["content"]
            messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "so?"}]
    first, second = await store.open_entries("r", 0)
    assert first.generation_token_ids.tolist() == [*b"ab\n"]
    whole = [*first.prompt_token_ids.tolist(), *first.generation_token_ids.tolist()]
    assert second.prompt_token_ids.tolist() == [*whole, EOS, 10, 3, *b"user:so?", EOS, 10, 3, *b"assistant:"]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A model directory with a byte-level tokeniser that has the special tokens of Qwen3 and Llama 3."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = "<|endoftext|> <|im_start|> <|im_end|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>"
    special += " <|eom_id|> <|end_of_text|> <|python_tag|>"
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special.split()])
    plain = "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"
    tokenizer.add_tokens([AddedToken(each) for each in plain.split()])
    folder = tmp_path_factory.mktemp("words")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return folder, tokenizer


FAMILIES = {
    "qwen3": ("<|im_end|>", "\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"),
    "llama-3": (
        "<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nwhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cut", [False, True])
async def test_the_package_extends_sampled_ids_for_qwen3_and_llama_3(words, family, cut):
    folder, tokenizer = words
    end, after = FAMILIES[family]

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    sampled = encode("<think>hm</think>yes" if family == "qwen3" else "yes") + ([] if cut else encode(end))
    told = await LibraryRenderer(family, tokenizer=folder).next_turn(turn([ASKED, THOUGHT, SAID, THEN], 3, sampled))
    assert told == encode((end if cut else "") + after)


NO_THOUGHT = "<think>\n\n</think>\n\n"


@pytest.mark.promise("MS-12")
@pytest.mark.parametrize(
    ("options", "extra", "after"),
    [
        ({}, {}, ""),
        ({}, {"chat_template_kwargs": {"enable_thinking": False}}, NO_THOUGHT),
        ({}, {"reasoning": {"effort": "none"}}, NO_THOUGHT),
        ({}, {"reasoning": {"effort": "low"}}, ""),
        ({"enable_thinking": False}, {}, NO_THOUGHT),
        ({"enable_thinking": False}, {"reasoning": {"effort": "low"}}, ""),
        ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": None}}, NO_THOUGHT),
        ({}, {"reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": True}}, ""),
        ({}, HARMLESS, ""),
        ({}, {"text": {"format": {"type": "json_object"}}}, ""),
    ],
)
async def test_the_package_writes_the_next_head_with_the_settings_of_the_request(words, options, extra, after):
    folder, tokenizer = words
    renderer = LibraryRenderer("qwen3", tokenizer=folder, options=options)
    sampled = tokenizer.encode("yes<|im_end|>", add_special_tokens=False).ids
    for _ in range(2):
        told = await renderer.next_turn(turn([ASKED, SAID, THEN], 2, sampled, extra=extra))
        assert tokenizer.decode(told, skip_special_tokens=False) == FAMILIES["qwen3"][1] + after


@pytest.mark.promise("MS-12")
@pytest.mark.parametrize(
    ("family", "extra", "named"),
    [
        ("llama-3", {"chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
        ("qwen3", {"chat_template_kwargs": {"enable_thinking": "false"}}, "reads .*'false'"),
        ("qwen3", {"chat_template_kwargs": {"enable_thinking": False, "add_vision_id": True}}, "add_vision_id"),
        ("qwen3", {"chat_template": "{{ x }}"}, "sets chat_template, which"),
        ("qwen3", {"documents": [{"title": "a"}]}, "sets documents, which"),
        ("qwen3", {"truncate_prompt_tokens": 9, "x": 1}, "sets truncate_prompt_tokens, x, which"),
    ],
)
async def test_the_package_refuses_settings_that_its_family_has_not(words, family, extra, named):
    renderer = LibraryRenderer(family, tokenizer=words[0])
    with pytest.raises(CannotContinue, match=named) as refused:
        await renderer.next_turn(turn([ASKED, SAID, THEN], 2, [65], extra=extra))
    assert refused.value.reason == "settings_not_carried"


WITHOUT_EFFORT = ("llama-3", "prime-qwen3")
"""Two of the package's families whose templates know neither an effort nor thinking switched off."""


@pytest.mark.promise("MS-12")
@pytest.mark.parametrize("family", WITHOUT_EFFORT)
@pytest.mark.parametrize("effort", ["none", "medium"])
async def test_an_effort_that_a_familys_template_cannot_read_shapes_nothing(words, family, effort):
    """Codex sets one in every request, whatever the model."""
    folder, tokenizer = words
    renderer = LibraryRenderer(family, tokenizer=folder)
    end, after = FAMILIES["qwen3" if family == "prime-qwen3" else family]
    sampled = tokenizer.encode(f"yes{end}", add_special_tokens=False).ids
    extra = {"reasoning": {"effort": effort, "summary": "auto"}}
    told = await renderer.next_turn(turn([ASKED, SAID, THEN], 2, sampled, extra=extra))
    assert told == await renderer.next_turn(turn([ASKED, SAID, THEN], 2, sampled))
    assert tokenizer.decode(told, skip_special_tokens=False) == after


@pytest.mark.promise("MS-12")
async def test_an_effort_is_refused_where_the_family_is_not_named(words, tmp_path, monkeypatch):
    """The package then knows it by the path of the tokeniser; what its template reads is not known here."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "Qwen" / "Qwen3-0.6B"
    model.parent.mkdir()
    model.symlink_to(words[0])
    renderer = LibraryRenderer("auto", tokenizer="Qwen/Qwen3-0.6B")
    with pytest.raises(CannotContinue, match="no setting for enable_thinking, reasoning_effort"):
        await renderer.next_turn(turn([ASKED, SAID, THEN], 2, [65], extra={"reasoning": {"effort": "none"}}))


async def test_the_package_is_refused_where_it_does_not_fit(words, tmp_path):
    folder, _ = words
    with pytest.raises(ConfigError, match="qwen3"):
        LibraryRenderer("qwen-3", tokenizer=folder)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        LibraryRenderer("qwen3", tokenizer=tmp_path)


async def test_the_embedded_model_continues_ids_and_closes_a_turn_as_its_template_does():
    engine = EmbeddedEngine(context=256, max_sequences=1)
    await engine.start()
    try:
        asked = {"role": "user", "content": "Say one word."}

        async def ask(items, prompt=None, session=None, most=4):
            request = ResponsesRequest(tuple(items), max_output_tokens=most, temperature=0)
            return await engine.generate(EngineRequest(request, "call", session, True, prompt_token_ids=prompt))

        first = await ask([asked], session="s")
        items = [asked, first.output[0], {"role": "user", "content": "And another."}]
        known, sampled = first.tokens.prompt_token_ids, first.tokens.generation_token_ids
        follows = await engine.next_turn(NextTurn(ResponsesRequest(()), tuple(items), 2, known, sampled))
        prompt = np.concatenate([known, sampled, np.array(follows, dtype=np.uint32)])
        given = await ask(items, prompt)
        remembered = await ask(items, session="s")
        assert given.tokens.prompt_token_ids.tolist() == prompt.tolist()
        assert remembered.tokens.prompt_token_ids.tolist() == prompt.tolist()
        assert given.tokens.generation_token_ids.tolist() == remembered.tokens.generation_token_ids.tolist()
    finally:
        await engine.close()
