"""Streamed replies of the scripted upstream: chunks as vLLM writes them, and everything that can go wrong with them.

    stream([chunk({"content": "hi"}, token_ids=[5], log_probs=[-0.5]), ...])   chunks of one's own
    streamed(completion(...))                                                 a plain completion, cut into chunks

Like `upstream`, it imports nothing else of Toprope.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Wait: TypeAlias = Callable[[], Awaitable[object]]
Piece: TypeAlias = bytes | Wait
End: TypeAlias = Literal["clean", "cut", "hang"]


@dataclass(frozen=True)
class UpstreamStream:
    """A body sent in pieces, each at once; a function among them is awaited (an event's `wait`).

    After the last piece the body ends, or the connection is cut, or it stays open until the client leaves.
    """

    pieces: Sequence[Piece]
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    before: Wait | None = None
    end: End = "clean"


def chunk(
    delta: dict[str, Any] | None = None,
    *,
    token_ids: list[int] | None = None,
    log_probs: list[float | None] | None = None,
    prompt_token_ids: list[int] | None = None,
    finish_reason: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """One chunk with one choice. `prompt_token_ids` stand at its top, as vLLM's first chunk has them."""
    choice: dict[str, Any] = {"index": 0, "delta": {} if delta is None else delta, "logprobs": None}
    choice["finish_reason"] = finish_reason
    if token_ids is not None:
        choice["token_ids"] = token_ids
    if log_probs is not None:
        named = zip(token_ids or range(len(log_probs)), log_probs, strict=False)
        content: list[Any] = [
            {"token": f"token_id:{t}", "logprob": v, "bytes": None, "top_logprobs": []} for t, v in named
        ]
        choice["logprobs"] = {"content": content}
    body = {"id": "up-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice], **more}
    if prompt_token_ids is not None:
        body["prompt_token_ids"] = prompt_token_ids
    return body


def usage_chunk(prompt: int, generated: int) -> dict[str, Any]:
    """The last chunk of a stream that was asked for usage: no choices."""
    usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
    return {
        "id": "up-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [],
        "usage": usage,
    }


def event(value: Any, *, newline: str = "\n", space: str = " ", name: str | None = None) -> bytes:
    """One server-sent event; `value` is JSON unless it is a string. Unicode stands raw in it, line separators too."""
    data = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    head = "" if name is None else f"event:{space}{name}{newline}"
    return f"{head}data:{space}{data}{newline}{newline}".encode("utf-8", "surrogatepass")


def stream(
    chunks: Iterable[dict[str, Any] | Piece],
    *,
    done: bool = True,
    end: End = "clean",
    newline: str = "\n",
    space: str = " ",
    before: Wait | None = None,
) -> UpstreamStream:
    """Chunks (or bytes, or waits) as a stream, and `[DONE]` at its end."""
    pieces: list[Piece] = [
        event(each, newline=newline, space=space) if isinstance(each, dict) else each for each in chunks
    ]
    if done and end == "clean":
        pieces.append(event("[DONE]", newline=newline, space=space))
    return UpstreamStream(pieces, headers={"content-type": "text/event-stream"}, before=before, end=end)


def error_event(message: str, *, code: int | str = 500, kind: str = "InternalServerError") -> bytes:
    """An error in the middle of a stream, as vLLM sends it: an event with an error object, then `[DONE]`."""
    return event({"error": {"object": "error", "message": message, "type": kind, "param": None, "code": code}})


def streamed(
    body: bytes, *, size: int = 4, hold_back: bool = False, merge_finish: bool = False
) -> list[dict[str, Any]]:
    """The chunks of a plain completion `body`: role and prompt ids, pieces of `size` characters, finish, usage.

    Ids and logprobs are spread over the chunks. `hold_back`: half of the ids come on chunks with an empty delta, as
    while a tool parser holds text back. `merge_finish`: the last delta and the finish reason share a chunk.
    """
    whole = json.loads(body)
    choice = whole["choices"][0]
    message = choice["message"]
    deltas = _deltas(message, size) or [{}]
    if hold_back:
        deltas = [each for delta in deltas for each in ({}, delta)]
    ids, content = choice.get("token_ids"), (choice.get("logprobs") or {}).get("content")
    opening = {"role": "assistant"} if message.get("content") is None else {"role": "assistant", "content": ""}
    chunks = [chunk(opening, prompt_token_ids=whole.get("prompt_token_ids"))]
    for index, delta in enumerate(deltas):
        at, to = (len(ids or content or ()) * n // len(deltas) for n in (index, index + 1))
        made = chunk(delta, token_ids=None if ids is None else ids[at:to])
        if content is not None:
            made["choices"][0]["logprobs"] = {"content": content[at:to]}
        chunks.append(made)
    finish = chunks[-1] if merge_finish else chunk({})
    finish["choices"][0]["finish_reason"] = choice["finish_reason"]
    chunks += [] if merge_finish else [finish]
    if whole.get("usage") is not None:
        usage = whole["usage"]
        chunks.append({**usage_chunk(0, 0), "usage": usage})
    for each in chunks:
        each.update({name: whole[name] for name in ("id", "model", "created") if name in whole})
    return chunks


def _deltas(message: dict[str, Any], size: int) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = []
    for name in ("reasoning_content", "reasoning", "content"):
        deltas += [{name: piece} for piece in _cut(message.get(name), size)]
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        first = {"index": index, "id": call["id"], "type": "function", "function": {"name": function["name"]}}
        first["function"]["arguments"] = ""
        deltas.append({"tool_calls": [first]})
        for piece in _cut(function["arguments"], size):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    return deltas


def _cut(text: Any, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)] if isinstance(text, str) else []
