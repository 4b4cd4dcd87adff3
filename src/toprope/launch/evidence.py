"""The files of a finished or running run, opened for reading by a command or a trainer. Writers may go on meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from toprope.errors.tree import ConfigError
from toprope.launch.stores import OnDisk, store_in
from toprope.results.layout import RunDir


def existing_directory(path: Path) -> RunDir:
    """`path` as a run directory. Raises `ConfigError` if there is no directory."""
    if not path.is_dir():
        raise ConfigError(
            f"{path}: there is no such directory; accepted: the directory of a run or of `toprope serve`."
        )
    return RunDir(path)


@asynccontextmanager
async def open_store(directory: str | Path) -> AsyncIterator[OnDisk]:
    """The capture store in the directory of a run or of `toprope serve`, which may still run.

    `async with toprope.open_store("served") as store:` gives what `finalize_rollout_token_capture` and
    `retire_rollout_token_capture` take as their source; `store.list_captures()` tells the keys. On leaving, all that
    was written is durable and the store is closed. Raises `ConfigError` if there is no such directory, or if nothing
    was captured there yet.
    """
    run_dir = existing_directory(Path(directory))
    async with capture_store(run_dir) as store:
        if store is None:
            raise ConfigError(
                f"{run_dir.path}: nothing was captured here: there is no {run_dir.capture_db.name} and no "
                f"{run_dir.capture_files.name}; accepted: a directory that captured calls went to, with "
                "`training-token-capture` in the base URL of the caller."
            )
        yield store


@asynccontextmanager
async def capture_store(run_dir: RunDir) -> AsyncIterator[OnDisk | None]:
    """The capture store of `run_dir`, closed at the end; None, and no file made, where nothing was captured."""
    store = store_in(run_dir)
    if store is None:
        yield None
        return
    try:
        yield store
    finally:
        await store.close()
