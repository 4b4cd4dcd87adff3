"""Statistics over rollouts and tasks. Pure.

Every sum is exact (`math.fsum`) and runs over sorted values, so that the figures do not depend on the order of rows,
and those of any split into shards equal those of the whole once the groups are put together again. Only measured
rollouts come in: masked and failed ones enter no statistic.

Sources: unbiased pass@k, Chen et al. 2021 (1 - C(n-c, k) / C(n, k)); the interval is the normal one over task means.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

Z95 = 1.959963984540054
_SQUARABLE = 400
"""Values below 2**400 can be squared and summed, a thousand million of them, within the range of floats."""


class Spread(msgspec.Struct, frozen=True):
    """`n` values; `std` is that of the sample (n - 1), None for a single value, or beyond the range of floats."""

    n: int
    mean: float
    min: float
    max: float
    std: float | None


class TaskSpread(msgspec.Struct, frozen=True):
    """A measure over tasks: the mean of the task means, its standard error, its 95 % interval.

    The error is None for one task, and the interval too; both are None where they pass the range of floats.
    """

    tasks: int
    mean: float
    standard_error: float | None
    interval95: tuple[float, float] | None


class PassAtK(msgspec.Struct, frozen=True):
    """pass@k over the `tasks` that have at least `k` measured rollouts."""

    k: int
    tasks: int
    value: float


def spread(values: Sequence[float]) -> Spread | None:
    """Mean, extremes and deviation; None without values."""
    if not values:
        return None
    mean, deviation = _moments(values)
    return Spread(len(values), mean, min(values), max(values), deviation)


def over_tasks(means: Iterable[float]) -> TaskSpread | None:
    """The mean over tasks, each task once however many rollouts it has."""
    values = list(means)
    if not values:
        return None
    mean, deviation = _moments(values)
    if deviation is None:
        return TaskSpread(len(values), mean, None, None)
    error = deviation / math.sqrt(len(values))
    ends = (mean - Z95 * error, mean + Z95 * error)
    return TaskSpread(len(values), mean, error, ends if all(map(math.isfinite, ends)) else None)


def pass_at_k(passed: int, total: int, k: int) -> float:
    """The chance that at least one of `k` rollouts drawn from `total`, of which `passed` passed, is a pass.

    Raises `ValueError` unless 1 <= k <= total.
    """
    if not 1 <= k <= total:
        raise ValueError(f"pass@{k} needs at least {k} rollouts, there are {total}")
    return 1.0 - math.comb(total - passed, k) / math.comb(total, k)


def passes(groups: Mapping[int, Sequence[float]], threshold: float) -> list[PassAtK]:
    """pass@k for k = 1, 2, 4, ... and the largest group; each over the tasks that have k measured rollouts."""
    largest = max((len(group) for group in groups.values()), default=0)
    ks = sorted({2**power for power in range(largest.bit_length()) if 2**power <= largest} | ({largest} - {0}))
    out = []
    for k in ks:
        able = [group for group in groups.values() if len(group) >= k]
        chances = [pass_at_k(_passed(group, threshold), len(group), k) for group in able]
        out.append(PassAtK(k, len(able), math.fsum(chances) / len(chances)))
    return out


def average_of_k(groups: Mapping[int, Sequence[float]], threshold: float) -> PassAtK | None:
    """pass@1[avg-of-k]: the share of passes among a task's rollouts, averaged over tasks; `k` is the largest group."""
    shares = [_passed(group, threshold) / len(group) for group in groups.values() if group]
    if not shares:
        return None
    return PassAtK(max(len(group) for group in groups.values()), len(shares), math.fsum(shares) / len(shares))


def _passed(group: Sequence[float], threshold: float) -> int:
    return sum(value >= threshold for value in group)


def _moments(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample deviation of one value or more; no deviation of a single one, or where none is a float.

    A square passes the range of floats from 2**512 on, a sum from the largest float on: such values are scaled by a
    power of two, which costs no digit, and the figures are scaled back.
    """
    power = max(math.frexp(value)[1] for value in values)
    if power <= _SQUARABLE:
        mean = math.fsum(values) / len(values)
        return mean, _deviation(values, mean)
    scaled = [math.ldexp(value, -power) for value in values]
    # The last digit of a quotient may pass what it is a mean of, and that may be the largest float.
    mean = min(max(math.fsum(scaled) / len(scaled), min(scaled)), max(scaled))
    deviation = _deviation(scaled, mean)
    try:
        return math.ldexp(mean, power), None if deviation is None else math.ldexp(deviation, power)
    except OverflowError:  # the deviation of values at both ends of the range
        return math.ldexp(mean, power), None


def _deviation(values: Sequence[float], mean: float) -> float | None:
    if len(values) < 2:
        return None
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
