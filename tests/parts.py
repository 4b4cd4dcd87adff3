"""Parts of a machine that some tests need: a program, a permission of the kernel.

Without one a test is skipped, and says so, but never in CI (the variable `CI` is set there): what was not run there
held nothing, so it fails. `scripts/setup.sh dev` installs the programs.
"""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest

IN_CI = bool(os.environ.get("CI"))


def needs(program: str) -> pytest.MarkDecorator:
    """Skip where a program is not installed; in CI the test runs, and fails for it."""
    missing = shutil.which(program) is None and not IN_CI
    return pytest.mark.skipif(missing, reason=f"the program {program} is not installed")


def not_here(why: str) -> NoReturn:
    """This machine forbids what the test needs: skip it, in CI fail it."""
    if IN_CI:
        pytest.fail(f"{why}; in CI that is a failure: what this test holds was not looked at")
    pytest.skip(why)
