"""What a provider's error reply means: who must act, and whether trying again can help.

The provider's status and words are kept. Left to others: trying again (`openai`), how a client is told
(`dialects.errors`).
"""

from __future__ import annotations

from typing import Any

from toprope.errors.body import read_error_body, shorten, status_is_retryable
from toprope.errors.tree import (
    EngineError,
    EngineUnavailable,
    ModelAuth,
    ModelContextLength,
    ModelQuota,
    ModelRejected,
)
from toprope.http.reply import Reply

_CONTEXT_WORDS = (
    "maximum context length",
    "context_length_exceeded",
    "context length",
    "context window",
    "prompt is too long",
    "too many tokens",
    "max_model_len",
)
_QUOTA_WORDS = ("insufficient_quota", "billing_hard_limit", "exceeded your current quota", "credit balance")
_RESENDABLE = frozenset({409})
"""A lock conflict at the provider: worth one more try, and never passed on, since clients repeat a 409 for ever."""


def provider_error(reply: Reply) -> EngineError:
    """The error for a reply of 400 or above. `retryable` says whether the same request may be sent again."""
    body = _body(reply)
    error = body.get("error")
    inner = error if isinstance(error, dict) else body
    code = str(inner.get("code") or "")
    told = f"{code} {inner.get('type') or ''} {inner.get('param') or ''}"
    message = _message(reply, body)
    text = f"{reply.url} answered {reply.status}: {message}"
    status = reply.status
    seen = f"{told} {message}".lower()
    if status == 402 or (status == 429 and any(word in seen for word in _QUOTA_WORDS)):
        return ModelQuota(text, upstream_status=status)
    if status in (401, 403):
        return ModelAuth(text, upstream_status=status)
    too_long = "input_tokens" in told or any(word in seen for word in _CONTEXT_WORDS)
    if status in (400, 413, 422) and too_long:
        return ModelContextLength(text, upstream_status=status)
    if status_is_retryable(status) or status in _RESENDABLE:
        return EngineUnavailable(text, headers=_retry_after(reply), upstream_status=status)
    return ModelRejected(text, upstream_status=status)


def event_error(event: dict[str, Any], data: bytes, url: str) -> EngineError:
    """The error for an error that a reply of 200 tells, in a stream's event or whole: its status stands in its `code`,
    if anywhere, else its words say what it would be."""
    error = event.get("error")
    inner = error if isinstance(error, dict) else event
    code = inner.get("code") or inner.get("status_code") or inner.get("status")
    try:
        status = int(code) if code is not None else _status_of(inner)
    except (TypeError, ValueError, OverflowError):
        status = _status_of(inner)
    status = status if 400 <= status < 600 else 500
    body = data if isinstance(error, dict) else b'{"error":' + data + b"}"
    return provider_error(Reply(status, body, url=url))


def _status_of(inner: dict[str, Any]) -> int:
    told = f"{inner.get('code') or ''} {inner.get('type') or ''} {inner.get('message') or ''}".lower()
    if any(word in told for word in (*_QUOTA_WORDS, "rate_limit")):
        return 429
    if any(word in told for word in _CONTEXT_WORDS) or str(inner.get("type", "")).startswith("invalid_request"):
        return 400
    return 500


def _body(reply: Reply) -> dict[str, Any]:
    try:
        value = reply.json()
    except Exception:  # a proxy's HTML page: the status table and an excerpt decide
        return {}
    return value if isinstance(value, dict) else {}


def _message(reply: Reply, body: dict[str, Any]) -> str:
    """The provider's words: `error.message`, or `message` / `detail` at the top as vLLM and FastAPI write them."""
    for name in ("message", "detail"):
        if isinstance(body.get(name), str):
            return shorten(body[name])
    return read_error_body(reply.status, body, reply.text[:500]).message


def _retry_after(reply: Reply) -> dict[str, str]:
    value = reply.headers.get("retry-after")
    return {} if value is None else {"retry-after": value}
