"""SQLite's own writes and syncs, which Python cannot see: killed by strace at the entry of each.

A commit is a dozen writes to the log and one sync; a close is a checkpoint. The call at which a process dies is not
carried out, so that every prefix of its writes is met.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from tests.crash.scenes import VERBS, seen
from tests.crash.syscalls import needs_strace, parse, traced

pytestmark = [pytest.mark.promise("CP-1"), pytest.mark.promise("CP-2"), needs_strace]

STEPS = ("pwrite64", "fdatasync", "fsync", "ftruncate", "unlink")


@pytest.mark.parametrize(
    ("verb", "stride"),
    [pytest.param("put of a begun call", 6, id="put-ci")]
    + [pytest.param(verb, 1, id=f"{verb}-long", marks=pytest.mark.long) for verb in VERBS],
)
async def test_a_process_killed_inside_a_commit_or_a_checkpoint_leaves_before_or_after(
    left_behind: dict[str, Path], memory_dir: Path, verb: str, stride: int
) -> None:
    def fresh() -> Path:
        copy = memory_dir / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        return shutil.copytree(left_behind["sqlite"], copy)

    trace = memory_dir / "trace"
    program = ["-m", "tests.crash.scenes", "act", "sqlite", str(memory_dir / "copy"), verb]
    before = await seen("sqlite", fresh())
    fresh()
    assert traced(trace, program).returncode == 0
    after = await seen("sqlite", memory_dir / "copy")
    calls = [c for c in parse(trace.read_text()) if c.name in STEPS and c.path.startswith(str(memory_dir)) and c.done]
    numbered: Counter[tuple[int, str]] = Counter()  # strace counts in each thread
    points: dict[tuple[str, int], None] = {}
    for n, call in enumerate(calls):
        numbered[call.pid, call.name] += 1
        if call.name != "pwrite64" or n % stride == 0:
            points[call.name, numbered[call.pid, call.name]] = None
    assert {"pwrite64", "fdatasync", "unlink"} <= {name for name, _ in points}  # a commit and a checkpoint
    outcomes: Counter[str] = Counter()
    for name, number in points:
        fresh()
        killed = traced(trace, program, "-e", f"inject={name}:signal=SIGKILL:when={number}")
        assert killed.returncode == -9, (name, number, killed.stderr)
        found = await seen("sqlite", memory_dir / "copy")
        assert found in (before, after), (name, number)
        if "acknowledged" in killed.stdout:
            assert found == after, (name, number)
        outcomes["after" if found == after else "before"] += 1
    if before != after:
        assert outcomes["before"] > 0
        assert outcomes["after"] > 0
