"""The model-call record of every call, captured or not, answered or not."""

from __future__ import annotations

from collections.abc import Callable

from toprope.correlation.context import current_rollout
from toprope.dialects.errors import error_status
from toprope.errors.body import as_toprope_error
from toprope.http.request import Request
from toprope.protocol.headers import CLIENT_SESSION
from toprope.servers.model.call import ModelCall
from toprope.servers.model.engines.base import Dialect, EngineReply
from toprope.telemetry.calls import CallLog, ModelCallRecord


class CallNotes:
    """Writes one server's records; without a log it writes nothing."""

    def __init__(self, call_log: CallLog | None, *, server: str, clock: Callable[[], float]) -> None:
        self._log = call_log
        self._server = server
        self._clock = clock

    def answered(self, call: ModelCall, made: EngineReply) -> None:
        """A call that has its reply."""
        if self._log is None:
            return
        self._log.write(
            ModelCallRecord(
                call_id=call.call_id,
                server=self._server,
                dialect=call.dialect,
                started=call.started,
                ended=self._clock(),
                status=200,
                rollout_id=call.rollout_id,
                captured=call.captured,
                model=made.model,
                finish_reason=made.finish_reason,
                input_tokens=made.usage.input_tokens,
                output_tokens=made.usage.output_tokens,
                token_fault=made.token_fault if call.want_tokens else None,
                client_session_id=call.client_session_id,
                retry_count=call.retry_count,
                losses=made.losses,
            )
        )

    def failed(self, dialect: Dialect, request: Request, call_id: str, started: float, raised: Exception) -> None:
        """A call that was refused or failed, at whatever point; also one whose body could not be read."""
        if self._log is None:
            return
        bound = current_rollout()
        error = as_toprope_error(raised)
        self._log.write(
            ModelCallRecord(
                call_id=call_id,
                server=self._server,
                dialect=dialect,
                started=started,
                ended=self._clock(),
                status=error_status(error),
                rollout_id=None if bound is None else bound.key,
                captured=bound is not None and bound.capture,
                error=str(error.kind),
                error_message=error.message,
                client_session_id=request.headers.get(CLIENT_SESSION),
            )
        )
