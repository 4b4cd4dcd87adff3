"""Bodies that no client should send: read or refused in the dialect's shape, never a fault of ours, never a hang."""

from __future__ import annotations

import asyncio
import copy
import json
import random

import pytest
from tests.unit.model.wire import ASK, CAPTURED, ENDS

from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import Recorder
from toprope.capture.sqlite_store import SqliteStore

pytestmark = pytest.mark.promise("MS-5")

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
SEEDS = {
    "chat": {
        "model": "m",
        "stream": False,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "be"}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "5"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
        },
        "temperature": 0.5,
        "stop": ["x"],
        "max_tokens": 7,
        "logprobs": True,
        "top_logprobs": None,
    },
    "responses": {
        "model": "m",
        "stream": False,
        "instructions": "be",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {
                "type": "function_call",
                "call_id": "c",
                "name": "f",
                "arguments": "{}",
                "id": "fc",
                "status": "completed",
            },
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "5"}]},
            {"role": "assistant", "content": "text"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {}}, {"type": "web_search"}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "reasoning": {"effort": "low"},
        "metadata": {"a": "b"},
        "max_output_tokens": 9,
    },
    "messages": {
        "model": "m",
        "max_tokens": 9,
        "stream": False,
        "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}, IMAGE]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text"}]}]},
            {"role": "system", "content": "later"},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}, {"type": "web_search_20250305", "name": "w"}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "stop_sequences": ["x"],
    },
}
ODD = (
    None, True, False, 0, -1, 2**70, 1e308, 10**400, -(10**400),
    "", "\ud800", "x" * 3000, "\u2028", [], {}, [None], [[]], {"type": None},
    {"type": "text"}, {"type": 5}, {"role": "user"}, "data:image/png;base64,%%%", {"a": {"b": {"c": []}}},
)  # fmt: skip


def places(value, path=()):
    """Every place of a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield from places(each, (*path, name))


def damaged(seed, rng):
    """A copy of `seed` with one to four places replaced, removed, doubled or renamed."""
    body = copy.deepcopy(seed)
    for _ in range(rng.randint(1, 4)):
        path = rng.choice([each for each in places(body) if each])
        holder = body
        for name in path[:-1]:
            holder = holder[name]
        what = rng.randrange(5)
        if what == 0:
            del holder[path[-1]]
        elif what == 1 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[path[-1]]))
        elif what == 2 and isinstance(holder, dict):
            holder["unknown"] = holder.pop(path[-1])
        else:
            holder[path[-1]] = copy.deepcopy(rng.choice(ODD))
        if not any(each for each in places(body)):
            return body
    return body


def spelled(body, rng):
    """The bytes of a body, sometimes cut or with a byte changed."""
    data = json.dumps(body).encode()
    if rng.random() < 0.1:
        data = data[: rng.randrange(len(data) + 1)]
    elif rng.random() < 0.1 and data:
        at = rng.randrange(len(data))
        data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    return data


@pytest.mark.parametrize("dialect", sorted(ASK))
async def test_a_damaged_body_is_read_or_refused_and_never_a_fault(serve, dialect):
    rng = random.Random(f"5 {dialect}")
    store, path = MemoryStore(), CAPTURED + ASK[dialect][0]
    statuses = {}
    async with serve(recorder=Recorder(store, reader=store)) as (peer, _):
        for number in range(600):
            data = spelled(damaged(SEEDS[dialect], rng), rng)
            async with asyncio.timeout(20):
                reply = await peer.request("POST", path, body=data, headers={"content-type": "application/json"})
            statuses[reply.status] = statuses.get(reply.status, 0) + 1
            assert reply.status in (200, 400, 422), (number, data, reply.body)
            if reply.status != 200:
                assert (reply.json().get("type") == "error") == (dialect == "messages")
                assert reply.json()["error"]["message"]
                assert reply.headers["x-should-retry"] == "false"
    assert statuses[200] > 50
    assert sum(statuses.values()) - statuses[200] > 50
    # A half of a surrogate pair in a recorded field (a model's name) is what no record can carry: said, not swallowed.
    assert {reason.partition(":")[0] for reason in (await store.freeze("4-2")).reasons} <= {"write_failed"}


@pytest.mark.parametrize("dialect", sorted(ASK))
async def test_the_seeds_themselves_are_served_plain_streamed_and_counted(serve, dialect):
    async with serve() as (peer, _):
        body = SEEDS[dialect]
        plain = await peer.request("POST", ASK[dialect][0], body=body)
        streamed = await peer.request("POST", ASK[dialect][0], body={**body, "stream": True})
        assert (plain.status, streamed.status) == (200, 200)
        assert ENDS[dialect] in streamed.body
        if dialect == "messages":
            counted = await peer.request("POST", "/v1/messages/count_tokens", body=body)
            assert (counted.status, counted.headers["x-toprope-estimate"]) == (200, "true")


@pytest.mark.parametrize("name", ["temperature", "top_p"])
@pytest.mark.parametrize("dialect", sorted(ASK))
async def test_a_number_that_no_float_can_be_is_refused_by_its_name(serve, dialect, name):
    path, body = ASK[dialect]
    async with serve() as (peer, _):
        for size in (10**400, -(10**400), 10**4200):
            reply = await peer.request("POST", path, body=json.dumps({**body, name: size}).encode())
            assert (reply.status, name in reply.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("count", ["9" * 5000, str(2**63), str(2**63 - 1), "9" * 20, "-1", "\u00b2", "1.5", "x", ""])
@pytest.mark.parametrize("dialect", sorted(ASK))
async def test_a_retry_count_that_no_library_reaches_marks_nothing(serve, tmp_path, dialect, count):
    store = SqliteStore(tmp_path / "c.db")
    path, body = ASK[dialect]
    async with serve(recorder=Recorder(store, reader=store)) as (peer, _):
        headers = {"x-stainless-retry-count": count}
        for _ in range(2):
            assert (await peer.request("POST", CAPTURED + path, body=body, headers=headers)).status == 200
    snapshot = await store.freeze("4-2")
    await store.close()
    assert (len(snapshot.entries), snapshot.incomplete) == (2, False)


@pytest.mark.promise("MS-6")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "fine", "bad"),
    [
        ("n", [None, 1, 1.0], [2, 0, "1", True, [1]]),
        ("best_of", [None, 1], [2, True]),
        ("use_beam_search", [None, False], [True, 0, 1]),
        ("echo", [None, False], [True, "yes"]),
        ("truncate_prompt_tokens", [None], [5, -1, 0, False]),
    ],
)
@pytest.mark.parametrize("dialect", sorted(ASK))
async def test_a_captured_call_makes_one_reply_that_was_sampled_as_it_is(serve, dialect, name, fine, bad, stream):
    store = MemoryStore()
    path, body = ASK[dialect]
    async with serve(recorder=Recorder(store, reader=store)) as (peer, _):
        for value, status in [*((each, 400) for each in bad), *((each, 200) for each in fine)]:
            asked = {**body, name: value, "stream": stream}
            reply = await peer.request("POST", CAPTURED + path, body=asked)
            plain = await peer.request("POST", "/ng-rollout/5-2" + path, body=asked)
            assert reply.status == status, value
            assert plain.status == (reply.status if name == "n" else 200)
            if reply.status == 400:
                assert reply.json()["error"]["message"].startswith(f"{name}: ")
    snapshot = await store.freeze("4-2")
    assert (len(snapshot.entries), snapshot.incomplete) == (len(fine), False)


@pytest.mark.promise("MS-6")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", sorted(ASK))
async def test_a_captured_call_is_never_asked_with_ids_in_place_of_its_messages(serve, dialect, stream):
    path, body = ASK[dialect]
    store = MemoryStore()
    async with serve(recorder=Recorder(store, reader=store)) as (peer, _):
        for given, status in (
            ({"prompt_token_ids": [120, 121]}, 400),
            ({"prompt_token_ids": [], "mine": 1}, 400),
            ({"prompt_token_ids": None}, 200),
            ({"mine": 1}, 200),
            ("odd", 200),
        ):
            asked = {**body, "kv_transfer_params": given, "stream": stream}
            reply = await peer.request("POST", CAPTURED + path, body=asked)
            assert reply.status == status, given
            if status == 400:
                assert reply.json()["error"]["message"].startswith("kv_transfer_params.prompt_token_ids: ")
            assert (await peer.request("POST", "/ng-rollout/5-2" + path, body=asked)).status == 200
    snapshot = await store.freeze("4-2")
    assert (len(snapshot.entries), snapshot.incomplete) == (3, False)
