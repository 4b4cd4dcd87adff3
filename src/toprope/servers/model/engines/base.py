"""What a model server asks of an inference engine, whoever computes the tokens.

An adapter turns an `EngineRequest` into an `EngineReply`; capabilities are declared, so that a run which needs token
ids is refused before it starts and not masked after it ended. Left to others: identity, capture, dialects (the model
server) and what a token record is (`toprope.tokens`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from toprope.dialects.deltas import Emit as Emit
from toprope.errors.tree import EngineUnavailable
from toprope.tokens.sampled import SampledTokens as SampledTokens
from toprope.wire.responses import FinishReason as FinishReason
from toprope.wire.responses import Item, ResponsesRequest
from toprope.wire.responses import Usage as Usage

Dialect = Literal["chat", "responses", "messages"]
LogprobsMode = Literal["raw", "processed"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do, as declared by its adapter and checked at start.

    `accepts_token_prompt`: `EngineRequest.prompt_token_ids` is obeyed; the prompt ids that come back prove it.
    `streams_ids`: a streamed call returns ids as a plain one does.
    """

    returns_ids: bool
    accepts_token_prompt: bool = False
    streams_ids: bool = False
    logprobs_mode: LogprobsMode = "raw"


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One model call as an engine gets it.

    `request` is the pivot form that every dialect is converted to; `body` and `dialect` are what the client sent,
    for engines that speak the same dialect and can pass its fields on. `session` is the `X-Session-ID` to use
    upstream. `want_tokens` is True when the call is captured: the engine must return ids and logprobs if it can.
    `emit` is set when the client reads a stream: an engine that can calls it with each delta as it is sampled; one that
    ignores it is still right, its whole output then leaves at the end. `prompt_token_ids` (P,) uint32 are the exact
    prompt to generate from, in place of the engine's own rendering of the messages; only for engines that accept it.
    `rollout_id` is the capture key where there is one: the calls of one rollout share a prefix, whatever sessions its
    client names.
    """

    request: ResponsesRequest
    call_id: str
    session: str | None = None
    want_tokens: bool = False
    dialect: Dialect = "responses"
    body: Mapping[str, Any] = field(default_factory=dict)
    emit: Emit | None = None
    prompt_token_ids: NDArray[np.uint32] | None = None
    rollout_id: str | None = None


@dataclass(frozen=True, slots=True)
class EngineReply:
    """One finished generation: Responses items in order (reasoning, message, function_call), ids when known.

    `token_fault` says why `tokens` is missing or not to be trusted (`no_token_ids: ...`); None when all is well.
    `logprobs` is a Chat choice's `logprobs` object, set only where the client itself asked for one; `extra` holds
    foreign top-level fields of an upstream's reply (`system_fingerprint`, ...); `losses` names what the request held
    and the engine's dialect could not carry (`tools.web_search`), and what of the reply the client's cannot
    (`reply.message.images`).
    """

    output: tuple[Item, ...]
    finish_reason: FinishReason
    model: str
    usage: Usage = field(default_factory=Usage)
    tokens: SampledTokens | None = None
    token_fault: str | None = None
    response_id: str | None = None
    logprobs: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    losses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NextTurn:
    """A call whose prompt is to begin with recorded ids: what the parent was given and what it sampled.

    `items` are all of the request's in prompt order, the first `tail` of them through the parent's turn; the rest is
    new, nothing of it the model's. `prompt_token_ids` (P,) and `generation_token_ids` (G,) uint32 are the parent's.
    `dialect` and `body` are as in `EngineRequest`. `changed` names what the parent's request set otherwise of
    `prompt_settings.STEERING`; all else that may shape a prompt is equal.
    """

    request: ResponsesRequest
    items: tuple[Item, ...]
    tail: int
    prompt_token_ids: NDArray[np.uint32]
    generation_token_ids: NDArray[np.uint32]
    dialect: Dialect = "responses"
    body: Mapping[str, Any] = field(default_factory=dict)
    changed: tuple[str, ...] = ()


class CannotContinue(Exception):
    """The ids that follow a recorded turn cannot be told. `reason` is one word; the text says more."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@runtime_checkable
class ContinuesTurns(Protocol):
    """Optional: who can say what follows a recorded turn: an engine that accepts token prompts, or a renderer."""

    async def next_turn(self, turn: NextTurn) -> Sequence[int]:
        """The ids after the parent's prompt and generation: what closes its turn and was not sampled, the new items,
        the head of the turn to generate. Raises `CannotContinue` where that is not certain."""


class StreamDied(EngineUnavailable):
    """An engine failed after deltas had left: nothing can be repeated here, and the client's connection is cut."""


@runtime_checkable
class NamesModel(Protocol):
    """Optional: an engine that knows the name of the model it serves (for `GET /v1/models`)."""

    model: str | None


class Engine(Protocol):
    """An inference engine behind a model server."""

    capabilities: Capabilities

    async def start(self) -> None:
        """On return the engine can serve. Raises `EngineUnavailable` (naming the URL or the missing part) if not."""

    async def generate(self, request: EngineRequest) -> EngineReply:
        """On return the generation is complete, all of `emit`'s deltas were given and none comes any more.

        Raises `EngineError` subclasses; never returns half a reply. One raised after a delta was given (`StreamDied`
        says so by its class) ends a stream that cannot be repeated. Cancelling it ends the generation.
        """

    async def close(self) -> None:
        """On return no request is running and no thread, process or socket of the engine is left."""
