"""Which store a configuration names, and how commands find it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toprope.capture.jsonl_store import JsonlStore
from toprope.capture.memory_store import MemoryStore
from toprope.capture.sqlite_store import SqliteStore
from toprope.collector.audit import audit
from toprope.errors.tree import ConfigError
from toprope.launch.config import Configuration, read_configuration
from toprope.launch.evidence import capture_store
from toprope.launch.run import RunJob
from toprope.launch.stores import open_custody, store_in
from toprope.launch.strict import Where
from toprope.results.layout import RunDir

SERVERS = {
    "policy": {"role": "model", "engine": {"kind": "scripted"}},
    "books": {"role": "resources", "use": "ledger"},
    "clerk": {"role": "agent", "use": "tool_loop", "model": "policy", "token_id_capture": True},
    "episode": {"role": "environment", "resources": "books", "agent": "clerk", "tools": ["direct_http"]},
}
HERE = __name__


def configured(store: Any, out: Path) -> Configuration:
    run = {"environment": "episode", "tasks": {"generate": "books", "size": 2}, "out": str(out)}
    values = {"servers": SERVERS, "run": run, "token_id_capture": {"enabled": True, "store": store}}
    return read_configuration(values, file="test.yaml", directory=Path())


class GymSink:
    """Exactly NeMo Gym's sink, kept in one process."""

    stores: dict[str, MemoryStore] = {}  # noqa: RUF012 (how the two ends of this process meet)

    def __init__(self, name: str) -> None:
        self.store = self.stores.setdefault(name, MemoryStore())

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        await self.store.begin_call(rollout_id, model_call_id)

    async def put(self, entry: Any) -> None:
        await self.store.put(entry)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        await self.store.mark_incomplete(rollout_id, model_call_id)

    async def close(self) -> None:
        """Nothing is open."""


class GymSource:
    """Exactly NeMo Gym's source."""

    closed = 0

    def __init__(self, name: str) -> None:
        self.store = GymSink.stores.setdefault(name, MemoryStore())

    async def freeze(self, rollout_id: str) -> Any:
        return await self.store.freeze(rollout_id)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        return await self.store.drop(rollout_id, snapshot_id=snapshot_id, version=version)

    async def close(self) -> None:
        type(self).closed += 1


class NoMark:
    async def put(self, entry: Any) -> None:
        """Never called."""


@pytest.mark.parametrize("store", ["sqlite", "jsonl"])
async def test_a_run_is_found_again_by_its_files_and_proven(store: str, tmp_path: Path) -> None:
    summary = await RunJob(configured(store, tmp_path / "run")).collect()
    assert (summary.coverage.measured, summary.tokens.rows) == (2, 2)
    run_dir = RunDir(tmp_path / "run")
    async with capture_store(run_dir) as found:
        assert isinstance(found, SqliteStore if store == "sqlite" else JsonlStore)
        assert await found.list_captures() == ()
        report = await audit(run_dir, found)
        assert (report.ok, report.counts["proven"]) == (True, 2)


@pytest.mark.promise("CP-16")
async def test_a_sink_and_a_source_with_exactly_nemo_gyms_signatures_pass_a_whole_run(tmp_path: Path) -> None:
    GymSource.closed = 0
    names = {"sink": f"{HERE}:GymSink", "source": f"{HERE}:GymSource", "config": {"name": str(tmp_path)}}
    summary = await RunJob(configured(names, tmp_path / "run")).collect()
    assert (summary.coverage.measured, summary.masks.capture, summary.tokens.rows) == (2, 0, 2)
    assert GymSource.closed == 1  # we made it, so we close it
    report = await audit(RunDir(tmp_path / "run"), None)
    assert (report.ok, report.counts["proven"]) == (True, 2)  # by the receipts in the journal


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ({"sink": "nowhere:Store"}, r"token_id_capture\.store\.sink"),
        ({"sink": f"{HERE}:NoMark"}, "mark_incomplete"),
        ({"sink": f"{HERE}:GymSink", "config": {"name": "x"}}, r"store\.source.*freeze"),
        ({"sink": f"{HERE}:GymSink"}, r"store\.config\.name"),
    ],
)
def test_a_transport_that_cannot_serve_is_refused_with_its_key(
    store: dict[str, Any], said: str, tmp_path: Path
) -> None:
    capture = configured(store, tmp_path).capture
    with pytest.raises(ConfigError, match=said):
        open_custody(capture, RunDir(tmp_path), Where("test.yaml").at("token_id_capture"))


def test_looking_for_a_store_makes_none(tmp_path: Path) -> None:
    assert store_in(RunDir(tmp_path)) is None
    assert list(tmp_path.iterdir()) == []
