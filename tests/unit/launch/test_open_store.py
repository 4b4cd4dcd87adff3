"""`toprope.open_store`: the store of a directory, for whoever takes tokens out of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

import toprope
from toprope.capture.sqlite_store import SqliteStore
from toprope.errors.tree import ConfigError
from toprope.results.layout import RunDir
from toprope.tokens.entry import TokenEntry


def entry(key: str) -> TokenEntry:
    return TokenEntry(
        rollout_id=key,
        model_call_id="c1",
        model="m",
        created_at=1.0,
        prompt_token_ids=np.array([1, 2], dtype=np.uint32),
        generation_token_ids=np.array([3, 4], dtype=np.uint32),
        generation_log_probs=np.array([-0.5, -0.25]),
        output_items=({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},),
        token_item_index=0,
        parent_decision="root",
    )


async def test_a_rollout_is_taken_while_its_writer_still_runs(tmp_path: Path) -> None:
    writer = SqliteStore(RunDir(tmp_path).capture_db)
    try:
        await writer.begin_call("k", "c1")
        await writer.put(entry("k"))
        async with toprope.open_store(str(tmp_path)) as store:
            row = {"_ng_rollout_id": "k", "response": {"output": []}}
            built = await toprope.finalize_rollout_token_capture(row, store)
            assert built is not None
            assert built["mask_sample"] is False
            assert await toprope.retire_rollout_token_capture("k", store, built) is True
        with pytest.raises(RuntimeError, match="closed"):
            await store.list_captures()
        assert await writer.list_captures() == ()
    finally:
        await writer.close()


@pytest.mark.promise("UX-2")
def test_no_directory_and_no_capture_are_told_apart_and_leave_no_file(tmp_path: Path) -> None:
    async def enter(directory: Path) -> None:
        async with toprope.open_store(directory):
            pass

    with pytest.raises(ConfigError, match=r"absent: there is no such directory"):
        asyncio.run(enter(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"nothing was captured here: .*capture\.sqlite"):
        asyncio.run(enter(tmp_path))
    assert list(tmp_path.iterdir()) == []
