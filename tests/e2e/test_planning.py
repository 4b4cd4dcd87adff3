"""What is wrong with a task is found by `check` and by `run` alike, before anything is written or sent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """
servers:
  policy: {role: model, engine: {kind: scripted}}
  books: {role: resources, use: ledger}
  clerk: {role: agent, use: tool_loop, model: policy}
  first: {role: environment, resources: books, agent: clerk}
  second: {role: environment, resources: books, agent: clerk}
run: {environment: {a: first, "*": second}, tasks: tasks.jsonl, repeats: 3, out: out}
"""


def row(taskset: str, task_id: str, **task_input: object) -> str:
    given = task_input or {"responses_create_params": {"input": "hi"}}
    return json.dumps({"task_id": {"taskset": taskset, "task_id": task_id}, "task_input": given})


def toprope(place: Path, *lines: str, command: str) -> subprocess.CompletedProcess[str]:
    (place / "run.yaml").write_text(CONFIG)
    (place / "tasks.jsonl").write_text("".join(line + "\n" for line in lines))
    return subprocess.run(
        [sys.executable, "-m", "toprope", command, "run.yaml"], cwd=place, capture_output=True, text=True, timeout=60
    )


@pytest.mark.promise("UX-2")
@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize(
    ("second", "parts"),
    [
        (row("a", "1"), ["two tasks have the id '1'", "tasks.jsonl, line 1", "tasks.jsonl, line 2"]),
        (
            '{"task_id": {"taskset": "a", "task_id": "2"}, "task_input": {}}',
            ["tasks.jsonl, line 2", "task_input.responses_create_params"],
        ),
        (row("b", "2", responses_create_params={"inputs": "hi"}), ["tasks.jsonl, line 2", "`input`"]),
        (
            '{"responses_create_params": {"input": "a", "seed": 1, "seed": 2}}',
            ["tasks.jsonl, line 2", "'seed'", "twice"],
        ),
    ],
)
def test_a_task_that_cannot_run_is_exit_2_with_its_line(
    tmp_path: Path, command: str, second: str, parts: list[str]
) -> None:
    result = toprope(tmp_path, row("a", "1"), second, command=command)
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert [part for part in parts if part not in result.stderr] == [], result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml", "tasks.jsonl"]


def test_check_counts_rollouts_by_environment(tmp_path: Path) -> None:
    result = toprope(tmp_path, row("a", "1"), row("b", "1"), row("c", "1"), command="check")
    assert result.returncode == 0, result.stderr
    assert "a run would have 3 tasks and 9 rollouts: 3 in first, 6 in second\n" in result.stdout
