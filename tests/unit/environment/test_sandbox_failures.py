"""The rows of the failure table that a sandbox adds: cannot be made, cannot be borrowed, gone while it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from toprope.errors.kinds import is_kind
from toprope.http.client import Client
from toprope.sandbox.desk import SandboxDesk
from toprope.sandbox.plain import PlainDirectory, PlainSandbox
from toprope.sandbox.provider import Sandbox
from toprope.sandbox.spec import SandboxBusy, SandboxLost, SandboxSpec, SandboxUnavailable
from toprope.servers.agent.agent import Activation, Agent
from toprope.servers.agent.server import AgentServer
from toprope.servers.environment.base import EnvironmentServer
from toprope.servers.environment.single_agent_turn import SingleAgentTurn
from toprope.servers.resources.environment import Environment
from toprope.servers.resources.server import ResourcesServer

KEY = b"k" * 32
EPISODE = {"rollout_id": "run.0-0", "attempt": 0}
TASK = {
    "task_id": {"taskset": "t", "task_id": "1"},
    "task_input": {"responses_create_params": {"input": "x"}, "task_data": {}},
}


class Boxes(PlainDirectory):
    """Plain directories, but for the fault of the test; keeps what it made, so that a test can take it away."""

    def __init__(self, leases: Path, fault: str) -> None:
        super().__init__(leases, name="box")
        self.fault = fault
        self.made: list[Sandbox] = []

    async def create(self, spec: SandboxSpec) -> PlainSandbox:
        if self.fault == "busy":
            raise SandboxBusy("the machine is full")
        if self.fault == "missing":
            raise SandboxUnavailable("no such program")
        sandbox = await super().create(spec)
        self.made.append(sandbox)
        return sandbox

    async def attach(self, descriptor: Mapping[str, Any]) -> Any:
        if self.fault == "gone before it is borrowed":
            raise SandboxLost("its owner died")
        return await super().attach(descriptor)

    async def go(self, fault: str) -> None:
        """Take away what was made, should that be the test's fault."""
        if self.fault == fault:
            for sandbox in self.made:
                await sandbox.stop()


class Lending(Environment):
    """Graded by a file that the agent writes."""

    sandbox = SandboxSpec()
    lends_sandbox = True

    def __init__(self, boxes: Boxes) -> None:
        self.boxes = boxes

    async def verify(self, state: Sandbox, task: dict[str, Any], response: dict[str, Any]) -> float:
        await self.boxes.go("gone in verify")
        return float(await state.read_file("answer") == b"4\n")


class Lean(Environment):
    """Lends nothing."""

    def verify(self, state: None, task: dict[str, Any], response: dict[str, Any]) -> float:
        return 1.0


class Coder(Agent):
    """Writes its answer with a program."""

    sandbox = SandboxSpec()

    def __init__(self, boxes: Boxes) -> None:
        self.boxes = boxes

    async def respond(self, activation: Activation) -> dict[str, Any]:
        assert activation.sandbox is not None
        await self.boxes.go("gone in the activation")
        await activation.sandbox.run(["sh", "-c", "echo 4 > answer"])
        return {"object": "response", "status": "completed", "output": []}


async def run(place: Path, fault: str) -> dict[str, Any]:
    """The reply to `/run` where `fault` happens."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(transport_attempts=1))
        boxes = Boxes(place, fault)
        desk = SandboxDesk(boxes)
        await desk.open()
        stack.push_async_callback(desk.close)
        environment = Lean() if fault == "none lent and none own" else Lending(boxes)
        resources = ResourcesServer(name="rooms", environment=environment, signing_key=KEY, sandboxes=desk)
        agent = AgentServer(
            name="coder",
            agent=Coder(boxes),
            model=client.peer("inline://nobody", "model"),
            client=client,
            signing_key=KEY,
            sandboxes={} if fault == "not known to the agent" else {"box": desk},
        )
        episode = EnvironmentServer(
            name="episode",
            protocol=SingleAgentTurn(),
            resources=client.peer("inline://rooms", "resources"),
            agent=client.peer("inline://coder", "agent"),
        )
        for server in (resources, agent, episode):
            client.register(f"inline://{server.name}", server.app)
            await server.app.start()
            stack.push_async_callback(server.app.stop)
        peer = client.peer("inline://episode", "environment")
        reply = await peer.request("POST", "/run", body={"episode_id": EPISODE, "task": TASK})
        outcome: dict[str, Any] = reply.json()
        assert (len(resources.sessions), len(agent.sessions)) == (0, 0)
    assert left(place) == [], "no sandbox is left"
    return outcome


def left(place: Path) -> list[str]:
    return [path.name for path in place.glob("*") if not path.name.startswith(".")]


async def test_without_a_fault_there_is_a_reward(tmp_path: Path) -> None:
    outcome = await run(tmp_path, "none")
    assert outcome["failure"] is None, outcome["failure"]
    assert outcome["result"]["reward"] == 1.0


@pytest.mark.promise("EP-9")
@pytest.mark.parametrize(
    ("fault", "stage", "terminal", "kind", "cause"),
    [
        ("busy", "seed", False, "grant_unavailable", "the machine is full"),
        ("missing", "seed", True, "grant_unavailable", "no such program"),
        ("gone before it is borrowed", "agent", False, "session_lost", "its owner died"),
        ("not known to the agent", "agent", True, "grant_unavailable", "knows no sandbox provider 'box'"),
        ("none lent and none own", "agent", True, "grant_unavailable", "the environment lends none"),
        ("gone in the activation", "agent", False, "session_lost", "sandbox"),
        ("gone in verify", "verification", False, "session_lost", "sandbox"),
    ],
)
async def test_each_failure_of_a_sandbox_has_its_stage_kind_and_cause(
    tmp_path: Path, fault: str, stage: str, terminal: bool, kind: str, cause: str
) -> None:
    outcome = await run(tmp_path, fault)
    failure = outcome["failure"]
    assert outcome["result"] is None
    assert (failure["stage"], failure["terminal"], failure["failure_kind"]) == (stage, terminal, kind)
    assert is_kind(kind)
    assert cause in failure["failure_reason"]
    assert ("partial_response" in failure) == (stage == "verification")
    assert "reward" not in failure
