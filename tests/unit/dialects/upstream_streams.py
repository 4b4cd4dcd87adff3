"""Random streams of an upstream that speaks Chat, with all that one may say in any order, and the plain reply."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.unit.dialects.odd_turns import CITED, IMAGE, VOICE

_WORDS = ("a", "the ", "é", "😀", "\n", '"', "so", "{", "\u2028")
_ODD_PARTS = (IMAGE, {"type": "audio", "audio": {"data": "AA==", "format": "wav"}}, {"type": "reference", "ids": [1]})


@dataclass(frozen=True)
class Said:
    """What was said: runs of (kind, what), the deltas that tell them, and the message that a plain reply has."""

    runs: tuple[tuple[str, Any], ...]
    deltas: tuple[dict[str, Any], ...]
    message: dict[str, Any]

    def all(self, *kinds: str) -> str:
        """All texts of some kinds, in order."""
        return "".join(what for kind, what in self.runs if kind in kinds)


def said(seed: int) -> Said:
    """The stream of `seed`: one to six runs in any order, then fields that nobody reads."""
    rng = random.Random(seed)
    kinds = ["content", "reasoning", "tool_calls", "refusal"]
    kinds += rng.choice(([], ["parts"], ["function_call"], ["thinking_blocks"], ["parts", "thought_parts"]))
    if "thinking_blocks" in kinds or ("thought_parts" in kinds and rng.random() < 0.5):
        kinds.remove("reasoning")
    if "function_call" in kinds:
        kinds.remove("tool_calls")
    runs: list[tuple[str, Any]] = []
    for kind in rng.choices(kinds, k=rng.randint(1, 6)):
        if kind == "function_call" and any(each == kind for each, _ in runs):
            continue
        if runs and runs[-1][0] == kind and kind != "tool_calls":
            continue
        runs.append((kind, _what(rng, kind, len(runs))))
    fields = rng.choice(({}, {}, {"images": [IMAGE]}, {"audio": VOICE}, {"annotations": [CITED]}, {"note": "n"}))
    deltas = [delta for kind, what in runs for delta in _deltas(rng, kind, what, runs)]
    deltas = _run_together(rng, deltas) if rng.random() < 0.3 else deltas
    details = _details(rng) if rng.random() < 0.3 else []
    for delta in _details_in_pieces(rng, details):
        deltas.insert(rng.randint(0, len(deltas)), delta)
    more = {"reasoning_details": details} if details else {}
    return Said(tuple(runs), (*deltas, *([fields] if fields else [])), {**_message(runs, fields), **more})


def _details(rng: random.Random) -> list[dict[str, Any]]:
    """Entries of a list that comes in pieces, each with its index."""
    kinds = rng.choices(("text", "summary"), k=rng.randint(1, 3))
    return [
        {"type": f"reasoning.{kind}", kind: "x" * rng.randint(2, 6), "id": f"d{at}", "format": "f", "index": at}
        for at, kind in enumerate(kinds)
    ]


def _details_in_pieces(rng: random.Random, details: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Their pieces, some of several entries in one chunk; all say what and whose they are."""
    pieces = []
    for entry in details:
        kind = "text" if "text" in entry else "summary"
        pieces += [{**entry, kind: piece} for piece in _cut(rng, entry[kind])]
    rng.shuffle(pieces)
    while pieces:
        some = rng.randint(1, len(pieces))
        yield {"reasoning_details": pieces[:some]}
        del pieces[:some]


def _run_together(rng: random.Random, deltas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some chunks with the next in one, as of a gateway that makes a stream of a reply that it has whole."""
    joined: list[dict[str, Any]] = []
    for delta in deltas:
        if joined and _go_together(joined[-1], delta) and rng.random() < 0.5:
            joined[-1] = {**joined[-1], **delta}
        else:
            joined.append(delta)
    return joined


def _go_together(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a chunk of both says what the two say: a thought among parts has no order to one of a field then, and a
    text that goes on after the call in its chunk may go on with white space, which is a parser's there."""
    if one.keys() & other.keys() or any(isinstance(each.get("content"), list) for each in (one, other)):
        return False
    return "content" not in other or not one.keys() & {"tool_calls", "function_call"}


def _what(rng: random.Random, kind: str, place: int) -> Any:
    if kind == "tool_calls":
        call = {"id": f"c{place}", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {place}}}'}}
        odd = rng.random()
        if odd < 0.1:
            call["extra_content"] = {"google": {"thought_signature": "SIG"}}
        elif odd < 0.2:
            call["score"] = None  # which streams say as NaN
        elif odd < 0.3:
            call["function"]["arguments"] = {"a": rng.choice((place, None))}  # null: said as infinite
        return call
    if kind == "function_call":
        return {"name": "add", "arguments": '{"a": 1}'}
    if kind == "parts":
        return rng.choice(_ODD_PARTS)
    return "x" + "".join(rng.choices(_WORDS, k=rng.randrange(5)))


def _deltas(rng: random.Random, kind: str, what: Any, runs: list[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    if kind == "parts":
        yield {"content": [what]}
    elif kind == "function_call":
        yield {kind: {"name": what["name"], "arguments": ""}}
        yield from ({kind: {"arguments": piece}} for piece in _cut(rng, what["arguments"]))
    elif kind == "tool_calls":
        calls = [each for each_kind, each in runs if each_kind == kind]
        index = next(at for at, each in enumerate(calls) if each is what)
        name, arguments = what["function"]["name"], what["function"]["arguments"]
        score = {"score": float("nan")} if "score" in what else {}
        if isinstance(arguments, dict):  # it has no pieces
            given = {key: float("inf") if value is None else value for key, value in arguments.items()}
            yield {kind: [{**what, "index": index, "function": {"name": name, "arguments": given}}]}
            return
        yield {kind: [{**what, **score, "index": index, "function": {"name": name, "arguments": ""}}]}
        for piece in _cut(rng, arguments):
            yield {kind: [{"index": index, "function": {"arguments": piece}}]}
    else:
        for piece in _cut(rng, what):
            if kind == "thinking_blocks":
                yield {kind: [{"type": "thinking", "thinking": piece}]}
            elif kind == "thought_parts":
                yield {"content": [{"type": "thinking", "thinking": piece}]}
            else:
                yield {kind: piece}


def _cut(rng: random.Random, text: str) -> list[str]:
    size = rng.choice((1, 2, 9))
    return [text[start : start + size] for start in range(0, len(text), size)]


def _message(runs: list[tuple[str, Any]], fields: dict[str, Any]) -> dict[str, Any]:
    """What a plain reply of the same holds."""
    message: dict[str, Any] = {"role": "assistant", "content": None}

    def texts(kind: str) -> str:
        return "".join(what for each, what in runs if each == kind)

    first = next((at for at, (kind, _) in enumerate(runs) if kind.endswith("parts")), len(runs))
    if texts("reasoning"):
        if "reasoning" in [kind for kind, _ in runs[:first]]:
            del message["content"]
        message["reasoning"] = texts("reasoning")
    text = "".join(what for kind, what in runs[:first] if kind == "content")
    message["content"] = text or None
    if first < len(runs):
        parts = [{"type": "text", "text": text}] if text else []
        for kind, what in runs[first:]:
            if kind == "parts":
                parts.append(what)
            elif kind == "thought_parts":
                parts.append({"type": "thinking", "thinking": what})
            elif kind == "content" and parts and parts[-1].get("type") == "text" and len(parts) > bool(text):
                parts[-1] = {"type": "text", "text": parts[-1]["text"] + what}
            elif kind == "content":
                parts.append({"type": "text", "text": what})
        message["content"] = parts
    if texts("refusal"):
        message["refusal"] = texts("refusal")
    for kind, what in runs:
        if kind == "tool_calls":
            message.setdefault(kind, []).append(what)
        elif kind == "function_call":
            message[kind] = what
    if texts("thinking_blocks"):
        message["thinking_blocks"] = [{"type": "thinking", "thinking": texts("thinking_blocks")}]
    return {**message, **fields}
