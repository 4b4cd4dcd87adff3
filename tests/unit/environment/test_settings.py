"""Settings of an environment server that leave no time or name nothing are refused, with what would be accepted."""

from __future__ import annotations

from typing import Any

import pytest

from toprope.errors.tree import ConfigError
from toprope.servers.environment.episode import Timeouts


@pytest.mark.promise("EP-10")
def test_the_agents_time_is_what_the_episode_leaves() -> None:
    assert Timeouts().agent_budget_s() == 3600 - 300 - 15
    assert Timeouts(agent_s=60).agent_budget_s() == 60
    assert Timeouts(episode_s=100, verify_s=30, cleanup_s=20, agent_s=90).agent_budget_s() == 60


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"episode_s": 300}, "no time is left for the agent"),
        ({"agent_s": 0.0}, "agent_timeout_s 0"),
        ({"verify_s": 0}, "verify_timeout_s"),
        ({"cleanup_s": float("nan")}, "cleanup_timeout_s"),
    ],
)
def test_bounds_that_leave_no_time_are_refused(given: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Timeouts(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tools": ["direct_https"]}, "direct_http, mcp"),
        ({"tools": ["mcp", "mcp"]}, "at most once"),
        ({"close_reply": "maybe"}, "required, optional"),
        ({"max_concurrent_episodes": 0}, "1 or more"),
    ],
)
async def test_settings_that_name_nothing_are_refused(make_house: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        await make_house(**given)
