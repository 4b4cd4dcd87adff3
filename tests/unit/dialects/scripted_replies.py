"""Random finished replies, and random ways in which an engine may have told them before the end."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from toprope.dialects.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from toprope.dialects.pivot import PivotReply, with_item_ids
from toprope.dialects.stream import StreamWriter
from toprope.wire.responses import Item, Usage

_PIECES = (
    "a", "the ", "\n", "\n\n", "\r\n", "\r", "\t", '"', "\\", "{", "}", "data: x", "event: ", "[DONE]", ": ", "é", "😀",
    "\u2028", "\u2029", "\x85", "\ufeff", "\x00", "\u200d", "<think>", "0", " ",
)  # fmt: skip
_VALUES = (1, -0.5, 1e2, 2**70, True, None, "", "café", '\u2028 "q"', [1, [2, {}]], {"n": {"m": "x\ny"}})


@dataclass(frozen=True)
class Told:
    """A reply and the deltas that came before its finish."""

    reply: PivotReply
    deltas: tuple[Delta, ...]


def told(seed: int, *, objects_only: bool, odd_order: bool = False) -> Told:
    """The reply of `seed`. With `objects_only` no argument string is an object that was cut short; with `odd_order` the
    items stand in any order, with another text among them."""
    rng = random.Random(seed)
    reply_id = f"r{seed:x}"
    items = _output(rng, objects_only)
    if odd_order:
        items.append(_message(rng))
        rng.shuffle(items)
    output = with_item_ids(items, reply_id)
    called = any(item["type"] == "function_call" for item in output)
    finish = rng.choice(("tool_calls" if called else "stop", "length", "stop", "content_filter"))
    usage = Usage(rng.randrange(1, 9999), rng.randrange(1, 99), rng.choice((None, 0, 1)), rng.choice((None, 3)))
    extra = rng.choice(({}, {"system_fingerprint": "fp"}))
    reply = PivotReply(output, finish, "m", usage, reply_id, 1_700_000_000, extra=extra)
    return Told(reply, tuple(_deltas(rng, output)))


def _output(rng: random.Random, objects_only: bool) -> list[Item]:
    items: list[Item] = []
    if rng.random() < 0.5:
        part = {"type": "reasoning_text", "text": _text(rng, 1)}
        items.append({"type": "reasoning", "summary": [], "content": [part]})
    if rng.random() < 0.7:
        items.append(_message(rng))
    for number in range(rng.choice((0, 0, 1, 2, 3)) if items else rng.choice((1, 2))):
        call_id = rng.choice((f"c{number}", "c0", "", "same"))
        name = rng.choice(("add", "bash", "f_1"))
        items.append({"type": "function_call", "call_id": call_id, "name": name, "arguments": _call(rng, objects_only)})
    return items


def _message(rng: random.Random) -> Item:
    part = {"type": "output_text", "text": _text(rng, 1), "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part]}


def _text(rng: random.Random, least: int) -> str:
    return "x" * least + "".join(rng.choices(_PIECES, k=rng.randrange(12)))


def _call(rng: random.Random, objects_only: bool) -> str:
    value = {rng.choice("abcdé"): rng.choice(_VALUES) for _ in range(rng.randrange(4))}
    indent, ascii_only = rng.choice((None, None, 1)), rng.random() < 0.5
    spelled = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    if rng.random() < 0.2:
        return rng.choice(("", " ", "[1, 2]", "null", "not json", "\n{}", "  x{"))
    return spelled[: rng.randrange(len(spelled) + 1)] if not objects_only and rng.random() < 0.3 else spelled


def _deltas(rng: random.Random, output: tuple[Item, ...]) -> Iterator[Delta]:
    """The items in order, each in random pieces, up to a random point of one of them."""
    last = rng.randrange(-1, len(output))
    for index, item in enumerate(output[: last + 1]):
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        pieces = _cut(rng, text if index < last or rng.random() < 0.5 else text[: rng.randrange(len(text) + 1)])
        if item["type"] == "function_call":
            given = rng.choice((item["call_id"], None)) if item["call_id"].startswith("call_") else item["call_id"]
            yield ToolCallDelta(index, pieces[0], item["name"], given)
            yield from (ToolCallDelta(index, piece) for piece in pieces[1:])
        else:
            kind = ReasoningDelta if item["type"] == "reasoning" else TextDelta
            yield from (kind(index, piece) for piece in pieces)


def _cut(rng: random.Random, text: str) -> list[str]:
    if not text:
        return [""]
    size = rng.choice((1, 2, 3, 8))
    return [text[start : start + size] for start in range(0, len(text), size)]


def written(writer: StreamWriter, told: Told, rng: random.Random) -> bytes:
    """All bytes of the stream of `told`, with keep-alives here and there."""
    out = [writer.keep_alive() if rng.random() < 0.2 else b"", writer.open()]
    for delta in told.deltas:
        out.append(writer.delta(delta))
        if rng.random() < 0.1:
            out.append(writer.keep_alive())
    return b"".join([*out, writer.finish(told.reply)])


def chopped(data: bytes, rng: random.Random) -> list[bytes]:
    """`data` cut at random places, inside characters too."""
    cuts = sorted({0, len(data), *(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 3, 40))))})
    return [data[a:b] for a, b in pairwise(cuts)]
