"""An upstream's Chat stream read whole: deltas as they come, and at the end the completion that the chunks make up.

The completion is what a plain reply of the same generation holds, so that ids, logprobs and faults are judged by the
same code. Nothing is taken from the first element only: ids and logprobs count on every chunk whatever its delta, and
calls are told apart by id as well as by index. Deltas follow the order of the final items (thought, text, calls); what
comes out of that order is in the completion and is not emitted. Left to others: the bytes (`wire.sse`) and what an
error event means (engines).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toprope.canonical.json import NotJson, loads
from toprope.dialects.chat_history import argument_text
from toprope.dialects.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from toprope.wire.chat import BadChatReply

_FIRST = ("id", "model", "created", "prompt_token_ids")
"""Fields of a chunk whose first value counts; of all others the last one does."""
_TOLD_ELSEWHERE = ("choices", "object")
_THOUGHTS = ("reasoning_content", "reasoning")
_READ = frozenset((*_THOUGHTS, "role", "content", "refusal", "tool_calls"))


class ChatStreamReader:
    """Reads the chunks of one completion. `call_id` is the seed of ids for calls that have none, as for a plain reply
    (`output_from_chat`)."""

    def __init__(self, call_id: str) -> None:
        self._call_id = call_id
        self._top: dict[str, Any] = {}
        self._choice: dict[str, Any] = {}
        self._lists: dict[str, list[Any]] = {}
        self._logprobs: dict[str, list[Any]] = {}
        self._message: dict[str, Any] = {}
        self._texts: dict[str, _Text] = {}
        self._parts: list[Any] = []
        self._late = _Text()
        self._calls: list[_Call] = []
        self._sent: list[str] = []
        self._open_call = 0
        self._mute = False
        self._begun = False

    @property
    def finish_reason(self) -> str | None:
        """The finish reason, None as long as there was none: a stream that ends so was cut."""
        reason = self._choice.get("finish_reason")
        return reason if isinstance(reason, str) else None

    def feed(self, chunk: Any) -> list[Delta]:
        """Take one chunk in; the deltas that it adds, maybe none. Raises `BadChatReply` for what is no chunk."""
        if not isinstance(chunk, dict):
            raise BadChatReply("a chunk is not an object")
        top = self._top
        for name, value in chunk.items():
            if value is not None and name not in _TOLD_ELSEWHERE and (name not in _FIRST or not top.get(name)):
                top[name] = value
        choices = chunk.get("choices")
        if choices is not None and not isinstance(choices, list):
            raise BadChatReply("the choices of a chunk are not a list")
        deltas: list[Delta] = []
        for choice in choices or ():
            if not isinstance(choice, dict) or choice.get("index") not in (None, 0):
                raise BadChatReply("a chunk has another choice than the first; exactly one is expected")
            deltas += self._take_choice(choice)
        return deltas

    def result(self) -> dict[str, Any]:
        """The completion so far, shaped like a plain reply. Raises `BadChatReply` if no choice came at all."""
        if not self._begun:
            raise BadChatReply("the stream ended before its first choice")
        choice: dict[str, Any] = {"index": 0, "message": self._whole_message(), **self._choice, **self._lists}
        if self._logprobs:
            choice["logprobs"] = dict(self._logprobs)
        return {**self._top, "object": "chat.completion", "choices": [choice]}

    def _take_choice(self, choice: Mapping[str, Any]) -> list[Delta]:
        self._begun = True
        for name, value in choice.items():
            if value is None or name in ("delta", "index", "message"):
                continue
            if name == "token_ids" and isinstance(value, list):
                self._lists.setdefault(name, []).extend(value)
            elif name == "logprobs" and isinstance(value, dict):
                for kind, entries in value.items():
                    if isinstance(entries, list):
                        self._logprobs.setdefault(kind, []).extend(entries)
            elif name not in _FIRST or not self._choice.get(name):
                self._choice[name] = value
        delta = choice.get("delta") or choice.get("message")
        return self._take_delta(delta) if isinstance(delta, dict) else []

    def _take_delta(self, delta: Mapping[str, Any]) -> list[Delta]:
        if len(delta) == 1 and "content" in delta:  # what most chunks are
            return self._take_content(delta["content"])
        deltas: list[Delta] = []
        deltas += self._take_thought(delta)
        deltas += self._take_content(delta.get("content"))
        if isinstance(delta.get("refusal"), str):
            self._text("refusal").add(delta["refusal"])
            self._mute = self._mute or bool(delta["refusal"])  # it shares an item with the text, and its place
        pieces = delta.get("tool_calls")
        for piece in pieces if isinstance(pieces, list) else ():
            if isinstance(piece, dict):
                self._take_call(piece)
        if pieces:
            deltas += self._calls_said()
        if isinstance(delta.get("role"), str):
            self._message["role"] = delta["role"]
        for name, value in delta.items():
            if name not in _READ and value is not None:
                self._mute = self._mute or (name in ("function_call", "thinking_blocks") and not self._sent)
                self._message[name] = _joined(self._message[name], value) if name in self._message else value
        return deltas

    def _take_thought(self, delta: Mapping[str, Any]) -> list[Delta]:
        """The thought, which some engines send under both of its names; the first name seen is the one emitted."""
        deltas: list[Delta] = []
        for name in _THOUGHTS:
            piece = delta.get(name)
            if not isinstance(piece, str) or not piece:
                continue
            said = self._text(name).add(piece)
            if next(iter(self._thought_names())) != name or not said:
                continue
            if self._mute or any(kind != "reasoning" for kind in self._sent):
                self._mute = True
                continue
            deltas.append(ReasoningDelta(self._place("reasoning"), said))
        return deltas

    def _thought_names(self) -> list[str]:
        return [name for name in self._texts if name in _THOUGHTS]

    def _take_content(self, content: Any) -> list[Delta]:
        if isinstance(content, list):  # parts, as some providers stream thoughts: kept, not emitted
            self._parts += content
            self._mute = True
        if not isinstance(content, str):
            return []
        if self._calls:  # a parser's white space between calls is dropped, as plain replies do
            self._late.add(content)
            self._mute = self._mute or (not content.isspace() and content != "")
            return []
        said = self._text("content").add(content)
        return [] if self._mute or not said else [TextDelta(self._place("message"), said)]

    def _take_call(self, piece: Mapping[str, Any]) -> None:
        """Put a piece into the call that it belongs to; a piece of a call that was left already silences the rest."""
        call = self._call_of(piece)
        if call is None:
            call = _Call(piece.get("index"), _given_id(piece))
            self._calls.append(call)
        elif not call.id:
            call.id = _given_id(piece)
        function = piece.get("function")
        if isinstance(function, dict):
            name = function.get("name")
            if isinstance(name, str) and name != call.name:
                self._mute = self._mute or call.begun
                call.name += name
            said = call.arguments.add(argument_text(function.get("arguments")))
            call.unsent += said
            left = any(call is each for each in self._calls[: self._open_call])
            self._mute = self._mute or (left and said != "")
        rest = {k: v for k, v in piece.items() if k not in ("index", "id", "function") and v is not None}
        call.rest.update(rest)
        self._mute = self._mute or rest.get("type") == "custom"

    def _call_of(self, piece: Mapping[str, Any]) -> _Call | None:
        """The call that a piece continues, None if it begins one.

        An id tells calls apart under one index. Without an id the newest call of the index is meant, unless the piece
        names a function and that call is complete.
        """
        index, call_id = piece.get("index"), _given_id(piece)
        here = [call for call in self._calls if index is None or call.index == index]
        if not here:
            return None
        if call_id and here[-1].id:
            return next((call for call in reversed(here) if call.id == call_id), None)
        function = piece.get("function")
        named = isinstance(function, dict) and bool(function.get("name"))
        return None if named and here[-1].name and here[-1].complete() else here[-1]

    def _calls_said(self) -> list[Delta]:
        """What is new of the open call, and of those after it where it is complete: engines may interleave calls."""
        deltas: list[Delta] = []
        while not self._mute and self._open_call < len(self._calls):
            place, call = self._open_call, self._calls[self._open_call]
            if not call.name:
                break
            if not call.begun:
                self._sent.append("function_call")
                call.begun, call.at = True, len(self._sent) - 1
                call_id = call.id or f"call_{self._call_id}_{place}"
                deltas.append(ToolCallDelta(call.at, call.unsent, call.name, call_id))
            elif call.unsent:
                deltas.append(ToolCallDelta(call.at, call.unsent))
            call.unsent = ""
            if place + 1 == len(self._calls) or not call.complete():
                break
            self._open_call += 1
        return deltas

    def _place(self, kind: str) -> int:
        if kind not in self._sent:
            self._sent.append(kind)
        return self._sent.index(kind)

    def _text(self, name: str) -> _Text:
        text = self._texts.get(name)
        if text is None:
            text = self._texts[name] = _Text()
        return text

    def _whole_message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, **self._message}
        message.update({name: text.whole() for name, text in self._texts.items()})
        late = self._late.whole()
        if late.strip():
            message["content"] = (message["content"] or "") + late
        if self._parts:
            text = [{"type": "text", "text": message["content"]}] if message["content"] else []
            message["content"] = text + self._parts
        if self._calls:
            message["tool_calls"] = [call.whole() for call in self._calls]
        return message


@dataclass(slots=True)
class _Text:
    """Text in pieces. One half of a surrogate pair waits for the other, as a parser of the whole would join them."""

    pieces: list[str] = field(default_factory=list)
    held: str = ""

    def add(self, piece: str) -> str:
        """The text that is new for sure."""
        if self.held or "\ud800" <= piece[-1:] <= "\udbff":
            piece = _paired(self.held + piece)
            self.held = piece[-1:] if "\ud800" <= piece[-1:] <= "\udbff" else ""
            piece = piece[: len(piece) - len(self.held)]
        if piece:
            self.pieces.append(piece)
        return piece

    def whole(self) -> str:
        """All of it."""
        return "".join(self.pieces) + self.held


@dataclass(slots=True)
class _Call:
    """One tool call in the making; `unsent` are arguments that no delta carried yet, `at` is its item's place."""

    index: Any
    id: str
    name: str = ""
    arguments: _Text = field(default_factory=_Text)
    unsent: str = ""
    begun: bool = False
    at: int = 0
    seen: int = 0
    parsed: int = 0
    is_whole: bool = False
    rest: dict[str, Any] = field(default_factory=dict)

    def complete(self) -> bool:
        """Whether its arguments are a whole JSON object, after which no engine sends more of them.

        Growing arguments are parsed when they have doubled, or when they grew no more: so seldom that the whole is
        linear.
        """
        count, seen = len(self.arguments.pieces), self.seen
        self.seen = count
        if count == self.parsed or not count or (seen != count < 2 * self.parsed):
            return self.is_whole
        self.parsed = count
        try:
            self.is_whole = isinstance(loads(self.arguments.whole()), dict)
        except (NotJson, RecursionError):
            self.is_whole = False
        return self.is_whole

    def whole(self) -> dict[str, Any]:
        """The call as a plain reply has it."""
        function = {"name": self.name, "arguments": self.arguments.whole()}
        return {"id": self.id or None, "type": "function", "function": function, **self.rest}


def _given_id(piece: Mapping[str, Any]) -> str:
    """The id of a tool-call piece, empty where it has none."""
    call_id = piece.get("id")
    return call_id if isinstance(call_id, str) else ""


def _paired(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def _joined(old: Any, new: Any) -> Any:
    """Two values of a field that we do not read, joined as the public libraries join them."""
    if isinstance(old, str) and isinstance(new, str):
        return old + new
    if isinstance(old, list) and isinstance(new, list):
        return old + new
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{name: _joined(old[name], value) if name in old else value for name, value in new.items()}}
    return new
