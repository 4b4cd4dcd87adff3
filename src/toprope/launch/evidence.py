"""The files of a finished or running run, opened for reading by a command. Writers may go on meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from toprope.capture.sqlite_store import SqliteStore
from toprope.errors.tree import ConfigError
from toprope.results.layout import RunDir


def existing_directory(path: Path) -> RunDir:
    """`path` as a run directory. Raises `ConfigError` if there is no directory."""
    if not path.is_dir():
        raise ConfigError(
            f"{path}: there is no such directory; accepted: the directory of a run or of `toprope serve`."
        )
    return RunDir(path)


@asynccontextmanager
async def capture_store(run_dir: RunDir) -> AsyncIterator[SqliteStore | None]:
    """The capture store of `run_dir`, closed at the end; None, and no file made, where nothing was captured."""
    if not run_dir.capture_db.exists():
        yield None
        return
    store = SqliteStore(run_dir.capture_db)
    try:
        yield store
    finally:
        await store.close()
