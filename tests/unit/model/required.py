"""A server that insists on token-in, before a stand-in of vLLM whose turns have ends."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

from toprope.capture.memory_store import MemoryStore
from toprope.capture.recorder import Recorder
from toprope.http.client import Client
from toprope.servers.model.engines.vllm import VllmEngine
from toprope.servers.model.server import ModelServer
from toprope.testing.upstream import serving
from toprope.testing.vllm_stand_in import VllmStandIn

PATH = "/ng-rollout/r/training-token-capture/v1/chat/completions"


@asynccontextmanager
async def required_before(upstream: VllmStandIn, **engine_options):
    """A peer of such a server before `upstream`, its store and its engine."""
    upstream.closes_turns = True
    store = MemoryStore()
    async with serving(upstream) as url, Client() as outside:
        engine = VllmEngine(client=outside, base_url=f"{url}/v1", **engine_options)
        server = ModelServer(name="policy", engine=engine, recorder=Recorder(store, reader=store), token_in="required")
        await server.app.start()
        async with Client(inline={"policy": server.app}) as client:
            yield client.peer("inline://policy", None), store, engine
        await server.app.stop()


@asynccontextmanager
async def required_on_vllm(says, stand_in=VllmStandIn):
    """A peer of such a server before a stand-in that says so, and its store."""
    async with required_before(stand_in(says=says)) as (peer, store, _):
        yield peer, store


async def converse(peer, path, fields, turns):
    """The replies to that many turns of a conversation in which the model says "hello"."""
    history, replies = [{"role": "user", "content": "hi"}], []
    for _ in range(turns):
        items = {"input" if path.endswith("responses") else "messages": history}
        replies.append(await peer.request("POST", path, body=json.dumps({"model": "m", **items, **fields}).encode()))
        history = [*history, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "so?"}]
    return replies
