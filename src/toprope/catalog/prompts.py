"""A Responses request as one text, for agents that take a prompt, and an answer as a Responses object."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from toprope.errors.tree import BadRequest

_PLAIN_ROLES = frozenset({"system", "developer", "user"})


def prompt_of(request: Mapping[str, Any]) -> str:
    """Instructions, then what stands in the input, in order, with blank lines between.

    Where the input holds more than the requester's own words (an assistant's turn, a tool's output), each part begins
    with who speaks. Raises `BadRequest` for what is no text (an image, a file).
    """
    given = request.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list(given or [])
    parts = [_part(item) for item in items]
    if isinstance(instructions := request.get("instructions"), str) and instructions:
        parts.insert(0, ("system", instructions))
    spoken = [part for part in parts if part is not None and part[1]]
    if all(role in _PLAIN_ROLES for role, _ in spoken):
        return "\n\n".join(text for _, text in spoken)
    return "\n\n".join(f"{role}: {text}" for role, text in spoken)


def _part(item: Mapping[str, Any]) -> tuple[str, str] | None:
    kind = item.get("type", "message")
    if kind == "message":
        return str(item.get("role", "user")), _content(item.get("content"))
    if kind == "function_call":
        return "assistant", f"called {item.get('name')} with {item.get('arguments')}"
    if kind == "function_call_output":
        return "tool", _content(item.get("output"))
    if kind == "reasoning":
        return None  # a thought is nobody's to answer
    raise BadRequest(f"input: an item of type {kind!r} cannot be put into a prompt; accepted: messages and tool calls")


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content or []:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise BadRequest(f"input: content of type {kind!r} cannot be put into a prompt; accepted: text")
        texts.append(part["text"])
    return "\n".join(texts)


def response_of(
    text: str, *, model: str, status: str = "completed", error: str | None = None, reason: str | None = None
) -> dict[str, Any]:
    """A Responses object with one assistant message. `error` belongs to status failed, `reason` to incomplete."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item_status = "completed" if status == "completed" else "incomplete"
    message = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": item_status}
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": time.time(),
        "model": model,
        "status": status,
        "output": [{**message, "content": content}],
        "error": None if error is None else {"code": "server_error", "message": error},
        "incomplete_details": {"reason": reason} if status == "incomplete" else None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
