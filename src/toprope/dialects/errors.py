"""An error of ours in the shape that a dialect's clients read.

The public clients obey `x-should-retry`; they repeat 408, 409, 429 and 5xx by themselves, so a refusal of ours is
none of these. Our own typed fields stand beside the dialect's, so that a Toprope peer reads kind and retryability
from the same body. Left to others: which error a failure is (engines, the server).
"""

from __future__ import annotations

from typing import Any

from toprope.errors.body import error_body
from toprope.errors.kinds import Kind
from toprope.errors.tree import EngineError, TopropeError
from toprope.protocol.headers import SHOULD_RETRY

_NEVER = 409
"""Clients repeat a 409 at once and for ever; a model server never answers it."""

_OPENAI_TYPE = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "insufficient_quota",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_OPENAI_CODE: dict[str, str] = {
    Kind.MODEL_CONTEXT_LENGTH: "context_length_exceeded",
    Kind.MODEL_QUOTA: "insufficient_quota",
    Kind.MODEL_AUTH: "invalid_api_key",
}


_MESSAGES_TYPE = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_status(error: TopropeError) -> int:
    """The status to answer: a terminal engine error keeps the provider's, everything else has its own."""
    kept = error.upstream_status if isinstance(error, EngineError) and not error.retryable else None
    status = kept if kept is not None and kept >= 400 else error.status
    if status == _NEVER:
        return 503 if error.retryable else 400
    return status


def error_headers(error: TopropeError, status: int) -> dict[str, str]:
    """`x-should-retry: false` where repeating cannot help; `retry-after` on every 429 and 503 that may be repeated."""
    headers = {name.lower(): value for name, value in error.headers.items()}
    if not error.retryable and (status < 500 or isinstance(error, EngineError)):
        headers[SHOULD_RETRY] = "false"
    elif status in (429, 503):
        headers.setdefault("retry-after", "1")
    return headers


def openai_error(error: TopropeError, status: int) -> dict[str, Any]:
    """The body that Chat and Responses clients read: message, type, param, code, and our typed fields."""
    typed = error_body(error)["error"]
    fallback = "server_error" if status >= 500 else "invalid_request_error"
    shape = {
        "message": typed["message"],
        "type": _OPENAI_TYPE.get(status, fallback),
        "param": None,
        "code": _OPENAI_CODE.get(str(error.kind), str(error.kind)),
    }
    return {"error": {**typed, **shape}}


def messages_error(error: TopropeError, status: int) -> dict[str, Any]:
    """The body that Messages clients read: type and message, and our typed fields."""
    typed = error_body(error)["error"]
    fallback = "api_error" if status >= 500 else "invalid_request_error"
    shape = {"type": _MESSAGES_TYPE.get(status, fallback), "message": typed["message"]}
    return {"type": "error", "error": {**typed, **shape}, "request_id": None}
