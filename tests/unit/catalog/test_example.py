"""The environment of the how-to page: the page shows the files, and the files run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/ledger"


@pytest.mark.parametrize("name", ["till.py", "till.yaml"])
def test_the_how_to_page_shows_the_file_as_it_is(name: str) -> None:
    page = (ROOT / "docs/how-to/write-an-environment.md").read_text()
    assert (EXAMPLE / name).read_text() in page


@pytest.mark.promise("EP-15")
def test_the_environment_has_at_most_forty_lines() -> None:
    lines = [line for line in (EXAMPLE / "till.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 40


def test_the_example_runs_and_its_rewards_are_those_of_its_readme(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "toprope", "run", str(EXAMPLE / "till.yaml"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    rewards = {(row["_ng_task_id"]["task_id"], row["reward"], row["total_rung_up"]) for row in rows}
    assert len(rows) == 4
    assert rewards == {("two-teas", 1.0, 6), ("tea-and-cake", 0.0, 6)}


@pytest.mark.promise("EP-15")
def test_the_environment_of_the_page_keeps_every_promise_as_it_stands() -> None:
    source = f"""
import sys
sys.path.insert(0, {str(EXAMPLE)!r})
from till import Shop
from toprope.testing.environment_suite import findings
found = findings(Shop(), tasks={str(EXAMPLE / "tasks.jsonl")!r})
assert found == [], found
"""
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)
