"""The tree of errors. Each is named after the boundary it crossed and says whether trying again can help.

    TopropeError
    |- ConfigError            a configuration or input file; exit status 2
    |- RefusedError           a server of ours refuses a request
    |  |- BadRequest 422, BadPath 400, Forbidden 403, NotFound 404 (session_lost), Conflict 409, TooLarge 413,
    |  |- CapacityReached 429, NotReady 503, CaptureClosed 403, LimitReached 403
    |- TransportError         no usable answer came back: refused, dropped, timed out
    |- PeerError              a peer answered, with an error or with nonsense
    |- EngineError            an engine: unavailable, rejected, auth, quota, context length
    |- CaptureError           custody could not be kept

Left to others: how an error looks in HTTP (`body`), what an episode makes of it (`servers.environment`).
"""

from __future__ import annotations

from collections.abc import Mapping

from toprope.errors.kinds import Delivery, Kind


class TopropeError(Exception):
    """Anything that Toprope raises on purpose. `message` is one paragraph: what, where, what would be accepted."""

    kind: str = Kind.INTERNAL
    status: int = 500
    retryable: bool = False

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        status: int | None = None,
        retryable: bool | None = None,
        stage: str | None = None,
        delivery: Delivery | None = None,
        upstream_status: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        if kind is not None:
            self.kind = kind
        if status is not None:
            self.status = status
        if retryable is not None:
            self.retryable = retryable
        self.stage = stage
        self.delivery = delivery
        self.upstream_status = upstream_status
        self.headers: Mapping[str, str] = headers or {}


class ConfigError(TopropeError):
    """A configuration or an input file is wrong; nothing ran."""

    kind = Kind.BAD_REQUEST
    status = 422


class RefusedError(TopropeError):
    """A server of ours refuses a request."""

    kind = Kind.BAD_REQUEST
    status = 400


class BadRequest(RefusedError):
    """A body that does not validate; the message names the field."""

    status = 422


class BadPath(RefusedError):
    """A path whose rollout prefix does not parse."""


class Forbidden(RefusedError):
    """The caller lacks the capability: close token, credential."""

    kind = Kind.FORBIDDEN
    status = 403


class SessionLost(RefusedError):
    """The session is not known here (any more)."""

    kind = Kind.SESSION_LOST
    status = 404
    retryable = True


class NotFound(RefusedError):
    """No such route, tool or object."""

    status = 404


class Conflict(RefusedError):
    """The same id with another payload, or in a state that does not admit the request."""

    kind = Kind.CONFLICT
    status = 409


class TooLarge(RefusedError):
    """A body over the configured limit, which the message names."""

    status = 413


class CapacityReached(RefusedError):
    """No room now; the reply carries Retry-After."""

    kind = Kind.CAPACITY
    status = 429
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, headers={"retry-after": str(max(1, round(retry_after_s)))})


class NotReady(RefusedError):
    """The server cannot serve yet, or is shutting down."""

    kind = Kind.CAPACITY
    status = 503
    retryable = True


class CaptureClosed(RefusedError):
    """A model call for a rollout whose capture is frozen or retired."""

    kind = Kind.CAPTURE_CLOSED
    status = 403


class LimitReached(RefusedError):
    """A budget of the rollout is used up."""

    kind = Kind.LIMIT_REACHED
    status = 403


class ToolError(TopropeError):
    """A tool says no: its text is given to the model (4xx, type `tool_error`)."""

    kind = Kind.BAD_REQUEST
    status = 422


class TransportError(TopropeError):
    """No usable answer came back. `url` and `delivery` are always set."""

    status = 502
    retryable = True

    def __init__(
        self,
        message: str,
        *,
        kind: Kind,
        url: str,
        delivery: Delivery,
        attempts: int = 1,
        elapsed_s: float = 0.0,
    ) -> None:
        super().__init__(message, kind=kind, delivery=delivery)
        self.url = url
        self.attempts = attempts
        self.elapsed_s = elapsed_s


class PeerError(TopropeError):
    """A peer answered, with an error status or with a body that is not what the protocol says."""

    kind = Kind.BAD_REPLY
    status = 502


class EngineError(TopropeError):
    """An inference engine failed or refused."""

    kind = Kind.MODEL_REJECTED
    status = 502


class EngineUnavailable(EngineError):
    """The engine cannot be reached or cannot start; the message names the URL or the missing part."""

    kind = Kind.MODEL_UNAVAILABLE
    status = 503
    retryable = True


class ModelRejected(EngineError):
    """The engine refused the request for what it says; the provider's status and words are kept."""

    kind = Kind.MODEL_REJECTED
    status = 400


class ModelAuth(EngineError):
    """The engine refused our credentials."""

    kind = Kind.MODEL_AUTH
    status = 401


class ModelQuota(EngineError):
    """The account behind the engine has nothing left."""

    kind = Kind.MODEL_QUOTA
    status = 402


class ModelContextLength(EngineError):
    """The prompt (with what was asked for) does not fit into the engine's context."""

    kind = Kind.MODEL_CONTEXT_LENGTH
    status = 400


class CaptureError(TopropeError):
    """Custody could not be kept: a write failed, a record is bad, a store is damaged."""

    kind = Kind.CAPTURE_FAILED
    status = 500
