"""The deltas that a scripted reply is streamed as. Left to others: when each of them leaves (`scripted`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from toprope.dialects.chat_parts import plain_text, reasoning_text
from toprope.dialects.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from toprope.wire.responses import Item

_TOKEN = 3
"""Bytes of UTF-8 in a piece: what a token of the toy tokeniser takes; no character is cut."""


def deltas_of(output: Sequence[Item], text_pieces: Sequence[str] | None = None) -> Iterator[Delta]:
    """The output items as deltas, in order; `text_pieces` says how the (one) message's text is cut."""
    for index, item in enumerate(output):
        kind = item.get("type")
        if kind == "reasoning":
            for piece in pieces_of(reasoning_text(item)):
                yield ReasoningDelta(index, piece)
        elif kind == "function_call":
            first, *rest = pieces_of(str(item["arguments"])) or [""]
            yield ToolCallDelta(index, first, str(item["name"]), item.get("call_id"))
            for piece in rest:
                yield ToolCallDelta(index, piece)
        else:
            for piece in text_pieces or pieces_of(plain_text(item.get("content"))) or [""]:
                yield TextDelta(index, piece)


def pieces_of(text: str) -> list[str]:
    """`text` in pieces of about a token, cut between characters."""
    pieces: list[str] = []
    piece, size = "", 0
    for character in text:
        piece += character
        size += len(character.encode("utf-8", "surrogatepass"))
        if size >= _TOKEN:
            pieces.append(piece)
            piece, size = "", 0
    return [*pieces, piece] if piece else pieces
