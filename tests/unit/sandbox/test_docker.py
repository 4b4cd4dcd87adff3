"""What the container engine is asked for, and what becomes of its refusals."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.sandbox.docker_engine import Engine, running_engine

from toprope.errors.tree import ConfigError
from toprope.sandbox.docker import Docker
from toprope.sandbox.provider import require_limits
from toprope.sandbox.spec import MIB, Aspect, Limits, SandboxSpec, SandboxUnavailable


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    async with running_engine(tmp_path / "engine") as engine:
        yield engine


async def test_a_container_is_made_with_everything_closed(engine: Engine, tmp_path: Path) -> None:
    provider = Docker(tmp_path / "leases", engine=engine.url, image="image:1")
    limits = Limits(memory_bytes=64 * MIB, processes=9, cpu_s=1.5, file_bytes=MIB)
    sandbox = await provider.create(SandboxSpec(limits=limits, lease_s=77, env={"A": "b"}))
    (container,) = engine.containers.values()
    asked, host = container.settings, container.settings["HostConfig"]
    assert asked["Cmd"] == ["sleep", "78"], "it ends by itself, whatever becomes of us"
    assert asked["User"] == "1000:1000"
    assert "A=b" in asked["Env"]
    assert host["NetworkMode"] == "none"
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (64 * MIB, 64 * MIB, 9)
    assert {(each["Name"], each["Hard"]) for each in host["Ulimits"]} == {("cpu", 2), ("fsize", MIB), ("core", 0)}
    assert [bind.rpartition(":")[2] for bind in host["Binds"]] == ["ro"], "nothing of the host can be written"
    assert host.get("Privileged") in (None, False)
    await sandbox.stop()
    assert engine.containers == {}


async def test_a_dead_owners_container_is_removed(engine: Engine, tmp_path: Path) -> None:
    leases = tmp_path / "leases"
    sandbox = await Docker(leases, engine=engine.url, image="image:1").create(SandboxSpec(lease_s=300))
    lease = leases / sandbox.sandbox_id / "lease.json"
    lease.write_bytes(lease.read_bytes().replace(b'"started":', b'"started":9'))
    assert await Docker(leases, engine=engine.url).reap() == (sandbox.sandbox_id,)
    assert engine.containers == {}
    assert not lease.parent.exists()


async def test_a_container_that_somebody_removed_can_still_be_stopped(engine: Engine, tmp_path: Path) -> None:
    sandbox = await Docker(tmp_path / "leases", engine=engine.url, image="image:1").create(SandboxSpec())
    engine.containers.clear()
    await sandbox.stop()


async def test_an_image_that_the_engine_lacks_leaves_no_lease(engine: Engine, tmp_path: Path) -> None:
    leases = tmp_path / "leases"
    with pytest.raises(SandboxUnavailable, match="absent") as caught:
        await Docker(leases, engine=engine.url).create(SandboxSpec(image="absent"))
    assert not caught.value.retryable, "it stays absent"
    assert [name for name in os.listdir(leases) if not name.startswith(".lock")] == []


async def test_a_limit_that_the_engine_cannot_hold_is_refused(engine: Engine, tmp_path: Path) -> None:
    engine.facts["PidsLimit"] = False
    provider = Docker(tmp_path / "leases", engine=engine.url, image="image:1")
    with pytest.raises(ConfigError, match="processes"):
        await require_limits(provider)
    await require_limits(provider, [Aspect.MEMORY, Aspect.FILES])


async def test_no_engine_is_said_in_one_sentence(tmp_path: Path) -> None:
    provider = Docker(tmp_path / "leases", engine="tcp://127.0.0.1:9", image="image:1")
    with pytest.raises(SandboxUnavailable, match="no engine answers") as caught:
        await provider.create(SandboxSpec())
    assert caught.value.retryable, "one that is started anew is there a moment later"
    with pytest.raises(ConfigError, match="no engine answers"):
        await require_limits(provider, [Aspect.FILES])


async def test_what_docker_cannot_give_is_refused(tmp_path: Path) -> None:
    provider = Docker(tmp_path / "leases")
    with pytest.raises(ConfigError, match="read_only"):
        await provider.create(SandboxSpec(read_only=("/usr/share",)))
    with pytest.raises(ConfigError, match="image"):
        await provider.create(SandboxSpec())
