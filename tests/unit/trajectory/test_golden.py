"""Every vector of `tests/golden/builder.jsonl`, in any order and with any copies of its entries."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from tests.unit.trajectory.golden import CASES, check, entries_of, run

from toprope.tokens.entry import BadRecord

BY_ID = {case["id"]: case for case in CASES}


@pytest.mark.promise("CP-8")
@pytest.mark.parametrize("name", list(BY_ID))
def test_golden_vector(name: str) -> None:
    case = BY_ID[name]
    if case["expect"] == "refused":
        with pytest.raises(BadRecord):
            entries_of(case)
        return
    check(case)


def _bytes(case: dict[str, Any], entries: list[Any], deliver: str) -> bytes:
    built = run(case, entries, deliver=deliver)
    traces = [trace.as_json() for trace in getattr(built, "traces", ())]
    return msgspec.json.encode([traces, getattr(built, "reasons", ()), built.metrics])


@pytest.mark.promise("CP-8")
@pytest.mark.parametrize("name", [name for name, case in BY_ID.items() if case["expect"] != "refused"])
def test_any_order_and_any_copies_give_the_same_bytes(name: str) -> None:
    case, choose = BY_ID[name], random.Random(name)
    for deliver in ("single", "all_chains"):
        expected = _bytes(case, entries_of(case), deliver)
        for _ in range(25):
            shuffled = entries_of(case)
            shuffled += choose.choices(shuffled, k=choose.randrange(4))
            choose.shuffle(shuffled)
            assert _bytes(case, shuffled, deliver) == expected
