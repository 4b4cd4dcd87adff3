"""A tokeniser without a model: exact, reversible, and the same on every machine.

A token is up to three bytes of UTF-8; its id is `(length << 24) | bytes`, so text and ids determine each other.
Ids below 16 are the marks of the chat template:

    1 begin of a turn   2 end of a turn   3 4 around a thought   5 6 around a tool call   7 between name and arguments

Marks cut the text, so a piece of a turn has the same ids wherever it stands: when history is unchanged the next
prompt is exactly this prompt + this generation + what came since. `width` is how many bytes a token takes; two
widths give two tokenisations of one text, which is how tests show that text is no evidence of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from toprope.canonical.json import canonical
from toprope.dialects.chat_parts import plain_text, reasoning_text
from toprope.dialects.pivot import request_items
from toprope.wire.responses import Item, ResponsesRequest

BEGIN, END, THINK, THOUGHT, CALL, CALLED, ARGUMENTS = 1, 2, 3, 4, 5, 6, 7
_MARKS = {
    BEGIN: "<|begin|>",
    END: "<|end|>",
    THINK: "<think>",
    THOUGHT: "</think>",
    CALL: "<call>",
    CALLED: "</call>",
    ARGUMENTS: ":",
}


def encode(text: str, *, width: int = 3) -> list[int]:
    """The ids of a text without marks. `width` (1 to 3) is the number of bytes a token takes."""
    data = text.encode("utf-8", "surrogatepass")
    pieces = (data[start : start + width] for start in range(0, len(data), width))
    return [len(piece) << 24 | int.from_bytes(piece, "big") for piece in pieces]


def decode(ids: Iterable[int]) -> str:
    """The text of ids, marks spelled out; the inverse of `encode` for text without marks."""
    data = bytearray()
    for token in ids:
        size = token >> 24
        if size:
            data += (token & 0xFFFFFF).to_bytes(size, "big")
        else:
            data += _MARKS.get(token, f"<|{token}|>").encode()
    return data.decode("utf-8", "surrogatepass")


def prompt_ids(
    request: ResponsesRequest, *, width: int = 3, history_width: int | None = None, drops_thinking: bool = False
) -> list[int]:
    """The prompt of a request, up to and including the head of the turn to generate.

    `history_width` tokenises the model's own earlier turns differently (a re-tokenised history); `drops_thinking`
    leaves the thoughts out of them, as many models' templates do.
    """
    ids: list[int] = []
    if request.tools:
        ids += [BEGIN, *encode("tools\n" + canonical(list(request.tools)).decode(), width=width), END]
    for turn in split_turns(request_items(request)):
        if is_model_authored(turn[0]):
            kept = [item for item in turn if not (drops_thinking and item.get("type") == "reasoning")]
            said = [token for item in kept for token in item_ids(item, width=history_width or width)]
            ids += [BEGIN, *encode("assistant\n", width=width), *said, END]
        else:
            ids += [BEGIN, *encode(_said_by_others(turn[0]), width=width), END]
    return [*ids, BEGIN, *encode("assistant\n", width=width)]


def next_turn_ids(new: Iterable[Item], *, ended: bool, width: int = 3) -> list[int]:
    """What follows a generation in the next prompt, if others then said `new`. `ended`: its end mark was sampled."""
    ids = [] if ended else [END]
    for item in new:
        ids += [BEGIN, *encode(_said_by_others(item), width=width), END]
    return [*ids, BEGIN, *encode("assistant\n", width=width)]


def split_turns(items: Iterable[Item]) -> list[list[Item]]:
    """The items of a request in turns: what one generation made stays together, anything else stands alone.

    One generation is thought, text, calls in this order, so a thought, or text after text or calls, begins the next.
    """
    turns: list[list[Item]] = []
    last: str | None = None
    for item in items:
        kind = str(item.get("type") or "message") if is_model_authored(item) else None
        joins = kind == "function_call" or (kind == "message" and last == "reasoning")
        if kind is not None and last is not None and joins:
            turns[-1].append(item)
        else:
            turns.append([item])
        last = kind
    return turns


def generation_ids(output: Sequence[Item], *, ended: bool = True, width: int = 3) -> list[int]:
    """What a model samples to say `output`; without the end mark where it was cut (`ended` False)."""
    ids = [token for item in output for token in item_ids(item, width=width)]
    return [*ids, END] if ended else ids


def item_ids(item: Item, *, width: int = 3) -> list[int]:
    """The ids of one item of the model's."""
    kind = item.get("type")
    if kind == "reasoning":
        return [THINK, *encode(reasoning_text(item), width=width), THOUGHT]
    if kind == "function_call":
        name, arguments = encode(str(item.get("name")), width=width), encode(str(item.get("arguments")), width=width)
        return [CALL, *name, ARGUMENTS, *arguments, CALLED]
    return encode(plain_text(item.get("content")), width=width)


def is_model_authored(item: Item) -> bool:
    """Whether a model wrote this item: a thought, a call, an assistant message."""
    kind = item.get("type")
    return kind in ("reasoning", "function_call") or (item.get("role") == "assistant" and kind in (None, "message"))


def _said_by_others(item: Item) -> str:
    if item.get("type") == "function_call_output":
        output: Any = item.get("output")
        return "tool\n" + (output if isinstance(output, str) else plain_text(output))
    if item.get("type") in (None, "message"):
        return f"{item.get('role')}\n{plain_text(item.get('content'))}"
    return f"{item.get('type')}\n{canonical(item).decode()}"
