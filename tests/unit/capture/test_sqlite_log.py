"""A log that was damaged where it had been synced is named before SQLite forgets what followed."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from toprope.capture.protocols import Intent
from toprope.capture.sqlite_log import damage_in
from toprope.capture.sqlite_store import SqliteStore
from toprope.errors.tree import CaptureError
from toprope.testing.capture_suite import sample_entry

FRAME = 24 + 4096


async def left_open(directory: Path, calls: int = 4) -> bytes:
    """A copy of a store whose log was not checkpointed, in `directory`; the bytes of the log."""
    live = SqliteStore(directory / "live.sqlite")
    for n in range(calls):
        await live.begin_call("k", f"c{n}", intent=Intent(writer_epoch="gone"))
        await live.put(sample_entry("k", f"c{n}", prompt=(1, n)))
    for ending in ("", "-wal"):
        shutil.copyfile(directory / f"live.sqlite{ending}", directory / f"c.sqlite{ending}")
    await live.close()
    return (directory / "c.sqlite-wal").read_bytes()


async def snapshot(path: Path) -> tuple[list[str], bool]:
    store = SqliteStore(path)
    try:
        found = await store.freeze("k")
    finally:
        await store.close()
    return [entry.model_call_id for entry in found.entries], found.incomplete


async def test_a_sound_log_is_read(memory_dir: Path) -> None:
    await left_open(memory_dir)
    assert damage_in(memory_dir / "c.sqlite-wal") is None
    assert await snapshot(memory_dir / "c.sqlite") == (["c0", "c1", "c2", "c3"], False)


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("at", [0, 9, 20, 32, 40, 50, 32 + 3 * FRAME + 700, 32 + 6 * FRAME])
async def test_damage_before_the_last_transaction_is_named_and_nothing_is_delivered(memory_dir: Path, at: int) -> None:
    data = bytearray(await left_open(memory_dir))
    data[at] ^= 4
    (memory_dir / "c.sqlite-wal").write_bytes(data)
    store = SqliteStore(memory_dir / "c.sqlite")
    for ask in (store.freeze("k"), store.list_captures(), store.put(sample_entry("k", "c9"))):
        with pytest.raises(CaptureError, match=r"c\.sqlite-wal: .*acknowledged captures are lost"):
            await ask
    await store.close()
    assert (memory_dir / "c.sqlite-wal").read_bytes() == data, "the evidence of it stays"


async def test_a_torn_last_transaction_is_no_damage(memory_dir: Path) -> None:
    data = await left_open(memory_dir)
    log = memory_dir / "c.sqlite-wal"
    for cut in (*range(len(data) - FRAME, len(data), 97), 10, 31, 32, 33):
        log.write_bytes(data[:cut])
        assert damage_in(log) is None, cut
    flipped = bytearray(data)
    flipped[-5] ^= 1
    log.write_bytes(flipped)
    assert await snapshot(memory_dir / "c.sqlite") != (["c0", "c1", "c2", "c3"], False)


def test_frames_of_an_earlier_round_of_the_log_are_no_damage(memory_dir: Path) -> None:
    path = memory_dir / "x.sqlite"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE t (x)")
    for _ in range(20):
        connection.execute("INSERT INTO t VALUES (zeroblob(9000))")
    connection.execute("PRAGMA wal_checkpoint(RESTART)")
    connection.execute("INSERT INTO t VALUES (1)")
    log = path.with_name("x.sqlite-wal")
    assert log.stat().st_size > 20 * FRAME
    assert damage_in(log) is None
    connection.close()
    assert damage_in(log) is None  # there is none any more
