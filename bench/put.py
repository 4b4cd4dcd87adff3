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
from toprope.canonical.json import dumps
from toprope.capture.jsonl_store import JsonlStore
from toprope.capture.recorder import CallEvidence, Recorder
from toprope.capture.sqlite_store import SqliteStore
from toprope.capture.sqlite_writer import Operation
from toprope.tokens.entry import TokenEntry
from toprope.tokens.sampled import SampledTokens
from toprope.trajectory.build import Trainable, build

ROLLOUTS, CALLS, ROUNDS = 128, 20, 3
PROMPT, GENERATED = 400, 100
DEEP, EARLY, WINDOW, ROUND = 5000, 10, 100, 61
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


async def deep_rollout(directory: Path) -> list[Figure]:
    """Calls through the recorder, as a model server makes them; ids and items grow as they do there.

    Two stretches of `WINDOW` calls are measured at either end. In the second a request's items are new objects, as a
    parse makes them, so that whoever compares them has to look; what that parse itself costs is the baseline.
    """
    early, late = slice(EARLY, EARLY + WINDOW), slice(DEEP - 2 * WINDOW, DEEP - WINDOW)
    early_parsed, late_parsed = slice(EARLY + WINDOW, EARLY + 2 * WINDOW), slice(DEEP - WINDOW, DEEP)

    def near(call: int) -> bool:
        return any(part.start <= call < part.stop for part in (early_parsed, late_parsed))

    store = SqliteStore(directory / "deep.sqlite")
    recorder = Recorder(store, reader=store)
    items = [message("user", "begin")]
    whole = np.arange(40 + DEEP * ROUND, dtype=np.uint32) % 150_000
    whole.flags.writeable = False
    at, gen = 40, 30
    costs: list[float] = []
    for call in range(DEEP):
        said = message("assistant", f"turn {call}")
        end = min(at, len(whole) - gen)
        evidence = CallEvidence(
            key="deep",
            call_id=f"c{call:06}",
            model="bench",
            request_items=_reparsed(items) if near(call) else list(items),
            output_items=[said],
            tokens=SampledTokens(whole[:end].copy(), whole[end : end + gen].copy(), -np.ones(gen) / 3),
        )
        used = cpu()
        await recorder.begin("deep", evidence.call_id)
        await recorder.record(evidence)
        costs.append(cpu() - used)
        items += [said, message("user", f"go on {call}")]
        at += ROUND
        if call == EARLY + 2 * WINDOW:
            early_bytes = await _stored(directory / "deep.sqlite", EARLY)
    late_bytes = await _stored(directory / "deep.sqlite", DEEP - 10)
    await recorder.close()
    await store.close()
    parse = min(_spent(lambda: _reparsed(items)) for _ in range(5))
    kept, fresh = (_usual(costs[late]), _usual(costs[late_parsed]))
    what = "CPU of call 5,000 of a rollout / of call 10 (recorder and store)"
    return [
        Figure("PF-5", f"{what}, items kept", kept / _usual(costs[early]), "x", must=1.2, aim=1.0),
        Figure("PF-5", f"{what}, items parsed anew", fresh / _usual(costs[early_parsed]), "x", must=1.2, aim=1.0),
        Figure("PF-5", "CPU of call 5,000, items kept", kept * 1e6, "us", _usual(costs[early]) * 1e6, "call 10"),
        Figure("PF-5", "CPU of call 5,000, items parsed anew", fresh * 1e6, "us", parse * 1e6, "the parse of them"),
        Figure("PF-5", "bytes of call 5,000 / of call 10", late_bytes / early_bytes, "x", must=1.2, aim=1.0),
    ]


def _usual(costs: list[float]) -> float:
    """What a call costs when nobody else is in the way: one in five is cheaper."""
    return float(np.quantile(costs, 0.2))


def _spent(work: Callable[[], object]) -> float:
    used = cpu()
    work()
    return cpu() - used


def _reparsed(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    again: list[dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(items))
    return again


async def _stored(path: Path, call: int) -> int:
    def read() -> int:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
            row = connection.execute("SELECT length(data) FROM entry WHERE ordinal = ?", (call,)).fetchone()
            return int(row[0])

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
        for part in (many_rollouts, deep_rollout, long_rollout):
            for figure in await part(Path(name)):
                figure.emit()


if __name__ == "__main__":
    asyncio.run(main())
