"""A resources server, an agent and an endpoint that others wrote, by URL in one configuration, over real sockets."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

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


def _line(value: dict[str, Any]) -> bytes:
    import msgspec

    return msgspec.json.encode(value) + b"\n"
