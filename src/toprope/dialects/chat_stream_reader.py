"""An upstream's Chat stream read whole: deltas as they come, and at the end the completion that the chunks make up.

The completion is what a plain reply of the same generation holds, so that ids, logprobs and faults are judged by the
same code. Nothing is taken from the first element only: ids and logprobs count on every chunk whatever its delta, and
calls are told apart by id as well as by index. A message holds thought, text and calls in no order of its own; where
they came otherwise (text after a call, a second thought), `reply` says in which, so that what left already stays where
it is. Chunks that only let grow what is open, which nearly all do, take a shorter road to the same end (`feed_plain`).
Left to others: the bytes (`wire.sse`) and what an error event means (engines).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from toprope.dialects.chat_parts import is_text_alone
from toprope.dialects.chat_stream_fields import grown, whole
from toprope.dialects.chat_stream_items import GrowingCall, GrowingPiece, GrowingText, arguments_of, given_id
from toprope.dialects.chat_stream_order import in_usual_order, order_of, parts_of
from toprope.dialects.chat_turn import thoughts_among
from toprope.dialects.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from toprope.wire.chat import THOUGHT_FIELDS, BadChatReply, ChatReply, Said, read_chat_object
from toprope.wire.chat_chunk import DECODERS, Decode, entry_of, log_probs_of

_FIRST = ("id", "model", "created", "prompt_token_ids")
"""Fields of a chunk whose first value counts; of all others the last one does."""
_SAME = ("id", "model", "created")
"""Those that every chunk repeats: once they are known, they do not count."""
_TOLD_ELSEWHERE = ("choices", "object")
_TEXTS = frozenset((*THOUGHT_FIELDS, "refusal"))
_READ = _TEXTS | {"role", "content", "tool_calls"}


class ChatStreamReader:
    """Reads the chunks of one completion. `call_id` is the seed of ids for calls that have none, as for a plain reply
    (`output_from_chat`)."""

    def __init__(self, call_id: str) -> None:
        self._call_id = call_id
        self._top: dict[str, Any] = {}
        self._choice: dict[str, Any] = {}
        self._lists: dict[str, list[Any]] = {}
        self._logprobs: dict[str, list[Any]] = {}
        self._role = "assistant"
        self._fields: dict[str, Any] = {}
        self._texts: dict[str, GrowingText] = {}
        self._alone: set[str] = set()
        self._parts: list[Any] = []
        self._line: list[GrowingPiece | GrowingCall] = []
        self._kinds: set[str] = set()
        self._calls: list[GrowingCall] = []
        self._blank = ""
        self._has_text = False
        self._at = 0
        self._mute = False
        self._begun = False
        self._prompt: Any = None
        self._fault: str | None = None

    @property
    def finish_reason(self) -> str | None:
        """The finish reason, None as long as there was none: a stream that ends so was cut."""
        reason = self._choice.get("finish_reason")
        return reason if isinstance(reason, str) and reason else None

    def feed(self, chunk: Any) -> list[Delta]:
        """Take one chunk in; the deltas that it adds, maybe none. Raises `BadChatReply` for what is no chunk."""
        if not isinstance(chunk, dict):
            raise BadChatReply("a chunk is not an object")
        top = self._top
        self._same_prompt(chunk.get("prompt_token_ids"))
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

    def feed_plain(self, chunks: Sequence[bytes], at: int, deltas: list[Delta]) -> int:
        """Take in `chunks` (JSON) from place `at` on as long as they only let the open item grow, and put what they add
        into `deltas`; the place of the first that is left, which is for `feed`. Never raises.

        What it takes is taken as `feed` would, except that of a logprob nothing but the number is kept.
        """
        growing = self._growing()
        if growing is None:
            return at
        decode, delta_of, texts, index = growing
        ids, log_probs = self._lists.get("token_ids"), self._logprobs.get("content")
        while at < len(chunks):
            try:
                chunk = decode(chunks[at])
            except (msgspec.DecodeError, RecursionError):
                break
            choice = chunk.choices[0]
            if index is not None and choice.delta.index not in (None, index):
                break
            if piece := choice.delta.text:
                for text in texts:
                    text.append(piece)
                deltas.append(delta_of(self._at, piece))
            if choice.token_ids is not None:
                ids = self._lists.setdefault("token_ids", []) if ids is None else ids
                ids += choice.token_ids
            if choice.logprobs is not None and choice.logprobs.content is not None:
                log_probs = self._logprobs.setdefault("content", []) if log_probs is None else log_probs
                log_probs += choice.logprobs.content
            if chunk.usage is not None:
                self._top["usage"] = chunk.usage
            if chunk.system_fingerprint is not None:
                self._top["system_fingerprint"] = chunk.system_fingerprint
            if chunk.service_tier is not None:
                self._top["service_tier"] = chunk.service_tier
            at += 1
        return at

    def _growing(self) -> tuple[Decode, Callable[[int, str], Delta], list[list[str]], int | None] | None:
        """How a plain chunk is read now, what delta it makes, the texts that its piece is put to, for a call its index.

        None where one of them could do more than let the open item grow.
        """
        if self._mute or not self._line or self._at + 1 != len(self._line) or self.finish_reason:
            return None
        if not all(self._top.get(name) for name in _SAME) or self._role != "assistant":
            return None
        item = self._line[-1]
        if isinstance(item, GrowingCall):
            if not item.begun or item.arguments.held or not isinstance(item.index, int):
                return None
            return DECODERS["tool_calls"], ToolCallDelta, [item.arguments.pieces], item.index
        if item.text.held:
            return None
        if item.kind == "message":
            return DECODERS["content"], TextDelta, [item.text.pieces], None
        names = [name for name in THOUGHT_FIELDS if name in self._texts]
        if len(names) > 1:
            return None
        return DECODERS[names[0]], ReasoningDelta, [item.text.pieces, self._texts[names[0]].pieces], None

    def result(self) -> dict[str, Any]:
        """The completion so far, shaped like a plain reply. Raises `BadChatReply` if no choice came at all."""
        return self._completion({kind: [entry_of(each) for each in told] for kind, told in self._logprobs.items()})

    def _completion(self, logprobs: dict[str, list[Any]]) -> dict[str, Any]:
        if not self._begun:
            raise BadChatReply("the stream ended before its first choice")
        choice: dict[str, Any] = {"index": 0, "message": self._whole_message(), **self._choice, **self._lists}
        if logprobs:
            choice["logprobs"] = logprobs
        return {**self._top, "object": "chat.completion", "choices": [choice]}

    def reply(self, *, keep_logprobs: bool = False) -> ChatReply:
        """The completion as a plain reply is read, with the order in which it was said, and with a fault where chunks
        contradict one another. Raises as `result`."""
        order, fault = self._order(), self._fault or self._told_twice()
        log_probs = None if keep_logprobs else log_probs_of(self._logprobs.get("content", ()))
        if log_probs is not None:  # numbers already: what else there is to judge is judged without them
            reply = read_chat_object(self._completion({"content": []}), order=order, fault=fault)
            if reply.token_ids is not None and reply.log_probs is not None and not len(reply.log_probs):
                return replace(reply, log_probs=log_probs)
        return read_chat_object(self.result(), keep_logprobs=keep_logprobs, order=order, fault=fault)

    def _order(self) -> tuple[Said, ...]:
        return () if in_usual_order(self._line) else order_of(self._line, self._whole_message())

    def _same_prompt(self, ids: Any) -> None:
        if not ids:
            return
        if self._prompt is None:
            self._prompt = ids
        elif ids != self._prompt:
            self._fault = self._fault or "no_token_ids: the prompt ids of two chunks differ"

    def _take_choice(self, choice: Mapping[str, Any]) -> list[Delta]:
        self._begun = True
        self._same_prompt(choice.get("prompt_token_ids"))
        ended = self.finish_reason
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
        if not isinstance(delta, dict):
            delta = {}
        if ended:
            self._no_more_than(ended, delta, choice)
        return self._take_delta(delta)

    def _no_more_than(self, ended: str, delta: Mapping[str, Any], choice: Mapping[str, Any]) -> None:
        more = choice.get("token_ids") or any(delta.get(name) for name in _READ if name != "role")
        if more or self.finish_reason != ended:
            self._fault = self._fault or f"no_token_ids: the reply went on after its finish reason {ended!r}"

    def _take_delta(self, delta: Mapping[str, Any]) -> list[Delta]:
        if len(delta) == 1 and "content" in delta:  # what most chunks are
            self._take_content(delta["content"])
            return self._news()
        self._take_thought(delta)
        self._take_content(delta.get("content"))
        if isinstance(delta.get("refusal"), str):
            self._text("refusal").add(delta["refusal"])
            if delta["refusal"]:
                self._held("refusal").text.add(delta["refusal"])
        pieces = delta.get("tool_calls")
        for piece in pieces if isinstance(pieces, list) else ():
            if isinstance(piece, dict):
                self._take_call(piece)
        if isinstance(delta.get("role"), str):
            self._role = delta["role"]
        for name, value in delta.items():
            if value is not None and (name not in _READ or (name in _TEXTS and not isinstance(value, str))):
                is_call = name == "function_call" and isinstance(value, dict)
                if is_call and not (self._calls or "legacy" in self._kinds):
                    self._held("legacy")
                self._fields[name] = grown(self._fields.get(name), value)
        return self._news()

    def _held(self, kind: str) -> GrowingPiece:
        """The open piece of a kind that no delta tells: it keeps its place, and all from it on waits for the finish."""
        self._mute = True
        return self._piece(kind)

    def _take_thought(self, delta: Mapping[str, Any]) -> None:
        """The thought: what a chunk says under both of its names is said once, all else in the order in which it came.

        Different texts in one chunk have no order, which is a fault."""
        said = [name for name in delta if name in THOUGHT_FIELDS and isinstance(delta[name], str) and delta[name]]
        for name in said:
            self._text(name).add(delta[name])
        if len(said) == 1:
            self._alone.add(said[0])
        elif len(said) > 1 and delta[said[0]] == delta[said[1]]:
            del said[1]
        elif said:
            self._fault = self._fault or "no_token_ids: one chunk has two thoughts under two names"
        for name in said:
            self._say("reasoning", delta[name])
        if "thinking_blocks" in delta and "reasoning" not in self._kinds:
            blocks = delta["thinking_blocks"]
            if isinstance(blocks, list) and (thought := thoughts_among(blocks)):
                self._held("blocks").text.add(thought)  # which the fields may still tell too

    def _told_twice(self) -> str | None:
        """The fault of a thought of which nobody knows whether its second name goes on with it or says it again."""
        if len(self._alone) < 2:
            return None
        one, other = sorted((self._texts[name].whole() for name in THOUGHT_FIELDS), key=len)
        if not other.startswith(one):
            return None
        return "no_token_ids: the thought came under two names, and the second may go on with it or say it again"

    def _take_content(self, content: Any) -> None:
        if isinstance(content, list):
            content = self._take_parts(content)
        if not isinstance(content, str):
            return
        if self._parts and content:  # after parts it is one of them: what stood before is the first
            self._parts.append(content)
            self._held("parts").parts.append(content)
            return
        self._has_text = self._has_text or not self._calls
        if self._line and self._line[-1].kind in (
            "function_call",
            "legacy",
        ):  # a parser's white space between calls is no text
            self._blank += content
            content = "" if self._blank.isspace() else self._blank
        if content:
            self._say("message", content)

    def _take_parts(self, parts: list[Any]) -> str | None:
        """Keep parts, as some providers stream thoughts, for the finish. A lone one of text is given back as that."""
        if len(parts) == 1 and is_text_alone(parts[0]):
            return str(parts[0]["text"])
        if parts:
            self._parts += parts
            self._held("parts").parts += parts
        return None

    def _say(self, kind: str, text: str) -> None:
        last = self._line[-1] if self._line else None
        piece = last if isinstance(last, GrowingPiece) and last.kind == kind else self._piece(kind)
        piece.unsent += piece.text.add(text)

    def _piece(self, kind: str) -> GrowingPiece:
        """The last piece where it is of this kind, else one that begins now."""
        last = self._line[-1] if self._line else None
        if isinstance(last, GrowingPiece) and last.kind == kind:
            return last
        self._end(last)
        piece = GrowingPiece(kind)
        self._kinds.add(kind)
        self._line.append(piece)
        return piece

    def _end(self, last: GrowingPiece | GrowingCall | None) -> None:
        """Something else begins: nothing more comes of what stood last, the other half of a character neither."""
        self._blank = ""
        if isinstance(last, GrowingPiece):
            last.unsent += last.text.end()

    def _take_call(self, piece: Mapping[str, Any]) -> None:
        """Put a piece into the call that it belongs to. One of a call that was left already waits for the finish."""
        call = self._call_of(piece)
        if call is None:
            call_id = given_id(piece)
            call = GrowingCall(piece.get("index"), call_id, call_id or f"call_{self._call_id}_{len(self._calls)}")
            self._end(self._line[-1] if self._line else None)
            self._calls.append(call)
            self._line.append(call)
        elif not call.id:
            call.id = given_id(piece)
            call.said_id = call.said_id if call.begun else call.id or call.said_id
        function = piece.get("function")
        self._mute = call.take_rest(piece) or self._mute  # no delta has a place for it: the finish tells the whole call
        if call.repeated(function):
            return
        if isinstance(function, dict):
            name = function.get("name")
            if isinstance(name, str) and name != call.name:
                self._mute = self._mute or call.begun
                call.name += name
            said = call.arguments.add(arguments_of(function))
            call.unsent += said
        self._mute = self._mute or call.type == "custom"

    def _call_of(self, piece: Mapping[str, Any]) -> GrowingCall | None:
        """The call that a piece continues, None if it begins one.

        An id tells calls apart under one index. Without an id the newest call of the index is meant, unless the piece
        names a function and that call is complete.
        """
        index, call_id = piece.get("index"), given_id(piece)
        here = [call for call in self._calls if index is None or call.index == index]
        if not here:
            return None
        function = piece.get("function")
        if call_id and here[-1].id:
            known = next((call for call in reversed(here) if call.id == call_id), None)
            return None if known is not None and known.other(function) else known
        return None if here[-1].ended_by(function) else here[-1]

    def _news(self) -> list[Delta]:
        """What is new of the open item, and of those after it where it is complete: engines may interleave calls."""
        deltas: list[Delta] = []
        while not self._mute and self._at < len(self._line):
            item = self._line[self._at]
            if isinstance(item, GrowingCall) and not item.name:
                break
            deltas += item.news(self._at)
            if self._at + 1 == len(self._line) or not item.complete():
                break
            self._at += 1
        return deltas

    def _text(self, name: str) -> GrowingText:
        text = self._texts.get(name)
        if text is None:
            text = self._texts[name] = GrowingText()
        return text

    def _said(self, kind: str) -> list[str]:
        return [each.text.whole() for each in self._line if each.kind == kind and isinstance(each, GrowingPiece)]

    def _whole_message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self._role, "content": None}
        message.update({name: whole(value) for name, value in self._fields.items()})
        thought = "".join(self._said("reasoning"))
        message.update(
            {name: thought if name in THOUGHT_FIELDS else text.whole() for name, text in self._texts.items()}
        )
        text = "".join(self._said("message"))
        if text or (self._has_text and not message.get("refusal")):  # beside a refusal an opening of nothing is null
            message["content"] = text
        if self._parts:
            first = [{"type": "text", "text": text}] if text else []
            kinds = [each.kind for each in self._line]
            if "reasoning" in kinds[: kinds.index("parts")]:
                del message["content"]  # the thought of a field left before those among the parts: so they are read
            message["content"] = first + parts_of(self._parts)
        if self._calls:
            message["tool_calls"] = [call.whole() for call in self._calls]
        return message
