"""SIGKILL of one process in mid-episode: what the others hold is given back, as the environment's ledger says.

Each server is a process; the episode stands in a tool call when one of them is killed. Nothing waits for a fixed time:
the ledger is read until it says what must come.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from toprope.http.client import Client

from .process import CLEANUP_S, EPISODE_S

PROGRAM = Path(__file__).with_name("process.py")
WAIT_S = 30.0
ONE_SWEEP_S = 5.0
"""One sweep (a quarter of the TTL: 0.1 s), and what a loaded machine takes to begin, to notice and to say so."""
TASK = {
    "responses_create_params": {
        "input": "hold it",
        "tools": [{"type": "function", "name": "hold", "parameters": {"type": "object", "properties": {}}}],
    },
    "goal": 1,
}


class Town:
    """The processes, the ledger, and the waiting."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.urls: dict[str, str] = {}
        (place / "ledger").touch()

    def start(self, role: str, *urls: str) -> None:
        command = [sys.executable, str(PROGRAM), role, str(self.place), *urls]
        self.processes[role] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def url(self, role: str) -> str:
        """Where the process listens, once it does."""
        if role not in self.urls:
            out = self.processes[role].stdout
            assert out is not None
            self.urls[role] = out.readline().strip()
        assert self.urls[role].startswith("http"), f"{role} did not start"
        return self.urls[role]

    def kill(self, role: str) -> None:
        self.processes[role].send_signal(signal.SIGKILL)
        self.processes[role].wait(WAIT_S)

    def lines(self) -> list[str]:
        return (self.place / "ledger").read_text().splitlines()

    def until(self, what: str, holds: Callable[[list[str]], bool]) -> list[str]:
        """The ledger once it `holds`."""
        ends = time.monotonic() + WAIT_S
        while not holds(lines := self.lines()):
            assert time.monotonic() < ends, f"never: {what}; the ledger says {lines}"
            time.sleep(0.01)
        return lines

    def let_go(self) -> None:
        (self.place / "go").touch()

    def stop(self) -> None:
        self.let_go()
        for process in self.processes.values():
            process.kill()
            process.wait(WAIT_S)
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    made = Town(tmp_path)
    try:
        made.start("resources")
        made.start("agent")
        made.start("environment", made.url("resources"), made.url("agent"))
        made.url("environment")
        yield made
    finally:
        made.stop()


async def run(town: Town, key: str) -> Any:
    """One episode; the reply to `/run`, or the error of the call."""
    body = {
        "episode_id": {"rollout_id": key, "attempt": 0},
        "task": {"task_id": {"taskset": "t", "task_id": "1"}, "task_input": TASK},
    }
    async with Client(transport_attempts=1) as client:
        peer = client.peer(town.urls["environment"], "environment")
        return (await peer.request("POST", "/run", body=body)).json()


def last_count(lines: list[str]) -> str:
    return [line for line in lines if line.startswith("agent-sessions")][-1]


@pytest.mark.promise("EP-11")
async def test_a_killed_environment_server_leaves_sessions_that_expire_with_their_lease_and_not_before(
    town: Town,
) -> None:
    began = time.monotonic()
    episode = asyncio.create_task(run(town, "one"))
    await asyncio.to_thread(town.until, "a tool call", lambda lines: "holding one" in lines)
    town.kill("environment")
    with pytest.raises(Exception, match="dropped"):
        await episode
    # The activation and its tool go on, as nobody who may stop them did; while they run nothing is released.
    assert not any(line.startswith("released") for line in town.lines())
    town.let_go()
    lines = await asyncio.to_thread(
        town.until, "both are released", lambda lines: "released one" in lines and last_count(lines)[-1] == "0"
    )
    took = time.monotonic() - began
    assert EPISODE_S + CLEANUP_S <= took <= EPISODE_S + CLEANUP_S + ONE_SWEEP_S
    assert [line for line in lines if not line.startswith("agent")] == ["allocated one", "holding one", "released one"]


@pytest.mark.slow
@pytest.mark.promise("EP-11")
async def test_a_killed_agent_server_is_a_retryable_failure_and_the_environments_allocation_is_given_back(
    town: Town,
) -> None:
    episode = asyncio.create_task(run(town, "two"))
    await asyncio.to_thread(town.until, "a tool call", lambda lines: "holding two" in lines)
    town.kill("agent")
    town.let_go()
    failure = (await episode)["failure"]
    assert (failure["stage"], failure["terminal"]) == ("agent", False)
    assert failure["failure_kind"] in ("transport_dropped", "transport_unreachable")
    assert failure["delivery"] == "possibly_delivered"
    lines = await asyncio.to_thread(town.until, "it is released", lambda lines: "released two" in lines)
    assert lines.count("allocated two") == lines.count("released two") == 1


@pytest.mark.slow
@pytest.mark.promise("EP-19")
async def test_a_tool_server_that_is_killed_in_mid_activation_is_a_retryable_failure_and_never_a_low_reward(
    town: Town,
) -> None:
    episode = asyncio.create_task(run(town, "three"))
    await asyncio.to_thread(town.until, "a tool call", lambda lines: "holding three" in lines)
    town.kill("resources")
    outcome = await episode
    assert outcome["result"] is None
    failure = outcome["failure"]
    assert (failure["stage"], failure["failure_kind"], failure["terminal"]) == ("agent", "tool_unavailable", False)
    assert "reward" not in failure
    assert [item["type"] for item in failure["partial_response"]["output"]] == ["function_call"]
    await asyncio.to_thread(town.until, "the agent is closed", lambda lines: last_count(lines)[-1] == "0")


@pytest.mark.slow
@pytest.mark.promise("EP-11")
def test_a_killed_collector_has_its_episode_closed_and_its_journal_says_what_was_in_flight(town: Town) -> None:
    (town.place / "tasks.jsonl").write_text(json.dumps(TASK) + "\n")
    servers = {"episode": {"role": "environment", "url": town.urls["environment"]}}
    configuration = {"servers": servers, "run": {"environment": "episode", "tasks": "tasks.jsonl"}}
    (town.place / "run.yaml").write_text(json.dumps(configuration))
    collector = subprocess.Popen(
        [sys.executable, "-m", "toprope", "run", "run.yaml", "--out", "out"],
        cwd=town.place,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "200"},
    )
    town.processes["collector"] = collector  # type: ignore[assignment]
    town.until("a tool call", lambda lines: any(line.startswith("holding") for line in lines))
    town.kill("collector")
    town.let_go()
    lines = town.until(
        "both are closed",
        lambda lines: any(line.startswith("released") for line in lines) and last_count(lines)[-1] == "0",
    )
    journal = [json.loads(line) for line in (town.place / "out/journal.jsonl").read_bytes().splitlines()]
    (dispatched,) = [line for line in journal if line["type"] == "dispatch"]
    assert f"released {dispatched['rollout_id']}" in lines
    assert not [line for line in journal if line["type"] == "outcome"]
