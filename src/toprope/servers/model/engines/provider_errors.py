"""What a provider's error reply means: who must act, and whether trying again can help.

The provider's status and words are kept. Left to others: trying again (`openai`), how a client is told
(`dialects.errors`).
"""

from __future__ import annotations

import json
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


def event_error(data: bytes, url: str) -> EngineError:
    """The error for an error that a reply of 200 tells in `data`, a stream's event or all of it: its status stands in
    its `code`, if anywhere, else its words say what it would be."""
    reply = Reply(200, data, url=url)
    body = _body(reply)
    error = body.get("error")
    inner = error if isinstance(error, dict) else body
    code = inner.get("code") or inner.get("status_code") or inner.get("status")
    try:
        status = int(code) if code is not None else _status_of(inner, _message(reply, body))
    except (TypeError, ValueError, OverflowError):
        status = _status_of(inner, _message(reply, body))
    return provider_error(Reply(status if 400 <= status < 600 else 500, data, url=url))


def _status_of(inner: dict[str, Any], message: str) -> int:
    told = f"{inner.get('code') or ''} {inner.get('type') or ''} {message}".lower()
    if any(word in told for word in (*_QUOTA_WORDS, "rate_limit")):
        return 429
    if any(word in told for word in _CONTEXT_WORDS) or str(inner.get("type", "")).startswith("invalid_request"):
        return 400
    return 500


def _body(reply: Reply) -> dict[str, Any]:
    try:
        value = json.loads(reply.body)  # takes the bare NaN and the lone surrogates that engines write
    except (ValueError, RecursionError):  # a proxy's HTML page: the status table and an excerpt decide
        return {}
    return value if isinstance(value, dict) else {}


def _message(reply: Reply, body: dict[str, Any]) -> str:
    """The provider's words: `error.message`, or text as `message`, `detail` (vLLM, FastAPI) or `error` (Ollama) at the
    top; where there is none of these, what the body begins with."""
    for name in ("message", "detail", "error"):
        told = body.get(name)
        if isinstance(told, str) and told.strip():
            return shorten(told)
    told = read_error_body(reply.status, body, reply.text[:500]).message
    return told if told.strip() else read_error_body(reply.status, None, reply.text[:500]).message


def _retry_after(reply: Reply) -> dict[str, str]:
    value = reply.headers.get("retry-after")
    return {} if value is None else {"retry-after": value}
