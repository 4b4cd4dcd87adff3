"""A conversation that grows through a real model server: read as what it adds, recorded as what it is."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import Recorder
from toprope.http.client import Client
from toprope.servers.model.server import ModelServer
from toprope.testing.scripted import ScriptedEngine
from toprope.tokens import items
from toprope.trajectory.build import Trainable, build

PATHS = {"chat": ("/v1/chat/completions", "messages"), "responses": ("/v1/responses", "input")}
TURNS = 8


def _said(dialect: str, reply: dict[str, Any]) -> list[dict[str, Any]]:
    return [reply["choices"][0]["message"]] if dialect == "chat" else list(reply["output"])


@pytest.mark.parametrize("dialect", sorted(PATHS))
async def test_every_turn_finds_its_parent_and_items_are_digested_once(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    digested: list[str] = []
    mark = items._mark

    def noted(item: Any) -> str | None:
        made = mark(item)
        if made is not None:  # an item that no policy wrote is not digested
            digested.append(made)
        return made

    monkeypatch.setattr(items, "_mark", noted)
    path, field = PATHS[dialect]
    store = MemoryStore()
    recorder = Recorder(store, reader=store)
    server = ModelServer(
        name="policy", engine=ScriptedEngine(script=[f"turn {n}" for n in range(TURNS)]), recorder=recorder
    )
    await server.app.start()
    history: list[dict[str, Any]] = [{"role": "user", "content": "rules " * 1_000}]
    bodies = []
    async with Client(inline={"policy": server.app}) as client:
        peer = client.peer("inline://policy", None)
        for turn in range(TURNS):
            bodies.append(json.dumps({"model": "m", field: history, "temperature": 1.0}).encode())
            where = f"/ng-rollout/r/training-token-capture{path}"
            reply = await peer.request("POST", where, body=json.loads(bodies[-1]))
            assert reply.status == 200, reply.body
            history = [*history, *_said(dialect, reply.json()), {"role": "user", "content": f"go on {turn}"}]
    await server.app.stop()
    await recorder.close()
    snapshot = await store.freeze("r")
    decisions = [(entry.parent_decision, entry.parent_call_id) for entry in snapshot.entries]
    ids = [entry.model_call_id for entry in snapshot.entries]
    assert decisions == [("root", None), *(("resolved", call) for call in ids[:-1])]
    assert [len(entry.item_digests) for entry in snapshot.entries] == [0] * TURNS
    built = build(snapshot)
    assert isinstance(built, Trainable)
    assert len(built.traces[0].call_ids) == TURNS
    # Once when it was sampled, once when it was first sent back; a plain reading would digest each turn every time.
    assert len(digested) == TURNS + (TURNS - 1)


async def test_the_recorded_digest_is_that_of_the_bytes_that_came() -> None:
    store = MemoryStore()
    recorder = Recorder(store, reader=store)
    server = ModelServer(name="policy", engine=ScriptedEngine(script=["a", "b"]), recorder=recorder)
    await server.app.start()
    history = [{"role": "user", "content": "rules " * 1_000}]
    sent = []
    async with Client(inline={"policy": server.app}) as client:
        peer = client.peer("inline://policy", None)
        for more in ("one", "two"):
            history = [*history, {"role": "user", "content": more}]
            sent.append(json.dumps({"messages": history}, separators=(",", ":")).encode())
            where = "/ng-rollout/r/training-token-capture/v1/chat/completions"
            assert (await peer.request("POST", where, body=json.loads(sent[-1]))).status == 200
    await server.app.stop()
    await recorder.close()
    entries = (await store.freeze("r")).entries
    assert [entry.request_digest for entry in entries] == [hashlib.sha256(data).hexdigest() for data in sent]
