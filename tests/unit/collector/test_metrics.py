"""Statistics: formulas, and the same figures however the rows are split."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toprope.collector.metrics import average_of_k, over_tasks, pass_at_k, passes, spread


def test_pass_at_k_equals_the_count_over_all_draws() -> None:
    for total in range(1, 7):
        for passed in range(total + 1):
            outcomes = [1] * passed + [0] * (total - passed)
            for k in range(1, total + 1):
                draws = list(itertools.combinations(outcomes, k))
                expected = sum(any(draw) for draw in draws) / len(draws)
                assert pass_at_k(passed, total, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_beyond_the_rollouts_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@4 needs at least 4"):
        pass_at_k(1, 3, 4)


def test_groups_too_small_for_k_are_left_out_and_counted() -> None:
    found = passes({0: [1.0, 0.0], 1: [1.0]}, 1.0)
    assert [(each.k, each.tasks, each.value) for each in found] == [(1, 2, 0.75), (2, 1, 1.0)]


def test_average_of_k_weighs_tasks_alike() -> None:
    found = average_of_k({0: [1.0, 1.0, 0.0, 0.0], 1: [1.0]}, 1.0)
    assert found is not None
    assert (found.k, found.tasks, found.value) == (4, 2, 0.75)


def test_the_interval_is_over_tasks_and_absent_for_one() -> None:
    one, two = over_tasks([0.5]), over_tasks([0.0, 1.0])
    assert one is not None
    assert one.standard_error is None
    assert one.interval95 is None
    assert two is not None
    assert two.interval95 is not None
    assert two.standard_error == pytest.approx(0.5)
    assert two.interval95 == pytest.approx((0.5 - 0.98, 0.5 + 0.98), abs=1e-3)


def test_nothing_measured_gives_no_figure() -> None:
    assert spread([]) is None
    assert over_tasks([]) is None
    assert passes({}, 1.0) == []
    assert average_of_k({}, 1.0) is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_the_order_of_rows_never_changes_a_figure(values: list[float], random: object) -> None:
    first = spread(values)
    random.shuffle(values)  # type: ignore[attr-defined]
    assert spread(values) == first
    assert first is not None
    assert math.isfinite(first.mean)
