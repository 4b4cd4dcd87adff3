"""One nursery for the module that kills, and directories whose syncs are free: what dies here is a process."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.crash.nursery import Nursery, nursery
from tests.crash.scenes import STORES


@pytest.fixture(scope="module")
def ward() -> Iterator[Nursery]:
    """Where victims come from."""
    with nursery() as made:
        yield made


@pytest.fixture(scope="module")
def left_behind(ward: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each store, what a killed process left: one key in every phase, all acknowledged, nothing closed."""
    made = {}
    for store in STORES:
        made[store] = tmp_path_factory.mktemp(store)
        fate = ward.run("prepare", made[store], kill_at=1, store=store)
        assert (fate.code, fate.said) == (-9, ["prepared"]), fate.error
    return made


@pytest.fixture
def memory_dir(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where there is one. A SIGKILL loses no page that a write has reached."""
    shared = Path("/dev/shm")
    where = Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else tmp_path))
    yield where
    shutil.rmtree(where)
