"""Open intents: of dead writers, settled without a clock; of live ones, waited for until they end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from toprope.capture.epochs import WriterEpochs
from toprope.capture.memory_store import MemoryStore
from toprope.capture.protocols import Intent
from toprope.capture.settling import Changes, InFlight, wait_settled
from toprope.capture.sqlite_store import SqliteStore
from toprope.testing.capture_suite import sample_entry

VICTIM = """
import asyncio, sys
from toprope.capture.protocols import Intent
from toprope.capture.sqlite_store import SqliteStore

async def main():
    store = SqliteStore(sys.argv[1])
    await store.begin_call("plain", "c1", intent=Intent(request_digest="d", writer_epoch="victim"))
    await store.begin_call("streamed", "c1", intent=Intent(stream=True, request_digest="d", writer_epoch="victim"))
    print("begun", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    made = SqliteStore(tmp_path / "c.sqlite")
    yield made
    await made.close()


def victim(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", VICTIM, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.promise("CP-6")
async def test_a_killed_writers_plain_call_is_aborted_and_a_clean_retry_leaves_the_rollout_whole(
    store: SqliteStore,
) -> None:
    process = victim(store.path)
    try:
        assert await store.settle_dead_writers() == 0  # it lives
        assert {(i.rollout_id, i.writer) for i in await store.list_captures()} == {
            ("plain", "live"),
            ("streamed", "live"),
        }
    finally:
        kill(process)
    assert {i.writer for i in await store.list_captures()} == {"dead"}
    assert await store.settle_dead_writers() == 1
    await store.put(sample_entry("plain", "c2"))
    plain = await store.freeze("plain")
    assert (plain.incomplete, plain.reasons) == (False, ())
    assert [e.model_call_id for e in plain.entries] == ["c2"]
    streamed = await store.freeze("streamed")
    assert (streamed.incomplete, streamed.reasons) == (True, ("dangling_intent:c1",))


async def test_a_killed_writers_streamed_call_is_settled_at_freeze_once_its_retry_is_there(store: SqliteStore) -> None:
    kill(victim(store.path))
    await store.begin_call("streamed", "c2", intent=Intent(True, "d", 1, "mine"))
    await store.put(sample_entry("streamed", "c2"))
    snapshot = await store.freeze("streamed")
    assert (snapshot.incomplete, [e.model_call_id for e in snapshot.entries]) == (False, ["c2"])


async def test_a_later_request_with_an_unrecorded_turn_keeps_the_streamed_call_lost(store: SqliteStore) -> None:
    kill(victim(store.path))
    await store.begin_call("streamed", "c2", intent=Intent(True, "d", 1, "mine"))
    await store.put(sample_entry("streamed", "c2"))
    unresolved = {"parent_decision": "unresolved", "parent_resolution_reason": "unrecorded_turn"}
    await store.put(sample_entry("streamed", "c3", **unresolved))
    assert (await store.freeze("streamed")).reasons == ("dangling_intent:c1",)


async def test_freezing_settles_only_what_is_open(store: SqliteStore) -> None:
    kill(victim(store.path))
    frozen = await store.freeze("plain")
    assert not frozen.incomplete
    again = await store.freeze("plain")
    assert (again.snapshot_id, again.version) == (frozen.snapshot_id, frozen.version)


@pytest.mark.parametrize("kind", ["sqlite", "memory"])
async def test_settling_waits_for_a_call_in_flight_and_wakes_with_its_end(kind: str, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "c.sqlite") if kind == "sqlite" else MemoryStore()
    for n, end in enumerate(("put", "abort")):
        key = f"k{n}"
        await store.begin_call(key, "c1", intent=Intent(writer_epoch="mine"))
        waiting = asyncio.ensure_future(store.settle(key, 60.0))
        assert await store.settle(key, 0.0) is False
        assert not waiting.done()
        if end == "put":
            await store.put(sample_entry(key, "c1"))
        else:
            await store.abort_call(key, "c1", reason="client_gone")
        assert await waiting is True
    assert await store.settle("never-heard-of", 60.0) is True
    await store.close()


async def test_settling_waits_for_another_process_until_it_dies(store: SqliteStore) -> None:
    process = victim(store.path)
    waiting = asyncio.ensure_future(store.settle("plain", 60.0))
    assert await store.settle("plain", 0.05) is False
    kill(process)
    assert await waiting is True


async def test_settling_sees_what_another_store_object_puts(store: SqliteStore) -> None:
    other = SqliteStore(store.path)
    await other.begin_call("k", "c1", intent=Intent(writer_epoch="other"))
    waiting = asyncio.ensure_future(store.settle("k", 60.0))
    await other.put(sample_entry("k", "c1"))
    assert await waiting is True
    await other.close()


async def test_a_closed_stores_writers_are_gone_and_leave_no_file(tmp_path: Path) -> None:
    first = SqliteStore(tmp_path / "c.sqlite")
    await first.begin_call("k", "c1", intent=Intent(writer_epoch="w"))
    assert len(list((tmp_path / "c.sqlite.writers").iterdir())) == 1
    await first.close()
    assert not (tmp_path / "c.sqlite.writers").exists()
    second = SqliteStore(tmp_path / "c.sqlite")
    assert [i.writer for i in await second.list_captures()] == ["dead"]
    assert not (await second.freeze("k")).incomplete
    await second.close()


def test_asking_who_lives_leaves_no_trace(tmp_path: Path) -> None:
    epochs = WriterEpochs(tmp_path / "w")
    assert not epochs.is_live("nobody")
    assert epochs.is_live("")  # of unknown origin: it may be
    assert not (tmp_path / "w").exists()


async def test_waiting_looks_again_at_others_and_ends_with_the_time() -> None:
    looks = 0

    async def ask() -> InFlight:
        nonlocal looks
        looks += 1
        return InFlight(others=int(looks < 3))

    assert await wait_settled(Changes(), "k", ask, 60.0) is True
    assert looks == 3
