"""A model server with a real store between a scripted upstream and a client, all on real sockets."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from toprope.capture.recorder import Recorder
from toprope.capture.sqlite_store import SqliteStore
from toprope.http.app import Limits
from toprope.http.client import Client
from toprope.http.serve import serve
from toprope.servers.model.engines.openai import OpenAIEngine
from toprope.servers.model.server import ModelServer
from toprope.testing.upstream import serving


class Bench:
    """`await bench.call(path, body)` in rollout `r`, captured; `await bench.built()` freezes and builds it."""

    def __init__(self, peer, store, server, url):
        self.peer = peer
        self.store = store
        self.server = server
        self.url = url

    async def call(self, path, body, *, capture=True, rollout="r", **more):
        prefix = f"/ng-rollout/{rollout}" + ("/training-token-capture" if capture else "")
        return await self.peer.request("POST", prefix + path, body=body, **more)

    async def snapshot(self, rollout="r"):
        return await self.store.freeze(rollout)


@pytest.fixture
def model_bench(tmp_path):
    @asynccontextmanager
    async def run(upstream, *, limits: Limits | None = None, **engine):
        store = SqliteStore(tmp_path / "capture.db")
        async with Client() as client, serving(upstream) as upstream_url:
            made = OpenAIEngine(client=client, base_url=f"{upstream_url}/v1", return_token_ids=True, **engine)
            recorder = Recorder(store, reader=store)
            server = ModelServer(name="policy", engine=made, recorder=recorder, limits=limits)
            await server.app.start()
            bound = await serve(server.app)
            try:
                yield Bench(client.peer(bound.url, None), store, server, bound.url)
            finally:
                await bound.close()
                await server.app.stop()
                await recorder.close()
                await store.close()

    return run
