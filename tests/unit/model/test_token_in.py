"""Token-in: turn k+1 begins with the recorded ids of turn k, or the engine renders it and that is said."""

from __future__ import annotations

import json
import logging
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import Recorder
from toprope.capture.sqlite_store import SqliteStore
from toprope.dialects.chat_request import request_from_chat
from toprope.dialects.messages_request import request_from_messages
from toprope.dialects.responses import request_from_responses
from toprope.errors.tree import ConfigError
from toprope.http.client import Client
from toprope.servers.model.server import ModelServer
from toprope.servers.model.token_in.said import Reader
from toprope.telemetry.calls import CallLog, read_call_log
from toprope.testing import toy_tokenizer
from toprope.testing.scripted import ScriptedCall, ScriptedEngine, ScriptedReply, When
from toprope.trajectory.build import Trainable, build
from toprope.wire.responses import ResponsesRequest

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SCRIPT = [
    ScriptedReply(reasoning="first I add", calls=[ScriptedCall("add", '{"a": 1,  "b": 2}', "c1")]),
    ScriptedReply(reasoning="now again", text="so far", calls=[ScriptedCall("add", '{"a": 3, "b": 1.0}', "c2")]),
    ScriptedReply(reasoning="done", text="It is 4."),
    ScriptedReply(reasoning="thanks", text="Bye."),
]
USER = {"role": "user", "content": "1 + 2, then + 1?"}


@pytest.fixture
def house(tmp_path):
    @asynccontextmanager
    async def run(store=None, engine=None, **settings):
        store = store or MemoryStore()
        engine = engine or ScriptedEngine(script=SCRIPT, drops_thinking=True, accepts_token_prompt=True)
        recorder = Recorder(store, reader=store)
        log = CallLog(tmp_path / "calls.jsonl")
        server = ModelServer(name="policy", engine=engine, recorder=recorder, call_log=log, **settings)
        await server.app.start()
        async with Client(inline={"policy": server.app}) as client:
            yield House(client.peer("inline://policy", None), store, engine, log.path)
        await server.app.stop()
        await recorder.close()
        log.close()

    return run


class House:
    def __init__(self, peer, store, engine, log):
        self.peer, self.store, self.engine, self._log = peer, store, engine, log

    async def ask(self, messages, *, stream=False, tools=TOOLS, status=200, **more):
        body = {"model": "m", "messages": messages, "tools": tools, "stream": stream, **more}
        reply = await self.peer.request(
            "POST", "/ng-rollout/r/training-token-capture/v1/chat/completions", body=json.dumps(body).encode()
        )
        assert reply.status == status, reply.body
        if status != 200 or not stream:
            told = json.loads(reply.body)
            return told if status != 200 else told["choices"][0]["message"]
        return assembled(reply.body)

    async def entries(self):
        return await self.store.open_entries("r", 0)

    async def built(self):
        return build(await self.store.freeze("r"))

    def outcomes(self):
        return [record.token_in for record in read_call_log(self._log)]

    def forgiven(self):
        return [record.forgiven for record in read_call_log(self._log)]


def assembled(body):
    message = {"role": "assistant", "content": None}
    for line in body.decode().split("\n"):
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls") or ():
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                for name in ("name", "arguments"):
                    calls[call["index"]]["function"][name] += call["function"].get(name) or ""
    return message


def without_thoughts(message):
    return {name: value for name, value in message.items() if not name.startswith("reasoning")}


async def three_turns(house, **more):
    """Two tool turns and a last word, thoughts never sent back; the messages as the client holds them."""
    messages = [USER]
    for result in ("3", "4", None):
        said = await house.ask(messages, **more)
        messages.append(without_thoughts(said))
        if result is not None:
            messages.append({"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": result})
    return messages


def whole(entry):
    return [*entry.prompt_token_ids.tolist(), *entry.generation_token_ids.tolist()]


@pytest.mark.promise("MS-12")
@pytest.mark.parametrize("stream", [False, True])
async def test_three_turns_are_contiguous_although_the_template_drops_thinking(house, stream):
    async with house() as here:
        await three_turns(here, stream=stream)
        first, second, third = await here.entries()
        given = [request.prompt_token_ids for request in here.engine.requests]
        assert given[0] is None
        for before, ids, result in ((first, given[1], "3"), (second, given[2], "4")):
            answer = [toy_tokenizer.BEGIN, *toy_tokenizer.encode(f"tool\n{result}"), toy_tokenizer.END]
            head = [toy_tokenizer.BEGIN, *toy_tokenizer.encode("assistant\n")]
            assert ids.tolist() == [*whole(before), *answer, *head]
        assert third.prompt_token_ids.tolist() == given[2].tolist()
        assert [entry.parent_resolution_reason for entry in (second, third)] == ["token_in", "token_in"]
        assert here.outcomes() == ["first", "exact", "exact"]
        assert here.forgiven() == [{}, {"dropped_thinking": 1}, {"dropped_thinking": 2}]
        built = await here.built()
        assert isinstance(built, Trainable)
        (trace,) = built.traces
        assert int(trace.loss_mask.sum()) == sum(len(e.generation_token_ids) for e in (first, second, third))
        assert built.metrics.token_in == {"calls": {"exact": 2, "first": 1}, "forgiven": {"dropped_thinking": 3}}


async def test_without_token_in_the_same_conversation_is_torn_and_masked(house):
    async with house(token_in="off") as here:
        await three_turns(here)
        first, second, _ = await here.entries()
        assert second.prompt_token_ids.tolist()[: len(whole(first))] != whole(first)
        built = await here.built()
        assert not isinstance(built, Trainable)
        assert built.metrics.token_in == {}
        assert here.outcomes() == [None, None, None]


@pytest.mark.promise("MS-12")
async def test_a_fork_continues_the_ids_of_its_own_parent(house):
    script = [
        ScriptedReply(reasoning="left", text="one", when=When(contains="go left")),
        ScriptedReply(reasoning="right", text="two", when=When(contains="go right")),
        ScriptedReply(text="end"),
    ]
    engine = ScriptedEngine(script=script, drops_thinking=True, accepts_token_prompt=True)
    async with house(engine=engine) as here:
        for way in ("left", "right"):
            said = without_thoughts(await here.ask([{"role": "user", "content": f"go {way}"}]))
            for question in ("and?", "or?"):
                asked = [{"role": "user", "content": f"go {way}"}, said, {"role": "user", "content": question}]
                await here.ask(asked)
        left, left_and, left_or, right, right_and, right_or = await here.entries()
        for parent, child in ((left, left_and), (left, left_or), (right, right_and), (right, right_or)):
            assert child.parent_call_id == parent.model_call_id
            assert child.prompt_token_ids.tolist()[: len(whole(parent))] == whole(parent)


async def test_equal_words_with_other_thoughts_are_told_apart_by_ids_or_not_at_all(house):
    script = [
        ScriptedReply(reasoning="so", calls=[ScriptedCall("add", "{}", "a")]),
        ScriptedReply(reasoning="or so", calls=[ScriptedCall("add", "{}", "b")]),
        ScriptedReply(text="end"),
    ]
    engine = ScriptedEngine(
        script=lambda call: script[min(call.index, 2)], drops_thinking=True, accepts_token_prompt=True
    )
    async with house(engine=engine) as here:
        said = [without_thoughts(await here.ask([USER])) for _ in range(2)]
        for message in said:
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "0"}
            await here.ask([USER, message, result])
        one, two, after_one, after_two = await here.entries()
        assert [after_one.parent_call_id, after_two.parent_call_id] == [one.model_call_id, two.model_call_id]
        nameless = {**said[0], "tool_calls": [{**said[0]["tool_calls"][0], "id": "z"}]}
        await here.ask([USER, nameless, {"role": "tool", "tool_call_id": "z", "content": "0"}])
        assert here.outcomes()[-1] == "fallback:ambiguous_parent"
        assert here.engine.requests[-1].prompt_token_ids is None


EDITS = {
    "user": lambda m: [{**m[0], "content": "2 + 2?"}, *m[1:]],
    "model": lambda m: [m[0], {**m[1], "content": "I never said so"}, *m[2:]],
    "call": lambda m: [
        m[0],
        {**m[1], "tool_calls": [{**m[1]["tool_calls"][0], "function": {"name": "add", "arguments": '{"a": 9}'}}]},
        *m[2:],
    ],
    "thought": lambda m: [m[0], {**m[1], "reasoning_content": "first I lie"}, *m[2:]],
    "system": lambda m: [{"role": "system", "content": "be brief"}, *m],
    "result": lambda m: [*m[:2], {**m[2], "content": "33"}, *m[3:]],
}


@pytest.mark.promise("MS-12")
@pytest.mark.parametrize("edit", EDITS)
async def test_an_edited_history_falls_back_to_the_template_and_is_spliced_onto_nothing(house, caplog, edit):
    async with house() as here:
        messages = await three_turns(here)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                await here.ask([*EDITS[edit](messages), {"role": "user", "content": "thanks"}])
        edited = here.engine.requests[-1]
        assert edited.prompt_token_ids is None
        *_, last = await here.entries()
        rendered = toy_tokenizer.prompt_ids(edited.request, drops_thinking=True)
        assert last.prompt_token_ids.tolist() == rendered
        reason = here.outcomes()[-1]
        assert reason in ("fallback:history_not_recorded", "fallback:turn_edited")
        assert here.outcomes()[-2] == reason
        said = [r for r in caplog.records if "engine's own rendering" in r.getMessage()]
        assert len(said) == 1
        built = await here.built()
        assert built.metrics.token_in["calls"][reason] == 2


OTHERS = {
    "name": ({"name": "alice"}, {"name": "bob"}),
    "no name": ({"name": "alice"}, {}),
    "new name": ({}, {"name": "bob"}),
    "field": ({"extra": 1}, {"extra": 2}),
    "kind of value": ({"extra": 1}, {"extra": True}),
    "field of a text": (
        {"content": [{"type": "text", "text": "hi", "extra": 1}]},
        {"content": [{"type": "text", "text": "hi", "extra": 2}]},
    ),
    "field that is new to a text": (
        {"content": [{"type": "text", "text": "hi"}]},
        {"content": [{"type": "text", "text": "hi", "extra": 0}]},
    ),
}
SAME = {
    "null": ({"name": None}, {}),
    "null in a part": (
        {"content": [{"type": "text", "text": "hi", "extra": None}]},
        {"content": [{"type": "text", "text": "hi"}]},
    ),
    "a text alone": ({"content": "hi"}, {"content": [{"type": "text", "text": "hi"}]}),
    "a cache's mark": ({"cache_control": {"type": "ephemeral"}}, {}),
    "a cache's mark on a part": (
        {"content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"content": [{"type": "text", "text": "hi"}]},
    ),
}


@pytest.mark.promise("MS-12")
@pytest.mark.parametrize("role", ["user", "system", "tool"])
@pytest.mark.parametrize("change", [*OTHERS, *SAME])
async def test_what_others_said_is_compared_whole(house, role, change):
    recorded, sent = {**OTHERS, **SAME}[change]
    message = {"role": role, "content": "hi", **({"tool_call_id": "c"} if role == "tool" else {})}
    async with house(engine=ScriptedEngine(script=["one", "two"], accepts_token_prompt=True)) as here:
        said = await here.ask([USER, {**message, **recorded}])
        await here.ask([USER, {**message, **sent}, said, USER])
        outcome = "exact" if change in SAME else "fallback:history_not_recorded"
        assert here.outcomes() == ["first", outcome]


def test_a_reader_knows_true_from_one():
    def asked(value):
        return ResponsesRequest(({"type": "message", "role": "user", "content": [{"type": "x", "deep": [value]}]},))

    reader = Reader()
    one, true = reader.conversation(asked(1)), reader.conversation(asked(True))
    assert one.skeleton(0) == Reader().conversation(asked(1)).skeleton(0)
    assert true.skeleton(0) == Reader().conversation(asked(True)).skeleton(0) != one.skeleton(0)


def test_a_reader_tells_a_longer_list_apart_and_no_null_from_an_absent_field():
    def skeleton(reader, message):
        return reader.conversation(ResponsesRequest(({"type": "message", "role": "user", **message},))).skeleton(0)

    reader = Reader()
    short = skeleton(reader, {"content": [{"type": "x", "deep": [1]}]})
    assert skeleton(reader, {"content": [{"type": "x", "deep": [1, 2]}]}) != short
    assert skeleton(reader, {"content": [{"type": "x", "deep": [1]}], "name": None}) == short
    assert skeleton(reader, {"content": [{"type": "x", "deep": [1]}], "name": "bob"}) != short


async def test_a_null_of_a_tool_is_an_absent_field(house):
    function = TOOLS[0]["function"]
    async with house(engine=ScriptedEngine(script=["one", "two", "three"], accepts_token_prompt=True)) as here:
        said = await here.ask([USER], tools=[{"type": "function", "function": {**function, "strict": None}}])
        await here.ask([USER, said, USER], tools=TOOLS)
        await here.ask([USER, said, USER], tools=[{"type": "function", "function": {**function, "strict": True}}])
        assert here.outcomes() == ["first", "exact", "fallback:history_not_recorded"]


async def test_other_tools_or_another_template_setting_are_another_history(house):
    async with house() as here:
        said = without_thoughts(await here.ask([USER]))
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3"}
        await here.ask([USER, said, result], tools=[*TOOLS, TOOLS[0]])
        await here.ask([USER, said, result], chat_template_kwargs={"enable_thinking": False})
        await here.ask([USER, said, result])
        assert here.outcomes()[1:] == ["fallback:history_not_recorded"] * 2 + ["exact"]


SETTINGS = {
    "effort": {"reasoning_effort": "none"},
    "variables": {"chat_template_kwargs": {"enable_thinking": False}},
    "template": {"chat_template": "{{ x }}"},
    "documents": {"documents": [{"title": "a", "text": "b"}]},
    "no tools": {"tool_choice": "none"},
    "unknown": {"something_new": 1},
    "media": {"mm_processor_kwargs": {"fps": 1}},
}


@pytest.mark.promise("MS-12")
@pytest.mark.parametrize("name", SETTINGS)
async def test_a_setting_that_may_shape_prompts_and_comes_or_goes_between_turns_is_another_history(house, name):
    """Each turn's prompt was made with its own request's settings: what came before would have been another."""
    one, two = {}, SETTINGS[name]
    for before, after in ((one, two), (two, one), (two, two)):
        async with house(engine=ScriptedEngine(script=["one", "two"], accepts_token_prompt=True)) as here:
            said = await here.ask([USER], **before)
            await here.ask([USER, said, USER], **after)
            outcome = "exact" if before is after else "fallback:history_not_recorded"
            assert here.outcomes()[-2:] == ["first", outcome]


@pytest.mark.promise("MS-12")
async def test_an_effort_that_changes_is_another_history_in_every_dialect():
    bodies = {
        request_from_chat: ("messages", lambda effort: {"reasoning_effort": effort}),
        request_from_responses: ("input", lambda effort: {"reasoning": {"effort": effort}}),
        request_from_messages: ("messages", lambda effort: {"max_tokens": 9, "output_config": {"effort": effort}}),
    }
    for read, (items, setting) in bodies.items():
        roots = [Reader().conversation(read({items: [USER], **setting(each)})).root for each in ("low", "high", "low")]
        assert roots[0] == roots[2] != roots[1]


@pytest.mark.promise("MS-12")
async def test_sampling_and_what_is_forced_of_a_reply_may_change_between_turns(house):
    forced = {"tool_choice": "required", "response_format": {"type": "json_object"}}
    turns = [
        {**forced, "temperature": 0.1, "max_tokens": 9, "stop": ["x"], "seed": 1, "logprobs": True, "top_logprobs": 1},
        {"temperature": 1, "frequency_penalty": 1, "metadata": {"n": 2}, "tool_choice": "auto", "user": "u"},
        {"response_format": {"type": "text"}, "add_generation_prompt": True, "continue_final_message": False},
    ]
    async with house(engine=Told(script=["1", "2", "3"], accepts_token_prompt=True)) as here:
        messages = [USER]
        for settings in turns:
            messages += [await here.ask(messages, **settings), USER]
        assert here.outcomes() == ["first", "exact", "exact"]
        assert [turn.changed for turn in here.engine.turns] == [("tool_choice", "response_format"), ()]
        assert all(turn.dialect == "chat" and turn.body["messages"] for turn in here.engine.turns)


@pytest.mark.promise("MS-12")
def test_the_format_of_a_reply_is_known_by_either_of_its_names():
    shape = {"type": "json_object"}
    bodies = ({}, {"text": {"format": shape}}, {"response_format": shape}, {"text": {"verbosity": "low"}})
    none, text, chat, low = [Reader().conversation(request_from_responses({"input": "1", **body})) for body in bodies]
    assert none.root == text.root == chat.root == low.root
    assert none.steering == low.steering == {}
    assert text.steering == chat.steering != {}


class Told(ScriptedEngine):
    """Keeps the turns that it was asked to continue."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.turns = []

    async def next_turn(self, turn):
        self.turns.append(turn)
        return await super().next_turn(turn)


async def test_what_a_client_changes_of_the_models_words_is_forgiven_and_counted(house):
    async with house() as here:
        messages = await three_turns(here)
        call = messages[1]["tool_calls"][0]
        messages[1] = {
            **messages[1],
            "tool_calls": [{**call, "function": {"name": "add", "arguments": '{"b":2,"a":1}'}}],
        }
        messages[5] = {
            "role": "assistant",
            "content": [{"type": "text", "text": "It "}, {"type": "text", "text": "is 4."}],
        }
        await here.ask([*messages, {"role": "user", "content": "thanks"}])
        assert here.outcomes()[-1] == "exact"
        assert here.forgiven()[-1] == {"dropped_thinking": 3, "argument_spelling": 1, "rechunked_text": 1}
        assert isinstance(await here.built(), Trainable)


async def test_thoughts_that_are_sent_back_whole_need_no_forgiveness(house):
    async with house() as here:
        said = await here.ask([USER])
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3"}
        await here.ask([USER, said, result])
        assert here.outcomes() == ["first", "exact"]
        assert here.forgiven() == [{}, {}]


@pytest.mark.parametrize("stream", [False, True])
async def test_required_refuses_what_cannot_be_built_and_keeps_what_came_before(house, stream):
    async with house(token_in="required") as here:
        messages = await three_turns(here)
        calls = here.engine.calls
        edited = [*EDITS["user"](messages), {"role": "user", "content": "thanks"}]
        told = await here.ask(edited, stream=stream, status=422)
        assert "token_in is required" in told["error"]["message"]
        assert here.engine.calls == calls
        assert isinstance(await here.built(), Trainable)


async def test_required_needs_an_engine_that_takes_ids_and_a_record_that_can_be_read(house):
    with pytest.raises(ConfigError, match="takes no prompts of ids"):
        async with house(engine=ScriptedEngine(), token_in="required"):
            pass
    blind = Recorder(MemoryStore())
    engine = ScriptedEngine(accepts_token_prompt=True)
    server = ModelServer(name="policy", engine=engine, recorder=blind, token_in="required")
    with pytest.raises(ConfigError, match="cannot be read"):
        await server.app.start()
    await blind.close()


class Deaf(ScriptedEngine):
    """Says that it takes prompts of ids, and renders the messages all the same."""

    async def generate(self, request):
        made = await super().generate(request)
        if request.prompt_token_ids is None:
            return made
        other = np.append(made.tokens.prompt_token_ids, np.uint32(toy_tokenizer.END))
        return type(made)(**{**fields(made), "tokens": type(made.tokens)(other, *fields(made.tokens)[1:])})


def fields(value):
    from dataclasses import fields as names

    told = {each.name: getattr(value, each.name) for each in names(value)}
    return told if "output" in told else list(told.values())


async def test_an_engine_that_answers_from_other_ids_leaves_a_marked_rollout_and_the_client_its_text(house):
    async with house(engine=Deaf(script=SCRIPT, accepts_token_prompt=True)) as here:
        said = await here.ask([USER])
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3"}
        assert (await here.ask([USER, said, result]))["content"] == "so far"
        snapshot = await here.store.freeze("r")
        assert snapshot.incomplete
        assert any(reason.startswith("no_token_ids") for reason in snapshot.reasons)


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}


@pytest.mark.promise("MS-12")
@pytest.mark.parametrize(
    ("after", "more", "outcome"),
    [
        ([], {}, "fallback:prefilled"),
        ([USER], {"continue_final_message": True}, "fallback:prefilled"),
        ([USER], {"add_generation_prompt": False}, "fallback:prefilled"),
        ([USER], {"continue_final_message": None, "add_generation_prompt": True}, "exact"),
        ([IMAGE], {}, "fallback:media"),
        ([USER], {}, "exact"),
    ],
)
async def test_a_turn_that_is_begun_already_or_holds_an_image_is_not_made_of_ids(house, after, more, outcome):
    async with house(engine=ScriptedEngine(script=["one", "two"], accepts_token_prompt=True)) as here:
        said = await here.ask([USER])
        await here.ask([USER, said, *after], **more)
        assert here.outcomes() == ["first", outcome]
        assert (here.engine.requests[-1].prompt_token_ids is None) is (outcome != "exact")


class Kept(MemoryStore):
    """Tells of its entries with some fields changed."""

    def __init__(self, **changed):
        super().__init__()
        self.changed = changed

    async def open_entries(self, rollout_id, since):
        return tuple(replace(entry, **self.changed) for entry in await super().open_entries(rollout_id, since))


NONE = {"generation_token_ids": np.array([], dtype=np.uint32), "generation_log_probs": np.array([])}


@pytest.mark.promise("MS-12")
@pytest.mark.parametrize(
    "changed", [{"media": True}, {"prompt_is_delta": True, "parent_call_id": "call-0"}, NONE], ids=list("mdn")
)
async def test_a_record_whose_ids_are_not_the_whole_of_what_was_asked_and_said_is_nobodys_parent(house, changed):
    for kept, outcome in ((Kept(), "exact"), (Kept(**changed), "fallback:history_not_recorded")):
        async with house(store=kept, engine=ScriptedEngine(script=["one"] * 4, accepts_token_prompt=True)) as here:
            said = await here.ask([USER])
            await here.ask([USER, said, USER])
            assert here.outcomes()[-1] == outcome


async def test_a_turn_cut_by_length_is_closed_before_what_follows(house):
    engine = ScriptedEngine(
        script=[ScriptedReply(text="cut", finish_reason="length"), "end"], accepts_token_prompt=True
    )
    async with house(engine=engine) as here:
        said = await here.ask([USER])
        await here.ask([USER, said, {"role": "user", "content": "go on"}])
        first, second = await here.entries()
        new = second.prompt_token_ids.tolist()[len(whole(first)) :]
        assert new[:2] == [toy_tokenizer.END, toy_tokenizer.BEGIN]
        assert here.outcomes() == ["first", "exact"]


async def test_token_in_goes_on_from_the_record_after_a_restart(house, tmp_path):
    store = SqliteStore(tmp_path / "capture.db")
    async with house(store=store) as here:
        said = without_thoughts(await here.ask([USER]))
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3"}
    async with house(store=store) as here:
        again = without_thoughts(await here.ask([USER, said, result]))
        more = {"role": "tool", "tool_call_id": again["tool_calls"][0]["id"], "content": "4"}
    async with house(store=store) as here:
        await here.ask([USER, said, result, again, more])
        assert here.outcomes() == ["first", "exact", "exact"]
        assert isinstance(await here.built(), Trainable)
    await store.close()


@pytest.mark.parametrize("dialect", ["responses", "messages"])
async def test_the_other_dialects_continue_recorded_ids_too(house, dialect):
    async with house() as here:
        path = f"/ng-rollout/r/training-token-capture/v1/{dialect}"
        if dialect == "responses":
            tools = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
            body = {"model": "m", "tools": tools, "input": [USER]}
        else:
            tools = [{"name": "add", "input_schema": {"type": "object"}}]
            body = {"model": "m", "max_tokens": 99, "tools": tools, "messages": [USER]}
        for _ in range(2):
            reply = json.loads((await here.peer.request("POST", path, body=json.dumps(body).encode())).body)
            if dialect == "responses":
                call = next(item for item in reply["output"] if item["type"] == "function_call")
                result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
                kept = [item for item in reply["output"] if item["type"] != "reasoning"]
                body = {**body, "input": [*body["input"], *kept, result]}
            else:
                kept = [part for part in reply["content"] if part["type"] != "thinking"]
                call = next(part for part in kept if part["type"] == "tool_use")
                result = {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "3"}],
                }
                body = {**body, "messages": [*body["messages"], {"role": "assistant", "content": kept}, result]}
        await here.peer.request("POST", path, body=json.dumps(body).encode())
        assert here.outcomes() == ["first", "exact", "exact"]
        assert isinstance(await here.built(), Trainable)
