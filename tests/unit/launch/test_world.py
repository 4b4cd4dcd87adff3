"""A configuration becomes a running system: who is built, who is bound, who is stopped."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from toprope import ModelServer, current_rollout_id
from toprope.correlation.context import rollout_context
from toprope.errors.tree import ConfigError, EngineUnavailable, TransportError
from toprope.http.app import Limits, Route, build_app
from toprope.http.client import Client
from toprope.http.reply import Reply, json_reply
from toprope.http.request import Request
from toprope.http.serve import serve
from toprope.launch.config import Configuration, read_configuration
from toprope.launch.elsewhere import ask_elsewhere
from toprope.launch.parts import build_parts
from toprope.launch.run import RunJob, check_capture, scoring_settings
from toprope.launch.server_settings import LimitsConfig
from toprope.launch.serving import check
from toprope.launch.workspace import Workspace, read_calls
from toprope.launch.world import World
from toprope.servers.model.engines.base import Capabilities
from toprope.testing.scripted import ScriptedEngine

POLICY: dict[str, Any] = {"role": "model", "engine": {"kind": "scripted"}}
SERVERS: dict[str, dict[str, Any]] = {
    "policy": POLICY,
    "books": {"role": "resources", "use": "ledger"},
    "clerk": {"role": "agent", "use": "tool_loop", "model": "policy"},
    "episode": {"role": "environment", "resources": "books", "agent": "clerk"},
}


def configured(servers: dict[str, Any], **more: Any) -> Configuration:
    return read_configuration({"servers": servers, **more}, file="test.yaml", directory=Path())


def world_of(configuration: Configuration, *, workspace: Workspace | None = None, bind: bool = False) -> World:
    client = Client()
    parts = build_parts(configuration, client)
    return World(configuration, parts, client, workspace=workspace, capture=workspace is not None, bind=bind)


class Telling(ModelServer):
    """A user's own model server."""

    async def after_call(self, call: Any, reply: Any) -> None:
        Told.keys.append(current_rollout_id())


class Told:
    keys: list[str | None] = []  # noqa: RUF012 (what one test collects)


class Failing(ScriptedEngine):
    """An engine that cannot be reached."""

    async def start(self) -> None:
        raise EngineUnavailable("the engine at http://example:1/v1 cannot be reached")


class Closing(ScriptedEngine):
    """An engine that knows whether it was closed."""

    closed = 0

    async def close(self) -> None:
        type(self).closed += 1


HERE = __name__


@pytest.mark.promise("ID-2")
async def test_a_users_model_server_from_a_configuration_knows_its_rollout() -> None:
    world = world_of(configured({"policy": {**POLICY, "use": f"{HERE}:Telling"}}))
    await world.start()
    try:
        Told.keys.clear()
        body = {"input": "hello"}
        with rollout_context("4-2"):
            reply = await world.peer("policy").request("POST", "/v1/responses", body=body)
        assert reply.status == 200
        await world.peer("policy").request("POST", "/v1/responses", body=body)
        assert Told.keys == ["4-2", None]
    finally:
        await world.stop()


async def test_when_one_engine_cannot_start_the_others_are_stopped() -> None:
    servers = {
        "well": {"role": "model", "engine": {"kind": f"{HERE}:Closing"}},
        "ill": {"role": "model", "engine": {"kind": f"{HERE}:Failing"}},
    }
    Closing.closed = 0
    with pytest.raises(EngineUnavailable, match="http://example:1/v1"):
        await world_of(configured(servers)).start()
    assert Closing.closed == 1


async def test_nothing_is_bound_unless_somebody_outside_may_call_it() -> None:
    world = world_of(configured(SERVERS))
    await world.start()
    try:
        assert world.bound() == []
    finally:
        await world.stop()


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({"books": {**SERVERS["books"], "port": 0}}, ["books"]),
        ({"clerk": {"role": "agent", "url": "http://127.0.0.1:9"}}, ["policy", "books"]),
        ({"books": {"role": "resources", "url": "http://127.0.0.1:9"}}, ["policy"]),
        ({"episode": {"role": "environment", "url": "http://127.0.0.1:9"}}, ["policy", "books", "clerk"]),
    ],
)
async def test_a_server_that_an_outsider_calls_is_bound(changes: dict[str, Any], bound: list[str]) -> None:
    world = world_of(configured({**SERVERS, **changes}))
    await world.start()
    try:
        assert [address.name for address in world.bound()] == bound
        for address in world.bound():
            reply = await world.client.peer(address.url, None).request("GET", "/readyz")
            assert reply.json()["name"] == address.name
    finally:
        await world.stop()
    with pytest.raises((RuntimeError, TransportError)):
        await Client().peer(world.bound()[0].url, None).request("GET", "/livez")


async def test_every_server_with_a_key_is_called_with_it(tmp_path: Path) -> None:
    keyed = {name: {**config, "api_key": f"key of {name}"} for name, config in SERVERS.items()}
    workspace = Workspace(tmp_path / "out")
    world = world_of(configured(keyed), workspace=workspace)
    await world.start()
    try:
        task_input = {"responses_create_params": {"input": "hi"}, "task_data": {"accounts": {}, "goal": {"ann": 0}}}
        body = {
            "episode_id": {"rollout_id": "r", "attempt": 0},
            "task": {"task_id": {"taskset": "t", "task_id": "1"}, "task_input": task_input},
        }
        reply = await world.peer("episode").request("POST", "/run", body=body)
        assert reply.json()["failure"] is None, reply.text
        stranger = await world.client.peer("inline://books", "resources").request("POST", "/verify", body={})
        assert stranger.status == 401
    finally:
        await world.stop()
    (call,) = read_calls(workspace.run_dir)
    assert (call.rollout_id, call.server, call.status) == ("r", "policy", 200)


async def test_a_captured_agent_needs_an_engine_that_returns_ids() -> None:
    servers = {**SERVERS, "policy": {"role": "model", "engine": {"kind": "scripted", "returns_ids": False}}}
    configuration = configured(servers, token_id_capture={"enabled": True, "all_agents": True})
    client = Client()
    parts = build_parts(configuration, client)
    assert parts.engines["policy"].capabilities == Capabilities(returns_ids=False)
    with pytest.raises(ConfigError, match=r"servers\.policy: token capture is on for the agent 'clerk'"):
        check_capture(configuration, parts)
    check_capture(configured(servers), parts)
    await client.close()


@pytest.mark.promise("UX-2")
async def test_check_names_a_server_elsewhere_that_does_not_answer() -> None:
    with socket.socket() as held:  # bound and not listening
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        servers = {**SERVERS, "books": {"role": "resources", "url": url}}
        with pytest.raises(ConfigError, match=rf"servers\.books\.url: {url} does not answer"):
            await check(configured(servers, run={"transport": {"budget_s": 0.1, "attempts": 1}}))


def test_scoring_settings_hold_what_changes_a_reward_and_no_address_or_secret() -> None:
    secret = {"kind": "openai", "base_url": "http://h:1", "api_key": "sk", "model": "m"}
    servers = {**SERVERS, "policy": {"role": "model", "engine": secret, "port": 8}}
    found = scoring_settings(configured(servers))
    assert found["policy"]["engine"] == {"kind": "openai", "model": "m"}
    assert "port" not in found["policy"]
    assert "sk" not in json.dumps(found)


@pytest.mark.promise("UX-2")
@pytest.mark.parametrize(
    ("servers", "message"),
    [
        (
            {"policy": {"role": "model", "engine": {"kind": "builtins:object"}}},
            "is no engine: it has no 'capabilities'",
        ),
        ({"policy": {"role": "model", "engine": {"model": "x"}}}, r"engine\.kind: this key is required"),
        (
            {"policy": {**POLICY, "use": "builtins:object"}},
            r"servers\.policy\.use: 'builtins:object' is no ModelServer",
        ),
        ({"books": {"role": "resources", "use": "builtins:object"}}, "is no Environment"),
        ({"books": {"role": "resources", "use": "json:JSONDecoder", "config": {"a": 1}}}, "is no Environment"),
        ({"policy": {"role": "model", "engine": {"kin": "scripted"}}}, "no key 'kin' here; did you mean 'kind'"),
        ({**SERVERS, "clerk": {**SERVERS["clerk"], "use": "builtins:object"}}, "is no Agent"),
        ({"a/b": POLICY}, "'a/b' cannot name a server"),
        ({"p": {**POLICY, "api_key": "x", "identity": ["api_key"]}}, r"servers\.p: p: the API key cannot be both"),
    ],
)
async def test_a_class_that_does_not_fit_is_refused_by_name(servers: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await world_of(configured(servers)).start()


def test_an_agent_that_runs_nothing_in_a_sandbox_is_given_none(tmp_path: Path) -> None:
    servers = {**SERVERS, "clerk": {**SERVERS["clerk"], "sandbox": "box"}}
    configuration = configured(servers, sandboxes={"box": {"kind": "directory", "leases": str(tmp_path)}})
    with pytest.raises(ConfigError, match=r"servers.clerk.sandbox: 'tool_loop' runs nothing in a sandbox"):
        build_parts(configuration, Client())


def test_the_limits_of_the_settings_are_those_of_every_server() -> None:
    limits = LimitsConfig()
    assert Limits(max_body_bytes=limits.max_body_bytes, drain_s=limits.drain_s) == Limits()


async def test_limits_and_return_token_ids_reach_the_model_server() -> None:
    tight = {"max_body_bytes": 100, "drain_s": 3}
    world = world_of(configured({"policy": {**POLICY, "limits": tight, "return_token_ids": True}}))
    await world.start()
    try:
        policy = world.peer("policy")
        reply = await policy.request("POST", "/v1/responses", body={"input": "hi"})
        (item,) = reply.json()["output"]
        assert len(item["generation_token_ids"]) == len(item["generation_log_probs"]) > 0
        assert item["prompt_token_ids"]
        refused = await policy.request("POST", "/v1/responses", body={"input": "x" * 100})
        assert refused.status == 413
        assert "100" in refused.text
    finally:
        await world.stop()


def test_limits_may_change_between_a_run_and_its_resumption() -> None:
    servers = {**SERVERS, "policy": {**POLICY, "limits": {"max_body_bytes": 5}}}
    assert scoring_settings(configured(servers)) == scoring_settings(configured(SERVERS))


@pytest.mark.promise("UX-2")
@pytest.mark.parametrize("role", ["model", "resources", "agent", "environment"])
async def test_a_run_finds_a_dead_server_elsewhere_before_it_sends_anything(tmp_path: Path, role: str) -> None:
    name = {"model": "policy", "resources": "books", "agent": "clerk", "environment": "episode"}[role]
    with socket.socket() as held:  # bound and not listening
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        tasks = tmp_path / "tasks.jsonl"
        tasks.write_text('{"responses_create_params": {"input": "hi"}}\n')
        run = {
            "environment": "episode",
            "tasks": str(tasks),
            "out": str(tmp_path / "out"),
            "transport": {"budget_s": 0.1, "attempts": 1},
        }
        job = RunJob(configured({**SERVERS, name: {"role": role, "url": url}}, run=run))
        with pytest.raises(ConfigError, match=rf"servers\.{name}\.url: {url} does not answer"):
            await job.collect()
    assert not (tmp_path / "out").exists()


async def test_any_http_answer_of_a_server_elsewhere_counts_and_a_model_is_asked_for_its_models() -> None:
    asked: list[str] = []

    async def elsewhere(request: Request) -> Reply:
        asked.append(request.path)
        return json_reply(None, 302, headers={"location": "http://elsewhere.invalid/"})

    async def broken(request: Request) -> Reply:
        asked.append(request.path)
        return json_reply(None, 503)

    routes = [Route("GET", "/a/v1/models", elsewhere), Route("GET", "/b/v1/models", broken)]
    bound = await serve(build_app(name="stranger", role="model", routes=routes))
    servers = {
        "policy": {"role": "model", "url": f"{bound.url}/a"},
        "second": {"role": "model", "url": f"{bound.url}/b"},
        "books": {"role": "resources", "url": f"{bound.url}/no/such/place"},
    }
    try:
        async with Client() as client:
            await ask_elsewhere(configured(servers), client)
    finally:
        await bound.close()
    assert sorted(asked) == ["/a/v1/models", "/b/v1/models"]
