"""What the builder must do beyond the golden vectors; the situations are in `cases`, so that mutants meet them too."""

from __future__ import annotations

import pytest
from tests.unit.trajectory.cases import CASES

from toprope.trajectory.build import build


@pytest.mark.parametrize("name", list(CASES))
def test_builder(name: str) -> None:
    CASES[name](build)
