"""What a model said in a reply that passed a gate: text and id, in any of the three dialects, plain or streamed.

Read from bytes that may be cut; what cannot be read is None, never a guess. Left to others: what it is used for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from toprope.canonical import json
from toprope.sandbox.gate import Heard


@dataclass(frozen=True, slots=True)
class Said:
    """`text`: the visible text of the reply, "" where it only called tools. `response_id`: what the server named it."""

    text: str
    response_id: str | None


def said(heard: Heard | None) -> Said | None:
    """What the model said in `heard`; None where that cannot be told."""
    if heard is None:
        return None
    try:
        if heard.content_type.startswith("text/event-stream"):
            return _streamed(heard.body)
        return _plain(json.loads(heard.body)) if heard.whole else None
    except (json.NotJson, TypeError, KeyError, AttributeError, IndexError):
        return None


def _plain(reply: dict[str, Any]) -> Said | None:
    response_id = reply.get("id") if isinstance(reply.get("id"), str) else None
    if isinstance(reply.get("choices"), list):
        return Said(_text(reply["choices"][0]["message"].get("content")), response_id)
    if isinstance(reply.get("output"), list):
        return Said("".join(_text(item.get("content")) for item in reply["output"] if _speaks(item)), response_id)
    if isinstance(reply.get("content"), list):
        return Said(_text(reply["content"]), response_id)
    return None


def _streamed(body: bytes) -> Said | None:
    texts: list[str] = []
    response_id: str | None = None
    seen = False
    for event in _events(body):
        kind = event.get("type", "")
        if kind in ("response.completed", "response.incomplete", "response.failed"):
            return _plain(event["response"])
        inner = event.get("message") if kind == "message_start" else event.get("response")
        found = inner.get("id") if isinstance(inner, dict) else event.get("id")
        response_id = response_id or (found if isinstance(found, str) else None)
        if "choices" in event:
            seen = True
            texts += [_text(each["delta"].get("content")) for each in event["choices"][:1]]
        elif kind == "content_block_delta":
            seen = True
            texts.append(_text(event["delta"].get("text")))
        elif kind == "response.output_text.delta":
            seen = True
            texts.append(_text(event.get("delta")))
    return Said("".join(texts), response_id) if seen else None


def _events(body: bytes) -> Iterator[dict[str, Any]]:
    for line in body.split(b"\n"):
        data = line.strip().removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data.startswith(b"{"):
            try:
                event = json.loads(data)
            except json.NotJson:
                return  # cut here
            if isinstance(event, dict):
                yield event


def _speaks(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type", "message") == "message"


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))
