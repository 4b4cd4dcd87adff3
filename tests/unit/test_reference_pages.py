"""Reference pages that are written by hand name everything that the program writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from toprope.telemetry.calls import ModelCallRecord

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"

SERVERS = """
servers:
  policy: {role: model, engine: {kind: scripted, script: [{text: one}]}}
  books: {role: resources, use: ledger}
  clerk: {role: agent, use: tool_loop, model: policy, token_id_capture: true}
  episode: {role: environment, resources: books, agent: clerk}
run: {environment: episode, tasks: {generate: books, size: 2, seed: 1}}
token_id_capture: {enabled: true, format: trace}
"""


def named(page: str) -> set[str]:
    """Everything that the page sets in code type, lists and sentences taken apart."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    found = set(re.findall(r"`([^`\n]+)`", text))
    return found | {word for each in found for word in re.findall(r"\w+", each)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run")
    (place / "run.yaml").write_text(SERVERS)
    command = [sys.executable, "-m", "toprope", "run", "run.yaml", "--out", "out"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return place / "out"


def rows(run: Path) -> Iterator[Mapping[str, Any]]:
    for line in (run / "results.jsonl").read_bytes().splitlines():
        yield json.loads(line)


@pytest.mark.promise("UX-4")
def test_the_page_of_the_run_directory_names_every_file_that_a_run_leaves(run: Path) -> None:
    page = (REFERENCE / "run-directory.md").read_text(encoding="utf-8")
    stores = ("capture.sqlite-wal", "capture.sqlite-shm", "capture.sqlite.lock", "capture.sqlite.writers")
    files = [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()]
    assert [name for name in files if name not in page and not name.startswith(stores)] == []
    assert {"logs/model_calls.jsonl", "results.jsonl"} <= set(files)
    assert "logs/toprope.log" in page


@pytest.mark.promise("UX-4")
def test_the_page_of_the_run_directory_names_every_field_of_a_model_call() -> None:
    assert set(ModelCallRecord.__struct_fields__) - named("run-directory.md") == set()


@pytest.mark.promise("UX-4")
def test_the_page_of_rows_names_every_key_of_ours_in_a_row_its_capture_and_its_trace(run: Path) -> None:
    found: set[str] = set()
    for row in rows(run):
        found |= {key for key in row if key.startswith("_ng_")}
        found |= set(row["_ng_token_capture"]) | {key for key in row["response"] if key.startswith("_ng_")}
        for trace in row["response"]["_ng_traces"]:
            found |= set(trace) | {key for span in trace["spans"] for key in span}
    assert {"_ng_token_capture", "_ng_traces", "loss_mask", "spans", "n_calls"} <= found
    assert found - named("result-rows.md") == set()
    for rare in ("projected_bytes", "truncated", "raw_logprobs_differ", "routed_experts", "grammar_forced", "error"):
        assert rare in named("result-rows.md")
    assert "weight_version" in named("result-rows.md")
