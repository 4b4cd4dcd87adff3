"""A Chat stream: chunks of one growing message.

Chat has no items: what left is kept as the text, the thought and the calls that a client has joined so far. Left to
others: the whole completion (`chat_reply`), whose message the joined chunks are equal to.
"""

from __future__ import annotations

from typing import Any

from toprope.dialects.chat_parts import CONTENT_PARTS, text_among
from toprope.dialects.chat_reply import chat_message, chat_usage
from toprope.dialects.deltas import Delta, TextDelta, ToolCallDelta
from toprope.dialects.emitted import COMMENT, PIECE, Emitted, StreamContradiction, around, data_event, rest_of
from toprope.dialects.pivot import PivotReply

_JOINED = frozenset(("role", "content", "refusal", "reasoning_content", "tool_calls"))


class ChatStream:
    """One Chat stream. `include_usage` is the client's `stream_options.include_usage`."""

    def __init__(self, *, reply_id: str, model: str, created: int, include_usage: bool = False) -> None:
        self._head = {
            "id": f"chatcmpl-{reply_id}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        self._include_usage = include_usage
        self._emitted = Emitted(reply_id)
        self._more: tuple[bytes, bytes] | None = None  # the chunk that lets the open item grow, around its piece

    def open(self) -> bytes:
        """The chunk that names the role."""
        return self._chunk({"role": "assistant", "content": None, "refusal": None})

    def delta(self, delta: Delta) -> bytes:
        """One chunk, or nothing for a piece that says nothing."""
        if (more := self._more) is not None and (piece := self._emitted.grow(delta)) is not None:
            return more[0] + piece + more[1] if piece else b""
        item, opened = self._emitted.take(delta)
        if isinstance(delta, ToolCallDelta):
            place = sum(each.kind == "function_call" for each in self._emitted.items) - 1
            self._more = around(self._argue(place, PIECE))
            if opened:
                return self._call(place, item.call_id, item.name, delta.arguments)
            return self._argue(place, delta.arguments)
        field = "content" if isinstance(delta, TextDelta) else "reasoning_content"
        self._more = around(self._say(field, PIECE))
        return self._say(field, delta.text)

    def finish(self, reply: PivotReply) -> bytes:
        """The rest of the message, the finish reason, usage where it was asked for, and `[DONE]`."""
        message = chat_message(reply.output)
        thought, text = self._emitted.said("reasoning"), self._emitted.said("message")
        more = {}
        if text and isinstance(parts := message["content"], list):  # what grew as a string goes on as one
            message["content"] = text_among(parts)
            more = {CONTENT_PARTS: parts}
        out = [self._rest("reasoning_content", thought, message), self._rest("content", text, message)]
        out.append(self._calls(message))
        if message.get("refusal") is not None:
            out.append(self._chunk({"refusal": message["refusal"]}))
        rest = {name: value for name, value in message.items() if name not in _JOINED} | more
        if not isinstance(message.get("reasoning_content", ""), str):
            rest["reasoning_content"] = message["reasoning_content"]  # in a shape of its own, which nobody joins
        choice: dict[str, Any] = {"delta": {**rest, **(reply.tokens or {})}, "finish_reason": reply.finish_reason}
        out.append(self._write({**reply.extra, "choices": [self._choice(**choice, logprobs=reply.logprobs)]}))
        if self._include_usage:
            out.append(self._write({**reply.extra, "choices": [], "usage": chat_usage(reply.usage)}))
        out.append(b"data: [DONE]\n\n")
        return b"".join(out)

    def keep_alive(self) -> bytes:
        """A comment."""
        return COMMENT

    def _rest(self, field: str, said: str, message: dict[str, Any]) -> bytes:
        final = message.get(field)
        if field == "content" and isinstance(final, list):
            return self._chunk({"content": final})
        rest = rest_of(said, final if isinstance(final, str) else "", field)
        if final == "" and field == "content":
            return self._chunk({"content": ""})  # said nothing, which is not the same as no content
        return self._say(field, rest)

    def _calls(self, message: dict[str, Any]) -> bytes:
        sent = [item for item in self._emitted.items if item.kind == "function_call"]
        final = message.get("tool_calls", ())
        if len(sent) > len(final):
            raise StreamContradiction(f"{len(sent)} calls were sent, {len(final)} were finished")
        out = []
        for place, call in enumerate(final):
            if place >= len(sent):
                out.append(self._chunk({"tool_calls": [{"index": place, **call}]}))
                continue
            item, function = sent[place], call.get("function", {})
            if (item.call_id, item.name) != (call["id"], function.get("name")):
                raise StreamContradiction(f"call {place}: {item.call_id} {item.name} was sent, {call} was finished")
            rest = rest_of(item.text, function["arguments"], f"arguments of call {place}")
            out += [self._argue(place, rest), self._more_of(place, call)]
        return b"".join(out)

    def _more_of(self, place: int, call: dict[str, Any]) -> bytes:
        """What a call that was told has beside its id, name and arguments."""
        more = {name: value for name, value in call.items() if name not in ("id", "type", "function")}
        function = {n: v for n, v in call["function"].items() if n not in ("name", "arguments")}
        if not more and not function:
            return b""
        more["function"] = {"arguments": "", **function}  # the public library wants a function in every piece of a call
        return self._chunk({"tool_calls": [{"index": place, **more}]})

    def _say(self, field: str, text: str) -> bytes:
        return self._chunk({field: text}) if text else b""

    def _call(self, place: int, call_id: str, name: str, arguments: str) -> bytes:
        call = {"index": place, "id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        return self._chunk({"tool_calls": [call]})

    def _argue(self, place: int, arguments: str) -> bytes:
        if not arguments:
            return b""
        return self._chunk({"tool_calls": [{"index": place, "function": {"arguments": arguments}}]})

    def _chunk(self, delta: dict[str, Any]) -> bytes:
        return self._write({"choices": [self._choice(delta=delta)]})

    def _choice(self, *, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None) -> Any:
        return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _write(self, fields: dict[str, Any]) -> bytes:
        if self._include_usage:
            fields.setdefault("usage", None)
        return data_event({**self._head, **fields, **self._head})
