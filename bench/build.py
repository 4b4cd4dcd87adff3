"""PF-6: a rollout of 1,000 calls and about 61,000 tokens: build it, and how big its native trace is.

Two baselines in the same run, on the same records: a builder that materialises every whole prompt as a list and
compares lists, call by call (quadratic, as peers do), and the row of projected items instead of the native trace.
Freezing is measured where the store is real (`sqlite`); the build alone also with whole prompts, as a store without
deltas returns them.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from bench.figures import Figure
from toprope.capture.sqlite_store import SqliteStore
from toprope.tokens.entry import TokenEntry
from toprope.tokens.hashing import ChainHash
from toprope.tokens.snapshot import TokenCaptureSnapshot
from toprope.trajectory.build import Trainable, build
from toprope.trajectory.content import written_by
from toprope.trajectory.evidence import read
from toprope.trajectory.project import size

MB = 10**6
CALLS = 1_000
VOCABULARY = 49_152  # of the embedded model; a JSON id is one digit longer for vocabularies beyond 100,000
FIRST_PROMPT, GENERATED, BETWEEN = 1_000, 20, 40


def rollout() -> list[TokenEntry]:
    """A tool loop: each call adds 40 tokens of tool result and samples 20."""
    dice = np.random.default_rng(6)
    entries: list[TokenEntry] = []
    prompt = dice.integers(0, VOCABULARY, FIRST_PROMPT, dtype=np.uint32)
    chain = ChainHash()
    seen = 0
    for at in range(CALLS):
        generated = dice.integers(0, VOCABULARY, GENERATED, dtype=np.uint32)
        chain = chain.extend(prompt[seen:]).extend(generated)
        seen = len(prompt) + GENERATED
        text = "".join(f" word{at}" for _ in range(8))
        item = {"type": "function_call", "call_id": f"call_{at}", "name": "run", "arguments": f'{{"command":"{text}"}}'}
        entries.append(
            TokenEntry(
                rollout_id="bench",
                model_call_id=f"c{at:05d}",
                model="m",
                created_at=float(at),
                prompt_token_ids=prompt,
                generation_token_ids=generated,
                generation_log_probs=(-dice.random(GENERATED, dtype=np.float32)).astype(np.float64),
                output_items=(item,),
                token_item_index=0,
                parent_decision="resolved" if at else "root",
                parent_call_id=f"c{at - 1:05d}" if at else None,
                cum_len=seen,
                chain_hash=chain.hexdigest(),
            )
        )
        prompt = np.concatenate([prompt, generated, dice.integers(0, VOCABULARY, BETWEEN, dtype=np.uint32)])
    return entries


def as_deltas(entries: list[TokenEntry]) -> list[TokenEntry]:
    """The same records, each with only what it adds to its parent."""
    deltas, before = [], 0
    for entry in entries:
        suffix = entry.prompt_token_ids[before:]
        deltas.append(replace(entry, prompt_token_ids=suffix, prompt_is_delta=before > 0))
        before = len(entry.prompt_token_ids) + GENERATED
    return deltas


def naive(entries: list[TokenEntry]) -> tuple[list[int], list[int]]:
    """Whole prompts as lists, every prefix compared as lists: the obvious way."""
    ids: list[int] = []
    mask: list[int] = []
    for entry in entries:
        prompt = entry.prompt_token_ids.tolist()
        if prompt[: len(ids)] != ids:
            raise AssertionError("not contiguous")
        mask += [0] * (len(prompt) - len(ids)) + [1] * GENERATED
        ids = prompt + entry.generation_token_ids.tolist()
    return ids, mask


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def witnessed(entries: list[TokenEntry]) -> float:
    """CPU seconds to read a row against a chat that repeats itself: all turns may be its writer, none is."""
    chat = [replace(entry, output_items=(said("Ok."),)) for entry in entries]
    output = [said("strange"), {"role": "user", "content": "go on"}, said("Ok.")]
    evidence = read("bench", chat)
    if written_by(evidence, chat, output):
        raise AssertionError("a call is named that no row shows")
    return cpu_seconds(lambda: written_by(evidence, chat, output))


def cpu_seconds(work: Callable[[], Any], times: int = 5) -> float:
    """The median CPU time of `work`."""
    spent = []
    for _ in range(times):
        started = time.process_time()
        work()
        spent.append(time.process_time() - started)
    return median(spent)


async def frozen(entries: list[TokenEntry], path: Path) -> tuple[float, TokenCaptureSnapshot, int]:
    """CPU seconds of a freeze in a store opened afresh, its snapshot, and the bytes on disk."""
    store = SqliteStore(path)
    for start in range(0, len(entries), 50):
        await asyncio.gather(*(store.put(entry) for entry in entries[start : start + 50]))
    await store.close()
    stored = sum(file.stat().st_size for file in path.parent.iterdir())
    store = SqliteStore(path)
    started = time.process_time()
    snapshot = await store.freeze("bench")
    spent = time.process_time() - started
    await store.close()
    return spent, snapshot, stored


def main() -> None:
    entries = rollout()
    with tempfile.TemporaryDirectory() as folder:
        freeze_s, snapshot, stored = asyncio.run(frozen(entries, Path(folder) / "capture.db"))
    deltas = TokenCaptureSnapshot("bench", tuple(as_deltas(entries)), False, "s", 1)
    whole = TokenCaptureSnapshot("bench", tuple(entries), False, "s", 1)
    built = build(snapshot)
    if not isinstance(built, Trainable):
        raise AssertionError(built.reasons)
    (trace,) = built.traces
    if (trace.token_ids.tolist(), trace.loss_mask.astype(int).tolist()) != naive(entries):
        raise AssertionError("the builder and the baseline disagree")
    slow = cpu_seconds(lambda: naive(entries), times=3)
    build_s = cpu_seconds(lambda: build(snapshot))
    what = f"{CALLS} calls, {len(trace.token_ids)} tokens"
    native = len(msgspec.json.encode(trace.as_json()))
    items = size(trace, {entry.model_call_id: entry for entry in entries})
    records = sum(len(msgspec.json.encode(entry.model_dump())) for entry in entries[::20]) * 20
    lists = "whole prompts as lists"
    for figure in (
        Figure("PF-6", f"freeze + build, sqlite, {what}", freeze_s + build_s, "s CPU", must=0.3, aim=0.1),
        Figure("PF-6", "build from deltas", cpu_seconds(lambda: build(deltas)), "s CPU", slow, lists),
        Figure("PF-6", "build from whole prompts", cpu_seconds(lambda: build(whole)), "s CPU", slow, lists),
        Figure("PF-6", f"content witness, {CALLS} equal turns", witnessed(entries), "s CPU"),
        Figure("PF-6", "native trace", native / MB, "MB", items / MB, "projected items", must=1),
        Figure("PF-6", "stored", stored / MB, "MB", records / MB, "whole prompts as JSON", must=2, aim=1.2),
    ):
        figure.emit()


if __name__ == "__main__":
    main()
