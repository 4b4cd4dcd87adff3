"""A bubblewrap provider over a lease directory of the test, and a look at what the host still runs."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from toprope.sandbox.bubblewrap import Bubblewrap
from toprope.sandbox.bwrap_handles import BubblewrapSandbox
from toprope.sandbox.spec import MIB, Limits, SandboxSpec

SMALL = {"wall_s": 60, "cpu_s": 30, "memory_bytes": 96 * MIB, "processes": 24, "output_bytes": 4 * MIB}

Make = Callable[..., Awaitable[BubblewrapSandbox]]


def processes_with(marker: str) -> list[int]:
    """Processes of this host that carry `marker` in their arguments."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if (
                name.isdigit()
                and int(name) != os.getpid()
                and marker.encode() in Path(f"/proc/{name}/cmdline").read_bytes()
            ):
                found.append(int(name))
        except OSError:
            continue
    return found


@pytest.fixture
def marker() -> str:
    """A word that no other process of this host has."""
    return f"marker-{secrets.token_hex(8)}"


@pytest.fixture(params=["counted", "watched"])
def counted(request: pytest.FixtureRequest) -> bool:
    """With control groups where they may be used, and without."""
    return request.param == "counted"


@pytest.fixture
async def provider(tmp_path: Path, request: pytest.FixtureRequest) -> Bubblewrap:
    if shutil.which("bwrap") is None:
        pytest.skip("the program bwrap is not installed")
    groups = request.getfixturevalue("counted") if "counted" in request.fixturenames else True
    return Bubblewrap(tmp_path / "leases", control_groups=groups)


@pytest.fixture
async def make(provider: Bubblewrap, tmp_path: Path) -> AsyncIterator[Make]:
    """Sandboxes that the test may forget; what they leave is checked."""
    made: list[BubblewrapSandbox] = []

    async def create(lease_s: float = 300, model_url: str | None = None, **limits: Any) -> BubblewrapSandbox:
        spec = SandboxSpec(limits=Limits(**{**SMALL, **limits}), lease_s=lease_s, model_url=model_url)
        made.append(await provider.create(spec))
        return made[-1]

    yield create
    for sandbox in made:
        await sandbox.stop()
    assert [name for name in os.listdir(tmp_path / "leases") if not name.startswith(".lock")] == []
    names = {f"toprope-{sandbox.sandbox_id}" for sandbox in made}
    left = [name for _, below, _ in os.walk("/sys/fs/cgroup") for name in below if name in names]
    assert left == [], "a control group is left"
