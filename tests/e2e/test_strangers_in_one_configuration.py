"""A resources server, an agent and an endpoint that others wrote, by URL in one configuration, over real sockets."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from toprope.collector.collect import Collector
from toprope.launch.config import read_configuration
from toprope.launch.run import RunJob
from toprope.launch.world import World

from ..contract import strangers  # noqa: TID252 (tests are no package that could be named)

ADD = {
    "type": "function",
    "name": "add",
    "description": "Add n.",
    "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
}
TASK: dict[str, Any] = {
    "responses_create_params": {"input": [{"role": "user", "content": "Add 5."}], "tools": [ADD]},
    "goal": 5,
}


@pytest.mark.promise("EP-18")
async def test_strangers_by_url_work_in_one_configuration(tmp_path: Path) -> None:
    resources, endpoint = strangers.StrangerResources(), strangers.StrangerEndpoint()
    agent = strangers.StrangerAgent("http://127.0.0.1:9")
    with ExitStack() as stack:
        urls = []
        for stranger in (resources, agent, endpoint):
            running = strangers.Running(stranger.app())
            stack.callback(running.stop)
            urls.append(running.url)
        configuration = read_configuration(
            {
                "servers": {
                    "policy": {"role": "model", "engine": {"kind": "openai", "base_url": f"{urls[2]}/v1"}},
                    "counter": {"role": "resources", "url": urls[0]},
                    "harness": {"role": "agent", "url": urls[1]},
                    "episode": {
                        "role": "environment",
                        "resources": "counter",
                        "agent": "harness",
                        "tools": ["direct_http"],
                    },
                },
                "run": {"environment": "episode", "tasks": "tasks.jsonl", "repeats": 3, "out": str(tmp_path / "out")},
            },
            file="strangers.yaml",
            directory=tmp_path,
        )
        (tmp_path / "tasks.jsonl").write_bytes(_line(TASK))
        bound: list[str] = []

        def ready(collector: Collector, world: World) -> None:
            # An agent elsewhere is told where the model server listens; ours is bound because such an agent is there.
            bound.extend(address.name for address in world.bound())
            agent.model_url = world.addresses["policy"].url

        summary = await RunJob(configuration).collect(ready=ready)
    assert bound == ["policy"]
    assert summary.exit_status == 0, summary.message
    assert summary.metrics.measures["reward"].rollouts.mean == 1.0
    assert (resources.opened, resources.closed) == (3, 3)
    assert (agent.opened, agent.closed) == (3, 3)
    # Both participants saw every call under its rollout's prefix, the endpoint none; at the start they were asked.
    keys = {f"{summary.run_id}.0-{repeat}" for repeat in range(3)}
    for participant in (resources, agent):
        assert participant.keys[0] == ("/health", None)
        assert {key for _, key in participant.keys[1:]} == keys
    assert {key for _, key in endpoint.keys} == {None}


@pytest.mark.promise("EP-18")
async def test_an_agents_own_run_takes_flat_rows_and_its_reply_is_the_result(tmp_path: Path) -> None:
    endpoint, resources = strangers.StrangerEndpoint(), strangers.StrangerFlatResources()
    with ExitStack() as stack:
        urls = []
        for stranger in (endpoint, resources):
            running = strangers.Running(stranger.app())
            stack.callback(running.stop)
            urls.append(running.url)
        agent = strangers.StrangerRunAgent(*urls)
        agent.failures = [503]
        running = strangers.Running(agent.app())
        stack.callback(running.stop)
        configuration = read_configuration(
            {
                "servers": {"harness": {"role": "agent", "url": running.url}},
                "run": {"agent": "harness", "tasks": "tasks.jsonl", "repeats": 3, "out": str(tmp_path / "out")},
            },
            file="strangers.yaml",
            directory=tmp_path,
        )
        materialised = {"task_id": {"taskset": "t", "task_id": "two"}, "task_input": TASK}
        (tmp_path / "tasks.jsonl").write_bytes(_line(TASK) + _line(materialised))
        summary = await RunJob(configuration).collect()
    assert summary.exit_status == 0, summary.message
    assert summary.metrics.measures["reward"].rollouts.mean == 1.0
    # One of six answered 503 and came back as attempt 1; each call of an episode carried the key of its own.
    assert sorted(asked.attempt for asked in agent.asked) == [0, 0, 0, 0, 0, 0, 1]
    ids = {f"{summary.run_id}.{task}-{repeat}" for task in range(2) for repeat in range(3)}
    assert {asked.rollout_id for asked in agent.asked} == ids
    keys = {asked.rollout_id + ("-a1" if asked.attempt else "") for asked in agent.asked[1:]}
    assert {key for _, key in resources.keys} == keys
    assert agent.keys[1:] == [("/run", None)] * 7
    rows = [msgspec.json.decode(line) for line in (tmp_path / "out/results.jsonl").read_bytes().splitlines()]
    assert {row["final_n"] for row in rows} == {5}
    assert {row["_ng_rollout_id"] for row in rows} == ids
    (failed,) = [msgspec.json.decode(line) for line in (tmp_path / "out/failures.jsonl").read_bytes().splitlines()]
    assert (failed["failure_kind"], failed["stage"], failed["terminal"]) == ("agent_failed", "agent", False)
    assert "the harness fell over" in failed["failure_reason"]


@pytest.mark.promise("EP-18")
async def test_an_older_environment_works_in_a_configuration_as_protocol_flat(tmp_path: Path) -> None:
    endpoint, resources = strangers.StrangerEndpoint(), strangers.StrangerFlatResources()
    with ExitStack() as stack:
        urls = []
        for stranger in (endpoint, resources):
            running = strangers.Running(stranger.app())
            stack.callback(running.stop)
            urls.append(running.url)
        configuration = read_configuration(
            {
                "servers": {
                    "policy": {"role": "model", "engine": {"kind": "openai", "base_url": f"{urls[0]}/v1"}},
                    "counter": {"role": "resources", "url": urls[1], "protocol": "flat"},
                    "solver": {"role": "agent", "use": "tool_loop", "model": "policy"},
                    "episode": {
                        "role": "environment",
                        "resources": "counter",
                        "agent": "solver",
                        "tools": ["direct_http"],
                    },
                },
                "run": {"environment": "episode", "tasks": "tasks.jsonl", "out": str(tmp_path / "out")},
            },
            file="strangers.yaml",
            directory=tmp_path,
        )
        (tmp_path / "tasks.jsonl").write_bytes(_line(TASK))
        summary = await RunJob(configuration).collect()
    assert summary.exit_status == 0, summary.message
    assert summary.metrics.measures["reward"].rollouts.mean == 1.0


def _line(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"
