"""Two roads for a chunk of an upstream's stream: whatever takes the short one is read as the long one reads it."""

from __future__ import annotations

import json
import random

import numpy as np

from toprope.dialects.chat_stream_reader import ChatStreamReader
from toprope.wire.chat import BadChatReply

_TEXTS = (
    "a", "the ", "", " ", "\n", '"', "\\", "é😀", "\u2028",
    "\ud83d", "\ude00", "\ud83d\ude00", "{", "}", '{"a": 1}', None,
)  # fmt: skip
_IDS = ([5], [5, 6], [], None, [7] * 3, [2**32 - 1], [2**32], [-1], [True], [1.0], ["1"], "7", 7)
_LOG_PROBS = (-0.5, -1, 0, -0.0, 1e300, None, float("nan"), True, "x", 2**70)
_ODD_CALLS = (
    {"id": "c1"}, {"id": ""}, {"type": "custom"}, {"index": None}, {"index": 0}, {"index": 1}, {"index": 9},
    {"extra": 1}, {"function": {}}, {"function": None},
)  # fmt: skip
_ODD_FUNCTIONS = ({"name": "add"}, {"name": "x"}, {"name": ""}, {"arguments": {"a": 1}}, {"arguments": None}, {"k": 1})
_ODD_DELTAS = ({"role": "tool"}, {"content": "z"}, {"reasoning": "z"}, {"refusal": "no"}, {"k": "v"}, {"k": "w"})
_ODD_CHOICES = (
    {"index": 1},
    {"index": None},
    {"finish_reason": "stop"},
    {"prompt_token_ids": [1, 3]},
    {"x": 1},
    {"stop_reason": "X"},
    {"matched_stop": "x"},
)
_TOPS = ({}, {}, {"system_fingerprint": "f"}, {"system_fingerprint": "g"}, {"service_tier": ""}, {"usage": {"n": 1}})
_ODD_TOPS = ({"id": "other"}, {"prompt_token_ids": [1, 2]}, {"choices": []}, {"more": 1})
_TRIPLE = {"prompt_token_ids": [1, 2], "generation_token_ids": [5, 6], "generation_log_probs": [-1.0, -2.0]}
_PLACES = ("piece", "call", "function", "calls", "ids", "log_prob", "logprobs", "delta", "choice", "top")
"""Where a chunk may be odd: in one place alone, so that what looks there is tried by itself, or in any of them."""


def _chunks(rng: random.Random) -> list[dict[str, object]]:
    """A stream in which most chunks are plain, as engines write them, and any other may stand among them."""
    odd, told = rng.choice((0.0, 0.1, 0.3)), rng.random() < 0.9
    role = "assistant" if rng.random() < 0.9 else "tool"
    first = _chunk({"role": role, "content": rng.choice(("", None, "a"))}, prompt_token_ids=[1, 2])
    chunks = [first if rng.random() < 0.9 else _chunk({})]
    untold = rng.choice(("id", "model", "created", *("none",) * 27))  # neither at the start nor at the end
    for run in range(rng.randint(1, 5)):
        kind, index = rng.choice(("content", "reasoning_content", "reasoning", "tool_calls")), rng.choice((0, 0, run))
        if kind == "tool_calls":
            begun = {"name": "add", "arguments": rng.choice(("", "", "{}", "{"))}
            opening = {"index": index, "id": f"c{run}", "type": "function", "function": begun}
            chunks.append(_chunk({"tool_calls": [opening]}))
        chunks += [_grown(rng, kind, index, odd, told) for _ in range(rng.randint(0, 12))]
    last = _chunk(
        {} if told else _TRIPLE,
        {"finish_reason": rng.choice(("stop", "tool_calls", "length", "odd", None)), "stop_reason": None},
    )
    late = [_grown(rng, "content", 0, odd, told)] * rng.choice((0, 0, 0, 1))
    end = {**_chunk({}), "choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 7}}
    for chunk in (chunks[0], last, end):
        chunk.pop(untold, None)
    return [*chunks, last, *late, end]


def _chunk(delta: object, choice: object = None, /, **top: object) -> dict[str, object]:
    only = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **(choice or {})}
    return {"id": "up", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [only], **top}


def _grown(rng: random.Random, kind: str, index: int, odd: float, told: bool) -> dict[str, object]:
    """One chunk of a run of `kind`. `told`: the stream has ids on its chunks, and not on its message."""
    only = rng.choice((*_PLACES, None)) if rng.random() < odd else ""

    def any_of(place, values, plain):
        is_odd = only == place or (only is None and rng.random() < 0.3)
        return rng.choice(values[plain:] if is_odd else values[:plain])

    piece = any_of("piece", _TEXTS, 9)
    delta: dict[str, object] = {kind: piece}
    if kind == "tool_calls":
        function = {"arguments": piece, **any_of("function", ({}, *_ODD_FUNCTIONS), 1)}
        call = {"index": index, "function": function, **any_of("call", ({}, *_ODD_CALLS), 1)}
        delta = {kind: [call] * any_of("calls", (1, 2, 0), 1)}
    choice: dict[str, object] = {}
    if told and rng.random() < 0.8:
        choice["token_ids"] = any_of("ids", _IDS, 5)
    if rng.random() < 0.8:
        entries = [
            {"token": "t", "logprob": any_of("log_prob", _LOG_PROBS, 5), "bytes": None}
            for _ in range(rng.randint(0, 2))
        ]
        shapes = (
            {"content": entries, "refusal": None}, None,
            {"content": entries, "refusal": [{"logprob": -1.0}]}, {"refusal": [1]}, {"content": 3}, {"k": 1},
        )  # fmt: skip
        choice["logprobs"] = any_of("logprobs", shapes, 2)
    top: dict[str, object] = dict(rng.choice(_TOPS))
    if rng.random() < 0.1:
        delta["role"] = "assistant"
    for place, fields, others in (
        ("delta", delta, _ODD_DELTAS), ("choice", choice, _ODD_CHOICES), ("top", top, _ODD_TOPS)
    ):  # fmt: skip
        fields.update(any_of(place, ({}, *others), 1))
    return {**_chunk(delta, choice), **top}


def _read(chunks: list[bytes], *, short: bool) -> tuple[object, int]:
    """What is made of a stream, or the words of its refusal with what had left; and how many took the short road."""
    reader, deltas, at, plain = ChatStreamReader("r1"), [], 0, 0
    try:
        while at < len(chunks):
            if short:
                before, at = at, reader.feed_plain(chunks, at, deltas)
                plain += at - before
            if at < len(chunks):
                deltas += reader.feed(json.loads(chunks[at]))
                at += 1
        reply = reader.reply(keep_logprobs=not short)  # one that keeps them is judged whole
    except BadChatReply as error:
        return (str(error), deltas), plain
    told = {name: getattr(reply, name) for name in reply.__dataclass_fields__}
    del told["logprobs"]
    whole = reader.result()
    (choice,) = whole["choices"]
    if "logprobs" in choice:  # of what else they say only the number is kept
        choice["logprobs"] = {kind: len(entries) for kind, entries in choice["logprobs"].items()}
    told["whole"] = json.dumps(whole, sort_keys=True)
    for name in ("prompt_ids", "token_ids", "log_probs"):
        told[name] = None if told[name] is None else (told[name].dtype.str, told[name].tobytes())
    return (told, deltas, reader.finish_reason), plain


def test_the_short_road_reads_every_stream_as_the_long_one_does():
    taken = whole = refused = 0
    for seed in range(6000):
        chunks = [json.dumps(chunk).encode() for chunk in _chunks(random.Random(seed))]
        (short, plain), (long, _) = _read(chunks, short=True), _read(chunks, short=False)
        assert short == long, f"seed {seed}"
        taken, whole, refused = taken + plain, whole + len(chunks), refused + isinstance(long[0], str)
    assert taken > 0.25 * whole  # else this compares the long road with itself
    assert 100 < refused < 3000


def test_a_long_reply_takes_the_short_road_from_its_second_piece_on():
    entry = {"token": "token_id:5", "logprob": -0.25, "bytes": [97], "top_logprobs": []}
    for name, piece in (("content", "a"), ("reasoning", "a"), ("reasoning_content", "a"), ("tool_calls", None)):
        call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
        begun, more = {name: piece or [call]}, {name: piece or [{"index": 0, "function": {"arguments": "1"}}]}
        chunks = [_chunk({"role": "assistant", "content": None}), _chunk(begun)]
        chunks += [_chunk(more, {"token_ids": [5], "logprobs": {"content": [entry]}})] * 50
        reader, deltas = ChatStreamReader("r1"), []
        for chunk in chunks[:2]:
            reader.feed(chunk)
        assert reader.feed_plain([json.dumps(chunk).encode() for chunk in chunks], 2, deltas) == 52
        assert len(deltas) == 50
        reply = reader.reply()
        assert np.array_equal(reply.token_ids, [5] * 50)
        assert np.array_equal(reply.log_probs, [-0.25] * 50)


def _after(*chunks, short):
    reader, deltas = ChatStreamReader("r1"), []
    for chunk in chunks:
        data = json.dumps(chunk).encode()
        if not (short and reader.feed_plain([data], 0, deltas)):
            deltas += reader.feed(json.loads(data))
    return deltas, reader.result()


def test_half_a_character_of_arguments_is_not_overtaken_on_the_short_road():
    def piece(text, **more):
        return _chunk(
            {"tool_calls": [{"index": 0, "function": {"arguments": text, **more.pop("function", {})}, **more}]}
        )

    begun = piece("", id="c", type="function", function={"name": "f"})
    for rest in ("x", "\ude00"):
        told = [begun, piece('{"'), piece("\ud83d"), piece(rest), piece('":1}')]
        short, long = _after(*told, short=True), _after(*told, short=False)
        assert short == long
        call = short[1]["choices"][0]["message"]["tool_calls"][0]
        assert json.loads(call["function"]["arguments"]) == {json.loads(json.dumps("\ud83d" + rest)): 1}


def test_a_role_that_is_told_again_counts_on_both_roads():
    told = [_chunk({"role": "tool", "content": "a"}), _chunk({"role": "assistant", "content": "b"})]
    for short in (True, False):
        assert _after(*told, short=short)[1]["choices"][0]["message"]["role"] == "assistant"
