"""A directory whose device waits for nobody: what is tested on it is not durability."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_dir(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where there is one. A SIGKILL loses no page that a write has reached."""
    shared = Path("/dev/shm")
    where = Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else tmp_path))
    yield where
    shutil.rmtree(where)
