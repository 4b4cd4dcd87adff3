"""Every environment that ships keeps every promise of an environment, as it stands."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from toprope.http.client import Client
from toprope.sandbox.bubblewrap import Bubblewrap
from toprope.sandbox.desk import SandboxDesk
from toprope.testing.environment_suite import check_environment

# The settings under which each is checked; how many sessions at once (a sandbox each is a directory and its groups).
SHIPPED: dict[str, list[dict[str, Any]]] = {
    "gymnasium": [{"env_id": "FrozenLake-v1"}, {"env_id": "Pendulum-v1"}],
    "judge": [{}],
    "ledger": [{}],
    "python_code": [{}],
    "reasoning_gym": [
        {"dataset": "basic_arithmetic", "tool": "add"},
        {"dataset": "arc_agi"},
        {"dataset": "word_sorting", "params": {"min_words": 3, "max_words": 4}},
    ],
    "user_sim": [{}, {"user": "model"}],
    "workbench": [{}],
}
CASES = [(name, settings) for name, several in SHIPPED.items() for settings in several]


@asynccontextmanager
async def sandboxes(place: Path) -> AsyncIterator[SandboxDesk]:
    if shutil.which("bwrap") is None:
        pytest.skip("the program bwrap is not installed")
    desk = SandboxDesk(Bubblewrap(place))
    await desk.open()
    try:
        yield desk
    finally:
        await desk.close()


@pytest.mark.promise("EP-15")
@pytest.mark.parametrize(
    ("name", "settings"), CASES, ids=[f"{name}-{number}" for number, (name, _) in enumerate(CASES)]
)
async def test_it_conforms(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    (point,) = entry_points(group="toprope.environments", name=name)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client())
        given = {"judge": client.peer("inline://nobody", "model")} if name == "judge" else {}
        environment = point.load()(**settings, **given)
        options: dict[str, Any] = {"size": 8}
        if environment.sandbox is not None:
            options |= {"sandboxes": await stack.enter_async_context(sandboxes(tmp_path / "leases")), "sessions": 12}
        assert await check_environment(environment, **options) == []


def test_every_environment_that_ships_is_checked() -> None:
    assert {point.name for point in entry_points(group="toprope.environments")} == set(SHIPPED)


def test_there_are_many_data_sets_of_reasoning_gym_to_choose_from() -> None:
    assert len(DATASETS) > 90
