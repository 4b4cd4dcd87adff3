"""What tests have to say besides passing: versions, counts, mechanisms. It stands at the end of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def say(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Say one line in the summary of the run, also from a worker process of pytest-xdist."""
    return lambda line: record_property("said", line)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what was said, in the order of the words."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    said = sorted({str(v) for r in reports for k, v in getattr(r, "user_properties", ()) if k == "said"})
    if said:
        terminalreporter.section("what tests say")
        for line in said:
            terminalreporter.write_line(line)
