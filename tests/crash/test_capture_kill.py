"""Writers die, logs are torn: what was acknowledged is there at once, what was not is absent or whole."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from toprope.capture.sqlite_store import SqliteStore
from toprope.testing.capture_suite import sample_entry

WRITER = """
import asyncio, sys
from pathlib import Path
from toprope.capture.sqlite_store import SqliteStore
from toprope.testing.capture_suite import sample_entry

async def write(store, key):
    parent, prompt = None, [1, 2, 3]
    for n in range(10_000):
        told = {"parent_decision": "resolved", "parent_call_id": parent} if parent else {}
        entry = sample_entry(key, f"c{n:05}", prompt=prompt, **told)
        await store.begin_call(key, entry.model_call_id)
        await store.put(entry)
        print(key, entry.model_call_id, flush=True)
        prompt, parent = [*prompt, *entry.generation_token_ids.tolist(), n], entry.model_call_id

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    await asyncio.gather(*(write(store, f"{sys.argv[2]}{n}") for n in range(4)))

asyncio.run(main())
"""


def start_writer(path: Path, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(path), name], stdout=subprocess.PIPE, text=True)


def acknowledged_until_killed(writer: subprocess.Popen[str], lines: int) -> list[tuple[str, str]]:
    """Read so many acknowledgements, kill, read what else had been said."""
    assert writer.stdout is not None
    said = [next(writer.stdout) for _ in range(lines)]
    writer.send_signal(signal.SIGKILL)
    said += [line for line in writer.stdout if line.endswith("\n")]
    assert writer.wait() == -signal.SIGKILL
    writer.stdout.close()
    return [(key, call) for key, call in (line.split() for line in said)]


async def check(store: SqliteStore, said: list[tuple[str, str]]) -> None:
    for key in sorted({key for key, _ in said}):
        acknowledged = {call for each, call in said if each == key}
        snapshot = await store.freeze(key)
        found = [entry.model_call_id for entry in snapshot.entries]
        assert acknowledged <= set(found)
        assert found == [f"c{n:05}" for n in range(len(found))]  # whole, in order, nothing in between missing
        prompt = [1, 2, 3]
        for n, entry in enumerate(snapshot.entries):
            assert entry.prompt_token_ids.tolist() == prompt
            prompt = [*prompt, *entry.generation_token_ids.tolist(), n]
        lost = [reason for reason in snapshot.reasons if not reason.startswith("dangling_intent:")]
        assert lost == []
        assert snapshot.incomplete == bool(snapshot.reasons)


@pytest.mark.promise("CP-1")
@pytest.mark.parametrize("lines", [1, 7, 40, 150])
async def test_a_killed_writer_loses_nothing_that_it_acknowledged(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "c.sqlite"
    said = acknowledged_until_killed(start_writer(path, "k"), lines)
    store = SqliteStore(path)
    try:
        await check(store, said)
    finally:
        await store.close()


@pytest.mark.promise("CP-1")
async def test_a_writer_killed_beside_others_hurts_nobody(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    victim, survivor = start_writer(path, "victim"), start_writer(path, "survivor")
    mine = SqliteStore(path)
    await mine.put(sample_entry("mine", "before"))
    said = acknowledged_until_killed(victim, 60)
    await mine.put(sample_entry("mine", "after"))
    assert [e.model_call_id for e in await mine.open_entries("mine")] == ["before", "after"]
    said += acknowledged_until_killed(survivor, 60)
    await check(mine, said)
    await mine.close()


@pytest.mark.promise("CP-2")
@pytest.mark.parametrize(
    ("damage", "stride"),
    [
        ("cut", 29),
        ("flip", 29),
        pytest.param("cut", 1, marks=pytest.mark.long),
        pytest.param("flip", 1, marks=pytest.mark.long),
    ],
)
async def test_a_log_torn_at_any_byte_of_its_last_record_keeps_the_records_before(
    memory_dir: Path, damage: str, stride: int
) -> None:
    tmp_path = memory_dir
    live = tmp_path / "live"
    live.mkdir()
    store = SqliteStore(live / "c.sqlite")
    await store.put(sample_entry("k", "c1"))
    whole = (live / "c.sqlite-wal").stat().st_size
    await store.put(sample_entry("k", "c2"))
    torn_to = (live / "c.sqlite-wal").stat().st_size
    assert torn_to > whole
    files = {name: (live / name).read_bytes() for name in ("c.sqlite", "c.sqlite-wal")}
    await store.close()
    # Every byte of the frame headers and of the end; of the pages every byte only in the full size.
    offsets = [at for at in range(whole, torn_to) if (at - 32) % 4120 < 24 or at % stride == 0 or at >= torn_to - 16]
    for at in offsets:
        copy = tmp_path / "copy"
        copy.mkdir()
        (copy / "c.sqlite").write_bytes(files["c.sqlite"])
        log = bytearray(files["c.sqlite-wal"])
        if damage == "cut":
            del log[at:]
        else:
            log[at] ^= 0x5A
        (copy / "c.sqlite-wal").write_bytes(log)
        after = SqliteStore(copy / "c.sqlite")
        found = [(e.model_call_id, e) for e in await after.open_entries("k")]  # a reader, before any writer came by
        await after.close()
        assert found[0] == ("c1", sample_entry("k", "c1"))
        assert found[1:] in ([], [("c2", sample_entry("k", "c2"))]), at
        if damage == "cut":
            assert found[1:] == []
        shutil.rmtree(copy)
