"""What a model server keeps of requests between calls: nothing of a rollout that ended."""

from __future__ import annotations

import json

from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import Recorder
from toprope.servers.model.reading import CallReader
from toprope.servers.model.weights import WeightVersions


async def test_a_rollout_that_was_frozen_leaves_no_request_behind() -> None:
    store = MemoryStore()
    recorder = Recorder(store, reader=store)
    memory = CallReader(recorder, WeightVersions(), return_token_ids=False)._memory
    body = json.dumps({"messages": [{"role": "user", "content": "long " * 2_000}]}).encode()
    for key in ("ended", "goes on"):
        await recorder.begin(key, "c1")
        memory.read("chat", key, body)
    held = memory.held_bytes
    await store.freeze("ended")
    assert memory.held_bytes == held // 2 > 4_000
    await recorder.close()
