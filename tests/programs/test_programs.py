"""Agent programs that others wrote, unchanged, on a task of the catalogue: a reward, and every token proven or masked.

The run says the version of each program at its end. `make test` installs them all.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from .house import require, run_program
from .recipes import PROGRAMS, REWRITES

pytestmark = [pytest.mark.slow, pytest.mark.promise("MS-8")]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_others_solves_a_task_and_its_tokens_are_proven(
    name: str, tmp_path: Path, say: Callable[[str], None]
) -> None:
    recipe = PROGRAMS[name]
    for path in (Path(recipe.argv[0]), Path(recipe.version[0])):
        require(path)
    told = subprocess.run(recipe.version, capture_output=True, text=True, timeout=120, check=True)
    version = (told.stdout + told.stderr).strip().splitlines()[-1]
    say(f"program {name}: {version}")
    outcome = run_program(recipe, tmp_path)
    row, capture = outcome.row, outcome.capture
    assert row["reward"] == 1.0, row
    assert capture["n_calls"] >= 2, capture
    assert not capture["incomplete_reasons"], capture
    if name in REWRITES:
        assert row["mask_sample"], f"{name} keeps its history as it was after all: it belongs into no list of rewriters"
        why = "unrecorded_turn" if name == "smolagents" else "history_rewritten"
        assert capture["mask_reasons"] == ["unresolved_parent", why], capture
        return
    assert not row["mask_sample"], capture
    assert capture["n_chains"] == 1, capture
    assert capture["generated_tokens_delivered"] == capture["generated_tokens_captured"], capture
