"""Seen by strace: no acknowledgement leaves before the device has its bytes, and the names of its files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.crash.scenes import STORES, VERBS
from tests.crash.syscalls import needs_strace, parse, traced, unsynced

pytestmark = [pytest.mark.promise("CP-2"), needs_strace]

CARELESS = """
import os, runpy, sqlite3, sys
class Careless(sqlite3.Connection):
    def execute(self, sql, *args):
        return super().execute(sql.replace("synchronous=FULL", "synchronous=OFF"), *args)
connect = sqlite3.connect
sqlite3.connect = lambda *args, **told: connect(*args, factory=Careless, **told)
os.fsync = os.fdatasync = lambda handle: None
sys.argv = ["scenes", *sys.argv[1:]]
runpy.run_module("tests.crash.scenes", run_name="__main__")
"""

ROWS = """
import asyncio, os, sys
from pathlib import Path
from toprope.storage.rows import DurableRows

async def main():
    rows = DurableRows(Path(sys.argv[1]) / "results.jsonl")
    for n in range(20):
        await rows.append(b'{"n": %d}' % n)
        os.write(1, b"ack row\\n")
    await rows.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("store", sorted(STORES))
def test_every_acknowledgement_follows_a_device_sync_of_its_bytes(tmp_path: Path, store: str) -> None:
    trace, directory = tmp_path / "trace", tmp_path / "run"
    seen = traced(trace, ["-m", "tests.crash.scenes", "every_verb", store, str(directory)])
    assert seen.returncode == 0, seen.stderr[-2000:]
    calls = parse(trace.read_text())
    acks, breaches = unsynced(calls, directory)
    assert breaches == []
    assert acks == seen.stdout.count("ack ") == 9 * len(VERBS)
    assert sum(call.name in ("fdatasync", "fsync") and call.done for call in calls) >= acks - 2


def test_every_row_of_a_ledger_follows_a_device_sync_of_its_bytes(tmp_path: Path) -> None:
    trace, directory = tmp_path / "trace", tmp_path / "run"
    seen = traced(trace, ["-c", ROWS, str(directory)])
    assert seen.returncode == 0, seen.stderr[-2000:]
    assert unsynced(parse(trace.read_text()), directory) == (20, [])


@pytest.mark.parametrize("store", sorted(STORES))
def test_a_store_that_does_not_sync_is_seen(tmp_path: Path, store: str) -> None:
    """The same program, with every sync taken out of it: the look from outside must not be blind."""
    trace, directory = tmp_path / "trace", tmp_path / "run"
    seen = traced(trace, ["-c", CARELESS, "every_verb", store, str(directory)])
    assert seen.returncode == 0, seen.stderr[-2000:]
    acks, breaches = unsynced(parse(trace.read_text()), directory)
    assert acks == 9 * len(VERBS)
    assert {breach.partition(":")[0] for breach in breaches} >= {f"ack {n}" for n in (1, 2, 3)}


def test_a_sync_covers_what_was_written_before_it_began_and_no_more() -> None:
    start = (
        '1 openat(AT_FDCWD, "/d/x", O_RDWR|O_CREAT, 0644) = 3</d/x>\n1 fsync(4</d>) = 0\n1 pwrite64(3</d/x>, ) = 1\n'
    )
    ack = '2 write(1</dev/pts/0>, "ack put", 7) = 7\n'
    good = '1 fdatasync(3</d/x> <unfinished ...>\n2 write(1, "other", 5) = 5\n1 <... fdatasync resumed>) = 0\n'
    late = "1 fdatasync(3</d/x> <unfinished ...>\n2 pwrite64(3</d/x>, ) = 1\n1 <... fdatasync resumed>) = 0\n"
    early = f"1 fdatasync(3</d/x> <unfinished ...>\n{ack}1 <... fdatasync resumed>) = 0\n"
    failed = "1 fdatasync(3</d/x>) = -1 EIO (Input/output error)\n"
    other = "1 fdatasync(5</d/y>) = 0\n"
    assert unsynced(parse(start + good + ack), Path("/d")) == (1, [])
    for bad in (start + late + ack, start + early, start + failed + ack, start + other + ack, start + ack):
        assert unsynced(parse(bad), Path("/d")) == (1, ["ack 1: bytes of /d/x"])
    nameless = start.replace("1 fsync(4</d>) = 0\n", "")
    assert unsynced(parse(nameless + good + ack), Path("/d")) == (1, ["ack 1: name of /d/x"])
