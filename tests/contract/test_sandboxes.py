"""One conformance list for every kind of sandbox: bubblewrap with control groups and without, containers, none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.parts import needs
from tests.unit.sandbox.docker_engine import running_engine

from toprope.sandbox.bubblewrap import Bubblewrap
from toprope.sandbox.docker import Docker
from toprope.sandbox.plain import PlainDirectory
from toprope.sandbox.provider import SandboxProvider
from toprope.testing.sandbox_suite import CHECKS, HELD, Check

needs_bwrap = needs("bwrap")
KINDS = [
    "directory",
    pytest.param("bubblewrap", marks=needs_bwrap),
    pytest.param("bubblewrap-watched", marks=needs_bwrap),
    pytest.param("docker", marks=needs_bwrap),  # the engine's stand-in runs its containers by bubblewrap
]


@pytest.fixture
async def provider(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SandboxProvider]:
    monkeypatch.setenv("TOPROPE_SECRET_OF_THE_HOST", "hunter2")
    leases = tmp_path / "leases"
    match request.param:
        case "directory":
            yield PlainDirectory(leases)
        case "docker":
            async with running_engine(tmp_path / "engine") as engine:
                yield Docker(leases, engine=engine.url, image="image:1")
                assert engine.containers == {}, "a container is left"
        case kind:
            yield Bubblewrap(leases, control_groups=kind == "bubblewrap")
    left = [path for path in leases.glob("*") if not path.name.startswith(".lock")]
    assert left == [], "a stopped sandbox leaves nothing"


@pytest.mark.parametrize("provider", KINDS, indirect=True)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_every_kind_of_sandbox_keeps_it(provider: SandboxProvider, check: Check) -> None:
    await check(provider)


@pytest.mark.parametrize("provider", KINDS[1:3], indirect=True)
@pytest.mark.parametrize("aspect", sorted(HELD))
async def test_what_a_report_claims_is_held(provider: SandboxProvider, aspect: str) -> None:
    report = await provider.enforces()
    assert report[aspect].mechanism is not None
    await HELD[aspect](provider)
