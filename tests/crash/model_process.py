"""A model server with capture in a process of its own.

`python -m tests.crash.model_process STORE DIR UPSTREAM PORT [DIE]` prints its URL, then serves. With DIE it kills
itself when its first call is on record and the reply has not left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from tests.crash.scenes import STORES

from toprope.capture.recorder import Recorder
from toprope.http.client import Client
from toprope.http.serve import serve
from toprope.servers.model.call import ModelCall
from toprope.servers.model.engines.base import EngineReply
from toprope.servers.model.engines.openai import OpenAIEngine
from toprope.servers.model.server import ModelServer


class Dying(ModelServer):
    async def after_call(self, call: ModelCall, reply: EngineReply) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


async def main(store: str, directory: Path, upstream: str, port: int, dying: bool) -> None:
    made = STORES[store](directory)
    await made.settle_dead_writers()
    async with Client() as client:
        engine = OpenAIEngine(client=client, base_url=f"{upstream}/v1", return_token_ids=True)
        kind = Dying if dying else ModelServer
        server = kind(name="policy", engine=engine, recorder=Recorder(made, reader=made))
        bound = await serve(server.app, port=port)
        print(bound.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), len(sys.argv) > 5))
