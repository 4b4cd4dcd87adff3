"""Field cases A15 (one bad rollout takes the batch with it) and A16 (a failure scored as 0, or rows just missing).

The agent and the resources server are strangers on real sockets: plain asyncio, nothing of ours, cookie sessions.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from toprope.collector.collect import Collector
from toprope.collector.settings import Destination, RunSettings
from toprope.collector.summary import Summary
from toprope.http.client import Client
from toprope.results.layout import RunDir
from toprope.servers.environment.base import EnvironmentServer
from toprope.servers.environment.single_agent_turn import SingleAgentTurn

CUT = object()
"""Answer with half a body and close the connection."""
EXIT = object()
"""Close the connection without an answer, and every later one."""

Answer = Callable[[str, dict[str, Any]], Any]


class Stranger:
    """A server that answers every POST by a function of path and body: a JSON value, (status, bytes), CUT or EXIT."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.seen: list[str] = []

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                path, length = line.split()[1].decode(), 0
                while (header := await reader.readline()) not in (b"\r\n", b""):
                    name, _, value = header.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                body = json.loads(await reader.readexactly(length) or b"{}")
                self.seen.append(path)
                told = self._answer(path, body)
                if told is EXIT:
                    return
                if told is CUT:
                    writer.write(
                        b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"id":'
                    )
                    await writer.drain()
                    return
                status, data = told if isinstance(told, tuple) else (200, json.dumps(told).encode())
                head = f"HTTP/1.1 {status} X\r\nset-cookie: s=1\r\ncontent-length: {len(data)}\r\n\r\n"
                writer.write(head.encode() + data)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def row_of(path: str) -> int:
    """The task index in `/ng-rollout/run.<task>-<repeat>[-a<n>]/...`."""
    return int(path.split("/")[2].removeprefix("run.").split("-")[0])


def polite_agent(path: str, body: dict[str, Any]) -> Any:
    if path.endswith("/v1/responses"):
        content = [{"type": "output_text", "text": "4", "annotations": []}]
        item = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": content}
        return {"id": "r", "object": "response", "status": "completed", "model": "m", "output": [item]}
    return {"agent_session_id": body["agent_session_id"]}


def polite_resources(path: str, body: dict[str, Any]) -> Any:
    return (
        {**body, "reward": 1.0} if path.endswith("/verify") else {"resources_session_id": body["resources_session_id"]}
    )


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with Client(transport_budget_s=1.0, transport_attempts=2) as client:
        yield client


async def collect(tmp_path: Path, client: Client, agent: Answer, resources: Answer, rows: int) -> Summary:
    a, r = Stranger(agent), Stranger(resources)
    a_url, r_url = await a.start(), await r.start()
    environment = EnvironmentServer(
        name="environment",
        protocol=SingleAgentTurn(),
        resources=client.peer(r_url, "resources"),
        agent=client.peer(a_url, "agent"),
    )
    client.register("inline://environment", environment.app)
    tasks = [{"responses_create_params": {"input": f"2+2 ({index})"}} for index in range(rows)]
    collector = Collector(
        run_dir=tmp_path,
        environments={"*": Destination(peer=client.peer("inline://environment", "environment"))},
        settings=RunSettings(run_id="run", backoff_s=0.0, max_attempts=2),
    )
    try:
        return await collector.collect(tasks)
    finally:
        await environment.app.stop()
        await client.close()
        await a.stop()
        await r.stop()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


async def test_a15_a_500_a_garbled_and_a_dropped_body_cost_one_row_each(tmp_path: Path, client: Client) -> None:
    def agent(path: str, body: dict[str, Any]) -> Any:
        faults = {5: (500, b"Traceback: the harness fell over"), 6: (200, b"not json"), 7: CUT}
        if path.endswith("/v1/responses") and row_of(path) in faults:
            return faults[row_of(path)]
        return polite_agent(path, body)

    summary = await collect(tmp_path, client, agent, polite_resources, 8)
    counts = summary.coverage
    assert (counts.expected, counts.measured, counts.failed) == (8, 5, 3)
    last = {row["_ng_task_index"]: row for row in lines(RunDir(tmp_path).failures)}
    assert set(last) == {5, 6, 7}
    assert last[5]["upstream_status"] == 500
    assert "the harness fell over" in last[5]["failure_reason"]
    assert "not json" in last[6]["failure_reason"]
    assert (last[5]["terminal"], last[6]["terminal"], last[7]["terminal"]) == (False, True, False)
    assert last[7]["failure_kind"] == "transport_dropped"
    assert {row["stage"] for row in last.values()} == {"agent"}


async def test_a16_infrastructure_failures_have_no_reward_and_no_row_is_missing(tmp_path: Path, client: Client) -> None:
    def resources(path: str, body: dict[str, Any]) -> Any:
        if path.endswith("/verify") and row_of(path) == 2:
            return 503, b'{"error": {"message": "sandbox pool is down"}}'
        if path.endswith("/verify") and row_of(path) == 3:
            return {key: value for key, value in polite_resources(path, body).items() if key != "reward"}
        return polite_resources(path, body)

    def agent(path: str, body: dict[str, Any]) -> Any:
        return EXIT if path.endswith("/v1/responses") and row_of(path) == 4 else polite_agent(path, body)

    summary = await collect(tmp_path, client, agent, resources, 6)
    run_dir = RunDir(tmp_path)
    last = {row["_ng_task_index"]: row for row in lines(run_dir.failures)}
    assert set(last) == {2, 3, 4}
    assert all("reward" not in row for row in lines(run_dir.failures))
    assert (last[2]["stage"], last[2]["terminal"], last[2]["upstream_status"]) == ("verification", False, 503)
    assert "sandbox pool is down" in last[2]["failure_reason"]
    assert (last[3]["stage"], last[3]["terminal"]) == ("verification", True)
    assert (last[4]["stage"], last[4]["terminal"]) == ("agent", False)
    assert last[2]["partial_response"]["output"]
    assert summary.metrics.measures["reward"].rollouts.n == 3
    assert summary.metrics.measures["reward"].rollouts.mean == 1.0
    assert len(lines(run_dir.results)) + len(last) == summary.coverage.expected
