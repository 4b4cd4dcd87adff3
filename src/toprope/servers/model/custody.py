"""One captured call between server and recorder: intent before dispatch, record before the reply, abort on failure.

Left to others: parents, judging ids, durability (`toprope.capture.recorder`).
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from toprope.capture.protocols import Intent
from toprope.capture.recorder import CallEvidence, Recorder
from toprope.correlation.context import RolloutContext
from toprope.dialects.pivot import has_media, request_items, sampling_of
from toprope.errors.kinds import Kind
from toprope.errors.tree import Forbidden, ModelContextLength, TopropeError
from toprope.servers.model.call import ModelCall
from toprope.servers.model.engines.base import EngineReply, LogprobsMode

if TYPE_CHECKING:
    from collections.abc import Iterator

_begun: ContextVar[list[str] | None] = ContextVar("toprope_model_calls_begun", default=None)
"""The calls that the running request has put under custody, so that an answer made beside it is noticed."""


class Custody:
    """What one server keeps of its captured calls. Calls that are not captured pass through untouched."""

    def __init__(self, recorder: Recorder | None, *, server: str, logprobs_mode: LogprobsMode) -> None:
        self._recorder = recorder
        self._server = server
        self._logprobs_mode = logprobs_mode

    def require(self) -> Recorder:
        """The recorder. Raises `Forbidden` where there is none: a captured call must not pass unrecorded."""
        if self._recorder is None:
            raise Forbidden(
                f"{self._server}: the path asks for token capture, and this server has no capture store",
                kind=Kind.CAPTURE_FAILED,
            )
        return self._recorder

    async def begin(self, call: ModelCall) -> None:
        """On return the intent of a captured call is durable. Raises what the recorder does: nothing was sampled."""
        if call.captured and call.rollout_id is not None:
            begun = _begun.get()
            if begun is not None:
                begun.append(call.call_id)
            intent = Intent(
                stream=bool(call.request.stream),
                request_digest=call.request_digest,
                retry_count=call.retry_count or 0,
            )
            await self.require().begin(call.rollout_id, call.call_id, intent=intent)

    async def abort(self, call: ModelCall, reason: str) -> None:
        """On return the intent is closed: nothing was sampled that an agent could keep."""
        if call.captured and call.rollout_id is not None:
            items = request_items(call.request)
            await self.require().abort(call.rollout_id, call.call_id, reason, request_items=items)

    async def record(self, call: ModelCall, made: EngineReply, response_id: str) -> None:
        """On return the call is durable, or the rollout is marked incomplete with the reason."""
        if not call.captured or call.rollout_id is None:
            return
        await self.require().record(
            CallEvidence(
                key=call.rollout_id,
                call_id=call.call_id,
                model=made.model,
                request_items=request_items(call.request),
                output_items=made.output,
                tokens=made.tokens,
                token_fault=made.token_fault,
                usage_output_tokens=made.usage.output_tokens,
                finish_reason=made.finish_reason,
                response_id=response_id,
                sampling=sampling_of(call.request),
                request_digest=call.request_digest,
                logprobs_mode=self._logprobs_mode,
                dialect=call.dialect,
                media=has_media(call.request),
            )
        )

    @staticmethod
    @contextmanager
    def watched() -> Iterator[list[str]]:
        """The ids of the calls that are begun inside the `with` statement, also in tasks started there."""
        begun: list[str] = []
        token = _begun.set(begun)
        try:
            yield begun
        finally:
            _begun.reset(token)

    async def unobserved(self, bound: RolloutContext, method: str, path: str) -> None:
        """On return the loss is durable: an answer left under a capture path that no record stands behind."""
        await self.require().incomplete(bound.key, "", f"unobserved_path:{method} {path}")


def abort_reason(error: BaseException) -> str:
    """Why a call ended without a reply. A prompt that outgrew the context ends the trajectory."""
    if isinstance(error, ModelContextLength):
        return f"truncated:{error.kind}"
    if isinstance(error, TopropeError):
        return f"upstream:{error.kind}"
    return f"upstream:{type(error).__name__}"
