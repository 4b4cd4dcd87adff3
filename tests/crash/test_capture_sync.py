"""Seen by strace: no acknowledgement of a put leaves before the device has its bytes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CALLS = "trace=pwrite64,fdatasync,fsync,write"
WRITER = """
import asyncio, os, sys
from pathlib import Path
from toprope.capture.sqlite_store import SqliteStore
from toprope.testing.capture_suite import sample_entry

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    await store.put(sample_entry("k", "first"))
    for n in range(20):
        await store.begin_call("k", f"c{n}")
        os.write(1, b"ack begin\\n")
        await store.put(sample_entry("k", f"c{n}"))
        os.write(1, b"ack put\\n")
    await store.close()

asyncio.run(main())
"""


@pytest.mark.promise("CP-2")
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_every_acknowledgement_follows_a_device_sync_of_its_bytes(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    seen = subprocess.run(
        ["strace", "-f", "-o", trace, "-e", CALLS, sys.executable, "-c", WRITER, tmp_path / "c.sqlite"],
        capture_output=True,
        text=True,
    )
    if "ptrace" in seen.stderr and seen.returncode:
        pytest.skip("tracing is not permitted here")
    assert seen.stdout.count("ack") == 40, seen.stderr[-500:]
    dirty, written, acks = False, 0, 0
    for line in trace.read_text().splitlines():
        if re.search(r"pwrite64\(", line):
            dirty, written = True, written + 1
        elif re.search(r"(fdatasync|fsync)(\(| resumed).*= 0$", line):
            dirty = False
        elif re.search(r'write\(1, "ack', line):
            assert written > 0, "an acknowledgement without a write before it"
            assert not dirty, "an acknowledgement before its bytes were synced"
            written, acks = 0, acks + 1
    assert acks == 40
