"""Agent programs that others wrote, unchanged, on a task of the catalogue: a reward, and every token proven or masked.

Each is run as its file in `examples/programs` says. The run says the version of each at its end. `make test` installs
them all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from .house import EXAMPLES, run_program, version_of
from .recipes import DISTRIBUTIONS, EXITS, REWRITES

PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
CASES = [(name, False) for name in PROGRAMS] + [(name, True) for name in sorted(REWRITES)]


@pytest.mark.slow
@pytest.mark.promise("MS-8")
@pytest.mark.parametrize(
    ("name", "token_in"), CASES, ids=lambda value: value if isinstance(value, str) else f"ids={value}"
)
def test_a_program_of_others_solves_a_task_and_its_tokens_are_proven(
    name: str, token_in: bool, tmp_path: Path, say: Callable[[str], None]
) -> None:
    recipe = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    say(f"program {name}: {version_of(name, recipe)}")
    row = run_program(name, recipe, tmp_path, token_in=token_in)
    capture = row["_ng_token_capture"]
    assert row["reward"] == 1.0, row
    assert capture["n_calls"] >= 2, capture
    assert not capture["incomplete_reasons"], capture
    if name in REWRITES and not (token_in and REWRITES[name] == "history_rewritten"):
        assert row["mask_sample"], f"{name} keeps its history as it was after all: it belongs into no list of rewriters"
        assert capture["mask_reasons"] == ["unresolved_parent", REWRITES[name]], capture
        return
    assert not row["mask_sample"], capture
    assert capture["n_chains"] == 1, capture
    assert capture["generated_tokens_delivered"] == capture["generated_tokens_captured"], capture


def test_every_program_that_is_spoken_of_has_its_file() -> None:
    assert {*DISTRIBUTIONS, *EXITS, *REWRITES} <= set(PROGRAMS)
