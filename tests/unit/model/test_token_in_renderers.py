"""Who says what follows a recorded turn: vLLM's `/tokenize`, the package `renderers`, the embedded model's ChatML."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import numpy as np
import pytest

from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import Recorder
from toprope.errors.tree import ConfigError
from toprope.http.client import Client
from toprope.servers.model.engines.base import CannotContinue, EngineRequest, NextTurn
from toprope.servers.model.engines.embedded.engine import EmbeddedEngine
from toprope.servers.model.engines.vllm import VllmEngine
from toprope.servers.model.engines.vllm_turns import TurnTails
from toprope.servers.model.server import ModelServer
from toprope.servers.model.token_in.library import LibraryRenderer
from toprope.testing.upstream import serving
from toprope.testing.vllm_stand_in import EOS, VllmStandIn
from toprope.wire.responses import ResponsesRequest

START, END = 1, 2
ASKED = {"type": "message", "role": "user", "content": "hi"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]}
THEN = {"type": "message", "role": "user", "content": "why?"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "3"}
CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}


def turn(items, tail, sampled, **more):
    request = ResponsesRequest(tuple(items), **more)
    prompt, ids = np.array([START], dtype=np.uint32), np.array(sampled, dtype=np.uint32)
    return NextTurn(request, tuple(items), tail, prompt, ids)


class Template:
    """ChatML over bytes. `thinks`: a last turn gets a thought, an answered one none; `signs`: every turn is signed with
    the number of messages, so that nothing of it stays; `open_calls`: a last turn that calls is left open; `end` is
    what closes a turn."""

    def __init__(self, *, thinks=False, signs=False, open_calls=False, end=(END, 10)):
        self.thinks, self.signs, self.open_calls, self.end = thinks, signs, open_calls, end
        self.calls, self.bodies = 0, []

    async def __call__(self, body):
        self.calls += 1
        self.bodies.append(body)
        messages, ids = body["messages"], []
        for index, message in enumerate(messages):
            text = message["content"] or ""
            if message["role"] == "assistant" and self.thinks and index == len(messages) - 1:
                text = f"<think>{message.get('reasoning') or ''}</think>{text}"
            ids += [START, *f"{message['role']}\n{text}".encode(), *([99, len(messages)] * self.signs)]
            if not (self.open_calls and message.get("tool_calls") and index == len(messages) - 1):
                ids += self.end
        return [*ids, START, *b"assistant\n"] if body["add_generation_prompt"] else ids


WHY = [START, *b"user\nwhy?", END, 10, START, *b"assistant\n"]


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(("sampled", "closing"), [([65, END], [10]), ([65, 66], [END, 10])])
async def test_tokenize_tells_what_follows_a_stop_and_what_follows_a_cut(thinks, sampled, closing):
    template = Template(thinks=thinks)
    tails = TurnTails(template, "reasoning")
    for _ in range(2):
        assert await tails.after(turn([ASKED, THOUGHT, SAID, THEN], 3, sampled)) == [*closing, *WHY]
    assert template.calls == 2 + 2 * (4 if thinks else 2)  # what closes a turn is asked for once


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
    told = await TurnTails(Template(), "reasoning").after(turn([ASKED, SAID, THEN], 2, sampled))
    assert told == [*closing, *WHY]


async def test_an_end_that_holds_one_id_twice_is_overlapped_as_far_as_it_goes():
    template, after = Template(end=(10, END, 10)), [START, *b"user\nwhy?", 10, END, 10, START, *b"assistant\n"]
    cases = (([65, 10], [END, 10]), ([65, 10, END], [10]), ([65, 10, END, 10], []), ([65], [10, END, 10]))
    for sampled, closing in cases:
        told = await TurnTails(template, "reasoning").after(turn([ASKED, SAID, THEN], 2, sampled))
        assert told == [*closing, *after]


async def test_the_template_is_asked_with_the_tools_and_settings_of_the_request():
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    settings = {"chat_template": "{{ messages }}", "chat_template_kwargs": {"enable_thinking": False}}
    template = Template(thinks=True)
    tails = TurnTails(template, "reasoning")
    await tails.after(turn([ASKED, THOUGHT, SAID, THEN], 3, [65, END], tools=(tool,), extra={**settings, "top_k": 1}))
    assert template.calls == 6
    for body in template.bodies:
        (sent,) = body["tools"]
        assert sent["function"]["name"] == "add"
        assert {name: body[name] for name in settings} == settings
        assert "top_k" not in body
        assert body["add_special_tokens"] is False
    await tails.after(turn([ASKED, THOUGHT, SAID, THEN], 3, [65, END]))
    assert template.calls == 6 + 6  # without them it is another template, whose end of a turn is asked for again
    assert not any({"tools", *settings} & body.keys() for body in template.bodies[6:])


async def test_a_template_without_an_end_of_turns_is_refused():
    with pytest.raises(CannotContinue, match="nothing after a turn") as refused:
        await TurnTails(Template(end=()), "reasoning").after(turn([ASKED, SAID, THEN], 2, [65]))
    assert refused.value.reason == "turns_have_no_end"


async def test_a_turn_that_the_template_leaves_open_while_it_is_the_last_is_closed_once():
    told = await TurnTails(Template(open_calls=True), "reasoning").after(turn([ASKED, CALL, RESULT], 2, [65, END]))
    assert told == [10, START, *b"tool\n3", END, 10, START, *b"assistant\n"]


async def test_a_template_that_writes_turns_anew_each_time_is_refused():
    with pytest.raises(CannotContinue, match="cannot be told apart") as refused:
        await TurnTails(Template(signs=True), "reasoning").after(turn([ASKED, SAID, THEN], 2, [65, END]))
    assert refused.value.reason == "template_rewrites_history"


async def test_a_result_after_a_call_is_what_follows_a_call():
    told = await TurnTails(Template(), "reasoning").after(turn([ASKED, CALL, RESULT], 2, [65, END]))
    assert told == [10, START, *b"tool\n3", END, 10, START, *b"assistant\n"]


PATH = "/ng-rollout/r/training-token-capture/v1/chat/completions"


@asynccontextmanager
async def required_on_vllm(says):
    """A peer of a server that insists on token-in, before a stand-in of vLLM that closes its turns, and its store."""
    upstream = VllmStandIn(says=says)
    upstream.closes_turns = True
    store = MemoryStore()
    async with serving(upstream) as url, Client() as outside:
        engine = VllmEngine(client=outside, base_url=f"{url}/v1")
        server = ModelServer(name="policy", engine=engine, recorder=Recorder(store, reader=store), token_in="required")
        await server.app.start()
        async with Client(inline={"policy": server.app}) as client:
            yield client.peer("inline://policy", None), store
        await server.app.stop()


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
