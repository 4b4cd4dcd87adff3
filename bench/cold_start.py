"""PF-7: from process start until the first rollout can be sent, with the scripted engine; processes; memory.

What is timed is `toprope run` itself, capture on, until it says that it dispatches the first rollout; by then the
servers are up, the engine was asked and the run directory is durable. The script then holds the rollout back, so that
processes and memory are counted while it waits. Baseline of the same run: a bare interpreter that imports what any
such program needs and does nothing.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.figures import Figure

RUNS = 5
CONFIG = """
servers:
  policy: {role: model, engine: {kind: scripted, script: [{text: late, delay_s: 600}]}}
  books: {role: resources, use: ledger}
  clerk: {role: agent, use: tool_loop, model: policy, token_id_capture: true}
  episode: {role: environment, resources: books, agent: clerk, tools: [direct_http]}
run: {environment: episode, tasks: {generate: books, size: 4}}
token_id_capture: {enabled: true}
"""
BARE = [sys.executable, "-c", "import aiohttp, starlette, uvicorn, numpy"]


def bare() -> tuple[float, float]:
    """Wall and CPU seconds of the baseline."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(BARE, check=True)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def cold_start(folder: Path, number: int) -> tuple[float, float, int, float]:
    """Wall seconds, CPU seconds, processes, MB of resident memory of all of them, at the first dispatch."""
    command = [sys.executable, "-m", "toprope", "run", str(folder / "cold.yaml"), "--json"]
    start = time.perf_counter()
    process = subprocess.Popen([*command, "--out", str(folder / f"run{number}")], stdout=subprocess.PIPE, cwd=folder)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "dispatched":
                break
        else:
            raise SystemExit("toprope run ended before it dispatched anything")
        wall = time.perf_counter() - start
        family = [process.pid, *children(process.pid)]
        return wall, cpu_seconds(process.pid), len(family), sum(map(resident_mb, family))
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def children(pid: int) -> list[int]:
    """Every process below `pid`."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of `pid` so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    """Resident memory of `pid` in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cold.yaml").write_text(CONFIG)
        cold_start(folder, 0)  # compiles bytecode and fills the page cache; cold is the process, not the disk
        bare()
        starts = [cold_start(folder, number) for number in range(1, RUNS + 1)]
        bases = [bare() for _ in range(RUNS)]
    baseline = "a bare interpreter importing aiohttp, starlette, uvicorn, numpy"
    Figure("PF-7", "wall time until the first rollout is sent (best of 5)", min(s[0] for s in starts), "s",
           min(b[0] for b in bases), baseline, 2.0, 1.0).emit()  # fmt: skip
    Figure("PF-7", "CPU time of the same (best of 5)", min(s[1] for s in starts), "s",
           min(b[1] for b in bases), baseline, 2.0, 1.0).emit()  # fmt: skip
    Figure("PF-7", "processes", max(s[2] for s in starts), "processes", must=1).emit()
    Figure("PF-7", "resident memory of all", max(s[3] for s in starts), "MB", must=150).emit()


if __name__ == "__main__":
    main()
