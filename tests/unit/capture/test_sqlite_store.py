"""The sqlite store beyond what every store must keep: other processes, groups, deltas, damage, limits."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from toprope.capture import sqlite_file
from toprope.capture.prompts import CallIds, RecentCalls
from toprope.capture.protocols import EntryConflict, Intent
from toprope.capture.sqlite_store import SqliteStore
from toprope.errors.tree import CaptureClosed, CaptureError, ConfigError
from toprope.storage.lock import FileLock
from toprope.testing.capture_suite import sample_entry
from toprope.tokens.entry import BadRecord, TokenEntry

READER = """
import asyncio, sys
from pathlib import Path
from toprope.capture.sqlite_store import SqliteStore

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    for line in sys.stdin:
        key = line.strip()
        seen = [e.model_call_id for e in await store.open_entries(key)]
        frozen = [e.model_call_id for e in (await store.freeze(key)).entries]
        print(*seen, "|", *frozen, flush=True)
    await store.close()

asyncio.run(main())
"""

WRITER = """
import asyncio, sys
from pathlib import Path
from toprope.capture.sqlite_store import SqliteStore
from toprope.testing.capture_suite import sample_entry

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    for n in range(int(sys.argv[3])):
        await store.begin_call("shared", f"{sys.argv[2]}{n}")
        await store.put(sample_entry("shared", f"{sys.argv[2]}{n}"))
    await store.close()

asyncio.run(main())
"""


def spawn(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def chain(key: str, length: int) -> list[TokenEntry]:
    entries: list[TokenEntry] = []
    prompt = np.arange(50, dtype=np.uint32)
    for n in range(length):
        told = {"parent_decision": "resolved", "parent_call_id": entries[-1].model_call_id} if entries else {}
        entries.append(sample_entry(key, f"c{n:04}", prompt=prompt, generated=20, **told))
        prompt = np.concatenate([prompt, entries[-1].generation_token_ids, np.full(10, n, dtype=np.uint32)])
    return entries


@pytest.mark.promise("CP-3")
async def test_what_put_acknowledged_another_process_sees_and_freezes(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    reader = spawn(READER, path)
    assert reader.stdin is not None
    assert reader.stdout is not None
    store = SqliteStore(path)
    try:
        for n in range(200):
            await store.put(sample_entry(f"k{n}", "c1"))
            reader.stdin.write(f"k{n}\n")
            reader.stdin.flush()
            assert (await asyncio.to_thread(reader.stdout.readline)).split() == ["c1", "|", "c1"], n
    finally:
        reader.communicate(timeout=30)
        await store.close()
    assert reader.returncode == 0


@pytest.mark.promise("CP-18")
async def test_several_processes_write_one_rollout_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    writers = [spawn(WRITER, path, name, 60) for name in "abc"]
    for writer in writers:
        await asyncio.to_thread(writer.communicate, timeout=60)
        assert writer.returncode == 0
    store = SqliteStore(path)
    snapshot = await store.freeze("shared")
    await store.close()
    assert sorted(e.model_call_id for e in snapshot.entries) == sorted(f"{w}{n}" for w in "abc" for n in range(60))
    assert not snapshot.incomplete


async def test_asking_for_unknown_keys_makes_no_file(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "sub" / "c.sqlite")
    assert await store.open_entries("k") == ()
    assert await store.receipts("k") is None
    assert await store.list_captures(retired=True) == ()
    assert await store.sweep_retired(0.0) == 0
    await store.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.promise("CP-2")
async def test_the_name_of_a_new_file_is_durable_before_its_first_acknowledgement(
    memory_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    monkeypatch.setattr(sqlite_file, "sync_directory", done.append)
    for _ in range(2):
        store = SqliteStore(memory_dir / "c.sqlite")
        await store.put(sample_entry("k", "c1"))
        done.append("acknowledged")
        await store.close()
    assert done == [memory_dir, "acknowledged", "acknowledged"]


async def test_a_drop_whose_receipts_were_read_before_the_freeze_is_a_guess_and_drops_nothing(memory_dir: Path) -> None:
    store = SqliteStore(memory_dir / "c.sqlite")
    await store.put(sample_entry("k", "c1"))
    snapshot = await store.freeze("k")
    pair = (snapshot.snapshot_id, snapshot.version)
    assert await store._write(lambda writer: writer.drop("k", *pair, None)) is False
    assert (await store.freeze("k")).entries == snapshot.entries
    await store.close()


async def test_the_first_write_makes_the_directory(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a" / "b" / "c.sqlite")
    await store.put(sample_entry("k", "c1"))
    assert len(await store.open_entries("k")) == 1
    await store.close()


async def test_an_archive_that_cannot_be_written_is_read_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.sqlite"
    store = SqliteStore(path)
    await store.put(sample_entry("k", "c1"))
    await store.close()
    for name in ("c.sqlite.lock", "c.sqlite.lock.turn"):
        os.remove(tmp_path / name)
    monkeypatch.setattr(sqlite_file, "can_write", lambda directory: False)
    store = SqliteStore(path)
    assert [e.model_call_id for e in await store.open_entries("k")] == ["c1"]
    await store.close()
    assert os.listdir(tmp_path) == ["c.sqlite"]
    (tmp_path / "c.sqlite-wal").write_bytes(b"")
    store = SqliteStore(path)
    with pytest.raises(CaptureError, match="was not closed; copy it first"):
        await store.open_entries("k")
    await store.close()


async def test_asking_for_an_unknown_key_makes_no_row(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "c.sqlite")
    await store.put(sample_entry("known", "c1"))
    assert await store.open_entries("k") == ()
    assert not await store.drop("k", snapshot_id="x", version=0)
    assert await store.supersede("k") is None
    assert [info.rollout_id for info in await store.list_captures(retired=True)] == ["known"]
    await store.close()


async def test_a_bad_put_does_not_take_its_group_along(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "c.sqlite")
    await store.put(sample_entry("k", "taken"))
    frozen = await store.freeze("frozen")
    results = await asyncio.gather(
        store.put(sample_entry("k", "good1")),
        store.put(sample_entry("k", "bad", extra={"x": float("nan")})),
        store.put(sample_entry("k", "taken", generated=9)),
        store.put(sample_entry("frozen", "late")),
        store.put(sample_entry("k", "good2")),
        store.put(sample_entry("new", "bad", extra={"x": float("nan")})),
        return_exceptions=True,
    )
    assert "new" not in [info.rollout_id for info in await store.list_captures()]  # undone to its last row
    assert [type(r) for r in results[1:4]] == [BadRecord, EntryConflict, CaptureClosed]
    snapshot = await store.freeze("k")
    assert [e.model_call_id for e in snapshot.entries] == ["taken", "good1", "good2"]
    assert snapshot.reasons == ("conflict:taken",)
    assert (await store.freeze("frozen")).version == frozen.version
    await store.close()


async def test_what_cannot_be_written_with_its_group_takes_nobody_along(tmp_path: Path) -> None:
    """A text that SQLite cannot hold is noticed when the group is written; the others are then written alone."""
    store = SqliteStore(tmp_path / "capture.db")
    await store.put(sample_entry("a", "c0"))
    with FileLock(tmp_path / "capture.db.lock").held():
        first = asyncio.ensure_future(store.begin_call("first", "c1"))  # the thread waits with it, the rest gathers
        await asyncio.sleep(0)
        answers = asyncio.gather(
            store.begin_call("b", "c1"),
            store.begin_call("c", "c1", intent=Intent(request_digest="\ud800")),
            store.put(sample_entry("a", "c1")),
            store.mark_incomplete("d", reason="write_failed:told"),
            return_exceptions=True,
        )
        await asyncio.sleep(0)
    await first
    begun, refused, put, marked = await answers
    assert (begun.calls, begun.entries) == (1, 0)
    assert isinstance(refused, UnicodeEncodeError)
    assert put.entries == 2
    assert marked is None
    await store.close()
    again = SqliteStore(tmp_path / "capture.db")
    assert {info.rollout_id for info in await again.list_captures()} == {"a", "b", "d", "first"}
    assert [entry.model_call_id for entry in (await again.freeze("a")).entries] == ["c0", "c1"]
    await again.close()


async def test_puts_of_one_call_that_share_a_commit_are_compared(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "capture.db")
    entry = sample_entry("k", "c1")
    await store.begin_call("k", "c1")
    with FileLock(tmp_path / "capture.db.lock").held():
        first = asyncio.ensure_future(store.begin_call("first", "c1"))
        await asyncio.sleep(0)
        answers = asyncio.gather(
            store.put(entry), store.put(entry), store.put(replace(entry, model="other")), return_exceptions=True
        )
        await asyncio.sleep(0)
    await first
    new, same, other = await answers
    assert (new.entries, same.entries) == (1, 1)
    assert isinstance(other, EntryConflict)
    snapshot = await store.freeze("k")
    assert [each.model for each in snapshot.entries] == [entry.model]
    assert snapshot.reasons == ("conflict:c1",)
    await store.close()


async def test_a_lock_that_another_holds_keeps_a_put_waiting_but_not_the_event_loop(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    store = SqliteStore(path)
    await store.put(sample_entry("k", "c1"))
    other = FileLock(path.with_name("c.sqlite.lock"))
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with other.held():
            held.set()
            release.wait(30)

    holder = asyncio.create_task(asyncio.to_thread(hold))
    await asyncio.to_thread(held.wait)
    waiting = [asyncio.create_task(store.put(sample_entry("k", f"w{n}"))) for n in range(5)]
    for _ in range(200):
        await asyncio.sleep(0)  # the loop turns although nobody can commit
    assert not any(task.done() for task in waiting)
    release.set()
    await asyncio.gather(holder, *waiting)
    assert len(await store.open_entries("k")) == 6
    await store.close()
    other.close()


async def test_a_cancelled_put_stands_and_disturbs_nobody(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "c.sqlite")
    gone = asyncio.create_task(store.put(sample_entry("k", "gone")))
    await asyncio.sleep(0)
    gone.cancel()
    await store.put(sample_entry("k", "after"))
    assert [e.model_call_id for e in await store.open_entries("k")] == ["gone", "after"]
    await store.close()


@pytest.mark.promise("CP-5")
async def test_a_thousand_puts_racing_freeze(tmp_path: Path) -> None:
    one, other = SqliteStore(tmp_path / "c.sqlite"), SqliteStore(tmp_path / "c.sqlite")

    async def race(n: int) -> None:
        key = f"k{n}"
        await one.put(sample_entry(key, "c1"))

        async def late() -> bool:
            try:
                await other.put(sample_entry(key, "c2"))
            except CaptureClosed:
                await other.mark_incomplete(key, "c2", reason="write_failed")
                return False
            return True

        snapshot, accepted = await asyncio.gather(one.freeze(key), late())
        inside = [e.model_call_id for e in snapshot.entries] == ["c1", "c2"]
        assert inside == accepted
        dropped = await one.drop(key, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        assert dropped == (inside or snapshot.incomplete)

    for start in range(0, 1000, 100):
        await asyncio.gather(*(race(n) for n in range(start, start + 100)))
    await one.close()
    await other.close()


@pytest.mark.promise("CP-7")
async def test_after_drop_no_payload_row_is_left(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    store = SqliteStore(path)
    for key in ("gone", "stays"):
        for entry in chain(key, 5):
            await store.begin_call(key, entry.model_call_id)
            await store.put(entry)
    snapshot = await store.freeze("gone")
    assert await store.drop("gone", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    receipts = await store.receipts("gone")
    await store.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM entry").fetchone() == (5,)
        assert connection.execute("SELECT count(*) FROM call").fetchone() == (5,)
    assert receipts is not None
    assert [(r.model_call_id, r.prompt_len, r.gen_len) for r in receipts] == [
        (e.model_call_id, len(e.prompt_token_ids), 20) for e in snapshot.entries
    ]


async def test_each_token_is_stored_once_however_long_the_conversation(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    store = SqliteStore(path)
    entries = chain("k", 1000)
    for start in range(0, 1000, 100):
        await asyncio.gather(*(store.put(entry) for entry in entries[start : start + 100]))
    snapshot = await store.freeze("k")
    assert snapshot.entries == tuple(entries)
    buffers = {id(e.prompt_token_ids.base) for e in snapshot.entries}
    assert len(buffers) < 20  # prompts are views of one growing buffer
    await store.close()
    with sqlite3.connect(path) as connection:
        sizes = [size for (size,) in connection.execute("SELECT length(data) FROM entry ORDER BY id")]
    assert max(sizes[1:]) - min(sizes[1:]) < 40  # digits of numbers, nothing else


async def test_a_deep_chain_written_by_another_client_is_continued_as_deltas(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    entries = chain("k", 60)
    for entry in entries:  # every call by a new client, which remembers nothing
        store = SqliteStore(path)
        await store.put(entry)
        await store.close()
    store = SqliteStore(path, recent_bytes=0)
    assert await store.open_entries("k", 57) == tuple(entries[57:])
    await store.close()
    with sqlite3.connect(path) as connection:
        sizes = [size for (size,) in connection.execute("SELECT length(data) FROM entry ORDER BY id")]
    assert max(sizes[1:]) - min(sizes[1:]) < 40


async def test_a_claimed_parent_that_the_prompt_does_not_begin_with_costs_bytes_not_truth(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "c.sqlite")
    first = sample_entry("k", "c1", prompt=[1, 2, 3])
    told = {"parent_decision": "resolved", "parent_call_id": "c1"}
    wrong = sample_entry("k", "c2", prompt=[1, 2, 4, 100, 101, 7], **told)
    short = sample_entry("k", "c3", prompt=[1, 2], **told)
    missing = sample_entry("k", "c4", prompt=[1, 2, 3, 100, 101], parent_decision="resolved", parent_call_id="none")
    delta = sample_entry("k", "c5", prompt=[9], prompt_is_delta=True, **told)
    orphan = sample_entry("k", "c6", prompt=[9], prompt_is_delta=True, parent_decision="resolved", parent_call_id="x")
    entries = (first, wrong, short, missing, delta, orphan)
    for entry in entries:
        await store.put(entry)
    assert (await store.freeze("k")).entries == entries
    whole = replace(delta, prompt_is_delta=False, prompt_token_ids=np.array([1, 2, 3, 100, 101, 9]))
    assert await store.open_entries("k") == (first, wrong, short, missing, whole, orphan)
    await store.close()


async def test_a_damaged_record_masks_its_rollout_by_name_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    store = SqliteStore(path)
    for key in ("hurt", "well"):
        for entry in chain(key, 4):
            await store.put(entry)
    await store.close()
    with sqlite3.connect(path) as connection:
        row, data = connection.execute(
            "SELECT e.id, e.data FROM entry e JOIN call c ON c.id = e.call WHERE c.call_id = 'c0001' LIMIT 1"
        ).fetchone()
        connection.execute("UPDATE entry SET data = ? WHERE id = ?", (data[:30] + b"\x55" + data[31:], row))
    store = SqliteStore(path)
    hurt, well = await store.freeze("hurt"), await store.freeze("well")
    assert hurt.incomplete
    assert [e.model_call_id for e in hurt.entries] == ["c0000"]  # the others need what is damaged
    assert [r.split(":")[:2] for r in hurt.reasons] == [["write_failed", f"c000{n}"] for n in (1, 2, 3)]
    assert len(well.entries) == 4
    assert not well.incomplete
    await store.close()


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("DELETE FROM entry WHERE ordinal = 1", "1 of 3 stored records are missing"),
        ("DELETE FROM entry WHERE ordinal = 2", "stored records are missing"),
        ("DELETE FROM entry WHERE ordinal = 3", "3 of 3 stored records are missing"),
        ("UPDATE capture SET last_entry = NULL", "3 of 3 stored records are missing"),
        ("UPDATE capture SET entries = 2", "the count is damaged"),
        ("UPDATE capture SET entries = 4", "1 of 4 stored records are missing"),
        ("UPDATE capture SET entries = 2, last_entry = (SELECT prev FROM entry WHERE ordinal = 3)", "were counted"),
        ("UPDATE capture SET calls = 2", "were counted"),
        ("DELETE FROM call WHERE call_id = 'c2'", "missing"),
        ("UPDATE call SET entry = NULL, abort = 'x' WHERE call_id = 'c2'", "were counted"),
        ("UPDATE entry SET prev = 1 WHERE ordinal = 3", "missing"),
        ("UPDATE entry SET data = (SELECT e.data FROM entry e WHERE e.ordinal = 1) WHERE ordinal = 3", "c3"),
    ],
)
async def test_whatever_of_a_line_is_gone_masks_by_name(memory_dir: Path, damage: str, said: str) -> None:
    path = memory_dir / "c.sqlite"
    store = SqliteStore(path)
    for n in (1, 2, 3):
        await store.begin_call("k", f"c{n}")
        await store.put(sample_entry("k", f"c{n}", prompt=(n, 2)))
    await store.close()
    connection = sqlite3.connect(path)
    assert connection.execute(damage).rowcount == 1
    connection.commit()
    connection.close()
    store = SqliteStore(path)
    snapshot = await store.freeze("k")
    await store.close()
    assert snapshot.incomplete
    assert any(said in reason for reason in snapshot.reasons), snapshot.reasons


async def test_files_that_are_no_store_are_refused_and_left_alone(tmp_path: Path) -> None:
    foreign, text = tmp_path / "foreign.sqlite", tmp_path / "text.sqlite"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    text.write_text("no database " * 100)
    for path in (foreign, text):
        before = path.read_bytes()
        store = SqliteStore(path)
        with pytest.raises((CaptureError, sqlite3.DatabaseError), match=r"not a capture store|not a database"):
            await store.put(sample_entry("k", "c1"))
        with pytest.raises(CaptureError, match="not a capture store"):
            await store.open_entries("k")
        await store.close()
        assert path.read_bytes() == before


@pytest.mark.promise("UX-2")
def test_a_directory_where_the_file_should_be_is_refused_in_one_paragraph(tmp_path: Path) -> None:
    (tmp_path / "capture.sqlite").mkdir()
    with pytest.raises(ConfigError, match=r"capture\.sqlite: a directory stands where"):
        SqliteStore(tmp_path / "capture.sqlite")


async def test_a_directory_that_cannot_be_made_is_said_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    store = SqliteStore(tmp_path / "taken" / "c.sqlite")
    with pytest.raises(CaptureError, match=r"taken/c\.sqlite: the disk refused"):
        await store.put(sample_entry("k", "c1"))
    await store.close()


async def test_a_network_file_system_is_refused_with_the_alternative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "kind_of", lambda path: "nfs4")
    with pytest.raises(ConfigError, match=r"nfs4.*jsonl"):
        SqliteStore(tmp_path / "c.sqlite")


async def test_intents_keep_what_settling_and_retries_need(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    store = SqliteStore(path)
    await store.begin_call("k", "c1", intent=Intent(True, "digest", 2, "epoch-1"))
    await store.begin_call("k", "c2", intent=Intent(False, "digest", 0, "epoch-2"))
    await store.abort_call("k", "c2", reason="client_gone")
    info = (await store.list_captures())[0]
    assert (info.writer_epochs, info.open_intents, info.aborts) == (("epoch-1",), 1, (("client_gone", 1),))
    await store.close()
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT call_id, stream, digest, retry, epoch FROM call ORDER BY id").fetchall()
    assert rows == [("c1", 1, "digest", 2, "epoch-1"), ("c2", 0, "digest", 0, "epoch-2")]


async def test_a_replayed_call_was_delivered_although_its_first_client_left(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "c.sqlite")
    await store.put(sample_entry("k", "c1", client_gone=True))
    await store.put(sample_entry("k", "c2", client_gone=True))
    await store.begin_call("k", "retry")
    await store.abort_call("k", "retry", reason="replay_of:c1")
    await store.begin_call("k", "cut")
    await store.abort_call("k", "cut", reason="truncated:model_context_length")
    snapshot = await store.freeze("k")
    assert [e.client_gone for e in snapshot.entries] == [False, True]
    assert not snapshot.incomplete
    assert snapshot.reasons == ("truncated:model_context_length",)
    await store.close()


def test_the_memory_of_recent_calls_is_bounded_and_parents_go_first() -> None:
    recent: RecentCalls[str] = RecentCalls(max_bytes=4 * 1000)
    ids = np.arange(100, dtype=np.uint32)
    for n in range(50):
        recent.keep(f"c{n}", CallIds(ids, ids[:0]), after=f"c{n - 1}" if n % 2 else None)
        assert recent.bytes <= 4000
    # Ten have room: a call whose continuation is here goes before all others.
    assert [n for n in range(50) if recent.get(f"c{n}") is not None] == list(range(31, 50, 2))
