"""Tables as plain text: aligned columns that read the same on a terminal and in a pipe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from toprope.collector.summary import Group, Summary
from toprope.errors.tree import ConfigError


def columns(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows under their heads, each column as wide as its widest cell; numbers to the right. Ends with a newline."""
    texts = [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(head), *texts]) for i in range(len(head))]
    right = [bool(texts) and all(_is_number(row[i]) for row in texts) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    return "\n".join([line(list(head)), line(["-" * width for width in widths]), *map(line, texts)]) + "\n"


def run_table(summary: Summary) -> str:
    """One line a task set and one for all: coverage, reward with its interval, pass@k."""
    names = list(summary.tasksets)
    sets = [(name, summary.tasksets[name]) for name in names]
    if len(sets) != 1:
        sets.append(("all", summary.metrics))
    rows = []
    for name, metrics in sets:
        groups = [group for group in summary.groups if name == "all" or group.taskset == name]
        reward = metrics.measures.get("reward")
        interval = reward.tasks.interval95 if reward is not None else None
        best = metrics.pass_at_k[-1] if metrics.pass_at_k else None
        rows.append(
            [
                name,
                len(groups),
                sum(group.reward.n for group in groups if group.reward is not None),
                sum(group.masked for group in groups),
                None if reward is None else f"{reward.tasks.mean:.3f}",
                None if interval is None else f"{interval[0]:.3f} .. {interval[1]:.3f}",
                None if best is None else f"{best.value:.3f} (k={best.k})",
                sum(mixed(group) for group in groups),
            ]
        )
    return columns(["tasks of", "tasks", "measured", "masked", "reward", "95 %", "pass@k", "mixed groups"], rows)


def mixed(group: Group) -> bool:
    """Whether the rollouts of a group differ in reward, so that they teach something."""
    return group.reward is not None and group.reward.min < group.reward.max


def age(seconds: float) -> str:
    """A span of time for people: `42 s`, `3 min 5 s`, `2 h 10 min`, `4 d 2 h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def seconds_of(text: str, option: str) -> float:
    """A span of time as people write it: `90`, `45s`, `30m`, `12h`, `7d`. Raises `ConfigError` naming `option`."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    number = text[:-1] if text[-1:] in units else text
    try:
        seconds = float(number) * units.get(text[-1:], 1.0)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < math.inf:
        raise ConfigError(f"{option}: {text!r} is no age; accepted: seconds, or a number with s, m, h or d, like 7d.")
    return seconds


def shortened(text: str, limit: int) -> str:
    """`text` on one line of at most `limit` characters. The end is kept: there a chain of causes says the first one."""
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    head = limit // 3
    return f"{line[:head]} ... {line[len(line) - (limit - head - 5) :]}"


def _text(cell: object) -> str:
    return "-" if cell is None else " ".join(str(cell).split())


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace("-", "", 1).isdecimal() or text == "-"
