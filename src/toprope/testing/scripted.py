"""An engine that says what a script tells it, with exact tokens: for tests, examples and measurements.

A script is a list of replies, a YAML or JSON file of one (`replies: [...]` or the bare list), a `module:function`, or a
function. In a list, replies with `when` are tried first, in order; then the reply whose place among the others is the
number of turns the model has taken in this conversation; the last one repeats. Without a script the engine echoes the
last thing said. Ids come from `toy_tokenizer`, unless a reply gives its own. Faults of engines (an error, also in
mid-stream, missing ids, a NaN, a usage that disagrees) can be scripted. How a reply is cut into deltas, and what each
of them waits for, is the script's too (`scripted_stream`).
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import yaml

from toprope.correlation.context import current_rollout_id
from toprope.dialects.chat_history import argument_text
from toprope.dialects.chat_parts import plain_text
from toprope.errors.body import status_is_retryable
from toprope.errors.kinds import Kind
from toprope.errors.tree import ConfigError, EngineError
from toprope.servers.model.engines.base import (
    Capabilities,
    Emit,
    EngineReply,
    EngineRequest,
    FinishReason,
    NextTurn,
    SampledTokens,
    Usage,
)
from toprope.testing import toy_tokenizer
from toprope.testing.scripted_stream import deltas_of
from toprope.wire.responses import Item, ResponsesRequest


class ScriptedCall(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call to make. `arguments` is a string, kept byte for byte, or an object, written compactly."""

    name: str
    arguments: str | dict[str, Any] = "{}"
    call_id: str | None = None


class ScriptedFault(msgspec.Struct, forbid_unknown_fields=True):
    """An error to raise instead of a reply, as a provider with this status would cause it."""

    status: int = 503
    message: str = "scripted fault"
    kind: str = Kind.MODEL_UNAVAILABLE


class When(msgspec.Struct, forbid_unknown_fields=True):
    """Conditions that must all hold: text in the last item, turns taken, whether tools are offered, the rollout."""

    contains: str | None = None
    turn: int | None = None
    tools: bool | None = None
    rollout: str | None = None


class ScriptedReply(msgspec.Struct, forbid_unknown_fields=True):
    """One generation: thought, text and calls in this order, or a fault.

    `finish_reason` follows from the rest unless given. `prompt_token_ids`, `token_ids` and `log_probs` replace what the
    toy tokeniser and the made-up logprobs would give. `tokens` damages the bundle: no ids, no logprobs, NaN as the
    second logprob, a logprob too few, a usage of one token more. `delay_s` passes before the reply.

    Streamed, it comes in deltas of about a token each, or the text as `pieces` (which then are the text). A `fault` is
    raised before the first delta, or with `fault_after` after that many.
    """

    text: str | None = None
    reasoning: str | None = None
    calls: list[ScriptedCall] = []
    finish_reason: FinishReason | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    log_probs: list[float] | None = None
    tokens: Literal["exact", "no_ids", "no_logprobs", "nan", "short", "usage"] = "exact"
    delay_s: float = 0.0
    fault: ScriptedFault | None = None
    fault_after: int = 0
    pieces: list[str] | None = None
    when: When | None = None


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """What a script function is asked: the engine request, turns taken in it, the rollout, calls before this one."""

    request: EngineRequest
    turn: int
    rollout_id: str | None
    index: int

    @property
    def last_text(self) -> str:
        """The text of the last item of the request, a tool's output included."""
        return _last_text(self.request.request)


Pace: TypeAlias = Callable[[EngineRequest, int], Awaitable[object]]
Say: TypeAlias = ScriptedReply | str
Script: TypeAlias = Callable[[ScriptCall], Say | Awaitable[Say]]


class ScriptedEngine:
    """An `Engine` driven by a script. `requests` holds the last `keep_requests` requests, oldest first; `calls` counts.

    `model` is the name it answers under; `returns_ids=False` makes it an endpoint that knows no ids;
    `retokenise_history` renders the model's earlier turns with another tokenisation of the same text and
    `drops_thinking` without their thoughts;
    `accepts_token_prompt` makes it generate from the prompt ids of a request that has them. `pace(request, n)` is
    awaited before delta `n` of a streamed reply, from 0, and once more before its end.
    """

    def __init__(
        self,
        *,
        script: Script | str | Path | Sequence[Any] | None = None,
        model: str = "scripted",
        returns_ids: bool = True,
        retokenise_history: bool = False,
        drops_thinking: bool = False,
        accepts_token_prompt: bool = False,
        pace: Pace | None = None,
        keep_requests: int = 1000,
    ) -> None:
        self.capabilities = Capabilities(
            returns_ids=returns_ids, accepts_token_prompt=accepts_token_prompt, streams_ids=returns_ids
        )
        self.model: str | None = model
        self.requests: deque[EngineRequest] = deque(maxlen=keep_requests)
        self.calls = 0
        self._history_width = 2 if retokenise_history else None
        self._drops_thinking = drops_thinking
        self._script = _load(script)
        self._pace = pace

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close."""

    async def generate(self, request: EngineRequest) -> EngineReply:
        """The reply that the script gives for this request. Raises `EngineError` where it says so."""
        self.requests.append(request)
        index, self.calls = self.calls, self.calls + 1
        said = self._script(ScriptCall(request, turns_taken(request.request), current_rollout_id(), index))
        if inspect.isawaitable(said):
            said = await said
        reply = ScriptedReply(text=said) if isinstance(said, str) else said
        if reply.delay_s:
            await asyncio.sleep(reply.delay_s)
        if reply.fault is not None and (reply.fault_after == 0 or request.emit is None):
            raise _fault(reply.fault)
        made = self._finish(request, reply)
        if request.emit is not None:
            await self._stream(request, reply, made, request.emit)
        return made

    async def next_turn(self, turn: NextTurn) -> list[int]:
        """What follows a recorded turn, for token-in."""
        ended = turn.generation_token_ids[-1] == toy_tokenizer.END
        return toy_tokenizer.next_turn_ids(turn.items[turn.tail :], ended=bool(ended))

    async def _stream(self, request: EngineRequest, reply: ScriptedReply, made: EngineReply, emit: Emit) -> None:
        count = 0
        for count, delta in enumerate(deltas_of(made.output, reply.pieces)):
            if reply.fault is not None and count == reply.fault_after:
                raise _fault(reply.fault)
            await (asyncio.sleep(0) if self._pace is None else self._pace(request, count))
            emit(delta)
        if reply.fault is not None:
            raise _fault(reply.fault)
        if self._pace is not None:
            await self._pace(request, count + 1)

    def _finish(self, request: EngineRequest, reply: ScriptedReply) -> EngineReply:
        output = output_items(reply)
        finish: FinishReason = reply.finish_reason or ("tool_calls" if reply.calls else "stop")
        prompt = reply.prompt_token_ids
        if prompt is None and request.prompt_token_ids is not None and self.capabilities.accepts_token_prompt:
            prompt = request.prompt_token_ids.tolist()
        if prompt is None:
            prompt = toy_tokenizer.prompt_ids(
                request.request, history_width=self._history_width, drops_thinking=self._drops_thinking
            )
        ids = reply.token_ids
        if ids is None:
            ids = toy_tokenizer.generation_ids(output, ended=finish != "length")
        log_probs = made_up_log_probs(ids) if reply.log_probs is None else np.array(reply.log_probs, dtype=np.float64)
        tokens: SampledTokens | None = None
        fault: str | None = None
        if not self.capabilities.returns_ids or reply.tokens == "no_ids":
            fault = "no_token_ids: the scripted engine was told to return none"
        elif reply.tokens == "no_logprobs":
            fault = "no_token_ids: logprobs were asked for and not returned"
        else:
            if reply.tokens == "nan":
                log_probs[min(1, len(log_probs) - 1)] = np.nan
            elif reply.tokens == "short":
                log_probs = log_probs[:-1]
            tokens = SampledTokens(np.array(prompt, dtype=np.uint32), np.array(ids, dtype=np.uint32), log_probs)
        usage = Usage(len(prompt), len(ids) + (reply.tokens == "usage"))
        model = request.request.model or self.model or "scripted"
        return EngineReply(output, finish, model, usage, tokens=tokens, token_fault=fault)


def output_items(reply: ScriptedReply) -> tuple[Item, ...]:
    """A scripted reply as Responses items; an empty message where it says nothing at all."""
    items: list[Item] = []
    if reply.reasoning:
        thought = {"type": "reasoning_text", "text": reply.reasoning}
        items.append({"type": "reasoning", "summary": [], "content": [thought]})
    text = reply.text if reply.pieces is None else "".join(reply.pieces)
    if text is not None or not (items or reply.calls):
        part = {"type": "output_text", "text": text or "", "annotations": []}
        items.append({"type": "message", "role": "assistant", "content": [part]})
    for call in reply.calls:
        item = {"type": "function_call", "name": call.name, "arguments": argument_text(call.arguments)}
        items.append(item if call.call_id is None else {**item, "call_id": call.call_id})
    return tuple(items)


def made_up_log_probs(ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """(G,) float64: a logprob in [-4, -0.001] for each id, made from the id and its position and nothing else."""
    mixed = [zlib.crc32(b"%d %d" % (position, token)) % 4000 for position, token in enumerate(ids)]
    return -(np.array(mixed, dtype=np.float64) + 1.0) / 1000.0


def turns_taken(request: ResponsesRequest) -> int:
    """How many turns the model has taken in this conversation."""
    return sum(toy_tokenizer.is_model_authored(turn[0]) for turn in toy_tokenizer.split_turns(request.input))


def _last_text(request: ResponsesRequest) -> str:
    if not request.input:
        return ""
    item = request.input[-1]
    return plain_text(item.get("output") if item.get("type") == "function_call_output" else item.get("content"))


def _load(script: Script | str | Path | Sequence[Any] | None) -> Script:
    if script is None:
        return lambda call: f"echo: {call.last_text}"
    if callable(script):
        return script
    if isinstance(script, str) and ":" in script and not Path(script).exists():
        return _function(script)
    if isinstance(script, str | Path):
        return _choose_among(_read(Path(script)), str(script))
    return _choose_among(script, "script")


def _function(name: str) -> Script:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"script {name!r}: {error}; a file, a list of replies or module:function is expected"
        ) from error
    if not callable(found):
        raise ConfigError(f"script {name!r}: it names {type(found).__name__}, not a function")
    script: Script = found
    return script


def _read(path: Path) -> Sequence[Any]:
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"script {path}: it cannot be read: {error}") from error
    replies = value.get("replies") if isinstance(value, dict) else value
    if not isinstance(replies, list):
        raise ConfigError(f"script {path}: a list of replies, or an object with `replies`, is expected")
    return replies


def _choose_among(raw: Sequence[Any], where: str) -> Script:
    try:
        replies = [
            r
            if isinstance(r, ScriptedReply)
            else msgspec.convert({"text": r} if isinstance(r, str) else r, ScriptedReply)
            for r in raw
        ]
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}; accepted are {', '.join(ScriptedReply.__struct_fields__)}") from error
    in_order = [reply for reply in replies if reply.when is None]
    chosen = [reply for reply in replies if reply.when is not None]
    if not replies:
        raise ConfigError(f"{where}: a script needs at least one reply")

    def choose(call: ScriptCall) -> ScriptedReply:
        for reply in chosen:
            if reply.when is not None and _holds(reply.when, call):
                return reply
        if not in_order:
            raise EngineError(f"{where}: no scripted reply fits turn {call.turn} after {call.last_text[:80]!r}")
        return in_order[min(call.turn, len(in_order) - 1)]

    return choose


def _holds(when: When, call: ScriptCall) -> bool:
    return (
        (when.contains is None or when.contains in call.last_text)
        and (when.turn is None or when.turn == call.turn)
        and (when.tools is None or when.tools == bool(call.request.request.tools))
        and (when.rollout is None or when.rollout == call.rollout_id)
    )


def _fault(fault: ScriptedFault) -> EngineError:
    return EngineError(
        fault.message,
        kind=fault.kind,
        status=fault.status if fault.status < 500 else 503,
        retryable=status_is_retryable(fault.status),
        upstream_status=fault.status,
    )
