"""The capture store that a configuration names, opened: one of ours in the run directory, or a transport of the user's.

Which store a directory holds is found by its files (`store_in`), so that commands need no configuration. Left to
others: what stores keep (`capture`), who reads and writes (`world`, the collector).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from toprope.capture.jsonl_store import JsonlStore
from toprope.capture.memory_store import MemoryStore
from toprope.capture.protocols import CaptureReader, TokenSink, TokenSource, own_verb
from toprope.capture.sqlite_store import SqliteStore
from toprope.errors.tree import ConfigError
from toprope.launch.construct import build, find
from toprope.launch.settings import CaptureConfig, TransportNames
from toprope.launch.strict import Where
from toprope.results.layout import RunDir

OnDisk: TypeAlias = SqliteStore | JsonlStore


@dataclass(frozen=True, slots=True)
class Custody:
    """The two ends of custody in this process; they may be one object. Both are closed here, once."""

    sink: TokenSink
    source: TokenSource

    @property
    def reader(self) -> CaptureReader | None:
        """The end that can be read while a rollout is open, if one can."""
        return next((end for end in (self.sink, self.source) if isinstance(end, CaptureReader)), None)

    async def settle_dead_writers(self) -> None:
        """Once it returns the intents of dead predecessors are settled, where the sink can do that."""
        settle: Callable[[], Awaitable[object]] | None = getattr(self.sink, "settle_dead_writers", None)
        if settle is not None:
            await settle()

    async def close(self) -> None:
        """Once it returns both ends are closed."""
        try:
            await self.sink.close()
        finally:
            if id(self.source) != id(self.sink):
                await self.source.close()


def open_custody(config: CaptureConfig, run_dir: RunDir, where: Where) -> Custody:
    """The store of `token_id_capture`. Raises `ConfigError` naming the key of what cannot be built."""
    if isinstance(config.store, TransportNames):
        return _named(config.store, where.at("store"))
    if config.store == "memory":
        memory = MemoryStore()
        return Custody(memory, memory)
    store = SqliteStore(run_dir.capture_db) if config.store == "sqlite" else JsonlStore(run_dir.capture_files)
    return Custody(store, store)


def store_in(run_dir: RunDir) -> OnDisk | None:
    """The store whose files lie in `run_dir`; None, and no file made, where nothing was captured."""
    if run_dir.capture_db.exists():
        return SqliteStore(run_dir.capture_db)
    return JsonlStore(run_dir.capture_files) if run_dir.capture_files.exists() else None


def _named(names: TransportNames, where: Where) -> Custody:
    sink = build(find(names.sink, "toprope.capture", where.at("sink")), names.config, where.at("config"))
    _require(sink, ("put", "mark_incomplete", "close"), names.sink, where.at("sink"))
    source = sink
    if names.source is not None:
        source = build(find(names.source, "toprope.capture", where.at("source")), names.config, where.at("config"))
    _require(source, ("freeze", "drop", "close"), names.source or names.sink, where.at("source"))
    return Custody(sink, source)


def _require(end: object, verbs: tuple[str, ...], name: str, where: Where) -> None:
    for verb in verbs:
        if own_verb(end, verb) is None:
            raise ConfigError(f"{where}: {name} has no {verb} of its own; accepted: a class with {', '.join(verbs)}.")
