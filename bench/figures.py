"""One form for every figure, so that runs can be kept as data and compared."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. `ratio` is value / baseline, both of the same run; `must` and `aim` are in `unit`."""

    id: str
    work: str
    value: float
    unit: str
    baseline: float | None = None
    baseline_is: str = ""
    must: float | None = None
    aim: float | None = None

    @property
    def ratio(self) -> float | None:
        return None if not self.baseline else self.value / self.baseline

    def emit(self) -> None:
        """Print the figure as one JSON line."""
        row = asdict(self)
        row["ratio"] = None if self.ratio is None else round(self.ratio, 3)
        print(json.dumps(row), flush=True)
