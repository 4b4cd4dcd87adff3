"""PF-4: begin_call + put of 128 rollouts at once. PF-5: a call deep in a rollout, and an early one. PF-6: a long one.

Baseline of PF-4, in the same run and directory: the `jsonl` store, one file a rollout and a sync a record, no group
commit. Ratios and CPU time are what to read; wall times follow the disk.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.figures import Figure
from toprope.canonical.digest import digest_bytes
from toprope.canonical.json import dumps
from toprope.capture.jsonl_store import JsonlStore
from toprope.capture.recorder import CallEvidence, Recorder
from toprope.capture.sqlite_store import SqliteStore
from toprope.capture.sqlite_writer import Operation
from toprope.dialects.incremental import RequestMemory
from toprope.dialects.pivot import has_media
from toprope.dialects.responses import request_from_responses
from toprope.tokens.asked import Asked
from toprope.tokens.entry import TokenEntry
from toprope.tokens.items import item_digests
from toprope.tokens.sampled import SampledTokens
from toprope.trajectory.build import Trainable, build
from toprope.wire.fields import read_object
from toprope.wire.responses import Item

ROLLOUTS, CALLS, ROUNDS = 128, 20, 3
PROMPT, GENERATED = 400, 100
DEEP, EARLY, WINDOW, ROUND = 5000, 10, 100, 61
COMPACTED = 20  # calls after which an agent begins anew from a summary
LONG_CALLS, LONG_TOKENS = 1000, 61


def cpu() -> float:
    """CPU seconds of this process, all threads, user and system."""
    return time.process_time()


def message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "output_text", "text": text}]}


def entry(key: str, call: int, prompt: np.ndarray, log_probs: np.ndarray) -> TokenEntry:
    return TokenEntry(
        rollout_id=key,
        model_call_id=f"call-{time.time_ns():016x}{call:08x}",
        model="bench",
        created_at=time.time(),
        prompt_token_ids=prompt,
        generation_token_ids=prompt[: len(log_probs)],
        generation_log_probs=log_probs,
        output_items=(
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x" * 300}]},
        ),
        token_item_index=0,
        finish_reason="stop",
        sampling={"temperature": 1.0, "max_output_tokens": 512},
    )


async def timed(work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Wall and CPU seconds of `work`."""
    started, used = time.perf_counter(), cpu()
    await work()
    return time.perf_counter() - started, cpu() - used


class CountedStore(SqliteStore):
    """The store, and how many transactions, each with one sync, its operations took."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.commits = 0
        commit = self._group._commit

        def counted(operations: Sequence[Operation]) -> Sequence[Any]:
            self.commits += 1
            return commit(operations)

        self._group._commit = counted


async def many_rollouts(directory: Path) -> list[Figure]:
    generator = np.random.default_rng(1)
    prompt = generator.integers(0, 150_000, PROMPT, dtype=np.uint32)
    log_probs = -generator.random(GENERATED)
    for array in (prompt, log_probs):
        array.flags.writeable = False
    store, jsonl = CountedStore(directory / "capture.sqlite"), JsonlStore(directory / "jsonl")

    async def rollout(sink: SqliteStore | JsonlStore, name: str, calls: int) -> None:
        for call in range(calls):
            made = entry(f"{name}-0", call, prompt, log_probs)
            await sink.begin_call(made.rollout_id, made.model_call_id)
            await sink.put(made)

    async def many(sink: SqliteStore | JsonlStore, part: int, calls: int) -> tuple[float, float]:
        """Calls a second and CPU seconds a call."""
        work = lambda: asyncio.gather(*(rollout(sink, f"r{part}.{n}", calls) for n in range(ROLLOUTS)))  # noqa: E731
        wall, used = await timed(work)
        return ROLLOUTS * calls / wall, used / (ROLLOUTS * calls)

    await rollout(store, "warm", 2)
    await rollout(jsonl, "warm", 2)
    store.commits = 0
    ours, theirs = [], []
    for part in range(ROUNDS):
        ours.append(await many(store, part, CALLS))
        theirs.append(await many(jsonl, part, CALLS // 5))
    per_sync = 2 * ROUNDS * ROLLOUTS * CALLS / store.commits
    await store.close()
    await jsonl.close()
    (rate, per_call), (base, base_per_call) = _best(ours), _best(theirs)
    files = "the jsonl store, a sync a record"
    return [
        Figure("PF-4", "begin_call + put, 128 rollouts at once", rate, "calls/s", base, files, must=3500),
        Figure("PF-4", "records that share a device sync", per_sync, "records", must=None, aim=30),
        Figure("PF-4", "begin_call + put, CPU per call", per_call * 1e6, "us", base_per_call * 1e6, files),
    ]


def _best(rounds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return max(rate for rate, _ in rounds), min(used for _, used in rounds)


def carried(before: Asked | None, items: Sequence[Item]) -> Asked:
    """What a model server carries from one request of a conversation to the next."""
    return (before or Asked()).extended(item_digests(items))


class Conversation:
    """One rollout's calls as a model server makes them: the request's text is read, the intent stored, ids recorded.

    Its client sends the whole conversation every time, as new bytes; ids and text grow as they do there. With
    `compacted` it begins anew from a summary after so many calls, as agents do whose context is full.
    """

    def __init__(
        self,
        key: str,
        memory: RequestMemory[Asked],
        recorder: Recorder,
        *,
        compacted: int | None = None,
    ) -> None:
        self.key, self.calls = key, 0
        self._memory, self._recorder, self._compacted = memory, recorder, compacted
        self._ids = np.arange(40 + (compacted or DEEP) * ROUND, dtype=np.uint32) % 150_000
        self._begin_anew()

    def _begin_anew(self) -> None:
        """The history is a task and what a summary of 4 KB says; no two summaries are alike, nor are their ids."""
        told = f"begin {self.calls:06} " + ("what was found out " * 220 if self._compacted else "")
        self.text = bytearray(b'{"model":"bench","input":[' + msgspec.json.encode(message("user", told)))
        self._begun = self.calls
        if self._compacted:
            self._ids[8:40] = self.calls

    def request(self) -> bytes:
        return bytes(self.text) + b'],"temperature":1}'

    async def call(self) -> tuple[float, float, float]:
        """CPU seconds of the next call: all that capture costs, the reading in that, and the whole list beside it.

        The list of the whole conversation is made for the engine, which goes through all of it, captured or not.
        """
        said, call = message("assistant", f"turn {self.calls}"), f"{self.key}-{self.calls:06}"
        if self._compacted and self.calls - self._begun == self._compacted:
            self._begin_anew()
        turns = self.calls - self._begun
        at, gen = 40 + ROUND * turns, 30
        tokens = SampledTokens(self._ids[:at].copy(), self._ids[at : at + gen].copy(), -np.ones(gen) / 3)
        data = self.request()
        started = cpu()
        read = self._memory.read("responses", self.key, data)
        reading = cpu() - started
        await self._recorder.begin(self.key, call)
        await self._recorder.record(
            CallEvidence(
                key=self.key,
                call_id=call,
                model="bench",
                request_items=read.settings.input,
                output_items=[said],
                tokens=tokens,
                request_digest=read.digest,
                media=read.media,
                asked=read.carried,
            )
        )
        spent = cpu() - started
        assert len(read.request.input) == len(read.body["input"]) == 1 + 2 * turns
        whole = cpu() - started - spent
        self.text += b"," + msgspec.json.encode(said)
        self.text += b"," + msgspec.json.encode(message("user", f"go on {self.calls}"))
        self.calls += 1
        return spent, reading, whole


async def deep_rollout(directory: Path) -> list[Figure]:
    """A call deep in a rollout and a tenth call of another take turns, so that both meet the same machine.

    Beside it the deep request read plainly: parsed, converted and digested whole, as if nothing of it were known.
    """
    path = directory / "deep.sqlite"
    store, memory = SqliteStore(path), RequestMemory(carried)
    recorder = Recorder(store, reader=store)
    deep = Conversation("deep", memory, recorder)
    while deep.calls < DEEP - WINDOW:
        await deep.call()
    late, early = [], []
    for turn in range(WINDOW):
        young = Conversation(f"young-{turn}", memory, recorder)
        while young.calls < EARLY:
            await young.call()
        early.append(await young.call())
        late.append(await deep.call())
    await recorder.close()
    await store.close()
    early_bytes, late_bytes = await _stored(path, f"young-0-{EARLY:06}"), await _stored(path, f"deep-{DEEP - 10:06}")
    data = deep.request()
    plain = min(_spent(lambda: _plainly(data)) for _ in range(5))
    ratio = _ratio([each[0] for each in late], [each[0] for each in early])
    first = _usual([spent for spent, _, _ in early])
    last, reading, whole = (_usual([each[at] for each in late]) for at in range(3))
    what = f"a request of {len(data) / 1e6:.1f} MB read, intent and record stored"
    return [
        Figure("PF-5", f"CPU of call 5,000 of a rollout / of call 10: {what}", ratio, "x", must=1.2, aim=1.0),
        Figure("PF-5", f"CPU of call 5,000: {what}", last * 1e6, "us", first * 1e6, "call 10"),
        Figure("PF-5", "CPU of call 5,000: reading the request", reading * 1e6, "us", plain * 1e6, "read plainly"),
        Figure(
            "PF-5", "CPU of call 5,000: the whole list, for the engine", whole * 1e6, "us", plain * 1e6, "read plainly"
        ),
        Figure("PF-5", "bytes of call 5,000 / of call 10", late_bytes / early_bytes, "x", must=1.2, aim=1.0),
    ]


async def deep_rollout_of_one_size(directory: Path) -> list[Figure]:
    """What is left of the cost of depth where the context is bounded: how many calls came before, and nothing else.

    Call 5,000 and call 10 stand at the same place of their contexts and take turns; so do all calls from one to the
    next such place, a new beginning among them.
    """
    path = directory / "compacted.sqlite"
    store, memory = SqliteStore(path), RequestMemory(carried)
    recorder = Recorder(store, reader=store)
    deep = Conversation("deep", memory, recorder, compacted=COMPACTED)
    while deep.calls < DEEP + EARLY - COMPACTED * WINDOW // 2:
        await deep.call()
    early, late, all_early, all_late = [], [], [], []
    for turn in range(WINDOW):
        young = Conversation(f"young-{turn}", memory, recorder, compacted=COMPACTED)
        while young.calls < EARLY:
            await young.call()
        first, last = [], []
        for _ in range(COMPACTED):
            first.append((await young.call())[0])
            last.append((await deep.call())[0])
        early.append(first[0])
        late.append(last[0])
        all_early.append(sum(first))
        all_late.append(sum(last))
    await recorder.close()
    await store.close()
    early_bytes, late_bytes = await _stored(path, f"young-0-{EARLY:06}"), await _stored(path, f"deep-{DEEP + EARLY:06}")
    what = f"a context of one size, compacted every {COMPACTED} calls"
    return [
        Figure("PF-5", f"CPU of call 5,000 / of call 10: {what}", _ratio(late, early), "x", must=1.2, aim=1.0),
        Figure(
            "PF-5",
            f"the same, all {COMPACTED} calls and a compaction",
            _ratio(all_late, all_early),
            "x",
            must=1.2,
            aim=1.0,
        ),
        Figure("PF-5", f"bytes of call 5,000 / of call 10: {what}", late_bytes / early_bytes, "x", must=1.2, aim=1.0),
    ]


def _ratio(later: list[float], earlier: list[float]) -> float:
    """The median of the ratios of costs that were measured side by side."""
    return float(np.median(np.divide(later, earlier)))


def _usual(costs: list[float]) -> float:
    """What a call costs when nobody else is in the way: one in five is cheaper."""
    return float(np.quantile(costs, 0.2))


def _spent(work: Callable[[], object]) -> float:
    used = cpu()
    work()
    return cpu() - used


def _plainly(data: bytes) -> None:
    request = request_from_responses(read_object(data))
    digest_bytes(data)
    has_media(request)
    item_digests(request.input)


async def _stored(path: Path, call: str) -> int:
    def read() -> int:
        query = "SELECT length(data) FROM entry JOIN call ON entry.call = call.id WHERE call_id = ?"
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
            return int(connection.execute(query, (call,)).fetchone()[0])

    return await asyncio.to_thread(read)


async def long_rollout(directory: Path) -> list[Figure]:
    path = directory / "long.sqlite"
    store = SqliteStore(path)
    recorder = Recorder(store, reader=store)
    items = [message("user", "begin")]
    gen, prompt = 30, np.arange(LONG_TOKENS - 30, dtype=np.uint32)
    log_probs = -np.random.default_rng(2).random(gen)
    for call in range(LONG_CALLS):
        said = {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": f"turn {call} " * 10}],
        }
        made = np.arange(call, call + gen, dtype=np.uint32)
        await recorder.begin("long", f"call-{call:012x}")
        await recorder.record(
            CallEvidence(
                key="long",
                call_id=f"call-{call:012x}",
                model="bench",
                request_items=list(items),
                output_items=[said],
                tokens=SampledTokens(prompt, made, log_probs.copy()),
                finish_reason="stop",
                request_digest="d" * 64,
            )
        )
        items += [said, message("user", "go on")]
        prompt = np.concatenate([prompt, made, np.arange(LONG_TOKENS - gen, dtype=np.uint32)])
    await store.close()
    size = path.stat().st_size
    store = SqliteStore(path)
    used = cpu()
    built = build(await store.freeze("long"))
    used = cpu() - used
    await store.close()
    if not isinstance(built, Trainable):
        raise SystemExit(f"the long rollout did not build: {built}")
    native = len(dumps(built.traces[0].as_json()))
    return [
        Figure("PF-6", "stored bytes, rollout of 1,000 calls and 61,000 tokens", size / 1e6, "MB", must=2.0, aim=1.2),
        Figure("PF-6", "freeze + build of it, CPU", used, "s", must=0.3, aim=0.1),
        Figure("PF-6", "its native trace as JSON", native / 1e6, "MB", must=1.0),
    ]


async def main() -> None:
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as name:
        for part in (many_rollouts, deep_rollout, deep_rollout_of_one_size, long_rollout):
            for figure in await part(Path(name)):
                figure.emit()


if __name__ == "__main__":
    asyncio.run(main())
