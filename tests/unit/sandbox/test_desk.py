"""A desk keeps its terms, opens only where they hold, and reaps as long as it is open."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from toprope.errors.tree import ConfigError, TopropeError
from toprope.protocol.grants import DirectSandbox, SandboxAccess
from toprope.sandbox.desk import SandboxDesk, Terms, borrow, within
from toprope.sandbox.leases import LeaseDirectory
from toprope.sandbox.plain import PlainDirectory
from toprope.sandbox.spec import MIB, Limits, SandboxSpec


def test_a_sandbox_gets_the_smaller_of_what_is_asked_and_what_is_allowed() -> None:
    terms = Terms(
        limits=Limits(wall_s=10, memory_bytes=64 * MIB),
        network="none",
        lease_s=100,
        env={"A": "terms", "B": "terms"},
        read_only=("/opt",),
        image="usual",
    )
    spec = SandboxSpec(limits=Limits(wall_s=5, memory_bytes=128 * MIB), env={"B": "own"}, read_only=("/srv",))
    found = within(spec, terms, 1000)
    assert (found.limits.wall_s, found.limits.memory_bytes) == (5, 64 * MIB)
    assert (found.network, found.lease_s, found.image) == ("none", 100, "usual")
    assert found.env == {"A": "terms", "B": "own"}
    assert found.read_only == ("/opt", "/srv")
    assert within(spec, Terms(), 1000).lease_s == 1000
    with pytest.raises(ConfigError, match="network: none"):
        within(SandboxSpec(model_url="http://127.0.0.1:9/v1"), terms, 10)


@pytest.mark.promise("EP-14")
async def test_it_does_not_open_where_the_machine_does_not_hold_what_is_required(tmp_path: Path) -> None:
    desk = SandboxDesk(PlainDirectory(tmp_path, name="box"), Terms(require=("output", "files", "network")))
    with pytest.raises(ConfigError, match=r"'box' does not enforce .* files .*; network"):
        await desk.open()


@pytest.mark.promise("EP-14")
async def test_an_open_desk_ends_what_dead_owners_left(tmp_path: Path) -> None:
    left = await PlainDirectory(tmp_path, name="another").create(SandboxSpec(lease_s=1e-6))
    desk = SandboxDesk(PlainDirectory(tmp_path, name="box"), Terms(reap_every_s=0.001))
    await desk.open()
    while left.sandbox_id in await asyncio.to_thread(os.listdir, tmp_path):
        pass
    await desk.close()


async def test_a_provider_of_another_name_lends_nothing_of_this_one(tmp_path: Path) -> None:
    one, other = (SandboxDesk(PlainDirectory(tmp_path, name=name)) for name in ("one", "other"))
    sandbox = await one.make(SandboxSpec(), lease_s=100)
    descriptor = sandbox.access().connection.descriptor
    with pytest.raises(TopropeError, match="made by 'one'"):
        await borrow({"other": other}, SandboxAccess(connection=DirectSandbox("other", descriptor), workdir="/"))
    borrowed = await borrow({"one": one}, sandbox.access())
    assert (await borrowed.run(["true"])).exit == 0
    await sandbox.stop()


def test_a_lease_directory_behind_a_link_of_somebody_else_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a link that belongs to somebody else")
    (tmp_path / "own").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "own")
    os.lchown(link, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to another user"):
        LeaseDirectory(link).leases()
    with pytest.raises(ConfigError, match="belongs to another user"):
        LeaseDirectory(link).reap("directory", lambda lease: None)
