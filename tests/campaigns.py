"""How much of a campaign runs: a share in every run of CI, the full size in `make test-long`.

`TOPROPE_CAMPAIGN=n` makes every full size n times as large. Counts that CI runs are listed in
docs/explanation/campaigns.md.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

SCALE = int(os.environ.get("TOPROPE_CAMPAIGN", "1"))


def campaign(ci: int, full: int) -> list[Any]:
    """The two sizes of a campaign, for `pytest.mark.parametrize`."""
    return [
        pytest.param(ci, id=f"ci-{ci}"),
        pytest.param(full * SCALE, id=f"long-{full * SCALE}", marks=pytest.mark.long),
    ]
