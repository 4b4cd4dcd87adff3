"""What an upstream says beside text, thought and calls of functions: in every dialect, plain and streamed alike."""

from __future__ import annotations

import json

import pytest
from tests.campaigns import campaign
from tests.unit.dialects.odd_turns import DETAILS, SIGNED, TURNS, add, custom, of_call, thinking
from tests.unit.dialects.upstream_streams import said

from toprope.dialects.chat_history import items_from_messages, messages_from_items
from toprope.dialects.chat_reply import chat_message, chat_reply, finish_from_chat, output_from_chat
from toprope.dialects.chat_request import clean_chat_body, request_to_chat
from toprope.dialects.chat_stream_reader import ChatStreamReader
from toprope.dialects.messages_reply import messages_reply
from toprope.dialects.pivot import PivotReply, with_item_ids
from toprope.dialects.responses import items_from_input, request_from_responses, responses_reply
from toprope.dialects.stream import open_stream
from toprope.tokens.items import CountedMarks, item_digests
from toprope.wire.responses import Usage

REQUEST = request_from_responses({"input": "x"})
each_turn = pytest.mark.parametrize(("message", "deltas"), TURNS.values(), ids=TURNS)


def read(deltas):
    """The deltas that left early, and the reply at the end."""
    reader = ChatStreamReader("r1")
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in ({"role": "assistant"}, *deltas)]
    early = [each for choice in choices for each in reader.feed({**head, "choices": [choice]})]
    reader.feed({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return early, reader.reply()


def pivot(message, order=()):
    items = with_item_ids(output_from_chat(message, "r1", order), "r1")
    return PivotReply(items, finish_from_chat(None, items), "m", Usage(1, 1), "r1", 1)


def streamed(dialect, deltas):
    """The events that a client of `dialect` gets, and the reply that they were made of."""
    early, reply = read(deltas)
    writer = open_stream(dialect, REQUEST, reply_id="r1", model="m", created=1)
    end = pivot(reply.message, () if dialect == "chat" else reply.order)
    data = b"".join([writer.open(), *map(writer.delta, early), writer.finish(end)])
    lines = [line[6:] for line in data.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines], end


def joined(old, new):
    """Two values of a field of a delta, put together as the public library does."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{name: joined(old.get(name), value) for name, value in new.items()}}
    if isinstance(old, list) and new and isinstance(new[0], dict) and "index" in new[0]:
        calls = {call["index"]: call for call in old}
        for call in new:
            calls[call["index"]] = joined(calls.get(call["index"]), {**call, "index": call["index"]})
        return list(calls.values())
    if isinstance(old, int) or old is None:
        return new
    return old + new if new is not None else old


@each_turn
def test_a_stream_and_a_plain_reply_have_the_same_items(message, deltas):
    _, reply = read(deltas)
    items = pivot(reply.message, reply.order).output
    assert items == pivot(message).output
    assert reply.token_fault is None


@each_turn
def test_a_chat_client_gets_all_of_it(message, deltas):
    told = chat_reply(pivot(message))["choices"][0]["message"]
    for name in ("reasoning_details", "tool_calls"):
        assert told.get(name) == message.get(name) or len({call["id"] for call in message[name]}) < len(message[name])
    if any(name in str(message) for name in ("image", "audio", "'reference'")):
        assert {name: told.get(name) for name in message} == message
    citation = "'type': 'url_citation', 'url_citation': {'url': 'u', 'title': 't', 'start_index': 0, 'end_index': 2}"
    assert str(told).count(citation) == str(message).count(citation)
    signed = '"signature": "' in json.dumps(message)
    assert told.get("thinking_blocks") == (message["thinking_blocks"] if signed else None)
    for name in ("reasoning", "reasoning_content", "refusal"):
        if name in message and not isinstance(message[name], str):
            assert told[name] == message[name]
    events, _ = streamed("chat", deltas)
    whole = {}
    for event in events:
        whole = joined(whole, event["choices"][0]["delta"])
    for call in whole.get("tool_calls", ()):
        del call["index"]
    if "content_parts" in whole:  # text had left as a string: a client goes on joining strings
        assert whole["content"] == "".join(part.get("text", "") for part in whole["content_parts"])
        whole["content"] = whole.pop("content_parts")
    assert whole == told


@each_turn
def test_a_responses_client_gets_all_of_it(message, deltas):
    output = responses_reply(pivot(message), REQUEST)["output"]
    events, _ = streamed("responses", deltas)
    assert events[-1]["response"]["output"] == output
    for name in ("extra_content", "reasoning_details", "note"):
        assert (f'"{name}"' in json.dumps(message)) == (f'"{name}"' in json.dumps(output))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == output


@each_turn
def test_a_messages_client_gets_the_thought_the_text_and_every_call(message, deltas):
    whole = messages_reply(pivot(message))
    blocks = [(block["type"], block.get("input")) for block in whole["content"]]
    calls = message.get("tool_calls", ())
    inputs = [{"raw_arguments": call["custom"]["input"]} if "custom" in call else {} for call in calls]
    assert [value for kind, value in blocks if kind == "tool_use"] == inputs
    assert (whole["stop_reason"] == "tool_use") == bool(calls)
    events, _ = streamed("messages", deltas)
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == [kind for kind, _ in blocks]
    pieces = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    given = "".join(piece.get("partial_json", "") for piece in pieces)
    assert given.replace("{}", "") == "".join(json.dumps(value, separators=(",", ":")) for value in inputs if value)
    assert "".join(piece.get("text", "") for piece in pieces) == "".join(
        block["text"] for block in whole["content"] if block["type"] == "text"
    )
    assert [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"] == [
        whole["stop_reason"]
    ]


@pytest.mark.promise("CP-9")
@each_turn
def test_what_a_client_echoes_is_what_was_recorded(message, deltas):
    recorded = pivot(message).output
    bag = CountedMarks(sampled=item_digests(recorded))
    echo = chat_message(recorded)
    for turn in (echo, {**echo, "content": echo["content"] or ""}, {k: v for k, v in echo.items() if k not in DETAILS}):
        assert bag.missing(item_digests(items_from_messages([turn]))) == (), turn
    assert bag.missing(item_digests(items_from_input([dict(item) for item in recorded]))) == ()
    for name in ("extra_content", "note"):
        assert all(
            bag.missing(item_digests(items_from_messages([{**echo, "tool_calls": [{**call, name: "LOST"}]}])))
            for call in echo.get("tool_calls", ())
        )


def test_what_a_client_of_a_stream_joined_comes_back_as_it_was_said():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    deltas = [{"content": "so "}, {"content": [image]}, {"content": "it is"}]
    events, end = streamed("chat", deltas)
    whole = {}
    for event in events:
        whole = joined(whole, event["choices"][0]["delta"])
    assert whole["content"] == "so it is"
    parts = [{"type": "text", "text": "so "}, image, {"type": "text", "text": "it is"}]
    assert clean_chat_body({"messages": [whole]})[0]["messages"] == [{"role": "assistant", "content": parts}]
    bag = CountedMarks(sampled=item_digests(end.output))
    assert bag.missing(item_digests(items_from_messages([whole]))) == ()
    changed = {**whole, "content": "so it was"}
    assert clean_chat_body({"messages": [changed]})[0]["messages"][0]["content"] == "so it was"
    assert bag.missing(item_digests(items_from_messages([changed])))


@pytest.mark.parametrize(
    "more",
    [DETAILS, {"reasoning_details": [{"text": "why"}]}, {"thought_signature": "s"}],
    ids=["sealed", "text", "other"],
)
def test_an_echo_over_responses_reaches_a_chat_upstream_as_one_turn(more):
    for message in (
        {"content": None, "tool_calls": [add(**SIGNED)], **more},
        {"content": None, "reasoning_content": "hm", "tool_calls": [add(**SIGNED, function={"note": "n"})], **more},
    ):
        echo = [dict(item) for item in pivot(message).output]
        result = {"type": "function_call_output", "call_id": "c0", "output": "3"}
        body, lost = request_to_chat(request_from_responses({"input": [*echo, result]}))
        assert body["messages"] == [
            {"role": "assistant", **message},
            {"role": "tool", "tool_call_id": "c0", "content": "3"},
        ]
        assert lost == ()


@pytest.mark.parametrize(
    "more",
    [
        {"annotations": [], "audio": None},
        {"prefix": False, "tool_calls_done": True},
        {"audio": {}, "reasoning_details": []},
    ],
)
def test_a_field_that_says_nothing_makes_no_message(more):
    assert [item["type"] for item in output_from_chat({"content": None, "tool_calls": [add()], **more}, "r")] == [
        "function_call"
    ]


def test_two_calls_of_custom_tools_under_one_id_get_one_each():
    first, second = pivot({"content": None, "tool_calls": [custom(), custom(said="pwd")]}).output
    assert (first["call_id"], second["call_id"]) == ("c0", "call_r1_1")
    assert finish_from_chat(None, (first,)) == "tool_calls"


def test_a_custom_call_is_written_for_an_upstream_that_takes_them():
    turn = {"role": "assistant", "content": "so", "tool_calls": [custom(**SIGNED)]}
    items = items_from_messages([turn])
    assert messages_from_items(items, custom_tools=True) == ([turn], [])
    assert messages_from_items(items) == ([{"role": "assistant", "content": "so"}], ["items.custom_tool_call"])
    output = {"type": "custom_tool_call_output", "call_id": "c0", "output": "f"}
    assert messages_from_items([*items, output], custom_tools=True)[0][1] == {
        "role": "tool",
        "tool_call_id": "c0",
        "content": "f",
    }


def test_a_result_without_an_id_is_that_of_a_custom_call():
    items = items_from_messages([{"role": "assistant", "tool_calls": [custom()]}, {"role": "tool", "content": "f"}])
    assert items[1]["call_id"] == "c0"


TEXT = {"type": "text", "text": "A"}


@pytest.mark.parametrize(
    ("turn", "sent", "lost"),
    [
        ({"content": [thinking("hm"), TEXT]}, {"reasoning_content": "hm", "content": "A"}, ()),
        (
            {
                "content": [
                    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                    TEXT,
                ]
            },
            {"reasoning_content": "hm", "content": "A"},
            (),
        ),
        (
            {"content": [{"type": "thinking", "thinking": {"odd": "hm"}}, TEXT]},
            {"content": [{"type": "thinking", "thinking": {"odd": "hm"}}, TEXT]},
            (),
        ),
        (
            {"content": [{"type": "thinking", "thinking": [{"type": "picture", "x": 1}]}, thinking("hm")]},
            {"reasoning_content": "hm", "content": [{"type": "thinking", "thinking": [{"type": "picture", "x": 1}]}]},
            (),
        ),
        (
            {"content": [thinking("hm"), TEXT], "tool_calls": [custom()]},
            {"reasoning_content": "hm", "content": "A", "tool_calls": [custom()]},
            (),
        ),
        ({"reasoning": "hm", "content": [thinking("so"), TEXT]}, {"reasoning": "hmso", "content": "A"}, ()),
        ({"content": [thinking("so"), TEXT], "reasoning": "hm"}, {"reasoning": "sohm", "content": "A"}, ()),
        (
            {"reasoning_content": "hm", "content": [thinking("hm"), TEXT]},
            {"reasoning_content": "hm", "content": "A"},
            (),
        ),
        (
            {"reasoning_content": ["x"], "content": [thinking("hm"), TEXT]},
            {"reasoning_content": ["x"], "reasoning": "hm", "content": "A"},
            (),
        ),
        (
            {"reasoning_content": ["x"], "reasoning": {"y": 1}, "content": [thinking("hm"), TEXT]},
            {"reasoning_content": ["x"], "reasoning": {"y": 1}, "content": "A"},
            ("items.message.thinking",),
        ),
        (
            {"content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, TEXT]},
            {"reasoning_content": "hm", "content": "A"},
            ("items.message.thinking.signature",),
        ),
        (
            {"content": [{"type": "reasoning", "summary": [], "encrypted_content": "zzz"}, TEXT]},
            {"content": "A"},
            ("items.message.reasoning.encrypted_content",),
        ),
        (
            {"content": [{"type": "tool_use", "id": "c0", "name": "add", "input": {}}], "tool_calls": [add(**SIGNED)]},
            {"content": None, "tool_calls": [add(**SIGNED)]},
            (),
        ),
        (
            {"content": [{"type": "tool_use", "id": "c0", "name": "add", "input": {"a": 1}}], "tool_calls": [add()]},
            {"content": None, "tool_calls": [add()]},
            ("items.message.tool_use",),
        ),
        (
            {
                "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}, "mood": "glad"}],
                "tool_calls": [add()],
            },
            {"content": None, "tool_calls": [add(), add("c1", {"arguments": '{"a":1}'})]},
            ("items.message.tool_use.mood",),
        ),
    ],
)
def test_thoughts_and_calls_among_the_parts_of_a_chat_turn_reach_a_chat_upstream_or_are_named(turn, sent, lost):
    body, told = clean_chat_body({"messages": [{"role": "assistant", **turn}]})
    assert body["messages"] == [{"role": "assistant", **sent}]
    assert told == lost


def test_two_thoughts_of_one_message_are_read_in_its_own_order():
    for message, thought in (
        ({"content": [thinking("so"), TEXT], "reasoning": "hm"}, "sohm"),
        ({"reasoning": "hm", "reasoning_content": "so", "content": "A"}, "hmso"),
        ({"reasoning_content": "so", "content": [thinking("hm"), TEXT], "reasoning": "so"}, "sohm"),
    ):
        assert chat_message(output_from_chat(message, "r"))["reasoning_content"] == thought


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_thoughts_between_texts_and_calls_with_their_blocks_beside_them_stay_where_they_were_said(dialect):
    def block(text, signature=""):
        return [{"type": "thinking", "thinking": text, "signature": signature}]

    deltas = [
        {"reasoning_content": "a", "thinking_blocks": block("a")},
        {"reasoning_content": "", "thinking_blocks": block("", "one")},
        {"content": "x"},
        {"reasoning_content": "b", "thinking_blocks": block("b")},
        {"thinking_blocks": block("", "two")},
        of_call(add()),
    ]
    events, end = streamed(dialect, deltas)  # raises where what was sent contradicts the end
    assert events
    expected = ["reasoning", "message", "function_call"] if dialect == "chat" else _AS_SAID
    assert [item["type"] for item in end.output] == expected


_AS_SAID = ["reasoning", "message", "reasoning", "function_call"]


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
@pytest.mark.parametrize(
    ("deltas", "kinds"),
    [
        ([{"refusal": "n"}, {"refusal": "o"}], [*"mrm"]),
        ([{"function_call": {"name": "add", "arguments": ""}}, {"function_call": {"arguments": "{}"}}], [*"mrf"]),
        ([{"refusal": "no"}, {"reasoning": "hm"}, {"content": "y"}, of_call(add())], [*"mrmrmf"]),
        ([{"refusal": "no"}, {"content": "y"}], [*"mrm"]),
        ([{"content": [{"type": "text", "text": "y"}]}, {"content": "z"}, of_call(add())], [*"mrmf"]),
        ([{"content": [thinking("b")]}, {"content": "y"}], [*"mrm"]),  # the thought of its fields once more
        ([{"content": [thinking("so")]}, {"content": [{"type": "tool_use", "id": "c", "name": "f"}]}], [*"mrrf"]),
    ],
    ids=["a refusal", "an old call", "more after it", "text after it", "parts", "a thought again", "odd parts"],
)
def test_what_comes_after_a_thought_after_a_text_stays_where_it_was_said(dialect, deltas, kinds):
    events, end = streamed(
        dialect, [{"content": "x"}, {"reasoning": "b"}, *deltas]
    )  # raises if that is a contradiction
    assert events
    if dialect != "chat":
        assert [item["type"][0] for item in end.output] == kinds
    assert _words(end.output, "text")[1].startswith("x")
    assert "no" in _words(end.output, "refusal")[1] or "refusal" not in str(deltas)


def test_a_refusal_after_a_call_does_not_cut_and_an_empty_one_is_none():
    for dialect in ("chat", "responses", "messages"):
        _, end = streamed(dialect, [{"content": "x", "refusal": ""}, of_call(add()), {"refusal": ""}])
        assert [item["type"] for item in end.output] == ["message", "function_call"]
        assert len(end.output[0]["content"]) == 1
        _, end = streamed(dialect, [{"content": "x"}, of_call(add()), {"refusal": "no"}])
        assert sum("refusal" in str(item) for item in end.output) == 1


_BLOCK = {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}]}


@pytest.mark.promise("MS-1")
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
@pytest.mark.parametrize(
    ("deltas", "kinds"),
    [
        ([{"content": "x", **_BLOCK}], [*"rm"]),
        ([{**_BLOCK, "content": "x"}, {"content": "y"}], [*"rm"]),
        ([{"content": "x", **_BLOCK, "reasoning_content": "hm"}], [*"rm"]),
        ([{"content": "x"}, _BLOCK], [*"mr"]),
        ([{"content": "x"}, {"content": "y", **_BLOCK}, {"content": "z"}], [*"mrm"]),
        ([of_call(add()), _BLOCK], [*"frm"]),  # the message has the block's signature
        ([of_call(add()) | _BLOCK], [*"rfm"]),
        ([of_call(add()), {"refusal": "no"}], [*"fm"]),
        ([{"reasoning": "hm"}, of_call(add()), {"refusal": "no"}], [*"rfm"]),
    ],
    ids=["with text", "before text", "told twice", "after text", "within text", "after a call", "with a call",
         "a refusal after a call", "a refusal after a thought and a call"],
)  # fmt: skip
def test_blocks_of_thoughts_and_refusals_cut_no_stream_wherever_they_come(dialect, deltas, kinds):
    _, end = streamed(dialect, deltas)  # raises where what was sent contradicts the end
    if dialect != "chat":
        assert [item["type"][0] for item in end.output] == kinds
    message = {}
    for delta in deltas:
        message = joined(message, delta)
    plain = pivot({**message, "tool_calls": [add()]} if "tool_calls" in message else message).output
    for kind in ("text", "refusal"):
        assert _words(end.output, kind) == _words(plain, kind)


def test_the_older_spelling_of_a_call_beside_the_newer_is_no_second_call():
    old = {"function_call": add()["function"]}
    for deltas in (
        [of_call(add()), old],
        [old, of_call(add())],
        [{"content": "x"}, old, {"reasoning": "b"}, of_call(add())],
    ):
        for dialect in ("chat", "responses", "messages"):
            _, end = streamed(dialect, deltas)
            assert sum(item["type"] == "function_call" for item in end.output) == 1


def test_fields_of_a_message_stand_on_one_of_its_texts():
    _, end = streamed("responses", [{"content": "x"}, of_call(add()), {"content": "y"}, DETAILS])
    assert ["reasoning_details" in item for item in end.output] == [False, False, True]


def test_two_signed_blocks_in_a_row_stay_two():
    blocks = [{"type": "thinking", "thinking": text, "signature": text * 2} for text in ("a", "b")]
    for deltas in ([{"thinking_blocks": blocks}], [{"thinking_blocks": [block]} for block in blocks]):
        _, end = streamed("chat", [*deltas, {"content": "x"}])
        assert chat_message(end.output)["thinking_blocks"] == blocks


def test_the_status_that_an_upstream_gives_a_call_is_not_ours():
    (item,) = pivot({"tool_calls": [add(status="in_progress", note="n")]}).output
    assert (item["status"], item["note"]) == ("completed", "n")


_PLACE = {"reasoning": 0, "thinking_blocks": 0, "thought_parts": 0, "tool_calls": 2, "function_call": 2}


@pytest.mark.promise("MS-1")
@pytest.mark.parametrize("seeds", campaign(1500, 20_000))
def test_random_streams_are_cut_in_no_dialect_and_say_what_the_plain_reply_does(seeds):
    usual = 0
    for seed in range(seeds):
        script = said(seed)
        plain = pivot(script.message).output
        _, reply = read(script.deltas)
        assert pivot(reply.message).output == plain, seed
        places = [_PLACE.get(kind, 1) for kind, _ in script.runs]
        if places == sorted(places):
            usual += 1
            assert pivot(reply.message, reply.order).output == plain, seed
        for dialect in ("chat", "responses", "messages"):
            _, end = streamed(dialect, script.deltas)  # raises where what was sent contradicts the end
            assert sorted(item["type"] for item in end.output if item["type"] == "function_call") == [
                "function_call" for item in plain if item["type"] == "function_call"
            ]
            for kind in ("text", "refusal"):
                (thought, text), (plain_thought, plain_text) = _words(end.output, kind), _words(plain, kind)
                assert text == plain_text, seed
                assert sorted(thought) == sorted(plain_thought), seed  # a message has those of its parts last
    assert seeds / 3 < usual < seeds


@pytest.mark.promise("CP-9")
def test_what_clients_of_random_streams_send_back_is_what_was_recorded():
    for seed in range(600):
        deltas = said(seed).deltas
        for dialect in ("chat", "responses"):
            events, end = streamed(dialect, deltas)
            bag = CountedMarks(sampled=item_digests(end.output))
            if dialect == "responses":
                assert bag.missing(item_digests(items_from_input([dict(item) for item in end.output]))) == (), seed
                continue
            whole = {}
            for event in events:
                whole = joined(whole, event["choices"][0]["delta"])
            for echo in (whole, chat_message(end.output)):
                assert bag.missing(item_digests(items_from_messages([echo]))) == (), seed


def _words(output, kind):
    """All thoughts, then all other texts of a kind of part."""
    return [
        "".join(
            part[kind]
            for item in output
            for part in item.get("content") or ()
            if part.get(kind) and thought == (item["type"] == "reasoning")
        )
        for thought in (True, False)
    ]
