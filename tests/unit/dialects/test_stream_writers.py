"""What leaves at once, what waits for the finish, and what may not be said: rules of every writer."""

from __future__ import annotations

import json

import pytest
from tests.unit.dialects.scripted_replies import told

from toprope.dialects.deltas import ReasoningDelta, TextDelta, ToolCallDelta
from toprope.dialects.emitted import PIECE
from toprope.dialects.pivot import PivotReply, with_item_ids
from toprope.dialects.responses import request_from_responses
from toprope.dialects.stream import StreamContradiction, open_stream
from toprope.wire.responses import Usage

REQUEST = request_from_responses({"input": "x"})
DIALECTS = ("chat", "responses", "messages")
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
TEXT = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "I add", "annotations": []}],
}
ADD = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
MUL = {"type": "function_call", "call_id": "c1", "name": "mul", "arguments": ""}
TRIPLE = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}


def _open(dialect, **options):
    return open_stream(dialect, REQUEST, reply_id="r", model="m", created=1, **options)


def _reply(*items, finish="stop", **fields):
    return PivotReply(with_item_ids(items, "r"), finish, "m", Usage(3, 4, 1), "r", 1, **fields)


def _events(data):
    """The parsed data of each event, `event:` lines checked against it."""
    out = []
    for block in data.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines and lines[-1] != "data: [DONE]":
            value = json.loads(lines[-1].removeprefix("data: "))
            assert lines[:-1] == ([f"event: {value['type']}"] if "type" in value else [])
            out.append(value)
    return out


def _types(data):
    return [event.get("type") for event in _events(data)]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_nothing_of_the_end_leaves_before_finish_even_when_every_token_was_told(dialect):
    writer = _open(dialect, include_usage=True)
    told = [ReasoningDelta(0, "hm"), TextDelta(1, "I add"), ToolCallDelta(2, '{"a": 1}', "add", "c1")]
    early = writer.open() + b"".join(map(writer.delta, told))
    late = writer.finish(_reply(THOUGHT, TEXT, ADD, finish="tool_calls"))
    ends = {
        "chat": (b'"finish_reason":"', b'"completion_tokens"', b"[DONE]"),
        "responses": (b"arguments.done", b'"output_tokens"', b"response.completed"),
        "messages": (b'"stop_reason":"', b"message_delta", b"message_stop"),
    }[dialect]
    for end in ends:
        assert end not in early
        assert end in late
    assert early.count(b"hm") >= 1
    assert b'"a' in early


def test_an_item_is_closed_when_the_next_begins_and_the_last_one_only_at_the_finish():
    writer = _open("responses")
    assert _types(writer.delta(TextDelta(0, "I add"))) == [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
    ]
    assert _types(writer.delta(ToolCallDelta(1, '{"a"', "add", "c1"))) == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
    ]
    assert _types(writer.finish(_reply(TEXT, ADD))) == [
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    writer = _open("messages")
    assert _types(writer.delta(TextDelta(0, "I add"))) == ["content_block_start", "content_block_delta"]
    assert _types(writer.delta(ToolCallDelta(1, "", "add", "c1"))) == ["content_block_stop", "content_block_start"]
    assert _types(writer.finish(_reply(TEXT, ADD))) == [
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_an_item_closed_early_is_the_item_of_the_record():
    writer = _open("responses")
    writer.delta(ReasoningDelta(0, "hm"))
    writer.delta(TextDelta(1, "I add"))
    writer.delta(ToolCallDelta(2, '{"a": 1}', "add", "c1"))
    closed = _events(writer.delta(ToolCallDelta(3, "", "mul", "c1")))
    record = with_item_ids((THOUGHT, TEXT, ADD, MUL), "r")
    assert [event["item"] for event in closed if event["type"] == "response.output_item.done"] == [record[2]]
    assert [event["item"]["call_id"] for event in closed if event["type"].endswith("added")] == [record[3]["call_id"]]


def test_responses_events_are_numbered_without_a_gap_over_the_whole_stream():
    writer = _open("responses")
    data = writer.open() + writer.keep_alive() + writer.delta(TextDelta(0, "I ")) + writer.finish(_reply(TEXT, ADD))
    events = _events(data)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_engine_that_told_nothing_is_written_whole_at_the_finish(dialect):
    writer = _open(dialect)
    text = (writer.open() + writer.finish(_reply(THOUGHT, TEXT, ADD, MUL, finish="tool_calls"))).decode()
    for said in ("hm", "I add", "add", "mul", '\\"a\\": 1'):
        assert said in text
    assert text.count("call_r_3") >= 1


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("told", "final"),
    [
        ([TextDelta(0, "I sub")], (TEXT,)),
        ([TextDelta(0, "I add up")], (TEXT,)),
        ([ReasoningDelta(0, "I add")], (TEXT,)),
        ([ToolCallDelta(0, '{"a"', "mul", "c1")], (ADD,)),
        ([ToolCallDelta(0, '{"a"', "add", "c9")], (ADD,)),
        ([ToolCallDelta(0, '{"b"', "add", "c1")], (ADD,)),
        ([TextDelta(0, "I add"), ToolCallDelta(1, "{", "add", "c1")], (TEXT,)),
    ],
    ids=["text", "more text", "kind", "name", "call id", "arguments", "one too many"],
)
def test_a_reply_that_does_not_continue_what_was_told_is_never_finished(dialect, told, final):
    writer = _open(dialect)
    for delta in told:
        writer.delta(delta)
    with pytest.raises(StreamContradiction):
        writer.finish(_reply(*final))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "told",
    [
        [TextDelta(1, "x")],
        [ReasoningDelta(0, "x"), TextDelta(1, "y"), ReasoningDelta(0, "z")],
        [TextDelta(0, "x"), ToolCallDelta(0, "{", "f")],
        [ToolCallDelta(0, "{")],
    ],
    ids=["an item left out", "an ended item", "another kind", "a call without a name"],
)
def test_a_delta_that_cannot_follow_is_refused(dialect, told):
    writer = _open(dialect)
    for delta in told[:-1]:
        writer.delta(delta)
    with pytest.raises(StreamContradiction):
        writer.delta(told[-1])


@pytest.mark.parametrize("dialect", ["responses", "messages"])
def test_an_item_that_ended_too_soon_is_a_contradiction(dialect):
    writer = _open(dialect)
    writer.delta(TextDelta(0, "I "))
    writer.delta(ToolCallDelta(1, "", "add", "c1"))
    with pytest.raises(StreamContradiction):
        writer.finish(_reply(TEXT, ADD))


def test_items_of_other_kinds_and_parts_have_their_events_and_stand_in_the_response():
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "***"}
    message = {
        "type": "message",
        "role": "assistant",
        "content": [*TEXT["content"], {"type": "refusal", "refusal": "no"}],
    }
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}
    writer = _open("responses")
    events = _events(writer.finish(_reply(thought, message, custom, {"type": "compaction", "x": 1})))
    types = [event["type"] for event in events]
    for kind in ("refusal.delta", "custom_tool_call_input.done", "reasoning_summary_text.delta"):
        assert f"response.{kind}" in types
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert types.count("response.output_item.added") == 4


@pytest.mark.parametrize(
    ("finish", "end"), [("length", "incomplete"), ("content_filter", "incomplete"), ("stop", "completed")]
)
def test_a_cut_response_ends_incomplete(finish, end):
    assert _types(_open("responses").finish(_reply(TEXT, finish=finish)))[-1] == f"response.{end}"


def test_chat_usage_comes_where_it_was_asked_for_and_in_a_chunk_of_its_own():
    events = _events(_open("chat", include_usage=True).finish(_reply(TEXT)))
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == 7
    assert all(event["usage"] is None for event in events[:-1])
    assert all("usage" not in event for event in _events(_open("chat").finish(_reply(TEXT))))


def test_messages_have_counts_at_both_ends():
    writer = _open("messages")
    start, *_, delta, _ = _events(writer.open() + writer.finish(_reply(TEXT)))
    names = {"input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"}
    assert start["message"]["usage"].keys() >= names
    assert delta["usage"] == {
        **dict.fromkeys(names, 0),
        "input_tokens": 2,
        "cache_read_input_tokens": 1,
        "output_tokens": 4,
    }


@pytest.mark.parametrize("dialect", DIALECTS)
def test_tokens_leave_with_the_finish_and_only_where_they_were_asked_for(dialect):
    assert b"token_ids" not in _open(dialect).finish(_reply(TEXT))
    assert b'"generation_token_ids":[2]' in _open(dialect).finish(_reply(TEXT, tokens=TRIPLE))


def test_arguments_that_are_no_object_are_told_as_one_when_the_block_stops():
    call = {**ADD, "arguments": "rm -rf"}
    writer = _open("messages")
    early = _events(writer.delta(ToolCallDelta(0, " ", "add", "c1")) + writer.delta(ToolCallDelta(0, "rm")))
    assert [event["type"] for event in early] == ["content_block_start"]
    call["arguments"] = " rm -rf"
    late = _events(writer.finish(_reply(call)))
    assert json.loads(late[0]["delta"]["partial_json"]) == {"raw_arguments": " rm -rf"}


def test_every_call_has_an_argument_delta_an_empty_one_too():
    events = _events(_open("messages").finish(_reply(ADD, MUL)))
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert pieces == ['{"a": 1}', ""]
    assert [e["content_block"]["input"] for e in events if e["type"] == "content_block_start"] == [{}, {}]


def test_a_triple_stands_in_the_last_items_done_and_not_in_its_beginning():
    events = _events(_open("responses").finish(_reply(TEXT, ADD, tokens=TRIPLE)))
    carrying = [event["type"] for event in events if "generation_token_ids" in json.dumps(event)]
    assert carrying == ["response.output_item.done", "response.completed"]


def test_logprobs_that_a_chat_client_asked_for_come_with_the_finish():
    logprobs = {"content": [{"token": "I", "logprob": -0.5}]}
    chosen = [event["choices"][0] for event in _events(_open("chat").finish(_reply(TEXT, logprobs=logprobs)))]
    assert [choice["logprobs"] for choice in chosen] == [None, logprobs]


@pytest.mark.promise("MS-1")
@pytest.mark.parametrize("dialect", DIALECTS)
def test_line_ends_of_unicode_never_stand_raw_in_an_event(dialect):
    text = "a\u2028b\u2029c\x85d\ud800"
    item = {**TEXT, "content": [{"type": "output_text", "text": text, "annotations": []}]}
    writer = _open(dialect)
    data = writer.open() + writer.delta(TextDelta(0, text)) + writer.finish(_reply(item))
    assert data.decode().splitlines() == data.decode().split("\n")[:-1]
    assert any(text in json.dumps(event, ensure_ascii=False) for event in _events(data))


def test_a_keep_alive_is_a_comment_and_a_ping_where_the_message_has_started():
    assert _open("messages").keep_alive().startswith(b":")
    writer = _open("messages")
    writer.open()
    assert _events(writer.keep_alive()) == [{"type": "ping"}]
    assert all(_open(dialect).keep_alive() == b": keep-alive\n\n" for dialect in ("chat", "responses"))


def test_a_long_stream_of_small_deltas_takes_linear_time():
    for dialect in DIALECTS:
        writer = _open(dialect)
        for _ in range(20_000):
            writer.delta(TextDelta(0, "ab"))
        item = {**TEXT, "content": [{"type": "output_text", "text": "ab" * 20_000, "annotations": []}]}
        assert writer.finish(_reply(item))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_piece_put_into_its_event_makes_the_bytes_that_writing_the_whole_event_makes(dialect):
    for seed in range(400):
        script, short, whole = told(seed, objects_only=False), _open(dialect), _open(dialect)
        whole._emitted.grow = lambda delta: None  # every delta is written as the first one of its item is
        for delta in script.deltas:
            assert short.delta(delta) == whole.delta(delta)
        assert [each.pieces for each in short._emitted.items] == [each.pieces for each in whole._emitted.items]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_model_that_is_named_like_the_place_of_a_piece_is_written_as_it_is(dialect):
    writer = open_stream(dialect, REQUEST, reply_id=PIECE, model=PIECE, created=1)
    texts = ["a", "b", PIECE, "\u2028\ud800"]
    events = [_events(writer.delta(TextDelta(0, text)))[-1] for text in texts]
    said = {
        "chat": lambda event: event["choices"][0]["delta"]["content"],
        "responses": lambda event: event["delta"],
        "messages": lambda event: event["delta"]["text"],
    }[dialect]
    assert [said(event) for event in events] == texts
    if dialect == "chat":
        assert {event["model"] for event in events} == {PIECE}
