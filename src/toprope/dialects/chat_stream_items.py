"""The items of one streamed message while they grow: text with halves of characters, and calls in pieces.

Left to others: which item a piece belongs to, and when it may leave (`chat_stream_reader`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toprope.canonical.json import NotJson, loads
from toprope.dialects.chat_history import argument_text
from toprope.dialects.chat_stream_fields import grown, is_told, whole
from toprope.dialects.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from toprope.errors.tree import BadRequest
from toprope.wire.chat import BadChatReply, finite_or_null
from toprope.wire.message_fields import says_something


@dataclass(slots=True)
class GrowingText:
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

    def end(self) -> str:
        """What waited for its other half, which does not come any more."""
        held, self.held = self.held, ""
        if held:
            self.pieces.append(held)
        return held

    def whole(self) -> str:
        """All of it."""
        return "".join(self.pieces) + self.held


@dataclass(slots=True)
class GrowingPiece:
    """A run of text or of thought, ended when anything else begins; `unsent` is what no delta carried yet.

    `kind` is `message` or `reasoning`, or for what no delta tells and the finish makes up `refusal`, `blocks` (thoughts
    in them), `parts` (of a content, with the texts after them) or `legacy` (the older spelling of a call).
    """

    kind: str
    text: GrowingText = field(default_factory=GrowingText)
    unsent: str = ""
    parts: list[Any] = field(default_factory=list)

    def news(self, at: int) -> list[Delta]:
        said, self.unsent = self.unsent, ""
        delta = TextDelta if self.kind == "message" else ReasoningDelta
        return [delta(at, said)] if said else []

    def complete(self) -> bool:
        return True  # asked only where something else has begun


_WHITE = " \t\r\n"
_MARKS = re.compile(r'\\.?|["{}]', re.DOTALL)


@dataclass(slots=True)
class Braces:
    """Where the outermost brace of JSON in pieces closes; what stands in strings does not count."""

    depth: int = 0
    in_string: bool = False
    escapes: bool = False
    closed: bool = False

    def close_in(self, pieces: Iterable[str]) -> bool:
        """Take further pieces in; whether the outermost brace has closed in one of them, which is not asked again."""
        for piece in pieces:
            piece, self.escapes = piece[1:] if self.escapes and piece else piece, self.escapes and not piece
            for mark in _MARKS.findall(piece):
                if mark[0] == "\\":
                    self.escapes = len(mark) == 1  # what it escapes begins the next piece
                elif mark == '"':
                    self.in_string = not self.in_string
                elif not self.in_string:
                    self.depth += 1 if mark == "{" else -1
                    if self.depth <= 0:
                        self.closed = True
                        return True
        return False


@dataclass(slots=True)
class GrowingCall:
    """One tool call in the making; `unsent` are arguments that no delta carried yet, `said_id` the id to tell."""

    kind = "function_call"

    index: Any
    id: str
    said_id: str
    name: str = ""
    arguments: GrowingText = field(default_factory=GrowingText)
    unsent: str = ""
    begun: bool = False
    scanned: int = 0
    braces: Braces = field(default_factory=Braces)
    is_whole: bool = False
    type: str = "function"
    rest: dict[str, Any] = field(default_factory=dict)
    beside: dict[str, Any] = field(default_factory=dict)

    def take_rest(self, piece: Mapping[str, Any]) -> bool:
        """Take in what a piece has beside id, name and arguments; whether it says something.

        `rest` are the call's fields, `beside` those of its function. Pieces of a field are joined, a whole value that
        is told once more is not.
        """
        more = {k: v for k, v in piece.items() if k not in _CALL_FIELDS and v is not None}
        function = piece.get("function")
        if isinstance(function, Mapping):
            beside = {k: v for k, v in function.items() if k not in _FUNCTION_FIELDS and v is not None}
        else:
            beside = {}
        if isinstance(piece.get("type"), str):
            self.type = piece["type"]
        for fields, new in ((self.rest, more), (self.beside, beside)):
            for name, value in new.items():
                if name not in fields:
                    fields[name] = grown(None, value)
                elif name == "custom" or not is_told(fields[name], value):  # an input may well say the same twice
                    fields[name] = grown(fields[name], value)
        return any(map(says_something, (*more.values(), *beside.values())))

    def news(self, at: int) -> list[Delta]:
        said, self.unsent = self.unsent, ""
        if not self.begun:
            self.begun = True
            return [ToolCallDelta(at, said, self.name, self.said_id)]
        return [ToolCallDelta(at, said)] if said else []

    def repeated(self, function: Any) -> bool:
        """Whether `function` says the whole call once more, as some engines do at the end; that adds nothing."""
        again = self._again(function)
        return again is not None and again == self.arguments.whole()

    def other(self, function: Any) -> bool:
        """Whether `function` is another whole call, although it has the id of this one, which is complete."""
        again = self._again(function)
        return again is not None and again != self.arguments.whole()

    def ended_by(self, function: Any) -> bool:
        """Whether `function`, which has no id, begins another call: it has a name, and this call is complete. White
        space under this call's own name still belongs to it."""
        if not isinstance(function, dict) or not function.get("name") or not self.name or not self.complete():
            return False
        arguments = arguments_of(function)
        return function["name"] != self.name or not arguments or bool(arguments.strip(_WHITE))

    def _again(self, function: Any) -> str | None:
        """The arguments of a piece that has the name of this complete call and an object of its own; else None."""
        if not isinstance(function, dict) or not self.name or function.get("name") != self.name:
            return None
        arguments = arguments_of(function)
        if not (arguments.lstrip().startswith("{") and arguments.rstrip().endswith("}")):
            return None
        return arguments if self.complete() else None

    def complete(self) -> bool:
        """Whether its arguments are a whole JSON object, after which no engine sends more of them.

        Braces are counted over what is new, and parsed is once, when the outermost closes: the whole is linear.
        """
        pieces, at = self.arguments.pieces, self.scanned
        if at == len(pieces):
            return self.is_whole
        self.scanned = len(pieces)
        if self.braces.closed:  # white space may follow, and nothing else
            self.is_whole = self.is_whole and not any(piece.strip(_WHITE) for piece in pieces[at:])
        elif self.braces.close_in(pieces[at:]):
            try:
                self.is_whole = isinstance(loads(self.arguments.whole()), dict)
            except (NotJson, RecursionError):
                self.is_whole = False
        return self.is_whole

    def whole(self) -> dict[str, Any]:
        """The call as a plain reply has it."""
        rest = {name: whole(value) for name, value in self.rest.items()}
        if self.type == "custom" and isinstance(rest.get("custom"), dict) and not self.name:
            return {"id": self.said_id, "type": self.type, **rest}
        beside = {name: whole(value) for name, value in self.beside.items()}
        function = {**beside, "name": self.name, "arguments": self.arguments.whole()}
        return {"id": self.said_id, "type": self.type, "function": function, **rest}


_CALL_FIELDS = frozenset(("id", "type", "index", "function"))
_FUNCTION_FIELDS = frozenset(("name", "arguments", "parsed_arguments"))


def arguments_of(function: Mapping[str, Any]) -> str:
    """The arguments in a piece of a call, as a plain reply's are read. Raises `BadChatReply` for what is no text."""
    told = function.get("arguments")
    if isinstance(told, str):
        return told
    try:
        return argument_text(finite_or_null(told))
    except BadRequest as error:
        raise BadChatReply(error.message) from error


def given_id(piece: Mapping[str, Any]) -> str:
    """The id of a tool-call piece, empty where it has none."""
    call_id = piece.get("id")
    return call_id if isinstance(call_id, str) else ""


def _paired(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
