"""1,000 episodes at concurrency 200, faults in 5 % of them: all are accounted for, and nothing is left open.

Each episode's allocation is a process. A session whose close never arrives is left to its lease: exactly these are left
when the run ends, with their processes, and none when the leases are over.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import time
import zlib
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from toprope.collector.collect import Collector
from toprope.collector.settings import RunSettings
from toprope.http.asgi import AsgiApp
from toprope.http.client import Client
from toprope.http.exchange import Exchange, Origin, Transport
from toprope.http.replay import ReplayBounds, Replayer, ReplayPolicy
from toprope.http.reply import Reply
from toprope.protocol.ids import EpisodeId
from toprope.servers.agent.server import AgentServer
from toprope.servers.environment.base import EnvironmentServer
from toprope.servers.environment.single_agent_turn import SingleAgentTurn
from toprope.servers.model.server import ModelServer
from toprope.servers.resources.server import ResourcesServer
from toprope.testing.scripted import ScriptedEngine

from .front import KEY, dead_port
from .house import HURRIED, LOOK, PATIENT, SIGNING_KEY, Counted, CountedAgent, solve
from .test_matrix import PATHS

EPISODES = 1000
CONCURRENCY = 200
ONE_IN = 20
KINDS = ("refused", "500", "429", "dropped_before", "hang", "dropped_after", "cut", "garbage")
BEFORE_THE_EFFECT = KINDS[:5]
CALLS = [call for call in PATHS if call != "user"]


class Processes(Counted):
    """The allocation of an episode is a process of the host, which only a release ends. `most`: at one time."""

    def __init__(self, did: Counter[tuple[str, str]]) -> None:
        super().__init__(did)
        self.running: set[int] = set()
        self.most = 0

    async def seed(self, task: dict[str, Any]) -> Any:
        await super().seed(task)
        child = await asyncio.to_thread(os.posix_spawnp, "sleep", ["sleep", "3600"], os.environ)
        self.running.add(child)
        self.most = max(self.most, len(self.running))
        return child

    async def release(self, state: Any) -> None:
        os.kill(state, signal.SIGKILL)
        await asyncio.to_thread(os.waitpid, state, 0)
        self.running.discard(state)
        await super().release(state)

    def kill_left(self) -> None:
        """What a test that fails leaves must not outlive it."""
        for child in self.running:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


class FaultLayer:
    """An app in front of another: one rollout in twenty meets a fault at one of its calls, once or always.

    Which, is a digest of its key: the same in every run.
    """

    def __init__(self, app: AsgiApp, met: Counter[str]) -> None:
        self.app = app
        self.met = met

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        kind = _meets(scope["path"], self.met) if scope["type"] == "http" else None
        if kind is None or kind == "refused":
            await self.app(scope, receive, send)
            return
        self.met[_key(scope["path"])] += 1
        if kind == "dropped_before":
            raise ConnectionError("dropped on purpose")
        if kind == "hang":
            await asyncio.Event().wait()
        if kind in ("500", "429"):
            await _answer(send, int(kind), b"out of order")
            return
        told: list[Any] = []

        async def keep(message: Any) -> None:
            told.append(message)

        await self.app(scope, receive, keep)
        if kind == "cut":
            await send(told[0])
        elif kind == "garbage":
            await _answer(send, 200, b"<html>")
        else:
            raise ConnectionError("dropped on purpose")


class Refuser(Replayer):
    """Sends calls that are to be refused to a port that refuses, so that the operating system says so."""

    def __init__(self, dead: Origin, met: Counter[str]) -> None:
        super().__init__(ReplayBounds(attempts=2, budget_s=1.0))
        self.dead, self.met = dead, met

    async def send(self, transport: Transport, exchange: Exchange, policy: ReplayPolicy) -> Reply:
        return await super().send(_Refusing(self, transport), exchange, policy)


@dataclasses.dataclass(slots=True)
class _Refusing:
    owner: Refuser
    transport: Transport

    async def send(self, exchange: Exchange) -> Reply:
        if _meets(exchange.target, self.owner.met) == "refused":
            self.owner.met[_key(exchange.target)] += 1
            exchange = dataclasses.replace(exchange, origin=self.owner.dead)
        return await self.transport.send(exchange)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


class Dispatch:
    """`/run` goes to the environment server that is hurried at the call that will hang, and else to the patient one."""

    def __init__(self, apps: dict[str | None, AsgiApp]) -> None:
        self.apps = apps

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        whole = [{"type": "http.request", "body": body, "more_body": False}]
        episode = msgspec.json.decode(body, type=_Run).episode_id

        async def again() -> Any:
            return whole.pop() if whole else await receive()

        fault = planned(episode.key)
        app = self.apps[fault[1] if fault is not None and fault[0] == "hang" else None]
        await app(scope, again, send)


class _Run(msgspec.Struct):
    episode_id: EpisodeId


async def _answer(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"text/plain"), *([(b"retry-after", b"0.02")] if status == 429 else [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def planned(key: str) -> tuple[str, str, bool] | None:
    """Fault, call, and whether it is met once only."""
    number = zlib.crc32(key.encode())
    if number % ONE_IN:
        return None
    number //= ONE_IN
    return KINDS[number % len(KINDS)], CALLS[number // len(KINDS) % len(CALLS)], bool(number // 64 % 2)


def _key(path: str) -> str:
    match = KEY.fullmatch(path)
    return match[1] if match else ""


def _meets(path: str, met: Counter[str]) -> str | None:
    """The fault that a call of this path meets now."""
    match = KEY.fullmatch(path)
    fault = None if match is None else planned(match[1])
    if match is None or fault is None or match[2] != PATHS[fault[1]] or (fault[2] and met[match[1]]):
        return None
    return fault[0]


def children() -> set[str]:
    """The processes that this one has started and that are still there, zombies too."""
    found: set[str] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            parent = stat.read_text().rpartition(")")[2].split()[1]
            if parent == str(os.getpid()):
                found.add(stat.parent.name)
    return found


@pytest.mark.promise("EP-9")
async def test_a_thousand_episodes_with_faults_are_accounted_for_and_leave_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, did, met = children(), Counter[tuple[str, str]](), Counter[str]()
    async with AsyncExitStack() as stack:
        dead = await stack.enter_async_context(dead_port())
        client = await stack.enter_async_context(Client(replayer=Refuser(dead, met)))

        async def up(app: Any, *, faulty: bool = False) -> None:
            client.register(f"inline://{app.name}", FaultLayer(app, met) if faulty else app)
            await app.start()
            stack.push_async_callback(app.stop)

        await up(ModelServer(name="policy", engine=ScriptedEngine(script=solve)).app)
        rooms = Processes(did)
        stack.callback(rooms.kill_left)
        resources = ResourcesServer(name="rooms", environment=rooms, signing_key=SIGNING_KEY)
        agent = AgentServer(
            name="solver",
            agent=CountedAgent(did),
            model=client.peer("inline://policy", "model"),
            client=client,
            signing_key=SIGNING_KEY,
        )
        await up(resources.app, faulty=True)
        await up(agent.app, faulty=True)
        environments: dict[str | None, EnvironmentServer] = {}
        for hurried in (None, *CALLS):
            environments[hurried] = EnvironmentServer(
                name=f"episode-{hurried or 'patient'}".replace("_", "-"),
                protocol=SingleAgentTurn(),
                resources=client.peer("inline://rooms", "resources"),
                agent=client.peer("inline://solver", "agent"),
                tools=["direct_http"],
                **(HURRIED[hurried] if hurried else PATIENT),  # type: ignore[arg-type]
            )
            await up(environments[hurried].app)
        client.register("inline://any", Dispatch({call: server.app for call, server in environments.items()}))
        collector = Collector(
            run_dir=tmp_path / "run",
            environments={"*": client.peer("inline://any", "environment")},
            settings=RunSettings(run_id="run", concurrency=CONCURRENCY, max_attempts=2, backoff_s=0.0),
        )
        params = {"input": "go", "tools": [LOOK]}
        tasks = [{"responses_create_params": params, "goal": number} for number in range(EPISODES)]
        summary = await collector.collect(tasks)
        assert [server.running for server in environments.values()] == [0] * len(environments)
        # A session is left to its lease exactly where no close of it arrived; so is its process.
        assert sorted(agent.sessions.keys()) == sorted(key for key in met if _never_closes(key, "agent_close"))
        unclosed = sorted(key for key in met if _never_closes(key, "resources_close"))
        assert sorted(resources.sessions.keys()) == unclosed != []
        assert children() - before == {str(pid) for pid in rooms.running}  # of earlier tests some may end meanwhile
        assert len(rooms.running) == len(unclosed)
        assert rooms.most > CONCURRENCY / 4, "processes of many episodes at a time, all of which are gone below"
        for sessions in (agent.sessions, resources.sessions):
            monkeypatch.setattr(sessions, "_clock", lambda: time.monotonic() + 10_000)
            sessions.sweep()
            async with asyncio.timeout(60):
                while sessions.keys():  # noqa: ASYNC110 (a registry tells nobody that it is empty)
                    await asyncio.sleep(0)
        assert children() <= before
    coverage = summary.coverage
    assert (coverage.expected, coverage.omitted) == (EPISODES, 0)
    assert coverage.measured + coverage.masked + coverage.failed == EPISODES
    results = [json.loads(line) for line in (tmp_path / "run/results.jsonl").read_bytes().splitlines()]
    failures = [json.loads(line) for line in (tmp_path / "run/failures.jsonl").read_bytes().splitlines()]
    assert len({row["_ng_rollout_id"] for row in results}) == len(results) == coverage.measured
    assert {row["reward"] for row in results} == {0.75}
    assert not any("reward" in row for row in failures)
    failed = {row["_ng_rollout_id"] for row in failures} - {row["_ng_rollout_id"] for row in results}
    assert len(failed) == coverage.failed > 0
    assert EPISODES // ONE_IN / 2 < len(met) < EPISODES // ONE_IN * 2
    plans = [plan for key in met if (plan := planned(key)) is not None]
    assert {kind for kind, _, _ in plans} == set(KINDS)
    assert {call for _, call, _ in plans} == set(CALLS)
    allocated, released = (
        {key: count for (what, key), count in did.items() if what == wanted} for wanted in ("allocated", "released")
    )
    assert released == allocated, "each allocation is given back once"


def _never_closes(key: str, call: str) -> bool:
    fault = planned(key)
    return fault is not None and fault[1] == call and not fault[2] and fault[0] in BEFORE_THE_EFFECT
