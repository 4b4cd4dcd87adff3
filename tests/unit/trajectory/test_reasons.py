"""The list of mask reasons is closed, documented, and every one of them can be produced."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.trajectory import golden

import toprope.trajectory.reasons as table
from toprope.tokens import lineage
from toprope.tokens.snapshot import INCOMPLETE_REASONS

ROOT = Path(__file__).parents[3]


def test_the_reference_page_is_written_from_the_table() -> None:
    assert (ROOT / "docs/reference/mask-reasons.md").read_text() == table.page()


def test_every_name_stands_in_the_table() -> None:
    names = {value for key, value in vars(table).items() if key.isupper() and isinstance(value, str)}
    assert names <= table.REASONS.keys()
    assert set(INCOMPLETE_REASONS) <= table.REASONS.keys()
    assert {lineage.UNRECORDED_TURN, lineage.HISTORY_REWRITTEN, lineage.AMBIGUOUS_PARENT} <= table.REASONS.keys()
    assert {case["reason"] for case in golden.CASES if "reason" in case} <= table.REASONS.keys()


def test_every_reason_is_met_by_some_test() -> None:
    """A reason that no test produces may be a reason that nothing produces."""
    met = "".join(
        path.read_text()
        for folder in ("unit/trajectory", "unit/delivery", "machine", "golden")
        for path in sorted((ROOT / "tests" / folder).iterdir())
        if path.suffix in (".py", ".jsonl") and path.name != Path(__file__).name
    )
    unmet = {name for name in table.REASONS if not re.search(rf"\b{name}\b", met)}
    assert unmet <= {"unobserved_path"}, "that one is the model server's to produce"


def test_details_are_left_out_of_names_and_unknown_names_come_last() -> None:
    assert table.bare("dangling_intent:call-7") == "dangling_intent"
    assert table.in_order({"zzz", "several_roots", "incomplete", "aaa"}) == (
        "incomplete",
        "several_roots",
        "aaa",
        "zzz",
    )
    assert table.of_unresolved("history_rewritten:c1@3") == ("unresolved_parent", "history_rewritten")
    assert table.of_unresolved("of another recorder") == table.of_unresolved(None) == ("unresolved_parent",)
