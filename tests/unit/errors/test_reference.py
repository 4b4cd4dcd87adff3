"""The failure page says something about every kind, stage and delivery that a row can have."""

from __future__ import annotations

import pytest

from toprope.errors.kinds import Delivery, Kind, Stage
from toprope.errors.reference import FAILURES, KINDS, page


@pytest.mark.promise("EP-9")
def test_every_kind_has_its_row_and_every_stage_and_delivery_its_name() -> None:
    assert set(KINDS) == set(Kind)
    text = page()
    for name in (*Kind, *Delivery):
        assert f"`{name}`" in text
    assert {row.stage for row in FAILURES} >= set(Stage)
    assert all(meaning.what.endswith(".") and meaning.helps for meaning in KINDS.values())
