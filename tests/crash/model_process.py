"""Model servers with capture in processes of their own.

`python -m tests.crash.model_process STORE DIR UPSTREAM PORT [DIE]` prints its URL, then serves. With DIE it kills
itself when its first call is on record and the reply has not left.

`python -m tests.crash.model_process` is a stable: it has everything imported and forks a server for each line
`{"directory", "upstream", "port", "turn", "kill_at"}` of its input; says that server's URL, the points that its call
number `turn` had (where `kill_at` is null) or the one it dies at, and its exit code when it has ended. A point is a
call of a function of the product while that request is in hand: they are found, not named, so that what is added later
is killed without being told. What is said of a point is its phase (`PHASES`) and the function.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.crash.scenes import STORES

import toprope
from toprope.capture.recorder import Recorder
from toprope.dialects.deltas import TextDelta
from toprope.http.client import Client
from toprope.http.serve import serve
from toprope.servers.model.call import ModelCall
from toprope.servers.model.engines.base import EngineReply, EngineRequest
from toprope.servers.model.engines.openai import OpenAIEngine
from toprope.servers.model.server import ModelServer

_PRODUCT = str(Path(toprope.__file__).parent)

PHASES = {
    "recorder.py:begin": "begun",
    "chat_endpoint.py:complete": "sent",
    "chat_endpoint.py:_finished": "finished",
    "sqlite_store.py:put": "put",
    "notes.py:answered": "recorded",
}
"""The functions that a phase of a call begins with; before all of them it is `read`. `finished`: the upstream's reply
is there and nobody has begun to write it down."""


class Dying(ModelServer):
    async def after_call(self, call: ModelCall, reply: EngineReply) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Spoken(OpenAIEngine):
    """Says the upstream's whole reply in two deltas, so that a streaming client has read a part before the record."""

    async def generate(self, request: EngineRequest) -> EngineReply:
        made = await super().generate(replace(request, emit=None))
        if request.emit is not None:
            text = made.output[0]["content"][0]["text"]
            for piece in (text[:3], text[3:]):
                request.emit(TextDelta(0, piece))
                for _ in range(3):
                    await asyncio.sleep(0)  # what was said leaves
        return made


class Counted:
    """The app, whose request number `turn` to a model is counted, point by point."""

    def __init__(self, app: Any, turn: int, kill_at: int | None) -> None:
        self._app, self._turn, self._kill_at = app, turn, kill_at
        self._asked, self._armed, self._phase = 0, False, "read"
        self._points: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        asks = scope["type"] == "http" and scope["method"] == "POST"
        self._asked += asks
        this = asks and self._asked == self._turn
        self._armed = self._armed or this
        await self._app(scope, receive, send)
        if this and self._kill_at is None:
            print(json.dumps({"points": self._points}), flush=True)

    def seen(self, frame: Any, event: str, _: object) -> None:
        if event != "call" or not self._armed or not frame.f_code.co_filename.startswith(_PRODUCT):
            return
        name = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_code.co_name}"
        self._phase = PHASES.get(name, self._phase)
        self._points.append(f"{self._phase} {name}")
        if len(self._points) == self._kill_at:
            os.write(1, json.dumps({"died": self._points[-1]}).encode() + b"\n")
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


async def foal(directory: str, upstream: str, port: int, kill_at: int | None, turn: int = 1) -> None:
    """One forked server."""
    made = STORES["sqlite"](Path(directory))
    await made.settle_dead_writers()
    async with Client() as client:
        engine = Spoken(client=client, base_url=f"{upstream}/v1", return_token_ids=True)
        server = ModelServer(name="policy", engine=engine, recorder=Recorder(made, reader=made))
        counted: Any = Counted(server.app, turn, kill_at)
        if kill_at != 0:
            threading.setprofile(counted.seen)
            sys.setprofile(counted.seen)
        bound = await serve(counted, port=port)
        print(json.dumps({"url": bound.url, "pid": os.getpid()}), flush=True)
        await asyncio.Event().wait()


def stable() -> None:
    """Fork a server for each line; one at a time is waited for by `wait`."""
    for line in sys.stdin:
        told = json.loads(line)
        if "wait" in told:
            code = os.waitstatus_to_exitcode(os.waitpid(told["wait"], 0)[1])
            print(json.dumps({"code": code}), flush=True)
        elif os.fork() == 0:
            try:
                asyncio.run(foal(**told))
            finally:
                os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        stable()
    else:
        asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), len(sys.argv) > 5))
