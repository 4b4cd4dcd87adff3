"""A model server in one process: its peer, its engine, and a recorder that writes down what it was told and when."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from toprope.http.client import Client
from toprope.servers.model.server import ModelServer
from toprope.testing.scripted import ScriptedEngine


class Notebook:
    """A recorder that only notes: (verb, key, call id, more)."""

    def __init__(self, events=None):
        self.events = [] if events is None else events
        self.evidence = []
        self.recorded = asyncio.Event()
        self.fail_begin = None
        self.forget_listeners = []

    async def begin(self, key, call_id, *, intent):
        if self.fail_begin is not None:
            raise self.fail_begin
        self.events.append(("begin", key, call_id, intent))

    async def record(self, call):
        self.events.append(("record", call.key, call.call_id, call))
        self.evidence.append(call)
        self.recorded.set()

    async def abort(self, key, call_id, reason, *, request_items=()):
        self.events.append(("abort", key, call_id, reason))

    readable = False

    def shares(self, key):
        return False

    async def journal(self, key):
        return ()

    async def recorded(self, key, since=0):
        return ()

    async def incomplete(self, key, call_id, reason):
        self.events.append(("incomplete", key, call_id, reason))


@pytest.fixture
def notebook():
    return Notebook()


@pytest.fixture
def serve():
    """`async with serve(ModelServer subclass?, **settings) as (peer, server)`: in process, over the same bytes."""

    @asynccontextmanager
    async def run(kind=ModelServer, **settings):
        settings.setdefault("engine", ScriptedEngine())
        server = kind(name="policy", **settings)
        await server.app.start()
        async with Client(inline={"policy": server.app}) as client:
            yield client.peer("inline://policy", None), server
        await server.app.stop()

    return run
