"""The typed error body that every server of ours sends, and how it is read back.

`{"error": {"kind", "message", "retryable", "stage"?, "delivery"?, "upstream_status"?}}`. A typed body's `retryable`
decides; without one the status table does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toprope.errors.kinds import Kind
from toprope.errors.tree import TopropeError

RETRYABLE_STATUSES = frozenset({408, 425, 429})
MESSAGE_LIMIT = 2000
_CUT = " ... [shortened]"


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """What a peer's error says. `kind` is None where the body was not typed."""

    message: str
    retryable: bool
    kind: str | None = None
    stage: str | None = None
    delivery: str | None = None
    upstream_status: int | None = None


def status_is_retryable(status: int) -> bool:
    """The status table: 408, 425, 429 and every 5xx may be tried again; other statuses may not."""
    return status in RETRYABLE_STATUSES or status >= 500


def shorten(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """`text`, cut to `limit` characters with the cut marked."""
    return text if len(text) <= limit else text[: limit - len(_CUT)] + _CUT


def error_body(error: TopropeError) -> dict[str, Any]:
    """The JSON body for an error of ours."""
    inner: dict[str, Any] = {
        "kind": str(error.kind),
        "message": shorten(error.message),
        "retryable": error.retryable,
    }
    for name in ("stage", "delivery", "upstream_status"):
        value = getattr(error, name)
        if value is not None:
            inner[name] = value if isinstance(value, int) else str(value)
    return {"error": inner}


def read_error_body(status: int, body: Any, excerpt: str) -> ErrorInfo:
    """What an error reply says: `body` is the parsed JSON or None, `excerpt` a bounded piece of its text."""
    inner = body.get("error") if isinstance(body, dict) else None
    if isinstance(inner, dict) and isinstance(inner.get("kind"), str) and isinstance(inner.get("message"), str):
        retryable = inner.get("retryable")
        upstream = inner.get("upstream_status")
        return ErrorInfo(
            message=shorten(inner["message"]),
            retryable=retryable if isinstance(retryable, bool) else status_is_retryable(status),
            kind=inner["kind"],
            stage=inner.get("stage") if isinstance(inner.get("stage"), str) else None,
            delivery=inner.get("delivery") if isinstance(inner.get("delivery"), str) else None,
            upstream_status=upstream if isinstance(upstream, int) else None,
        )
    if isinstance(inner, dict) and isinstance(inner.get("message"), str):
        return ErrorInfo(shorten(inner["message"]), status_is_retryable(status))
    return ErrorInfo(shorten(excerpt) or f"status {status} with an empty body", status_is_retryable(status))


def as_toprope_error(error: BaseException) -> TopropeError:
    """`error` itself if it is ours, else an `internal` error that carries its type and text."""
    if isinstance(error, TopropeError):
        return error
    return TopropeError(said_by(error), kind=Kind.INTERNAL)


def said_by(error: BaseException) -> str:
    """`Type: text` of an error; of ours the message. Never raises, whatever an author's `__str__` does."""
    if isinstance(error, TopropeError):
        return error.message
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except BaseException as trouble:  # an author's own `__str__`, sys.exit() in it too: the type is what is left to say
        return f"{name} (its text cannot be had: {type(trouble).__name__})"
