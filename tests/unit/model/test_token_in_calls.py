"""Token-in beside function calls: other kinds of calls as clients echo them, and what a record is known by."""

from __future__ import annotations

import json

import pytest

from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import Recorder
from toprope.dialects.chat_request import request_from_chat
from toprope.dialects.responses import request_from_responses
from toprope.errors.tree import EngineUnavailable, ModelRejected
from toprope.http.client import Client
from toprope.servers.model.engines.base import CannotContinue
from toprope.servers.model.server import ModelServer
from toprope.servers.model.token_in import record
from toprope.servers.model.token_in.record import NOTE, Conversations
from toprope.servers.model.token_in.said import Conversation, Reader, forgiven, segment_of
from toprope.testing.scripted import ScriptedEngine
from toprope.tokens.entry import TokenEntry

pytestmark = pytest.mark.promise("MS-12")

CALLS = {
    "custom": {"type": "custom_tool_call", "call_id": "k", "name": "p", "input": "x", "extra_content": {"a": "s"}},
    "shell": {"type": "local_shell_call", "call_id": "k", "action": {"command": ["ls"], "env": {}}, "note": "s"},
    "mcp": {"type": "mcp_call", "name": "p", "arguments": "{}", "server_label": "l", "output": "o"},
    "unknown": {"type": "some_call", "call_id": "k", "input": {"a": 1}, "signature": "s"},
    "nameless": {"type": "compaction", "sealed": "abc"},
}


def given(echo):
    body = {"model": "m", "input": [{"role": "user", "content": "hi"}, echo, {"role": "user", "content": "on"}]}
    return Reader().conversation(request_from_responses(body)).segments


def said_as(kind, **echo):
    """What is forgiven of a recorded call that comes back with these fields; None where it is another turn."""
    told = {**CALLS[kind], "id": "x_1", "status": "completed"}
    return forgiven([segment_of([told])], given({**told, **echo}))


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_of_any_kind_that_comes_back_with_nulls_is_the_same(kind):
    assert said_as(kind, async_=None, caller=None, namespace=None, name=CALLS[kind].get("name"), status=None) == {}
    assert said_as(kind, call_id="another") == {}
    if "action" in CALLS[kind]:
        assert said_as(kind, action={**CALLS[kind]["action"], "timeout_ms": None}) == {}


@pytest.mark.parametrize(
    ("kind", "left_out"), [("custom", "extra_content"), ("shell", "note"), ("mcp", "output"), ("unknown", "signature")]
)
def test_a_field_about_a_call_may_be_left_out(kind, left_out):
    echo = {name: value for name, value in CALLS[kind].items() if name != left_out}
    assert forgiven([segment_of([CALLS[kind]])], given(echo)) == {}


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("custom", {"input": "y"}),
        ("custom", {"name": "q"}),
        ("custom", {"input": None}),
        ("custom", {"type": "other_call"}),
        ("shell", {"action": {"command": ["rm"], "env": {}}}),
        ("mcp", {"arguments": "[]"}),
        ("mcp", {"server_label": "m"}),
        ("unknown", {"input": {"a": 2}}),
        ("nameless", {"sealed": "abd"}),
        ("nameless", {"sealed": None}),
        ("nameless", {"more": "x"}),
    ],
)
def test_what_a_call_does_may_not_be_changed(kind, changed):
    assert said_as(kind, **changed) is None


def test_a_call_may_be_nested_as_deep_as_a_body_can_be():
    deep = {}
    for _ in range(700):
        deep = {"a": deep}
    assert said_as("unknown", input=deep) is None
    call = {**CALLS["unknown"], "input": deep}
    assert forgiven([segment_of([call])], given(call)) == {}


def test_where_a_block_of_others_ends_is_part_of_the_skeleton():
    one = Conversation("r", (("a", "b"), ("c",), ()), (), 0)
    two = Conversation("r", (("a",), ("b", "c"), ()), (), 0)
    assert one.skeleton(1) != two.skeleton(1)


# -- the record ------------------------------------------------------------------------------------------------------


def conversation(*items):
    return Reader().conversation(request_from_chat({"model": "m", "messages": list(items)}))


USER, ON = {"role": "user", "content": "hi"}, {"role": "user", "content": "on"}


def entry(name, said, *, ids, thought=None, key="r"):
    items = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]}]
    if thought is not None:
        items.insert(0, {"type": "reasoning", "content": [{"type": "reasoning_text", "text": thought}]})
    note = {"skeleton": conversation(USER).skeleton(0)}
    return TokenEntry(key, name, "m", 1.0, [1], ids, [-0.5] * len(ids), output_items=tuple(items), extra={NOTE: note})


async def recorded(*entries):
    store = MemoryStore()
    for each in entries:
        await store.begin_call(each.rollout_id, each.model_call_id)
        await store.put(each)
    return Recorder(store, reader=store)


async def test_of_calls_that_fit_the_one_with_the_least_to_forgive_is_continued():
    recorder = await recorded(entry("a", "so", ids=[5], thought="well"), entry("b", "so", ids=[6]))
    found = await Conversations(recorder).parent_of("r", conversation(USER, {"role": "assistant", "content": "so"}, ON))
    assert (found.call_id, dict(found.forgiven)) == ("b", {})
    twice = await recorded(entry("a", "so", ids=[5]), entry("b", "so", ids=[6]))
    with pytest.raises(CannotContinue, match="say the same with other ids"):
        await Conversations(twice).parent_of("r", conversation(USER, {"role": "assistant", "content": "so"}, ON))


async def test_the_ids_of_the_oldest_calls_are_let_go_and_each_is_counted_once(monkeypatch):
    monkeypatch.setattr(record, "_MAX_IDS", 8)
    entries = [entry(name, name, ids=[5, 6, 7], key=name) for name in "abc"]  # four ids each, with the prompt
    reads = []

    class Counted(Recorder):
        async def recorded(self, key, since=0):
            reads.append(key)
            return await super().recorded(key, since)

    store = MemoryStore()
    for each in entries:
        await store.begin_call(each.rollout_id, each.model_call_id)
        await store.put(each)
    here = Conversations(Counted(store, reader=store))

    async def read_again(name):
        """Whether the ids of this call had to be read again, the look at what is new apart."""
        reads.clear()
        found = await here.parent_of(name, conversation(USER, {"role": "assistant", "content": name}, ON))
        assert found.generation_token_ids.tolist() == [5, 6, 7]
        return len(reads) > 1

    for name in "abc":
        await read_again(name)
    assert [await read_again(name) for name in "cba"] == [False, False, True]
    monkeypatch.setattr(record, "_MAX_ROLLOUTS", 0)  # each is forgotten at once, and read anew
    for _ in range(5):
        await read_again("a")
        await read_again("b")
    monkeypatch.setattr(record, "_MAX_ROLLOUTS", 9)
    assert [await read_again(name) for name in "abab"] == [False] * 4


# -- what a call is given --------------------------------------------------------------------------------------------

PATH = "/ng-rollout/r/training-token-capture/v1/chat/completions"


async def ask(engine, mode, *bodies):
    """The replies and the entries of a server in front of `engine`."""
    store = MemoryStore()
    server = ModelServer(name="policy", engine=engine, recorder=Recorder(store, reader=store), token_in=mode)
    await server.app.start()
    async with Client(inline={"policy": server.app}) as client:
        peer = client.peer("inline://policy", None)
        replies = [
            await peer.request("POST", PATH, body=json.dumps({"model": "m", "messages": body}).encode())
            for body in bodies
        ]
    await server.app.stop()
    return replies, await store.open_entries("r", 0)


class Refusing(ScriptedEngine):
    error: Exception

    async def next_turn(self, turn):
        raise self.error


@pytest.mark.parametrize(
    ("error", "status"), [(ModelRejected("no /tokenize here"), 422), (EngineUnavailable("restarts"), 503)]
)
async def test_required_refuses_for_good_where_asking_the_engine_again_changes_nothing(error, status):
    engine = Refusing(script=["one", "two"], accepts_token_prompt=True)
    engine.error = error
    said = {"role": "assistant", "content": "one"}
    (first, second), _ = await ask(engine, "required", [USER], [USER, said, ON])
    assert (first.status, second.status) == (200, status)
    assert second.headers.get("x-should-retry") == ("false" if status == 422 else None)
    assert str(error) in json.loads(second.body)["error"]["message"]


async def test_a_conversation_that_begins_with_shown_turns_is_continued_from_its_first_call():
    engine = ScriptedEngine(script=lambda told: "two", accepts_token_prompt=True)
    shown = [USER, {"role": "assistant", "content": "one"}, ON]
    replies, entries = await ask(engine, "required", shown, [*shown, {"role": "assistant", "content": "two"}, ON])
    assert [reply.status for reply in replies] == [200, 200]
    first, second = entries
    whole = [*first.prompt_token_ids.tolist(), *first.generation_token_ids.tolist()]
    assert engine.requests[1].prompt_token_ids.tolist()[: len(whole)] == whole
    assert second.parent_call_id == first.model_call_id
