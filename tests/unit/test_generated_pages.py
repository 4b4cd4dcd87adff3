"""Pages that are made from the program are what it says, and `make docs` makes them all."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/make_docs.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.promise("UX-4")
def test_no_generated_page_is_behind_the_program(script: dict[str, Any]) -> None:
    assert [str(path.relative_to(ROOT)) for path in script["behind"]()] == [], "run: make docs"


def test_every_page_that_says_it_is_generated_is_generated(script: dict[str, Any]) -> None:
    marks = ("do not edit", "written from the table", "drawn: begin", "programs: begin")
    pages = (page for page in (ROOT / "docs").rglob("*.md") if any(mark in page.read_text() for mark in marks))
    assert {str(page.relative_to(ROOT / "docs")) for page in pages} == set(script["PAGES"])


def test_what_is_drawn_goes_between_its_markers_and_touches_nothing_else(script: dict[str, Any]) -> None:
    page = "before\n<!-- drawn: begin -->\nold\n<!-- drawn: end -->\nafter\n"
    made = script["between"]("drawn", "new\n", page)
    assert made == "before\n<!-- drawn: begin -->\nnew\n<!-- drawn: end -->\nafter\n"
    with pytest.raises(ValueError, match="markers"):
        script["between"]("drawn", "new\n", "no marker")


def test_make_docs_in_a_copy_writes_what_is_behind_and_check_only_says_so(tmp_path: Path) -> None:
    copy = tmp_path / "scripts/make_docs.py"
    copy.parent.mkdir()
    copy.write_text(SCRIPT.read_text())
    for name in ("reference", "explanation", "how-to"):
        (tmp_path / "docs" / name).mkdir(parents=True)
    for page in ("docs/explanation/custody.md", "docs/how-to/connect-your-agent.md"):
        (tmp_path / page).write_text((ROOT / page).read_text())

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, str(copy), *arguments], capture_output=True, text=True, timeout=60)

    checked = run("--check")
    assert checked.returncode == 1
    assert "docs/reference/cli.md is behind" in checked.stdout
    assert not (tmp_path / "docs/reference/cli.md").exists()
    assert run().returncode == 0
    assert (tmp_path / "docs/reference/cli.md").read_text().startswith("# Commands\n")
    assert run("--check").returncode == 0
