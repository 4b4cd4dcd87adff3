"""What the victims of the nursery do: one verb of a store, or the end of a rollout in a real collector."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.crash.nursery import Points

from toprope.capture.jsonl_store import JsonlStore
from toprope.capture.protocols import Intent
from toprope.capture.sqlite_store import SqliteStore
from toprope.collector.settings import CaptureSettings, RunSettings
from toprope.testing.capture_suite import sample_entry
from toprope.testing.episodes import Run, collect_scripted, sample_calls

STORES: dict[str, Callable[[Path], Any]] = {
    "sqlite": lambda directory: SqliteStore(directory / "c.sqlite"),
    "jsonl": lambda directory: JsonlStore(directory / "c"),
}


def child(key: str, call_id: str = "c3", **fields: Any) -> Any:
    """A call that extends `c1`, so that a store which keeps deltas stores only its suffix."""
    prompt = [1, 2, 3, 100, 101, 7]
    return sample_entry(key, call_id, prompt=prompt, parent_decision="resolved", parent_call_id="c1", **fields)


async def prepare(directory: Path, points: Points, store: str) -> None:
    """One key in every phase, acknowledged; then the process dies, nothing closed."""
    made = STORES[store](directory)
    await made.begin_call("orphan", "c1", intent=Intent(request_digest="d1", writer_epoch="a writer that dies"))
    for key in ("k", "frozen", "gone", "masked", "other"):
        await made.begin_call(key, "c1")
        await made.put(sample_entry(key, "c1"))
    await made.begin_call("k", "c2")
    await made.mark_incomplete("masked", "c9", reason="bad_logprob")
    await made.freeze("frozen")
    snapshot = await made.freeze("gone")
    assert await made.drop("gone", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    points.say("prepared")
    points.arm()
    points.reached("end")


async def _drop(store: Any, key: str) -> None:
    snapshot = await store.freeze(key)
    assert await store.drop(key, snapshot_id=snapshot.snapshot_id, version=snapshot.version)


async def _conflict(store: Any) -> None:
    try:
        await store.put(sample_entry("k", "c1", generated=5))
    except Exception:
        return
    raise AssertionError("a conflicting put was accepted")


VERBS: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "begin_call": lambda store: store.begin_call("k", "c3"),
    "begin_call with an intent": lambda store: store.begin_call("k", "c3", intent=Intent(writer_epoch="another")),
    "begin_call of a new key": lambda store: store.begin_call("new", "c1"),
    "put of a begun call": lambda store: store.put(sample_entry("k", "c2")),
    "put of a continued call": lambda store: store.put(child("k")),
    "put of a new key": lambda store: store.put(sample_entry("new", "c1")),
    "put of other bytes": _conflict,
    "put of the same bytes": lambda store: store.put(sample_entry("k", "c1")),
    "abort_call": lambda store: store.abort_call("k", "c2", reason="upstream:500"),
    "abort_call after freeze": lambda store: store.abort_call("frozen", "c5", reason="client_gone"),
    "mark_incomplete": lambda store: store.mark_incomplete("k", "c2"),
    "mark_incomplete after freeze": lambda store: store.mark_incomplete("frozen"),
    "freeze": lambda store: store.freeze("k"),
    "freeze of a dead writer's key": lambda store: store.freeze("orphan"),
    "settle_dead_writers": lambda store: store.settle_dead_writers(),
    "freeze of a new key": lambda store: store.freeze("new"),
    "drop": lambda store: _drop(store, "frozen"),
    "supersede of an open key": lambda store: store.supersede("k"),
    "supersede of a frozen key": lambda store: store.supersede("frozen"),
    "supersede of a retired key": lambda store: store.supersede("gone"),
    "sweep_retired": lambda store: store.sweep_retired(-1.0),
}


async def act(directory: Path, points: Points, store: str, verb: str) -> None:
    """One verb of a store that another process left behind."""
    made = STORES[store](directory)
    points.arm()
    await VERBS[verb](made)
    points.say("acknowledged")
    await made.close()


async def together(directory: Path, points: Points, store: str) -> None:
    """Five rollouts write at once: with a group commit, several operations in one transaction."""
    made = STORES[store](directory)
    await made.open_entries("k")
    points.arm()

    async def one(n: int) -> None:
        await made.begin_call(f"t{n}", "c1")
        points.say(f"begun t{n}")
        await made.put(sample_entry(f"t{n}", "c1"))
        points.say(f"put t{n}")

    await asyncio.gather(*(one(n) for n in range(5)))


async def seen(store: str, directory: Path) -> dict[str, Any]:
    """Everything that a fresh client can read, but for what is random or a time."""
    made = STORES[store](directory)
    try:
        found: dict[str, Any] = {}
        for info in await made.list_captures(retired=True):
            key = info.rollout_id
            receipts = await made.receipts(key)
            found[key] = (
                str(info.state),
                info.version,
                info.incomplete,
                info.abandoned,
                info.open_intents,
                sorted(info.reasons),
                await made.open_entries(key),
                None if receipts is None else [r.model_call_id for r in receipts],
            )
        return found
    finally:
        await made.close()


TURNS = [([1, 10, 11], [50, 2]), ([9, 12], [51, 52, 2])]
LATE = 1  # the task over whose delivery the collector dies; the one before it is delivered


async def collect(directory: Path, points: Points, store: str, lose: str = "") -> None:
    """A real collector of two captured rollouts, one at a time; the second is delivered under fire.

    `lose`: a call of the second is lost, so that its row is masked and its capture stays.
    """
    writer, source = STORES[store](directory / "captures"), STORES[store](directory / "captures")

    async def answer(run: Run) -> dict[str, Any]:
        await sample_calls(writer, run.key, TURNS)
        if run.task_id == str(LATE):
            if lose:
                await writer.mark_incomplete(run.key, lose)
            points.arm()
        return run.result(0.5, note="verifier's own")

    await collect_scripted(
        directory,
        answer,
        [{"responses_create_params": {"input": str(n)}} for n in range(2)],
        source=source,
        selected=True,
        settings=RunSettings(run_id="run", concurrency=1),
        capture=CaptureSettings(enabled=True, settle_s=0.0),
        observers=[lambda event: points.say(f"{type(event).__name__} {getattr(event, 'rollout_id', '')}".strip())],
    )
    await source.close()
    await writer.close()


async def every_verb(directory: Path, acknowledged: Callable[[str], None], store: str) -> None:
    """Every verb that writes, on one new store after another, each followed by its acknowledgement."""
    for number, (verb, act_out) in enumerate(VERBS.items()):
        made = STORES[store](directory / str(number))
        await made.begin_call("k", "c1")
        acknowledged("begin_call")
        await made.put(sample_entry("k", "c1"))
        acknowledged("put")
        await made.begin_call("k", "c2")
        acknowledged("begin_call")
        for key in ("frozen", "gone"):
            await made.put(sample_entry(key, "c1"))
            acknowledged("put")
            snapshot = await made.freeze(key)
            acknowledged("freeze")
            if key == "gone":
                await made.drop(key, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
                acknowledged("drop")
        await act_out(made)
        acknowledged(verb)
        await made.close()


async def _alone(scene: str, store: str, directory: Path, *told: str) -> None:
    if scene == "act":
        made = STORES[store](directory)
        await VERBS[told[0]](made)
        print("acknowledged", flush=True)
        await made.close()
    else:
        await every_verb(directory, lambda verb: print("ack", verb, flush=True), store)


if __name__ == "__main__":  # a process of its own, for those who look at it from outside
    asyncio.run(_alone(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:]))
