"""One captured call between server and recorder: intent before dispatch, record before the reply, abort on failure.

Left to others: parents, judging ids, durability (`toprope.capture.recorder`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from toprope.capture.protocols import Intent
from toprope.capture.recorder import CallEvidence, Recorder
from toprope.correlation.context import RolloutContext
from toprope.dialects.pivot import request_items, sampling_of
from toprope.errors.kinds import Kind
from toprope.errors.tree import Forbidden, ModelContextLength, RefusedError, TopropeError
from toprope.servers.model.call import ModelCall
from toprope.servers.model.engines.base import EngineReply, LogprobsMode
from toprope.servers.model.replies import reply_details
from toprope.servers.model.retries import NOT_SENT
from toprope.servers.model.token_in.supply import Supply
from toprope.tokens.behaviour import differing
from toprope.tokens.entry import WeightSpan

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

_begun: ContextVar[list[str] | None] = ContextVar("toprope_model_calls_begun", default=None)
"""The calls that the running request has put under custody, so that an answer made beside it is noticed."""


class Custody:
    """What one server keeps of its captured calls. Calls that are not captured pass through untouched."""

    def __init__(self, recorder: Recorder | None, *, server: str, logprobs_mode: LogprobsMode) -> None:
        self._recorder = recorder
        self._server = server
        self._logprobs_mode = logprobs_mode
        self._warned = False

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
            intent = Intent(stream=call.stream, request_digest=call.tag, retry_count=call.retry_count or 0)
            try:
                await self.require().begin(call.rollout_id, call.call_id, intent=intent)
            except asyncio.CancelledError:  # the client left: the intent may stand by now, and nothing will follow it
                await self.abort(call, NOT_SENT)
                raise

    async def abort(self, call: ModelCall, reason: str) -> None:
        """On return the intent is closed: nothing was sampled that an agent could keep."""
        if call.captured and call.rollout_id is not None:
            items = request_items(call.request)
            await self.require().abort(call.rollout_id, call.call_id, reason, request_items=items)

    async def record(
        self,
        call: ModelCall,
        made: EngineReply,
        response_id: str,
        *,
        client_gone: bool = False,
        weights: tuple[WeightSpan, ...] = (),
        supply: Supply | None = None,
    ) -> None:
        """On return the call is durable, or the rollout is marked incomplete with the reason."""
        if not call.captured or call.rollout_id is None:
            return
        sampling = sampling_of(call.request)
        self._warn_of_raw(sampling)
        await self.require().record(
            CallEvidence(
                key=call.rollout_id,
                call_id=call.call_id,
                model=made.model,
                request_items=request_items(call.request) if call.asked is None else call.request.input,
                asked=call.asked,
                output_items=made.output,
                tokens=made.tokens,
                token_fault=made.token_fault,
                usage_input_tokens=made.usage.input_tokens,
                usage_output_tokens=made.usage.output_tokens,
                finish_reason=made.finish_reason,
                response_id=response_id,
                sampling=sampling,
                request_digest=call.request_digest,
                logprobs_mode=self._logprobs_mode,
                dialect=call.dialect,
                media=call.media,
                client_gone=client_gone,
                weight_versions=weights,
                reply=reply_details(made),
                token_in={} if supply is None else supply.note,
                continues=None if supply is None else supply.parent,
            )
        )

    def _warn_of_raw(self, sampling: Mapping[str, Any]) -> None:
        """Say once that the recorded logprobs are not those of the policy that sampled."""
        if not self._warned and (shaped := differing(sampling, self._logprobs_mode)):
            self._warned = True
            log.warning(
                "%s: sampled with %s, but the engine's logprobs are raw: they differ from the behaviour policy's",
                self._server,
                ", ".join(shaped),
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
    """Why a call ended without a reply. A prompt that outgrew the context, or our refusal, ends the trajectory."""
    if isinstance(error, ModelContextLength | RefusedError):
        return f"truncated:{error.kind}"
    if isinstance(error, TopropeError):
        return f"upstream:{error.kind}"
    return f"upstream:{type(error).__name__}"
