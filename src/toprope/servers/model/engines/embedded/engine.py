"""The embedded engine: requests in on the event loop, tokens computed on one thread of its own, replies out.

The thread owns the model, the batch and the memory of turns, so none of them is locked; requests reach it through a
queue, deltas and replies leave through the caller's loop. A request whose task is cancelled loses its place before the
next pass. Left to others: dialects, identity, capture (the model server).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from toprope.errors.tree import ConfigError, EngineError, EngineUnavailable, ModelContextLength, ModelRejected
from toprope.servers.model.engines.base import (
    CannotContinue,
    Capabilities,
    EngineReply,
    EngineRequest,
    NextTurn,
    SampledTokens,
    Usage,
)
from toprope.servers.model.engines.embedded.batch import Batch
from toprope.servers.model.engines.embedded.forward import Cache, Forward, NumpyForward, new_cache
from toprope.servers.model.engines.embedded.grammar import Grammars
from toprope.servers.model.engines.embedded.memory import TurnMemory
from toprope.servers.model.engines.embedded.replies import CallIds, output_items
from toprope.servers.model.engines.embedded.sampling import Sampler, read_knobs
from toprope.servers.model.engines.embedded.sequence import Limits, Sequence
from toprope.servers.model.engines.embedded.streaming import ItemStream, Outlet
from toprope.servers.model.engines.embedded.template import (
    Function,
    functions,
    item_text,
    next_turn_ids,
    prompt_ids,
    turn_text,
    turns,
)
from toprope.servers.model.engines.embedded.tokenizer import Vocabulary
from toprope.servers.model.engines.embedded.weights import (
    MODEL,
    SMOLLM2_135M,
    Weights,
    find_weights,
    load_weights,
    open_weights,
)
from toprope.wire.responses import ResponsesRequest

log = logging.getLogger(__name__)

_KEPT_TOKENS = 4096
"""Prompt tokens whose cache is kept after a request, 46 KB each: about 190 MB when full."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """One request on its way. A cancelled future is how the thread learns that nobody waits any more."""

    request: EngineRequest
    outlet: Outlet | None = None
    call_ids: CallIds = field(default_factory=CallIds)
    reply: Future[EngineReply] = field(default_factory=Future)

    @property
    def calls(self) -> bool:
        """Whether call frames in the text are calls."""
        asked = self.request.request
        return bool(asked.tools) and asked.tool_choice != "none"


@dataclass(frozen=True, slots=True, eq=False)
class _Streaming:
    """A running job whose deltas are wanted."""

    job: _Job
    sequence: Sequence
    outlet: Outlet
    items: ItemStream


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the thread works with once the model is loaded."""

    vocabulary: Vocabulary
    grammars: Grammars
    memory: TurnMemory
    batch: Batch[_Job]
    size: int


class EmbeddedEngine:
    """SmolLM2-135M-Instruct in this process: exact ids, a raw logprob for each, seeds that reproduce.

    `context` caps prompt + generation in tokens; `max_sequences` run at once, more wait; `threads` are ONNX Runtime's
    (the "numpy" backend takes OPENBLAS_NUM_THREADS). A seed gives the same ids and logprobs, bit for bit, alone or
    beside other requests, on one machine with one version of everything ("onnxruntime" only). Raises `ConfigError` for
    a value out of range.
    """

    capabilities = Capabilities(returns_ids=True, accepts_token_prompt=True, streams_ids=True, logprobs_mode="raw")

    def __init__(
        self,
        *,
        model: str = MODEL,
        weights: Path | str | None = None,
        context: int = 2048,
        max_sequences: int = 16,
        threads: int = 1,
        backend: Literal["onnxruntime", "numpy"] = "onnxruntime",
    ) -> None:
        for name, value, most in (("context", context, SMOLLM2_135M.context), ("max_sequences", max_sequences, 256)):
            if not 1 <= value <= most:
                raise ConfigError(f"embedded engine: {name} is {value}; it must be 1 to {most}.")
        if threads < 1:
            raise ConfigError(f"embedded engine: threads is {threads}; it must be at least 1.")
        if backend not in ("onnxruntime", "numpy"):
            raise ConfigError(f"embedded engine: backend is {backend!r}; it must be 'onnxruntime' or 'numpy'.")
        if model != MODEL and weights is None:
            raise ConfigError(f"embedded engine: model is {model!r}; known is {MODEL!r}.")
        self.model = model
        self.context = context
        self._weights = weights
        self._max_sequences = max_sequences
        self._threads = threads
        self._backend = backend
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._waiting: deque[_Job] = deque()
        self._streams: list[_Streaming] = []
        self._door = threading.Lock()
        self._open = False
        self._thread: threading.Thread | None = None
        self._stopped: Future[None] = Future()
        self._parts: _Parts | None = None

    @property
    def forward_passes(self) -> int:
        """Forward passes since the start, each over one or several sequences."""
        return self._parts.batch.passes if self._parts else 0

    @property
    def running(self) -> int:
        """Sequences that hold a row of the cache now."""
        return len(self._parts.batch) if self._parts else 0

    async def start(self) -> None:
        """On return the model is loaded (about 3 s and 1.5 GB). Raises `EngineUnavailable` naming what is missing."""
        if self._thread is not None:
            raise EngineUnavailable("The embedded engine was started before; make a new one.")
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="toprope-embedded", daemon=True)
        self._thread.start()
        await asyncio.wrap_future(ready)

    async def generate(self, request: EngineRequest) -> EngineReply:
        """On return the generation is complete. A cancelled caller's place is free before the next pass.

        Raises `ModelRejected` (400) for a request that cannot be served as asked, `ModelContextLength` (400) for a
        prompt that fills the context, `EngineUnavailable` if the engine is not running.
        """
        outlet = None if request.emit is None else Outlet(request.emit)
        job = _Job(request, outlet)
        with self._door:
            if not self._open:
                raise EngineUnavailable("The embedded engine is not running.")
            self._inbox.put(job)
        try:
            return await asyncio.wrap_future(job.reply)
        finally:
            if outlet is not None:
                outlet.close()

    async def next_turn(self, turn: NextTurn) -> list[int]:
        """What follows a recorded turn, for token-in. Raises `CannotContinue` for items that cannot be written."""
        if self._parts is None:
            raise EngineUnavailable("The embedded engine is not running.")
        try:
            # The vocabulary is read-only, so that this needs no turn on the engine's thread.
            return next_turn_ids(turn.items[turn.tail :], turn.generation_token_ids.tolist(), self._parts.vocabulary)
        except ModelRejected as error:
            raise CannotContinue("items_not_written", error.message) from error

    async def close(self) -> None:
        """On return the thread has ended and the model is released; open requests got `EngineUnavailable`."""
        if self._thread is None:
            return
        with self._door:
            self._open = False
            self._inbox.put(None)
        await asyncio.shield(asyncio.wrap_future(self._stopped))
        self._thread.join()

    # What follows runs on the engine's own thread.

    def _run(self, ready: Future[None]) -> None:
        try:
            self._parts = self._load()
            with self._door:
                self._open = True
            if ready.set_running_or_notify_cancel():
                ready.set_result(None)
            self._serve(self._parts)
        except BaseException as error:  # the thread's last words go to whoever waits: start(), or every request
            if not ready.done():
                ready.set_exception(error)
            else:
                log.exception("the embedded engine's thread died")
        finally:
            with self._door:
                self._open = False
            self._refuse_all()
            self._stopped.set_result(None)

    def _load(self) -> _Parts:
        file = open_weights(find_weights(self.model, self._weights))
        vocabulary = Vocabulary(file)
        weights = load_weights(file)
        cache = new_cache(weights.shape, self._max_sequences, self.context)
        batch: Batch[_Job] = Batch(
            self._forward(weights, cache), cache, _KEPT_TOKENS, lambda job: job.reply.cancelled()
        )
        size = weights.shape.vocabulary
        return _Parts(vocabulary, Grammars(vocabulary, size), TurnMemory(), batch, size)

    def _forward(self, weights: Weights, cache: Cache) -> Forward:
        if self._backend == "numpy":
            return NumpyForward(weights, cache)
        try:
            from toprope.servers.model.engines.embedded.onnx_forward import OnnxForward

            return OnnxForward(weights, cache, self._threads)
        except ImportError as error:
            raise EngineUnavailable(
                "The embedded engine needs the package onnxruntime; install it with `pip install 'toprope[embedded]'`, "
                "or choose `backend: numpy`."
            ) from error

    def _serve(self, parts: _Parts) -> None:
        while self._collect(parts):
            while self._waiting and not parts.batch.full:
                self._admit(parts, self._waiting.popleft())
            try:
                done = parts.batch.step()
            except Exception as error:  # a pass that failed fails those on board; the engine goes on for the rest
                log.exception("a forward pass failed")
                for job in parts.batch.jobs:
                    parts.batch.drop(job)
                    _fail(job, EngineUnavailable(f"The embedded engine failed in a forward pass: {error!r}"))
                continue
            self._stream()
            for job, sequence in done:
                self._answer(parts, job, sequence)

    def _stream(self) -> None:
        """Send what the running streams said since the last pass, and forget those that are over."""
        for one in self._streams:
            if not one.job.reply.cancelled():
                one.outlet.send(one.items.advance(one.sequence))
        self._streams = [one for one in self._streams if not (one.sequence.done or one.job.reply.done())]

    def _collect(self, parts: _Parts) -> bool:
        """Takes in what has arrived, waiting only when there is nothing to do. False when the engine is closing."""
        idle = not self._waiting and not len(parts.batch)
        while True:
            try:
                job = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if job is None:
                return False
            self._waiting.append(job)
            idle = False

    def _admit(self, parts: _Parts, job: _Job) -> None:
        if job.reply.cancelled():
            return
        try:
            sequence = self._sequence(parts, job.request)
        except EngineError as error:
            _fail(job, error)
        except Exception as error:  # a request that cannot be read fails alone; its sender gets the words
            log.exception("the embedded engine could not prepare a request")
            _fail(job, ModelRejected(f"The embedded engine could not read the request: {error!r}"))
        else:
            parts.batch.add(job, sequence)
            if job.outlet is not None:
                items = ItemStream(calls=job.calls, call_ids=job.call_ids)
                self._streams.append(_Streaming(job, sequence, job.outlet, items))

    def _refuse_all(self) -> None:
        while not self._inbox.empty():
            if (job := self._inbox.get()) is not None:
                self._waiting.append(job)
        running = self._parts.batch.jobs if self._parts else []
        for job in [*running, *self._waiting]:
            _fail(job, EngineUnavailable("The embedded engine was closed."))
        self._waiting.clear()
        self._parts = None

    def _sequence(self, parts: _Parts, request: EngineRequest) -> Sequence:
        asked = request.request
        session = request.session

        def recall(prompt: Any, text: str) -> tuple[int, ...] | None:
            return None if session is None else parts.memory.get(session, prompt, text)

        given = request.prompt_token_ids
        prompt = prompt_ids(turns(asked), parts.vocabulary, recall) if given is None else _known(given, parts)
        room = self.context - len(prompt)
        if room < 1:
            raise ModelContextLength(
                f"The prompt has {len(prompt)} tokens; the embedded engine's context is {self.context} tokens, "
                "and at least one must be left to generate."
            )
        if asked.max_output_tokens is not None and asked.max_output_tokens < 1:
            raise ModelRejected(f"max_output_tokens is {asked.max_output_tokens}; it must be at least 1.")
        stop = tuple(text.encode() for text in asked.stop if text)
        limits = Limits(min(room, asked.max_output_tokens or room), stop)
        forced = forced_functions(asked)
        constraint = parts.grammars.one_call(forced) if forced else None
        return Sequence(prompt, Sampler(read_knobs(asked)), limits, parts.vocabulary, constraint)

    def _answer(self, parts: _Parts, job: _Job, sequence: Sequence) -> None:
        try:
            reply = self._reply(parts, job, sequence)
        except Exception as error:  # the sender gets the words; the thread must live on for the others
            log.exception("the embedded engine could not make a reply")
            _fail(job, EngineUnavailable(f"The embedded engine could not make a reply: {error!r}"))
            return
        if job.reply.set_running_or_notify_cancel():
            job.reply.set_result(reply)

    def _reply(self, parts: _Parts, job: _Job, sequence: Sequence) -> EngineReply:
        request, complete = job.request, sequence.finish == "stop"
        items = output_items(sequence.text, calls=job.calls, complete=complete, call_ids=job.call_ids)
        if request.session is not None:
            text = turn_text([item_text(item) for item in items])
            parts.memory.put(request.session, sequence.prompt, text, sequence.ids)
        called = any(item["type"] == "function_call" for item in items)
        assert sequence.finish is not None
        return EngineReply(
            output=items,
            finish_reason="tool_calls" if called and sequence.finish == "stop" else sequence.finish,
            model=self.model,
            usage=Usage(len(sequence.prompt), len(sequence.ids)),
            tokens=SampledTokens(
                np.array(sequence.prompt, dtype=np.uint32),
                np.array(sequence.ids, dtype=np.uint32),
                np.array(sequence.logprobs, dtype=np.float64),
                np.array(sequence.forced, dtype=np.bool_) if sequence.constrained else None,
            ),
            response_id=f"resp_{request.call_id}",
        )


def forced_functions(request: ResponsesRequest) -> tuple[Function, ...]:
    """The functions one of which must be called; none if the reply is free. Raises `ModelRejected` for a bad choice."""
    choice, known = request.tool_choice, functions(request)
    if choice is None or choice in ("auto", "none"):
        return ()
    if choice == "required":
        if not known:
            raise ModelRejected("tool_choice is 'required', but the request has no tools.")
        return known
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        name = choice.get("name", (choice.get("function") or {}).get("name"))
        named = tuple(function for function in known if function.name == name)
        if named:
            return named
        names = ", ".join(repr(function.name) for function in known) or "none"
        raise ModelRejected(f"tool_choice names the function {name!r}; the request's functions are {names}.")
    raise ModelRejected(
        f"tool_choice is {choice!r}; the embedded engine takes 'auto', 'none', 'required' or a function by name."
    )


def _known(given: NDArray[np.uint32], parts: _Parts) -> list[int]:
    """A prompt of ids. Raises `ModelRejected` for one that is empty or holds an id that the model does not have."""
    if not len(given) or int(given.max()) >= parts.size:
        raise ModelRejected(
            f"A prompt of ids needs at least one, each below {parts.size}; got {len(given)} ids"
            + (f", the largest {int(given.max())}." if len(given) else ".")
        )
    return [int(token) for token in given]


def _fail(job: _Job, error: Exception) -> None:
    if job.reply.set_running_or_notify_cancel():
        job.reply.set_exception(error)
