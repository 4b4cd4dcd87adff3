"""Field cases A12, A13, A17 and A19 as whole runs or episodes. A23 is held by tests/e2e/test_run.py, with processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from toprope.catalog.tool_loop import ToolLoop
from toprope.collector.collect import Collector
from toprope.collector.events import Event, Finished
from toprope.collector.settings import RunSettings
from toprope.correlation.context import current_rollout_id
from toprope.errors.tree import ConfigError, TransportError
from toprope.http.client import Client
from toprope.http.replay import BEFORE_DELIVERY, DEDUPLICATED
from toprope.http.serve import serve
from toprope.launch.config import read_configuration
from toprope.launch.construct import importable
from toprope.launch.run import RunJob
from toprope.servers.agent.agent import Activation, Agent
from toprope.servers.agent.server import AgentServer
from toprope.servers.environment.base import EnvironmentServer
from toprope.servers.environment.single_agent_turn import SingleAgentTurn
from toprope.servers.model.server import ModelServer
from toprope.servers.resources.environment import Environment
from toprope.servers.resources.server import ResourcesServer
from toprope.testing.scripted import ScriptCall, ScriptedEngine

KEY = b"k" * 32
DEAD = "http://127.0.0.1:9"


class Nothing(Environment):
    """Worth one point whatever was done."""

    def verify(self, state: Any, task: dict[str, Any], response: dict[str, Any]) -> float:
        return 1.0


class Street:
    """Servers in this process; whatever a test wants on a socket it binds itself."""

    def __init__(self, client: Client, stack: AsyncExitStack) -> None:
        self.client = client
        self.stack = stack

    async def up(self, app: Any) -> str:
        self.client.register(f"inline://{app.name}", app)
        await app.start()
        self.stack.push_async_callback(app.stop)
        return f"inline://{app.name}"

    async def environment(self, *, agent: Agent, model_url: str, **options: Any) -> Any:
        resources = ResourcesServer(name="rooms", environment=Nothing(), signing_key=KEY)
        server = AgentServer(
            name="solver",
            agent=agent,
            model=self.client.peer(model_url, "model"),
            client=self.client,
            signing_key=KEY,
        )
        episode = EnvironmentServer(
            name="episode",
            protocol=SingleAgentTurn(),
            resources=self.client.peer(await self.up(resources.app), "resources"),
            agent=self.client.peer(await self.up(server.app), "agent"),
            **options,
        )
        return self.client.peer(await self.up(episode.app), "environment")


@pytest.fixture
async def street() -> AsyncIterator[Street]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(transport_attempts=2, transport_budget_s=0.5))
        yield Street(client, stack)


async def test_a12_a_dead_model_server_ends_as_failure_rows_with_its_url_and_a_status_of_1(
    street: Street, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = await street.environment(agent=ToolLoop(), model_url=DEAD)
    collector = Collector(
        run_dir=tmp_path / "run",
        environments={"*": environment},
        settings=RunSettings(run_id="run", concurrency=2, max_attempts=1),
    )
    summary = await collector.collect([{"responses_create_params": {"input": str(row)}} for row in range(4)])
    assert (summary.coverage.failed, summary.coverage.measured, summary.exit_status) == (4, 0, 1)
    failures = [json.loads(line) for line in (tmp_path / "run/failures.jsonl").read_bytes().splitlines()]
    assert {row["failure_kind"] for row in failures} == {"transport_unreachable"}
    assert all(DEAD in row["failure_reason"] and not row["terminal"] for row in failures)
    first = next(record.message for record in caplog.records if record.name == "toprope.http")
    assert DEAD in first
    assert "[transport_unreachable]; attempt 1 of 2" in first


@pytest.mark.parametrize("policy", [BEFORE_DELIVERY, DEDUPLICATED])
@pytest.mark.parametrize("path", ["/run", "/seed_session"])
async def test_a13_a_connection_that_its_peer_gave_up_while_idle_costs_no_second_execution(
    street: Street, path: str, policy: Any
) -> None:
    executed = 0
    given_up = asyncio.Event()

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal executed
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(length)
        executed += 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()  # as after an idle second: nothing in the reply said so
        await writer.wait_closed()
        given_up.set()

    server = await asyncio.start_server(peer, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        asked = street.client.peer(url, "environment")
        assert (await asked.request("POST", path, body={}, policy=policy)).status == 200
        await given_up.wait()
        assert (await asked.request("POST", path, body={}, policy=policy)).status == 200
    finally:
        server.close()
    assert executed == 2


async def test_a13_a_peer_that_reads_and_never_answers_is_a_timeout_and_no_lost_connection(street: Street) -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(peer, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        environment = await street.environment(agent=ToolLoop(), model_url=url, agent_timeout_s=0.3)
        outcome = (await environment.request("POST", "/run", body=episode("run.0-0"))).json()
        with pytest.raises(TransportError) as failed:
            await street.client.peer(url, "model").request("POST", "/v1/responses", body={}, timeout_s=0.2)
    finally:
        server.close()
    assert (outcome["failure"]["failure_kind"], outcome["failure"]["stage"]) == ("agent_timeout", "agent")
    assert failed.value.kind == "transport_timeout"


MODULE = '''
import asyncio
from pathlib import Path

from toprope import Environment, tool


class Bench(Environment):
    """Its state can be scored at any time; what its release does is in the task."""

    gradable_on_timeout = True

    def seed(self, task):
        return {"work": 0, "fate": task["fate"]}

    @tool
    def work(self, state) -> str:
        """Do the work."""
        state["work"] = 1
        return "done"

    def verify(self, state, task, response):
        return float(state["work"])

    async def release(self, state):
        if state["fate"] == "slow close":
            while not (Path(__file__).parent / "rows are written").exists():
                await asyncio.sleep(0.01)
        if state["fate"] == "broken close":
            raise RuntimeError("the box would not close")


async def say(call):
    if call.turn == 0:
        from toprope.testing.scripted import ScriptedCall, ScriptedReply

        return ScriptedReply(calls=[ScriptedCall("work", {})])
    if "never" in str(call.request.request.input[0]):
        await asyncio.Event().wait()
    return "finished"
'''


@pytest.mark.promise("EP-6")
@pytest.mark.promise("EP-10")
async def test_a17_a_verified_reward_survives_the_agents_deadline_and_a_close_that_hangs_or_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a17_bench.py").write_text(MODULE)
    tool = {"type": "function", "name": "work", "parameters": {"type": "object", "properties": {}}}
    fates = {"late agent": "never end", "slow close": "end", "broken close": "end"}
    with (tmp_path / "tasks.jsonl").open("w") as file:
        for fate, text in fates.items():
            row = {"responses_create_params": {"input": text, "tools": [tool]}, "fate": fate}
            file.write(json.dumps(row) + "\n")
    values = {
        "servers": {
            "policy": {"role": "model", "engine": {"kind": "scripted", "script": "a17_bench:say"}},
            "bench": {"role": "resources", "use": "a17_bench:Bench"},
            "solver": {"role": "agent", "use": "tool_loop", "model": "policy", "token_id_capture": True},
            "episode": {
                "role": "environment",
                "resources": "bench",
                "agent": "solver",
                "tools": ["direct_http"],
                "agent_timeout_s": 4.0,
                "cleanup_timeout_s": 6.0,
            },
        },
        "run": {"environment": "episode", "tasks": "tasks.jsonl", "out": str(tmp_path / "out"), "stop_s": 0.1},
        "token_id_capture": {"enabled": True, "settle_s": 0.1},
    }
    importable(tmp_path)
    ended: list[Event] = []

    def seen(event: Event) -> None:
        ended.extend([event] if isinstance(event, Finished) else [])
        if len(ended) == len(fates):
            (tmp_path / "rows are written").touch()

    job = RunJob(read_configuration(values, file="a17.yaml", directory=tmp_path))
    summary = await job.collect(observers=[seen])
    assert summary.coverage.failed == 0, summary.message
    rows = {row["fate"]: row for row in map(json.loads, (tmp_path / "out/results.jsonl").read_bytes().splitlines())}
    assert {fate: row["reward"] for fate, row in rows.items()} == dict.fromkeys(fates, 1.0)
    assert {row["_ng_attempt_index"] for row in rows.values()} == {0}
    late = rows.pop("late agent")
    assert late["termination"] == "agent_timeout"
    assert late["_ng_token_capture"]["n_calls"] >= 1
    assert not any("termination" in row for row in rows.values())
    assert "the box would not close" in caplog.text


def test_a19_more_than_one_worker_is_refused_with_a_clear_message(tmp_path: Path) -> None:
    servers = {"rooms": {"role": "resources", "use": "ledger", "workers": 2}}
    with pytest.raises(ConfigError, match=r"servers\.rooms\.workers: 2 .*accepted: 1"):
        read_configuration({"servers": servers}, file="x.yaml", directory=tmp_path)


class Threaded(Agent):
    """Calls its model from a pool of threads of its own, with a base URL, as programs do."""

    async def respond(self, activation: Activation) -> dict[str, Any]:
        import urllib.request

        url = f"{activation.model.url()}/responses"

        def ask() -> Any:
            body = json.dumps({"model": "m", "input": "hi"}).encode()
            request = urllib.request.Request(url, body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=30) as reply:
                return json.loads(reply.read())

        with ThreadPoolExecutor(2) as pool:
            first, _ = await asyncio.gather(*(asyncio.wrap_future(pool.submit(ask)) for _ in range(2)))
        answer: dict[str, Any] = first
        return answer


async def test_a19_calls_from_an_agents_own_threads_carry_the_rollout(street: Street) -> None:
    seen: list[str | None] = []

    def say(call: ScriptCall) -> str:
        seen.append(current_rollout_id())
        return "done"

    model = await serve(ModelServer(name="policy", engine=ScriptedEngine(script=say)).app)
    street.stack.push_async_callback(model.close)
    environment = await street.environment(agent=Threaded(), model_url=model.url)
    outcome = (await environment.request("POST", "/run", body=episode("run.7-0"))).json()
    assert outcome["failure"] is None, outcome["failure"]
    assert seen == ["run.7-0", "run.7-0"]


def episode(rollout_id: str) -> dict[str, Any]:
    task_input = {"responses_create_params": {"input": "x"}}
    task = {"task_id": {"taskset": "t", "task_id": "1"}, "task_input": task_input}
    return {"episode_id": {"rollout_id": rollout_id, "attempt": 0}, "task": task}
