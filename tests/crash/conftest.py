"""One nursery for the module that kills, and directories whose syncs are free: what dies here is a process."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.crash.nursery import Nursery, nursery


@pytest.fixture(scope="module")
def ward() -> Iterator[Nursery]:
    """Where victims come from."""
    with nursery() as made:
        yield made


@pytest.fixture
def memory_dir(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where there is one. A SIGKILL loses no page that a write has reached."""
    shared = Path("/dev/shm")
    where = Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else tmp_path))
    yield where
    shutil.rmtree(where)
