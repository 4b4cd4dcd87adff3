"""A sandbox a session: made before the seed, given to the author, lent if the environment says so, stopped with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from toprope.errors.tree import ConfigError
from toprope.http.client import Client
from toprope.http.reply import Reply
from toprope.protocol.grants import SandboxAccess
from toprope.sandbox.desk import SandboxDesk, borrow
from toprope.sandbox.plain import PlainDirectory
from toprope.sandbox.provider import Sandbox, SandboxProvider
from toprope.sandbox.spec import SandboxBusy, SandboxLost, SandboxSpec, SandboxUnavailable
from toprope.servers.resources.environment import Environment
from toprope.servers.resources.server import ResourcesServer

KEY = "run.0-0"
EPISODE = {"rollout_id": KEY, "attempt": 0}
HEADERS = {"x-toprope-close-token": "tok", "x-toprope-session": "s1"}


class Lending(Environment):
    """The reward is what stands in a file of the sandbox."""

    sandbox = SandboxSpec()
    lends_sandbox = True

    async def seed(self, task: dict[str, Any], sandbox: Sandbox) -> Sandbox:
        await sandbox.write_file("given", str(task["goal"]).encode())
        if task.get("breaks"):
            raise ValueError("no such thing")
        return sandbox

    async def verify(self, state: Sandbox, task: dict[str, Any], response: dict[str, Any]) -> float:
        return float(await state.read_file("answer") == str(task["goal"]).encode())


class Private(Environment):
    """Runs code of its own in the sandbox, which the agent never sees. Without a seed the sandbox is the state."""

    sandbox = SandboxSpec()

    async def verify(self, state: Sandbox, task: dict[str, Any], response: dict[str, Any]) -> float:
        return float((await state.run(["sh", "-c", "exit 0"])).exit == 0)


@asynccontextmanager
async def house(
    environment: Environment, leases: Path, ttl_s: float = 900, provider: SandboxProvider | None = None
) -> AsyncIterator[tuple[Any, Any, SandboxDesk]]:
    desk = SandboxDesk(provider or PlainDirectory(leases, name="box"))
    server = ResourcesServer(
        name="env", environment=environment, signing_key=b"k" * 32, sandboxes=desk, session_ttl_s=ttl_s
    )
    async with Client(transport_attempts=1) as client:
        client.register("inline://env", server.app)
        await desk.open()
        await server.app.start()
        try:
            yield server, client.peer("inline://env", "resources"), desk
        finally:
            await server.app.stop()
            await desk.close()
    assert left(leases) == []


def left(leases: Path) -> list[str]:
    return [path.name for path in leases.glob("*") if not path.name.startswith(".")]


async def seed(peer: Any, session: str = "s1", **data: Any) -> Reply:
    body = {"resources_session_id": session, "episode_id": EPISODE, "task_data": {"goal": 42, **data}}
    body["task_id"] = {"taskset": "t", "task_id": "1"}
    reply: Reply = await peer.request("POST", "/seed_session", body=body, headers=HEADERS)
    return reply


async def close(peer: Any, session: str = "s1") -> Reply:
    body = {"resources_session_id": session, "episode_id": EPISODE}
    reply: Reply = await peer.request("POST", "/close_session", body=body, headers=HEADERS)
    return reply


async def verify(peer: Any) -> Reply:
    body = {"goal": 42, "responses_create_params": {"input": "x"}, "response": {"output": []}}
    reply: Reply = await peer.request("POST", "/verify", body=body, headers=HEADERS)
    return reply


@pytest.mark.promise("EP-14")
async def test_the_seed_reply_lends_it_the_verifier_finds_what_was_done_and_the_close_stops_it(tmp_path: Path) -> None:
    async with house(Lending(), tmp_path) as (_, peer, desk):
        told = (await seed(peer)).json()["sandbox_access"]
        assert told["connection"]["kind"] == "direct"
        assert told["connection"]["provider_config_ref"] == "box"
        assert (await seed(peer)).json()["sandbox_access"] == told, "a seed that is sent again made no second one"
        borrowed = await borrow({"box": desk}, msgspec.convert(told, SandboxAccess))
        done = await borrowed.run(["sh", "-c", "cp given answer"])
        assert done.exit == 0
        await borrowed.disconnect()
        assert (await verify(peer)).json()["reward"] == 1.0
        assert len(left(tmp_path)) == 1
        assert (await close(peer)).status == 200
        assert left(tmp_path) == []
        with pytest.raises(SandboxLost):
            await borrow({"box": desk}, msgspec.convert(told, SandboxAccess))


@pytest.mark.parametrize(("refusal", "retryable"), [(SandboxBusy, True), (SandboxUnavailable, False)])
async def test_a_seed_without_its_sandbox_says_whether_another_try_can_help(
    tmp_path: Path, refusal: type[SandboxUnavailable], retryable: bool
) -> None:
    class Refusing(PlainDirectory):
        async def create(self, spec: SandboxSpec) -> Any:
            raise refusal("none today")

    async with house(Private(), tmp_path, provider=Refusing(tmp_path, name="box")) as (_, peer, _desk):
        reply = await seed(peer)
    error = reply.json()["error"]
    assert (reply.status, error["kind"], error["retryable"]) == (503, "grant_unavailable", retryable)


async def test_a_private_one_is_not_told_to_anybody(tmp_path: Path) -> None:
    async with house(Private(), tmp_path) as (_, peer, _desk):
        assert "sandbox_access" not in (await seed(peer)).json()
        assert (await verify(peer)).json()["reward"] == 1.0
        await close(peer)
        assert left(tmp_path) == []


async def test_a_seed_that_fails_leaves_none(tmp_path: Path) -> None:
    async with house(Lending(), tmp_path) as (_, peer, _desk):
        failed = await seed(peer, breaks=True)
        assert failed.json()["error"]["kind"] == "seed_failed"
        assert left(tmp_path) == []


@pytest.mark.promise("EP-11")
async def test_a_session_that_expires_takes_its_sandbox_along(tmp_path: Path) -> None:
    async with house(Lending(), tmp_path, ttl_s=0.001) as (server, peer, _desk):
        await seed(peer)
        while server.sessions.sweep() == 0:
            pass
        await close(peer)  # waits for the release that the expiry began
        assert left(tmp_path) == []


def test_an_environment_that_needs_one_does_not_start_without_a_provider() -> None:
    with pytest.raises(ConfigError, match="needs `sandbox`"):
        ResourcesServer(name="env", environment=Private(), signing_key=b"k" * 32)
