"""Fields of assistant messages that nobody reads: copies say nothing new, whatever else stands there is a turn."""

from __future__ import annotations

import copy

import pytest

from toprope.dialects.chat_history import items_from_messages
from toprope.dialects.chat_reply import chat_message, output_from_chat
from toprope.dialects.pivot import with_item_ids
from toprope.dialects.responses import items_from_input
from toprope.tokens.items import CountedMarks, item_digests

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
RECORDED = (
    {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm so"}]},
    {
        "type": "message",
        "id": "m",
        "role": "assistant",
        "content": [{"type": "output_text", "text": '{"a": [1, "b"]}'}],
    },
    {"type": "function_call", "id": "fc", "call_id": "c1", "name": "add", "arguments": "{}"},
)
TOLD = {"role": "assistant", "content": '{"a": [1, "b"]}', "reasoning_content": "hm so", "tool_calls": [CALL]}


def _unexplained(*messages, recorded=RECORDED):
    return CountedMarks(item_digests(recorded)).missing(item_digests(items_from_messages(messages)))


@pytest.mark.parametrize(
    "more",
    [
        {"reasoning": "hm so"},
        {"thinking": "hm so"},
        {"provider_specific_fields": {"reasoning_content": "hm so", "refusal": None}},
        {"provider_specific_fields": {"reasoning": "hm so"}, "function_call": None, "audio": None},
        {"thinking_blocks": [{"type": "thinking", "thinking": "hm so", "signature": "x"}]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "hm"}, {"type": "thinking", "thinking": " so"}]},
        {"reasoning_details": [{"type": "reasoning.text", "text": "hm so", "format": "unknown", "index": 0}]},
        {"function_call": {"name": "add", "arguments": "{}"}},
        {"parsed": {"a": [1, "b"]}},
        {"name": "planner", "cache_control": {"type": "ephemeral"}, "prefix": True, "timestamp": 1700000000.5},
        {"tool_calls": [{**CALL, "index": 0, "function": {**CALL["function"], "parsed_arguments": {"a": 1}}}]},
        {"tool_calls": [{**CALL, "provider_specific_fields": None, "extra_content": {}}]},
        {"annotations": [], "refusal": None, "prompt_token_ids": [1, 2], "token_ids": [3]},
    ],
)
def test_copies_that_programs_add_to_a_turn_say_nothing_new(more):
    assert _unexplained({**TOLD, **more}) == ()
    without_text = {**TOLD, **more, "content": None}
    if "parsed" not in more:
        assert [item["type"] for item in items_from_messages([without_text])] == ["reasoning", "function_call"]
        assert _unexplained(without_text) == ()


NOTES = (
    "id", "uuid", "status", "name", "phase", "object", "model", "provider", "created", "created_at", "timestamp",
    "usage", "cost", "index", "finish_reason", "stop_reason", "stop_sequence", "container", "context_management",
    "logprobs", "cache_control", "prefix", "partial", "weight",
)  # fmt: skip


@pytest.mark.parametrize("note", NOTES)
def test_a_note_about_a_turn_is_no_turn(note):
    for value in ("2026", 7, {"applied_edits": [{"type": "clear", "cleared": 3}]}):
        assert _unexplained({**TOLD, note: value}) == ()
        if note not in ("id", "uuid"):
            assert _unexplained({**TOLD, "content": None, note: value}) == ()
        (item,) = items_from_messages([{"role": "user", "content": "x", note: value}])
        assert item_digests([{**item, "role": "assistant", "content": ""}]) == ()


LOST = [
    {"thinking": "LOST"},
    {"reasoning": "LOST"},
    {"reasoning": {"text": "LOST"}},
    {"refusal": {"text": "LOST"}},
    {"audio": {"transcript": "LOST"}},
    {"annotations": ["LOST"]},
    {"reasoning_details": [{"type": "reasoning.text", "text": "LOST"}]},
    {"provider_specific_fields": {"thinking": "LOST"}},
    {"thinking_blocks": [{"type": "thinking", "thinking": "LOST"}]},
    {"thinking_blocks": [{"type": "thinking", "thinking": "hm so", "more": "LOST"}]},
    {"function_call": {"name": "add", "arguments": "LOST"}},
    {"parsed": {"a": "LOST"}},
    {"a_field_of_tomorrow": 42},
    {"tool_calls": [{**CALL, "extra_content": {"google": {"thought": "LOST"}}}]},
    {"tool_calls": [{**CALL, "function": {**CALL["function"], "thinking": "LOST"}}]},
    {"tool_calls": [CALL, {"id": "c1", "type": "custom", "custom": {"name": "add", "input": "", "thinking": "LOST"}}]},
]


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("lost", LOST)
def test_what_stands_in_a_field_that_is_not_read_is_seen_beside_a_recorded_turn(lost):
    shapes = [{**TOLD, **lost}, {**TOLD, **lost, "content": None}, {**TOLD, **lost, "content": ""}]
    if "reasoning" not in lost and "thinking_blocks" not in lost:
        shapes.append({k: v for k, v in {**TOLD, **lost}.items() if k != "reasoning_content"})
    for turn in shapes:
        before = copy.deepcopy(turn)
        assert _unexplained(turn), turn
        assert turn == before


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("lost", LOST)
def test_a_turn_that_stands_in_another_field_alone_is_a_turn(lost):
    for content in ("", None, [], [{"type": "text", "text": ""}]):
        assert _unexplained(TOLD, {"role": "assistant", "content": content, **lost}), content


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("said", [{"content": "hi"}, {"content": "hi", "reasoning": "hm"}])
@pytest.mark.parametrize("more", [{"reasoning_details": [{"text": "why"}]}, {"annotations": [{"url": "u"}]}])
def test_fields_of_an_upstream_come_back_as_they_were_recorded(said, more):
    output = output_from_chat({"role": "assistant", **said, **more}, "x")
    echo = chat_message(output)
    assert echo.items() >= more.items()
    moved = {**{k: v for k, v in echo.items() if k not in more}, "provider_specific_fields": more}
    dropped = {k: v for k, v in echo.items() if k not in more}
    for turn in (echo, moved, dropped):
        assert _unexplained(turn, recorded=output) == (), turn
    assert _unexplained({**echo, next(iter(more)): [{"text": "LOST"}]}, recorded=output)
    items = items_from_input([dict(item) for item in with_item_ids(output, "r")])
    assert CountedMarks(item_digests(output)).missing(item_digests(items)) == ()
