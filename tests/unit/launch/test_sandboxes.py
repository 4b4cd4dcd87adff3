"""`sandboxes:` in a configuration: read strictly, opened with the servers, swept by a command."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.sandbox.docker_engine import running_engine

from toprope.errors.tree import ConfigError
from toprope.http.client import Client
from toprope.launch.config import load_configuration
from toprope.launch.parts import build_parts
from toprope.launch.run import sandbox_settings, scoring_settings
from toprope.launch.sandboxes import Desks, sweep
from toprope.launch.world import World
from toprope.sandbox.docker import Docker
from toprope.sandbox.leases import LeaseDirectory
from toprope.sandbox.plain import PlainDirectory
from toprope.sandbox.spec import SandboxSpec, SandboxUnavailable

POLICY = {"role": "model", "engine": {"kind": "scripted"}}
COMMAND = {"role": "agent", "use": "command", "model": "policy", "config": {"argv": ["true", "{prompt}"]}}


def read(tmp_path: Path, values: dict[str, Any]) -> Any:
    file = tmp_path / "c.yaml"
    file.write_bytes(msgspec.json.encode(values))
    return load_configuration(file, [], os.environ)


@pytest.mark.parametrize(
    ("sandboxes", "agent", "named"),
    [
        ({"box": {"kind": "bubblewarp"}}, {}, r"sandboxes\.box\.kind"),
        ({"box": {"kind": "bubblewrap", "limit": {}}}, {}, r"sandboxes\.box\.limit: .*limits"),
        ({"box": {"kind": "bubblewrap", "limits": {"memory": 1}}}, {}, r"limits\.memory: .*memory_bytes"),
        ({"box": {"kind": "bubblewrap", "require_limits": ["file"]}}, {}, r"require_limits"),
        ({"box": {"kind": "bubblewrap", "image": "x"}}, {}, r"sandboxes\.box\.image: only .* docker"),
        ({"a box": {"kind": "bubblewrap"}}, {}, r"'a box' cannot name a provider"),
        ({"box": {"kind": "bubblewrap"}}, {"sandbox": "bux"}, r"sandbox: 'bux' names no provider .*box"),
    ],
)
def test_a_mistake_names_the_key_and_what_is_accepted(
    sandboxes: Any, agent: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=named):
        read(tmp_path, {"sandboxes": sandboxes, "servers": {"policy": POLICY, "solver": {**COMMAND, **agent}}})


def test_too_little_memory_is_named_where_it_stands(tmp_path: Path) -> None:
    box = {"kind": "bubblewrap", "limits": {"memory_bytes": 1}}
    with pytest.raises(ConfigError, match=r"sandboxes\.box\.limits: .*33554432"):
        Desks(read(tmp_path, {"sandboxes": {"box": box}, "servers": {"policy": POLICY}}))


def test_what_a_run_writes_down_of_its_agents_and_sandboxes_holds_no_secret(tmp_path: Path) -> None:
    program = {"argv": ["true", "{prompt}"], "env": {"TOKEN": "hunter2"}}
    stranger = {"url": "http://127.0.0.1:9/", "api_key": "hunter2", "headers": {"x-key": "hunter2"}, "timeout_s": 5}
    servers = {
        "policy": POLICY,
        "solver": {**COMMAND, "config": program},
        "other": {**COMMAND, "use": "remote", "config": stranger},
    }
    box = {"kind": "directory", "env": {"TOKEN": "hunter2"}, "limits": {"wall_s": 5}}
    configuration = read(tmp_path, {"sandboxes": {"box": box}, "servers": servers})
    written = {**scoring_settings(configuration), **sandbox_settings(configuration)}
    assert "hunter2" not in str(written)
    assert written["solver"]["config"] == {"argv": ["true", "{prompt}"], "env": ["TOKEN"]}
    assert written["other"]["config"]["timeout_s"] == 5
    assert written["sandboxes"]["box"]["limits"]["wall_s"] == 5


@pytest.mark.promise("EP-14")
async def test_nothing_starts_where_a_required_limit_is_not_held(tmp_path: Path) -> None:
    box = {"kind": "directory", "leases": str(tmp_path / "leases"), "require_limits": True}
    configuration = read(tmp_path, {"sandboxes": {"box": box}, "servers": {"policy": POLICY}})
    client = Client()
    world = World(configuration, build_parts(configuration, client), client, workspace=None, capture=False)
    with pytest.raises(ConfigError, match=r"sandboxes\.box: .*files"):
        await world.start()


@pytest.mark.parametrize(("verify_s", "refused"), [(60, True), (61, False)])
async def test_a_verify_that_may_take_longer_than_its_time_is_refused(
    tmp_path: Path, verify_s: float, refused: bool
) -> None:
    code = {"role": "resources", "use": "python_code", "sandbox": "box", "config": {"total_wall_s": 60}}
    episode = {"role": "environment", "resources": "code", "agent": "solver", "verify_timeout_s": verify_s}
    solver = {"role": "agent", "use": "tool_loop", "model": "policy"}
    servers = {"policy": POLICY, "code": code, "solver": solver, "episode": episode}
    box = {"kind": "directory", "leases": "leases"}
    configuration = read(tmp_path, {"sandboxes": {"box": box}, "servers": servers})
    world = World(configuration, build_parts(configuration, Client()), Client(), workspace=None, capture=False)
    try:
        if refused:
            with pytest.raises(ConfigError, match=r"episode: verify_timeout_s: 60 given.*60 s"):
                await world.start()
        else:
            await world.start()
    finally:
        await world.stop()


async def test_a_model_server_listens_if_an_agent_starts_programs(tmp_path: Path) -> None:
    servers = {"policy": POLICY, "other": POLICY, "solver": COMMAND}
    configuration = read(tmp_path, {"servers": servers})
    client = Client()
    world = World(configuration, build_parts(configuration, client), client, workspace=None, capture=False)
    await world.start()
    try:
        assert world.addresses["policy"].url.startswith("http://127.0.0.1:")
        assert world.addresses["other"].url == "inline://other"
    finally:
        await world.stop()


@pytest.mark.promise("EP-14")
async def test_a_sweep_ends_every_kind_and_lists_what_lives(tmp_path: Path) -> None:
    leases = tmp_path / "leases"
    async with running_engine(tmp_path / "engine") as engine:
        docker = Docker(leases, name="containers", engine=engine.url, image="image:1")
        dead = await docker.create(SandboxSpec(lease_s=300))
        plain = PlainDirectory(leases, name="box")
        over, living = await plain.create(SandboxSpec(lease_s=1e-6)), await plain.create(SandboxSpec(lease_s=300))
        lease = leases / dead.sandbox_id / "lease.json"
        written = msgspec.json.decode(lease.read_bytes())
        lease.write_bytes(msgspec.json.encode({**written, "deadline": 1.0}))
        swept = await asyncio.to_thread(sweep, leases)
        assert set(swept.reaped) == {dead.sandbox_id, over.sandbox_id}
        assert engine.containers == {}, "at the engine that made it"
        (left,) = swept.living
        assert (left.sandbox_id, left.kind, left.provider, left.owner) == (
            living.sandbox_id,
            "directory",
            "box",
            os.getpid(),
        )
        assert 0 < left.ends_s <= 300
        await living.stop()
    assert LeaseDirectory(leases).leases() == []


async def test_a_lease_that_cannot_be_read_stops_no_other_kind_from_being_swept(tmp_path: Path) -> None:
    leases = tmp_path / "leases"
    async with running_engine(tmp_path / "engine") as engine:
        docker = Docker(leases, name="containers", engine=engine.url, image="image:1")
        plain = PlainDirectory(leases, name="box")
        await plain.create(SandboxSpec(lease_s=1e-6))
        held, torn = [await made.create(SandboxSpec(lease_s=300)) for made in (docker, plain)]
        lease = leases / held.sandbox_id / "lease.json"
        lease.write_bytes(msgspec.json.encode({**msgspec.json.decode(lease.read_bytes()), "deadline": 1.0}))
        (leases / torn.sandbox_id / "lease.json").write_bytes(b"{")
        with pytest.raises(SandboxUnavailable, match=torn.sandbox_id):
            await asyncio.to_thread(sweep, leases)
        assert engine.containers == {}
        assert sorted(path.name for path in leases.iterdir() if path.is_dir()) == [torn.sandbox_id]
