"""Gymnasium environments by id: played in words, scored by sum or success, closed with their session."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest

from toprope.catalog.gym_env import GymnasiumEnvironment
from toprope.catalog.gym_text import uncoloured
from toprope.errors.tree import ConfigError, ToolError
from toprope.testing.environment_suite import check_environment

TOY = ["FrozenLake-v1", "Taxi-v3", "Blackjack-v1", "CliffWalking-v1"]
UP, RIGHT, DOWN = 0, 1, 2


def question(environment: GymnasiumEnvironment, seed: int = 3) -> str:
    (task,) = environment.tasks(1, seed)
    text: str = task.task_input["responses_create_params"]["input"][0]["content"]
    return text


@pytest.mark.promise("EP-15")
@pytest.mark.parametrize("env_id", TOY)
async def test_every_toy_text_game_conforms(env_id: str) -> None:
    assert await check_environment(GymnasiumEnvironment(env_id=env_id), sessions=20) == []


def test_a_solved_lake_is_a_success_and_its_picture_shows_where_one_stands() -> None:
    environment = GymnasiumEnvironment(env_id="FrozenLake-v1", params={"is_slippery": False})
    assert "[S]FFF\nFHFH\nFFFH\nHFFG" in question(environment)
    assert "0 (left), 1 (down), 2 (right), 3 (up)" in question(environment)
    play = environment.seed({"env_seed": 1})
    said = [environment.step(play, action) for action in (1, 1, 2, 1, 2, 2)]
    assert "SFFF\n[F]HFH" in said[0]
    assert said[-1].endswith("The episode is over.")
    verdict = environment.verify(play, {}, {})
    assert (verdict.reward, verdict.extra["return"], verdict.extra["steps"]) == (1.0, 1.0, 6)
    with pytest.raises(ToolError, match="over"):
        environment.step(play, 0)
    environment.release(play)


def test_a_fall_is_no_success_and_ends_the_episode() -> None:
    environment = GymnasiumEnvironment(env_id="FrozenLake-v1", params={"is_slippery": False})
    play = environment.seed({"env_seed": 1})
    environment.step(play, 2)
    assert "over" in environment.step(play, 1)
    verdict = environment.verify(play, {}, {})
    assert (verdict.reward, verdict.extra["terminated"], verdict.extra["success"]) == (0.0, True, False)


def test_the_cliff_costs_under_sum_and_reaching_the_end_is_a_success_whatever_it_cost() -> None:
    walk = [UP, *[RIGHT] * 11, DOWN]
    for reward, expected in (("sum", -13.0), ("success", 1.0), (None, 1.0)):
        environment = GymnasiumEnvironment(env_id="CliffWalking-v1", reward=reward)
        play = environment.seed({"env_seed": 0})
        for action in walk:
            environment.step(play, action)
        assert environment.verify(play, {}, {}).reward == expected
    left = GymnasiumEnvironment(env_id="CliffWalking-v1", reward="sum", unfinished_reward=-200.0)
    assert left.verify(left.seed({"env_seed": 0}), {}, {}).reward == -200.0


def test_a_game_without_a_bound_of_its_own_is_truncated_and_is_then_over() -> None:
    environment = GymnasiumEnvironment(env_id="CliffWalking-v1", max_steps=3)
    play = environment.seed({"env_seed": 0})
    said = [environment.step(play, UP) for _ in range(3)]
    assert said[2].endswith("The episode is over.")
    verdict = environment.verify(play, {}, {})
    assert (verdict.reward, verdict.extra["truncated"], verdict.extra["success"]) == (0.0, True, False)


def test_the_taxi_is_described_in_words_and_blackjack_too() -> None:
    assert "The taxi is in row" in question(GymnasiumEnvironment(env_id="Taxi-v3"))
    assert "\x1b" not in question(GymnasiumEnvironment(env_id="Taxi-v3"))
    assert "The dealer shows" in question(GymnasiumEnvironment(env_id="Blackjack-v1"))


def test_a_seed_decides_the_whole_episode() -> None:
    environment = GymnasiumEnvironment(env_id="FrozenLake-v1")
    plays = [environment.seed({"env_seed": seed}) for seed in (5, 5, 6, 7, 8, 9)]
    said = [[environment.step(play, 2) for _ in range(2)] for play in plays]
    assert said[0] == said[1]
    assert len({tuple(each) for each in said}) > 1
    first, second = ([task.task_input for task in environment.tasks(5, seed)] for seed in (1, 2))
    assert len({task["task_data"]["env_seed"] for task in (*first, *second)}) == 10


@pytest.mark.parametrize("action", [4, -1, [0.0], []])
def test_an_action_that_the_game_does_not_have_is_refused_in_words_and_is_no_step(action: Any) -> None:
    environment = GymnasiumEnvironment(env_id="FrozenLake-v1")
    play = environment.seed({"env_seed": 1})
    with pytest.raises(ToolError, match="left"):
        environment.step(play, action)
    assert play.steps == 0


def test_an_environment_with_vectors_is_played_with_lists() -> None:
    environment = GymnasiumEnvironment(env_id="Pendulum-v1")
    assert (environment.reward, "Observation: [" in question(environment)) == ("sum", True)
    play = environment.seed({"env_seed": 1})
    assert "Observation" in environment.step(play, [0.5])
    for wrong in (1, [], [0.1, 0.2], [50.0]):
        with pytest.raises(ToolError):
            environment.step(play, wrong)
    assert environment.verify(play, {}, {}).reward < 0


def test_it_is_closed_with_its_session_and_when_its_reset_fails() -> None:
    closed = []

    class Fragile(gymnasium.Env[int, int]):
        action_space = gymnasium.spaces.Discrete(2)
        observation_space = gymnasium.spaces.Discrete(2)
        metadata = {}  # noqa: RUF012

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
            if seed == 13:
                raise OSError("no display")
            return 0, {}

        def close(self) -> None:
            closed.append(self)

    gymnasium.register("Fragile-v0", entry_point=lambda **kwargs: Fragile())
    try:
        environment = GymnasiumEnvironment(env_id="Fragile-v0", reward="sum")
        closed.clear()
        environment.release(environment.seed({"env_seed": 1}))
        with pytest.raises(OSError, match="no display"):
            environment.seed({"env_seed": 13})
        assert len(closed) == 2
    finally:
        del gymnasium.registry["Fragile-v0"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"env_id": "NoSuchGame-v1"}, "NoSuchGame"),
        ({"env_id": "FrozenLake-v1", "params": {"map_name": "99x99"}}, "99x99"),
        ({"env_id": "FrozenLake-v1", "params": {"no_such": 1}}, "no_such"),
        ({"env_id": "FrozenLake-v1", "max_steps": 0}, "max_steps"),
        ({"env_id": "Pendulum-v1", "reward": "success"}, "success_reward"),
    ],
)
def test_a_bad_setting_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        GymnasiumEnvironment(**settings)


def test_colours_become_brackets_or_nothing() -> None:
    assert uncoloured("\x1b[41mS\x1b[0mF\x1b[34;1mR\x1b[0m") == "[S]FR"
