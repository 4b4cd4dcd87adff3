"""Field case A22: memory and descriptors grow with the run. CI's share; 20,000 rollouts are `bench`'s (PF-10)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import asyncio, json, os, resource, sys
from toprope.collector.events import Finished
from toprope.collector.settings import RunSettings
from toprope.testing.episodes import collect_scripted, text_response

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
directory, rollouts, size, concurrency = sys.argv[1], *map(int, sys.argv[2:])
seen, done = [], 0

def watch(event):
    global done
    if isinstance(event, Finished):
        done += 1
        if done in (rollouts // 4, rollouts - 1):
            with open("/proc/self/statm") as statm:
                pages = int(statm.read().split()[1])
            seen.append((pages * resource.getpagesize(), len(os.listdir("/proc/self/fd"))))

async def answer(run):
    return run.result(1.0, response=text_response("x" * size))

async def main():
    tasks = [{"responses_create_params": {"input": str(index)}} for index in range(rollouts // 4)]
    settings = RunSettings(concurrency=concurrency, repeats=4)
    summary = await collect_scripted(directory, answer, tasks, settings=settings, observers=[watch])
    assert summary.coverage.measured == rollouts

asyncio.run(main())
print(json.dumps(seen))
"""


@pytest.mark.promise("CO-9")
@pytest.mark.parametrize(("rollouts", "size", "concurrency"), [(2000, 10, 64), (200, 1 << 20, 8)])
def test_a22_memory_and_descriptors_do_not_grow_with_finished_rollouts(
    tmp_path: Path, rollouts: int, size: int, concurrency: int
) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(rollouts), str(size), str(concurrency)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    (early, files), (late, files_late) = json.loads(ran.stdout)
    # What is in flight may be in memory, twice over (reply and row); what is finished may not.
    allowed = 16 * 2**20 + 4 * concurrency * size
    assert late - early < allowed
    assert max(files, files_late) < 128
