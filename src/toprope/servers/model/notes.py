"""The model-call record of every call, captured or not, answered or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toprope.correlation.context import current_rollout
from toprope.dialects.errors import error_status
from toprope.errors.body import as_toprope_error
from toprope.errors.kinds import Kind
from toprope.http.request import Request
from toprope.protocol.headers import CLIENT_SESSION
from toprope.servers.model.call import ModelCall
from toprope.servers.model.engines.base import Dialect, EngineReply
from toprope.servers.model.token_in.supply import Supply
from toprope.telemetry.calls import CallLog, ModelCallRecord


class CallNotes:
    """Writes one server's records; without a log it writes nothing."""

    def __init__(self, call_log: CallLog | None, *, server: str, clock: Callable[[], float]) -> None:
        self._log = call_log
        self._server = server
        self._clock = clock

    def answered(
        self,
        call: ModelCall,
        made: EngineReply,
        *,
        first_token: float | None = None,
        client_gone: bool = False,
        replay_of: str | None = None,
        supply: Supply | None = None,
    ) -> None:
        """A call that has its reply, from the engine or from the record."""
        self._write(
            call,
            status=200,
            model=made.model,
            finish_reason=made.finish_reason,
            input_tokens=made.usage.input_tokens,
            output_tokens=made.usage.output_tokens,
            token_fault=made.token_fault if call.want_tokens else None,
            losses=(*call.losses, *made.losses),
            time_to_first_token=None if first_token is None else max(0.0, first_token - call.started),
            client_gone=client_gone,
            replay_of=replay_of,
            token_in=None if supply is None else supply.outcome,
            forgiven={} if supply is None else dict(supply.forgiven),
        )

    def broken(
        self, call: ModelCall, raised: BaseException, *, first_token: float | None = None, client_gone: bool = False
    ) -> None:
        """A call that was dispatched and came to nothing."""
        error = as_toprope_error(raised) if isinstance(raised, Exception) else None
        self._write(
            call,
            status=499 if error is None else error_status(error),
            error=str(Kind.CANCELLED if error is None else error.kind),
            error_message="the call was stopped" if error is None else error.message,
            losses=call.losses,
            time_to_first_token=None if first_token is None else max(0.0, first_token - call.started),
            client_gone=client_gone,
        )

    def _write(self, call: ModelCall, **told: Any) -> None:
        if self._log is None:
            return
        self._log.write(
            ModelCallRecord(
                call_id=call.call_id,
                server=self._server,
                dialect=call.dialect,
                started=call.started,
                ended=self._clock(),
                rollout_id=call.rollout_id,
                captured=call.captured,
                streamed=call.stream,
                client_session_id=call.client_session_id,
                retry_count=call.retry_count,
                **told,
            )
        )

    def failed(self, dialect: Dialect, request: Request, call_id: str, started: float, raised: Exception) -> None:
        """A call that was refused or failed before it was dispatched; also one whose body could not be read."""
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
