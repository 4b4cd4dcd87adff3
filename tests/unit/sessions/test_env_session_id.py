"""ID-6: which rollouts used this session of a provider: measured, failed, aborted and cancelled ones alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from toprope.catalog.tool_loop import ToolLoop
from toprope.cli.app import app
from toprope.cli.reporting import reporting
from toprope.collector.collect import Collector
from toprope.collector.events import Event, Finished
from toprope.collector.settings import Destination, RunSettings
from toprope.http.client import Client
from toprope.http.serve import serve
from toprope.servers.agent.server import AgentServer
from toprope.servers.environment.base import EnvironmentServer
from toprope.servers.environment.single_agent_turn import SingleAgentTurn
from toprope.servers.model.server import ModelServer
from toprope.servers.resources.environment import Environment, Verdict
from toprope.servers.resources.server import ResourcesServer
from toprope.testing.scripted import ScriptCall, ScriptedEngine

SIGNING_KEY = b"k" * 32


class Boxes(Environment):
    """Two boxes for all; verify fails, hangs or moves to another box where the task says so."""

    def seed(self, task: dict[str, Any]) -> str:
        return str(task["box"])

    def env_session_id(self, state: str) -> str | None:
        return state or None

    async def verify(self, state: str, task: dict[str, Any], response: dict[str, Any]) -> Verdict:
        if task["fate"] == "fails":
            raise RuntimeError("the box is on fire")
        if task["fate"] == "hangs":
            await asyncio.Event().wait()
        return Verdict(reward=1.0, env_session_id=task.get("moved_to"))


FATES = [
    {"box": "box-a", "fate": "fine"},
    {"box": "box-a", "fate": "fails"},
    {"box": "box-b", "fate": "fine", "moved_to": "box-c"},
    {"box": "", "fate": "fine"},
    {"box": "box-a", "fate": "hangs"},
]


class World:
    """The four servers, the environment server here or elsewhere, and a run that is stopped once four have ended."""

    def __init__(self, client: Client, stack: AsyncExitStack, place: Path) -> None:
        self.client = client
        self.stack = stack
        self.place = place
        self.ended = 0
        self.collector: Collector | None = None

    async def collect(self, *, elsewhere: bool) -> None:
        def tell(event: str) -> Any:
            def told(report: Any) -> Any:
                assert self.collector is not None
                return self.collector.session(report, event=event)

            return None if elsewhere else told

        await self._up(ModelServer(name="policy", engine=ScriptedEngine(script=_say)).app)
        await self._up(ResourcesServer(name="boxes", environment=Boxes(), signing_key=SIGNING_KEY).app)
        model = self.client.peer("inline://policy", "model")
        await self._up(
            AgentServer(name="solver", agent=ToolLoop(), model=model, client=self.client, signing_key=SIGNING_KEY).app
        )
        server = EnvironmentServer(
            name="episode",
            protocol=SingleAgentTurn(),
            resources=self.client.peer("inline://boxes", "resources"),
            agent=self.client.peer("inline://solver", "agent"),
            on_session=tell("opened"),
            on_session_closed=tell("closed"),
        )
        url = "inline://episode"
        if elsewhere:
            bound = await serve(server.app)
            self.stack.push_async_callback(bound.close)
            url = bound.url
        else:
            await self._up(server.app)
        self.collector = Collector(
            run_dir=self.place,
            environments={"*": Destination(peer=self.client.peer(url, "environment"), tells_sessions=not elsewhere)},
            settings=RunSettings(run_id="run", max_attempts=1),
            observers=[self._seen],
        )
        await self.collector.collect([{"responses_create_params": {"input": "x"}, **fate} for fate in FATES])

    async def _up(self, app: Any) -> None:
        self.client.register(f"inline://{app.name}", app)
        await app.start()
        self.stack.push_async_callback(app.stop)

    def _seen(self, event: Event) -> None:
        self.ended += isinstance(event, Finished)
        if self.ended == len(FATES) - 1 and isinstance(event, Finished):
            assert self.collector is not None
            asyncio.get_running_loop().call_soon(self.collector.stop)


def _say(call: ScriptCall) -> str:
    return "done"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(transport_attempts=1))
        yield World(client, stack, tmp_path / "run")


def show(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[Any], str]:
    with pytest.raises(SystemExit) as ended, reporting(debug=False):
        app(args=["show", *arguments, "--json"], prog_name="toprope")
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), [json.loads(line) for line in out.splitlines()], err


@pytest.mark.promise("ID-6")
@pytest.mark.parametrize("elsewhere", [False, True])
async def test_one_command_lists_the_rollouts_of_a_providers_session_whatever_became_of_them(
    world: World, elsewhere: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    await world.collect(elsewhere=elsewhere)
    place = str(world.place)
    status, lines, _ = await asyncio.to_thread(show, capsys, place, "--env-session", "box-a")
    assert status == 0
    told = [(line["rollout_id"], line["outcome"], line["env_sessions"]) for line in lines]
    assert told == [
        ("run.0-0", "measured", ["box-a"]),
        ("run.1-0", "failed", ["box-a"]),
        ("run.4-0", "interrupted", ["box-a"]),
    ]
    for handle in ("box-b", "box-c"):  # the seed's handle and the verdict's, where they differ
        _, (line,), _ = await asyncio.to_thread(show, capsys, place, "--env-session", handle)
        assert (line["rollout_id"], set(line["env_sessions"])) == ("run.2-0", {"box-b", "box-c"})
    _, lines, _ = await asyncio.to_thread(show, capsys, place)
    assert [line["env_sessions"] for line in lines if line["rollout_id"] == "run.3-0"] == [[]]
    status, lines, err = await asyncio.to_thread(show, capsys, place, "--env-session", "box-z")
    assert (status, lines) == (2, [])
    assert "'box-z'" in err
    assert "4 of 5 attempts name one" in err


@pytest.mark.promise("ID-6")
async def test_the_handle_stands_on_rows_and_nowhere_where_there_is_none(world: World) -> None:
    await world.collect(elsewhere=True)
    results = {row["_ng_rollout_id"]: row for row in _rows(world.place / "results.jsonl")}
    assert results["run.0-0"]["env_session_id"] == "box-a"
    assert "seed_env_session_id" not in results["run.0-0"]
    assert (results["run.2-0"]["env_session_id"], results["run.2-0"]["seed_env_session_id"]) == ("box-c", "box-b")
    assert not any("env_session" in key for key in results["run.3-0"])
    (failure,) = _rows(world.place / "failures.jsonl")
    assert failure["env_session_id"] == "box-a"


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]
