"""`make bench`: run every benchmark in a process of its own, print a table, keep the figures as data.

`python -m bench [name ...]` runs the named ones only. Results go to `bench/results/<date>.json` with the machine's
facts; wall times of shared machines are noise, so read the ratios.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("install_size", "cold_start", "embedded", "model_call", "episode", "put", "build")


def machine() -> dict[str, object]:
    """What a reader needs to judge the figures."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_at_start": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def run(name: str) -> tuple[list[dict[str, object]], str | None]:
    """The figures that one benchmark printed, and why it failed, if it did."""
    process = subprocess.run(
        [sys.executable, "-m", f"bench.{name}"], cwd=HERE.parent, capture_output=True, text=True, timeout=900
    )
    figures = [json.loads(line) for line in process.stdout.splitlines() if line.startswith('{"id"')]
    if process.returncode:
        return figures, process.stderr.strip()[-2000:] or f"exit status {process.returncode}"
    return figures, None if figures else "printed no figure"


def show(figure: dict[str, object]) -> str:
    """One line of the table."""
    must, ratio = figure.get("must"), figure.get("ratio")
    parts = [f"{figure['id']:7} {figure['work']}: {figure['value']:.4g} {figure['unit']}"]
    if must is not None:
        parts.append(f"must {must:g}, aim {figure.get('aim')}")
    if ratio is not None:
        parts.append(f"{ratio:.3g} x baseline ({figure['baseline_is']})")
    return "; ".join(parts)


def main() -> int:
    """Run the named benchmarks, or all; the day's file keeps what others of them gave. Exit status 1 if one failed."""
    results = HERE / "results" / f"{datetime.now(UTC):%Y-%m-%d}.json"
    kept = json.loads(results.read_text()) if results.exists() else {}
    failed = False
    for name in sys.argv[1:] or [name for name in NAMES if (HERE / f"{name}.py").exists()]:
        print(f"-- {name}", flush=True)
        started = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
        figures, why = run(name)
        for figure in figures:
            print(show(figure), flush=True)
        if why:
            failed = True
            print(f"{name} failed: {why}", file=sys.stderr)
        kept[name] = {**started, "figures": figures, "failed": why}
        results.parent.mkdir(exist_ok=True)
        results.write_text(json.dumps(kept, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
