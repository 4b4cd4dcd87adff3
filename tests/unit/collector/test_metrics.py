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


LARGEST = 1.7976931348623157e308


@pytest.mark.parametrize(
    ("values", "mean", "std"),
    [
        ([LARGEST], LARGEST, None),
        ([LARGEST, LARGEST, LARGEST], LARGEST, 0.0),
        ([1.5e308, 1.7e308], 1.6e308, 1e307 * math.sqrt(2)),
        ([0.0, 1e200], 5e199, 1e200 / math.sqrt(2)),
        ([LARGEST, -LARGEST], 0.0, None),
        ([5e-324, LARGEST], LARGEST / 2, LARGEST / math.sqrt(2)),
    ],
)
def test_rewards_as_large_as_floats_have_figures_and_end_nothing(
    values: list[float], mean: float, std: float | None
) -> None:
    found = spread(values)
    assert found is not None
    assert found.mean == pytest.approx(mean)
    assert found.std == (None if std is None else pytest.approx(std))
    assert spread(values[::-1]) == found
    tasks = over_tasks(values)
    assert tasks is not None
    assert tasks.mean == found.mean
    assert tasks.interval95 is None or all(map(math.isfinite, tasks.interval95))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_no_finite_rewards_have_a_figure_that_json_cannot_carry(values: list[float]) -> None:
    found, tasks = spread(values), over_tasks(values)
    assert found is not None
    assert tasks is not None
    assert min(values) <= found.mean <= max(values) or found.mean == pytest.approx(values[0])
    ends = tasks.interval95 or ()
    figures = [found.mean, found.std, tasks.mean, tasks.standard_error, *ends]
    assert all(math.isfinite(figure) for figure in figures if figure is not None)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20), st.integers(200, 900))
def test_scaling_rewards_by_a_power_of_two_scales_their_figures(values: list[float], power: int) -> None:
    values = [round(value) for value in values]
    plain, large = spread(values), spread([math.ldexp(value, power) for value in values])
    assert plain is not None
    assert large is not None
    assert large.mean == pytest.approx(math.ldexp(plain.mean, power))
    assert plain.std is not None
    assert large.std == pytest.approx(math.ldexp(plain.std, power))
