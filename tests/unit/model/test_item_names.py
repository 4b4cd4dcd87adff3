"""The names of items: a stream says them before the engine does, so they are the server's own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.unit.model.wire import Typist, events, on_the_wire

from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import Recorder
from toprope.testing.scripted import ScriptedCall, ScriptedReply

RICH = ScriptedReply(reasoning="I add.", text="now", calls=[ScriptedCall("add", "{}", "c1"), ScriptedCall("mul")])


class LateNames(Typist):
    """Says deltas, and calls its items by names of its own at the finish only."""

    def __init__(self, name=str, **settings):
        super().__init__(**settings)
        self.name = name

    async def generate(self, request):
        made = await super().generate(request)
        return replace(made, output=tuple({**item, "id": self.name(at)} for at, item in enumerate(made.output)))


@pytest.mark.parametrize("name", [lambda at: f"msg_{at}_own", lambda at: f"fc_{at}_own", lambda at: "same"])
async def test_items_that_an_engine_names_at_its_finish_keep_the_names_that_their_deltas_left_under(name):
    store = MemoryStore()
    engine = LateNames(name, script=[RICH], size=3)
    async with on_the_wire(engine=engine, recorder=Recorder(store, reader=store)) as wire:
        call = await wire.ask("responses", stream=True)
        told = [json.loads(data) for _, data in events(await call.end())]
    opened = [event["item"]["id"] for event in told if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in told[-1]["response"]["output"]] == opened
    assert [item["id"] for item in (await store.open_entries("4-2"))[0].output_items] == opened
    assert len(set(opened)) == len(opened) > 1
