"""An upstream's chunks, in every shape seen in the field: the same completion as plain, and deltas in its order."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from tests.unit.dialects.scripted_replies import told, written

from toprope.dialects.chat_reply import chat_reply, finish_from_chat, output_from_chat
from toprope.dialects.chat_stream_items import GrowingCall
from toprope.dialects.chat_stream_reader import ChatStreamReader
from toprope.dialects.deltas import ReasoningDelta, TextDelta, ToolCallDelta
from toprope.dialects.pivot import PivotReply, with_item_ids
from toprope.dialects.responses import request_from_responses
from toprope.dialects.stream import StreamContradiction, open_stream
from toprope.wire.chat import BadChatReply, read_chat_object, read_chat_reply
from toprope.wire.responses import Usage

REQUEST = request_from_responses({"input": "x"})
DIALECTS = ("chat", "responses", "messages")


def _chunk(delta=None, /, **choice):
    choice = {"index": 0, "delta": delta or {}, "finish_reason": None, **choice}
    return {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def _call(index, arguments="", **fields):
    name = {"name": fields.pop("name")} if "name" in fields else {}
    return {"index": index, "function": {**name, "arguments": arguments}, **fields}


def _read(*chunks):
    reader = ChatStreamReader("r1")
    return [delta for chunk in chunks for delta in reader.feed(chunk)], reader.result()


def _items(completion):
    return with_item_ids(output_from_chat(completion["choices"][0]["message"], "r1"), "r1")


def _relayed(dialect, deltas, completion):
    """The whole stream that a client of `dialect` gets from what was read."""
    writer = open_stream(dialect, REQUEST, reply_id="r1", model="m", created=1)
    items = _items(completion)
    reply = PivotReply(items, finish_from_chat("stop", items), "m", Usage(1, 1), "r1", 1)
    return b"".join([writer.open(), *map(writer.delta, deltas), writer.finish(reply)])


def test_what_our_writer_wrote_reads_as_the_plain_reply_whatever_was_told_before_the_finish():
    for seed in range(1500):
        script, rng = told(seed, objects_only=False), random.Random(seed)
        reply = script.reply
        writer = open_stream("chat", REQUEST, reply_id=reply.reply_id, model="m", created=1, include_usage=True)
        reader, deltas = ChatStreamReader("r1"), []
        for event in written(writer, script, rng).split(b"\n\n"):
            if event.startswith(b"data: {"):
                deltas += reader.feed(json.loads(event[6:]))
        completion = reader.result()
        plain = chat_reply(reply)
        assert reader.finish_reason == reply.finish_reason
        assert output_from_chat(completion["choices"][0]["message"], "r1") == output_from_chat(
            plain["choices"][0]["message"], "r1"
        )
        assert {k: completion[k] for k in ("id", "model", "usage")} == {k: plain[k] for k in ("id", "model", "usage")}
        for dialect in DIALECTS:
            _relayed(dialect, deltas, completion)


@pytest.mark.promise("MS-1")
def test_ids_count_on_every_chunk_whatever_its_delta():
    def entries(*values):
        return {"content": [{"token": "t", "logprob": value} for value in values]}

    deltas, completion = _read(
        {**_chunk({"role": "assistant", "content": ""}), "prompt_token_ids": [1, 2]},
        _chunk({"content": "a"}, token_ids=[60], logprobs=entries(-1.0)),
        _chunk({}, token_ids=[61, 62], logprobs=entries(-2.0, -3.0)),
        {"choices": [{"index": 0, "token_ids": [63], "logprobs": entries(-4.0)}]},
        _chunk(None, delta=None, token_ids=[64], logprobs=entries(-5.0)),
        _chunk({"content": "b"}, token_ids=[2], logprobs=entries(-6.0), finish_reason="stop"),
        {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 6}},
    )
    assert deltas == [TextDelta(0, "a"), TextDelta(0, "b")]
    streamed = read_chat_object(completion)
    message = {"role": "assistant", "content": "ab"}
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "stop",
        "token_ids": [60, 61, 62, 63, 64, 2],
        "logprobs": entries(-1.0, -2.0, -3.0, -4.0, -5.0, -6.0),
    }
    usage = {"prompt_tokens": 2, "completion_tokens": 6}
    body = {"id": "x", "model": "m", "created": 1, "choices": [choice], "usage": usage, "prompt_token_ids": [1, 2]}
    plain = read_chat_reply(json.dumps(body).encode())
    for name in ("token_ids", "prompt_ids", "log_probs"):
        assert np.array_equal(getattr(streamed, name), getattr(plain, name))
    for name in ("message", "finish_reason", "id", "model", "created", "usage", "token_fault"):
        assert getattr(streamed, name) == getattr(plain, name)


def test_a_logprob_that_is_no_number_is_one_fault_as_in_a_plain_reply():
    _, completion = _read(
        _chunk({"content": "a"}, token_ids=[1], logprobs={"content": [{"logprob": None}]}),
        _chunk({}, token_ids=[2], logprobs={"content": [{"logprob": float("nan")}]}, finish_reason="stop"),
    )
    read = read_chat_object(completion)
    assert np.isnan(read.log_probs).all()
    assert len(read.log_probs) == 2


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "chunks",
    [
        [[_call(0, '{"a":1}', id="c1", name="add"), _call(1, '{"a":2}', id="c2", name="mul")]],
        [[_call(0, '{"a":1}', id="c1", name="add")], [_call(0, '{"a":2}', id="c2", name="mul")]],
        [[_call(0, '{"a":1}', name="add", id="c1")], [_call(0, '{"a"', name="mul", id="c2")], [_call(0, ":2}")]],
        [[_call(0, "", id="c1", name="add"), _call(1, "", id="c2", name="mul")],
         [_call(0, '{"a"'), _call(1, '{"a":')], [_call(1, "2}"), _call(0, ":1}")]],
        [[_call(0, '{"a":1}', id="c1", name="add")], [_call(1, '{"a":2}', id="c2", name="mul")],
         [_call(0, "", id="c1")]],
        [[_call(0, '{"a":1}', name="add")], [_call(0, '{"a":2}', name="mul")]],
        [[{"function": {"name": "add", "arguments": {"a": 1}}}],
         [{"function": {"name": "mul", "arguments": '{"a":2}'}}]],
        [[_call(0, '{"a"', id="c1", name="add")], [_call(0, ":1}", id="c1", name="add")],
         [_call(1, '{"a":2}', id="c1", name="mul")]],
    ],
    ids=[
        "two in one delta", "two under one index", "pieces under one index", "interleaved", "a late empty piece",
        "neither ids nor indexes of their own", "objects without index or id", "a repeated id and name",
    ],
)  # fmt: skip
def test_two_calls_stay_two_in_every_dialect(dialect, chunks):
    deltas, completion = _read(*(_chunk({"tool_calls": pieces}) for pieces in chunks))
    calls = completion["choices"][0]["message"]["tool_calls"]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in calls] == [
        ("add", '{"a":1}'),
        ("mul", '{"a":2}'),
    ]
    assert "".join(d.arguments for d in deltas if d.index == 0) == '{"a":1}'
    text = _relayed(dialect, deltas, completion).decode()
    for word in ("add", "mul"):
        assert word in text
    items = _items(completion)
    assert len({item["call_id"] for item in items}) == len({item["id"] for item in items}) == 2
    assert all(item["call_id"] in text for item in items)


@pytest.mark.parametrize("index", [0, None])
@pytest.mark.parametrize("first", [['{"a"', ":", "1}"], ['{"a"', ":", "1", "}"], ['{"a":"', "}", "\\", '"', '"}', " "]])
def test_a_name_on_every_piece_melts_no_two_calls_that_have_no_ids(first, index):
    pieces = [*first, '{"b"', ":2}", "", '{"c":3}']
    _, completion = _read(*(_chunk({"tool_calls": [_call(index, piece, name="f")]}) for piece in pieces))
    calls = completion["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == ["".join(first), '{"b":2}', '{"c":3}']


def test_a_call_is_complete_where_a_parser_of_its_arguments_says_so():
    rng, whole = random.Random(7), 0
    parts = [
        "{",
        "}",
        "{}",
        '"',
        "\\",
        ":",
        ",",
        " ",
        "\n",
        "\u00a0",
        "1",
        '"a":',
        '"b":"}{"',
        '{"a":1}',
        "[",
        "]",
        "",
        '\\"',
        "x",
    ]
    for _ in range(20_000):
        call = GrowingCall(0, "c", "c", "f")
        for piece in ["{"] * rng.randint(0, 1) + rng.choices(parts, k=rng.randint(1, 6)):
            call.arguments.add(piece)
            try:
                is_whole = isinstance(json.loads(call.arguments.whole()), dict)
            except ValueError:
                is_whole = False
            if rng.random() < 0.7:
                assert call.complete() is is_whole, call.arguments.pieces
                whole += is_whole
    assert whole > 1000


def test_a_call_without_an_id_has_the_one_that_a_plain_reply_gives_it():
    deltas, completion = _read(_chunk({"content": "a", "tool_calls": [_call(0, "{}", name="f")]}))
    assert deltas == [TextDelta(0, "a"), ToolCallDelta(1, "{}", "f", _items(completion)[1]["call_id"])]


def test_text_that_carries_an_empty_list_of_calls_is_text():
    deltas, completion = _read(_chunk({"content": "a", "tool_calls": []}), _chunk({"content": "b", "tool_calls": None}))
    assert deltas == [TextDelta(0, "a"), TextDelta(0, "b")]
    assert "tool_calls" not in completion["choices"][0]["message"]


@pytest.mark.parametrize("names", [["reasoning"], ["reasoning_content"], ["reasoning_content", "reasoning"]])
def test_a_thought_is_one_under_either_name_or_both(names):
    deltas, completion = _read(*(_chunk(dict.fromkeys(names, piece)) for piece in ("h", "m")), _chunk({"content": "a"}))
    assert deltas == [ReasoningDelta(0, "h"), ReasoningDelta(0, "m"), TextDelta(1, "a")]
    assert [item["type"] for item in _items(completion)] == ["reasoning", "message"]


@pytest.mark.parametrize(
    ("chunks", "thought", "fault"),
    [
        ([{"reasoning": "t"}, {"reasoning_content": "u"}, {"reasoning": "v"}], "tuv", None),
        ([{"reasoning_content": "t"}, {"reasoning": "u"}, {"content": "x"}, {"reasoning_content": "v"}], "tuv", None),
        ([{"reasoning": "t", "reasoning_content": "t"}, {"reasoning": "u"}, {"reasoning_content": "v"}], "tuv", None),
        ([{"reasoning": "t", "reasoning_content": "t"}, {"reasoning": "u"}], "tu", None),
        ([{"reasoning": "t", "reasoning_content": "u"}], "tu", "two thoughts"),
        (
            [{"reasoning": "t", "reasoning_content": "t"}, {"reasoning": "u"}, {"reasoning_content": "u"}],
            "tuu",
            "again",
        ),
        ([{"reasoning": "tu"}, {"reasoning_content": "t"}, {"reasoning_content": "u"}], "tutu", "say it again"),
        ([{"reasoning": "t"}, {"reasoning_content": "t"}, {"reasoning": "v"}], "ttv", "say it again"),
    ],
    ids=[
        "to and fro",
        "round a text",
        "after both",
        "one goes on",
        "in one chunk",
        "both and each",
        "a copy or not",
        "a piece again",
    ],
)
@pytest.mark.parametrize("short", [False, True])
def test_a_thought_under_two_names_is_told_and_kept_whole_in_the_order_said(chunks, thought, fault, short):
    reader, said = ChatStreamReader("r1"), []
    for chunk in map(_chunk, [{"role": "assistant"}, *chunks]):
        if not (short and reader.feed_plain([json.dumps(chunk).encode()], 0, said)):
            said += reader.feed(chunk)
    reader.feed(_chunk({}, finish_reason="stop"))
    reply = reader.reply()
    assert "".join(delta.text for delta in said if isinstance(delta, ReasoningDelta)) == thought
    for dialect in DIALECTS:
        items = with_item_ids(output_from_chat(reply.message, "r1", () if dialect == "chat" else reply.order), "r1")
        kept = [part["text"] for item in items if item["type"] == "reasoning" for part in item["content"]]
        assert "".join(kept) == thought
        writer = open_stream(dialect, REQUEST, reply_id="r1", model="m", created=1)
        end = PivotReply(items, "stop", "m", Usage(1, 1), "r1", 1)
        b"".join([writer.open(), *map(writer.delta, said), writer.finish(end)])  # which no contradiction ends
    assert reply.token_fault is None if fault is None else fault in reply.token_fault


def test_halves_of_a_character_in_two_chunks_are_one_character():
    deltas, completion = _read(
        _chunk({"content": "a\ud83d"}), _chunk({"content": "\ude00b"}), _chunk({"content": "\ud83d"})
    )
    assert "".join(delta.text for delta in deltas) == "a😀b"
    assert completion["choices"][0]["message"]["content"] == "a😀b\ud83d"
    for dialect in DIALECTS:
        _relayed(dialect, deltas, completion)


def test_a_parsers_white_space_after_a_call_is_no_text():
    deltas, completion = _read(
        _chunk({"tool_calls": [_call(0, "{}", id="c1", name="f")]}),
        _chunk({"content": "\n"}),
        _chunk({"tool_calls": [_call(1, "{}", id="c2", name="f")]}),
    )
    assert [delta.index for delta in deltas] == [0, 1]
    assert completion["choices"][0]["message"]["content"] is None


ADD = _call(0, '{"a":1}', id="c1", name="add")
MUL = _call(1, '{"a":2}', id="c2", name="mul")


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("deltas", "kinds"),
    [
        ([{"tool_calls": [ADD]}, {"content": "la"}, {"content": "te"}], ["function_call", "message"]),
        ([{"content": "t"}, {"tool_calls": [ADD]}, {"content": "late"}], ["message", "function_call", "message"]),
        ([{"tool_calls": [ADD]}, {"content": "late"}, {"tool_calls": [MUL]}],
         ["function_call", "message", "function_call"]),
        ([{"content": "late"}, {"reasoning": "hm"}], ["message", "reasoning"]),
        ([{"reasoning": "hm"}, {"content": "late"}, {"reasoning": "so"}, {"content": "t"}],
         ["reasoning", "message", "reasoning", "message"]),
        ([{"tool_calls": [ADD]}, {"reasoning": "hm"}, {"content": "late"}], ["function_call", "reasoning", "message"]),
        ([{"tool_calls": [_call(0, '{"a"', id="c1", name="add")]}, {"content": "late"},
          {"tool_calls": [_call(0, ":1}")]}], ["function_call", "message"]),
        ([{"tool_calls": [_call(0, "", id="c1", name="add")]}, {"content": "late"}], ["function_call", "message"]),
    ],
    ids=["text last", "text round a call", "text between calls", "a thought last", "thoughts between", "all late",
         "inside a call", "after a call without arguments"],
)  # fmt: skip
def test_what_comes_out_of_the_usual_order_is_delivered_and_keeps_it(dialect, deltas, kinds):
    reader = ChatStreamReader("r1")
    said = [each for delta in deltas for each in reader.feed(_chunk(delta))]
    reader.feed(_chunk({}, finish_reason="stop"))
    reply = reader.reply()
    order = () if dialect == "chat" else reply.order
    items = with_item_ids(output_from_chat(reply.message, "r1", order), "r1")
    if dialect != "chat":
        assert [item["type"] for item in items] == kinds
    writer = open_stream(dialect, REQUEST, reply_id="r1", model="m", created=1)
    end = PivotReply(items, "stop", "m", Usage(1, 1), "r1", 1)
    text = b"".join([writer.open(), *map(writer.delta, said), writer.finish(end)]).decode()
    assert reply.token_fault is None
    for piece in (delta[name] for delta in deltas for name in ("reasoning", "content") if name in delta):
        assert piece in text
    assert "".join(each["content"][0]["text"] for each in items if each["type"] == "message") == "".join(
        delta["content"] for delta in deltas if "content" in delta
    )


def test_text_after_a_call_leaves_before_the_finish():
    deltas, _ = _read(_chunk({"tool_calls": [ADD]}), _chunk({"content": "\nla"}), _chunk({"content": " te"}))
    assert deltas[1:] == [TextDelta(1, "\nla"), TextDelta(1, " te")]


def test_half_a_character_that_ends_a_text_is_said_before_what_comes_next():
    for first in ("content", "reasoning"):
        for dialect in DIALECTS:
            deltas, completion = _read(_chunk({first: "a\ud83d"}), _chunk({"tool_calls": [ADD]}))
            assert "".join(delta.text for delta in deltas[:-1]) == "a\ud83d"
            assert deltas[-1] == ToolCallDelta(1, '{"a":1}', "add", "c1")
            assert b"ud83d" in _relayed(dialect, deltas, completion)


def test_a_whole_call_said_once_more_is_one_call_and_another_under_its_id_is_another():
    pieces = [_call(0, piece, id="c1", name="add") for piece in ("{", '"a"', ":", "1", ", ", '"b":2', "}")]
    whole = _call(0, '{"a":1, "b":2}', id="c1", name="add")
    for chunks in ([*pieces, whole], [whole, whole], [whole, whole, whole]):
        deltas, completion = _read(*(_chunk({"tool_calls": [piece]}) for piece in chunks))
        assert [c["function"]["arguments"] for c in completion["choices"][0]["message"]["tool_calls"]] == [
            '{"a":1, "b":2}'
        ]
        for dialect in DIALECTS:
            _relayed(dialect, deltas, completion)
    other = _call(0, '{"a":2}', id="c1", name="add")
    deltas, completion = _read(_chunk({"tool_calls": [whole]}), _chunk({"tool_calls": [other]}))
    assert [c["function"]["arguments"] for c in completion["choices"][0]["message"]["tool_calls"]] == [
        '{"a":1, "b":2}',
        '{"a":2}',
    ]
    for dialect in DIALECTS:
        _relayed(dialect, deltas, completion)


def test_a_piece_of_a_call_that_was_left_keeps_nothing_back_and_is_in_the_whole():
    chunks = [_chunk({"tool_calls": [piece]}) for piece in (ADD, MUL, _call(0, " "), _call(2, "{}", id="c3", name="f"))]
    deltas, completion = _read(*chunks)
    assert [delta.name for delta in deltas] == ["add", "mul", "f"]
    assert completion["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"a":1} '
    _relayed("chat", deltas, completion)
    for dialect in ("responses", "messages"):  # the item was ended: what is more of it cannot be said
        with pytest.raises(StreamContradiction):
            _relayed(dialect, deltas, completion)


def test_white_space_before_text_that_comes_after_a_call_belongs_to_it():
    deltas, _ = _read(_chunk({"tool_calls": [ADD]}), _chunk({"content": "\n"}), _chunk({"content": "x"}))
    assert deltas[1:] == [TextDelta(1, "\nx")]
    told = ({"tool_calls": [ADD]}, {"content": "\n"}, {"tool_calls": [MUL]}, {"content": "x"})
    deltas, _ = _read(*map(_chunk, told))  # but what stood between two calls does not
    assert deltas[2:] == [TextDelta(2, "x")]


def test_an_empty_text_is_not_the_same_as_none():
    for delta, content in (({"content": ""}, ""), ({}, None)):
        assert _read(_chunk(delta))[1]["choices"][0]["message"]["content"] == content


def test_content_in_parts_is_in_the_reply_in_whatever_order_the_rest_came():
    reader = ChatStreamReader("r1")
    part = {"type": "text", "text": "part", "note": "n"}
    for delta in ({"tool_calls": [ADD]}, {"content": "late"}, {"content": [part]}):
        reader.feed(_chunk(delta))
    reply = reader.reply()
    call, message = output_from_chat(reply.message, "r1", reply.order)
    assert (call["call_id"], [part["text"] for part in message["content"]]) == ("c1", ["late", "part"])


def test_text_alone_in_a_part_leaves_as_it_comes():
    told = [{"content": [{"type": "text", "text": piece}]} for piece in ("so ", "it ", "is")]
    deltas, completion = _read(*map(_chunk, told))
    assert deltas == [TextDelta(0, "so "), TextDelta(0, "it "), TextDelta(0, "is")]
    assert completion["choices"][0]["message"]["content"] == "so it is"


def test_who_answers_is_said_once_and_what_else_is_said_of_the_reply_last():
    first, second = (
        _chunk({"content": "a"}),
        {**_chunk({}, finish_reason="stop"), "id": "y", "model": "n", "created": 2},
    )
    _, completion = _read({**first, "service_tier": "flex"}, {**second, "service_tier": "default"})
    assert [completion[name] for name in ("id", "model", "created", "service_tier")] == ["x", "m", 1, "default"]


def test_an_id_that_comes_after_the_call_was_told_does_not_rename_it():
    deltas, completion = _read(
        _chunk({"tool_calls": [_call(0, "{", name="f")]}), _chunk({"tool_calls": [_call(0, "}", id="c9")]})
    )
    for dialect in DIALECTS:
        assert _items(completion)[0]["call_id"].encode() in _relayed(dialect, deltas, completion)


def test_a_refusal_is_whole_at_the_end():
    deltas, completion = _read(_chunk({"refusal": "I can"}), _chunk({"refusal": "not"}, finish_reason="stop"))
    assert deltas == []
    assert completion["choices"][0]["message"]["refusal"] == "I cannot"
    for dialect in DIALECTS:
        assert b"I cannot" in _relayed(dialect, deltas, completion)


def test_fields_that_nobody_reads_are_joined_as_the_public_libraries_do():
    _, completion = _read(
        _chunk({"content": "a", "note": "x", "reasoning_details": [{"a": 1}], "meta": {"t": "p"}}, stop_reason=None),
        _chunk({"note": "y", "reasoning_details": [{"a": 2}], "meta": {"t": "q"}}, finish_reason="stop", stop_reason=7),
        {"choices": [], "system_fingerprint": "fp"},
    )
    message = completion["choices"][0]["message"]
    assert (message["note"], message["reasoning_details"]) == ("xy", [{"a": 1}, {"a": 2}])
    assert message["meta"] == {"t": "pq"}
    assert completion["choices"][0]["stop_reason"] == 7
    assert completion["system_fingerprint"] == "fp"


def test_a_field_of_a_call_that_is_told_whole_once_more_is_not_joined():
    signed = {"extra_content": {"google": {"thought_signature": "SIG"}}}
    call = _call(0, "{}", id="c1", name="f", **signed)
    call["function"]["note"] = "n"
    halves = [{"extra_content": {"google": {"thought_signature": half}}} for half in ("S", "IG")]
    for pieces in (
        [call, call],
        [call, {"index": 0, **signed, "function": {"note": "n"}}],
        [_call(0, "{}", id="c1", name="f"), *({"index": 0, **half} for half in halves), {"index": 0, **signed}],
    ):
        _, completion = _read(*(_chunk({"tool_calls": [piece]}) for piece in pieces))
        (whole,) = completion["choices"][0]["message"]["tool_calls"]
        assert whole["extra_content"] == signed["extra_content"]
        assert whole["function"].get("note") == ("n" if pieces[0] is call else None)


def test_an_input_of_a_custom_call_may_say_the_same_piece_twice():
    piece = {"index": 0, "id": "c1", "type": "custom", "custom": {"name": "sh", "input": "ls "}}
    _, completion = _read(*(_chunk({"tool_calls": [piece]}) for _ in range(3)))
    (whole,) = completion["choices"][0]["message"]["tool_calls"]
    assert whole == {"id": "c1", "type": "custom", "custom": {"name": "sh", "input": "ls " * 3}}


def test_a_field_that_is_no_number_is_read_as_null_as_in_a_plain_reply():
    for call in (
        _call(0, "{}", id="c1", name="f", score=float("nan")),
        {**_call(0, "{}", id="c1"), "function": {"name": "f", "arguments": "{}", "score": float("inf")}},
    ):
        for pieces in ([call], [call, call]):
            reader = ChatStreamReader("r1")
            for piece in pieces:
                reader.feed(_chunk({"tool_calls": [piece]}))
            (whole,) = reader.reply().message["tool_calls"]
            assert {**whole, **whole["function"]}["score"] is None


def test_arguments_that_are_an_object_are_written_as_a_plain_replys():
    call = _call(0, {"a": float("nan"), "b": [float("-inf"), 1]}, id="c1", name="f")
    deltas, completion = _read(_chunk({"tool_calls": [call]}))
    assert deltas == [ToolCallDelta(0, '{"a":null,"b":[null,1]}', "f", "c1")]
    plain = {"choices": [{"message": {"tool_calls": [{"id": "c1", "function": call["function"]}]}}]}
    assert _items(completion) == with_item_ids(output_from_chat(read_chat_object(plain).message, "r1"), "r1")


def test_arguments_that_cannot_be_written_are_no_reply():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(BadChatReply):
        _read(_chunk({"tool_calls": [_call(0, deep, id="c1", name="f")]}))


def test_nothing_more_leaves_of_a_call_whose_name_grew_after_it_had_left():
    pieces = (_call(0, "{", id="c1", name="ad"), _call(0, "", name="d"), _call(0, "}"))
    deltas, completion = _read(*(_chunk({"tool_calls": [piece]}) for piece in pieces))
    assert deltas == [ToolCallDelta(0, "{", "ad", "c1")]
    assert completion["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"


def test_an_opening_that_says_nothing_puts_no_text_before_a_refusal():
    for content in ("", None):
        _, completion = _read(_chunk({"role": "assistant", "content": content}), _chunk({"refusal": "no"}))
        (message,) = _items(completion)
        assert message["content"] == [{"type": "refusal", "refusal": "no"}]


def test_a_whole_message_in_place_of_a_delta_is_read():
    deltas, completion = _read({"choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}}]})
    assert deltas == [TextDelta(0, "a")]
    assert completion["choices"][0]["message"]["content"] == "a"


@pytest.mark.parametrize("told", [None, ""])
def test_a_stream_without_a_finish_reason_says_so(told):
    reader = ChatStreamReader("r1")
    reader.feed(_chunk({"content": "a"}, finish_reason=told))
    assert reader.finish_reason is None
    assert "no finish reason" in reader.reply().token_fault


STOP = _chunk({}, finish_reason="stop", token_ids=[2])


@pytest.mark.promise("MS-7")
@pytest.mark.parametrize(
    ("chunks", "fault"),
    [
        ([STOP, _chunk({}, finish_reason="stop")], None),
        ([STOP, _chunk({"role": "assistant", "content": "", "tool_calls": []}, token_ids=[])], None),
        ([STOP, _chunk({"content": "LATE"})], "went on after its finish reason 'stop'"),
        ([STOP, _chunk({"tool_calls": [ADD]})], "went on after"),
        ([STOP, _chunk({}, token_ids=[7])], "went on after"),
        ([STOP, _chunk({}, finish_reason="length")], "went on after"),
        ([{**STOP, "prompt_token_ids": [1, 2]}, {"choices": [], "prompt_token_ids": [1, 2]}], None),
        ([{**_chunk({"content": "a"}), "prompt_token_ids": [1, 2]}, {**STOP, "prompt_token_ids": [9]}], "prompt ids"),
        ([_chunk({"content": "a"}, prompt_token_ids=[1, 2]), {**STOP, "prompt_token_ids": [9]}], "prompt ids"),
        ([_chunk({"content": "a"}, prompt_token_ids=[1]), _chunk({}, finish_reason="stop", prompt_token_ids=[9])],
         "prompt ids"),
    ],
    ids=["stop twice", "an empty chunk after it", "text after it", "a call after it", "ids after it", "another finish",
         "prompt ids again", "other prompt ids", "other ones at the choice", "both at the choice"],
)  # fmt: skip
def test_chunks_that_contradict_one_another_are_a_fault_and_the_text_stays(chunks, fault):
    reader = ChatStreamReader("r1")
    for chunk in chunks:
        reader.feed(chunk)
    found = reader.reply().token_fault
    assert found is None if fault is None else fault in found


@pytest.mark.parametrize("chunk", [None, 3, [], {"choices": 3}, {"choices": ["x"]}, {"choices": [{"index": 1}]}])
def test_what_is_no_chunk_is_refused(chunk):
    with pytest.raises(BadChatReply):
        ChatStreamReader("r1").feed(chunk)


def test_a_stream_of_no_choice_at_all_is_no_reply():
    with pytest.raises(BadChatReply):
        _read({"choices": [], "usage": {"prompt_tokens": 1}})


def test_a_long_reply_of_small_chunks_takes_linear_time():
    reader = ChatStreamReader("r1")
    pieces = ['{"a": "', *["}"] * 40_000, '"}']
    reader.feed(_chunk({"tool_calls": [_call(0, "", id="c1", name="f"), _call(1, "{", id="c2", name="g")]}))
    said = [d for piece in pieces for d in reader.feed(_chunk({"tool_calls": [_call(0, piece)]}))]
    said += reader.feed(_chunk({"tool_calls": [_call(1, "}")]}))
    assert all(delta.index == 0 for delta in said[:-2])
    assert said[-2:] == [ToolCallDelta(1, "{", "g", "c2"), ToolCallDelta(1, "}")]
