"""Any Gymnasium environment by its id, played through one tool, `step`.

An episode is a fresh instance, reset with the task's seed, closed with the session. The reward is the sum of the
environment's rewards, or 1 for a success and else 0. Left to others: how things look as text (`gym_text`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import gymnasium

from toprope.catalog.gym_text import actions_in_words, known, observation_in_words, read_action
from toprope.errors.tree import ConfigError, ToolError
from toprope.protocol.episode import Task
from toprope.protocol.ids import TaskId
from toprope.servers.resources.environment import Environment, Verdict
from toprope.tools.spec import tool

DEFAULT_MAX_STEPS = 200


@dataclass
class Play:
    """One episode: the environment and how it went."""

    env: Any
    total: float = 0.0
    last: float = 0.0
    steps: int = 0
    terminated: bool = False
    truncated: bool = False

    @property
    def over(self) -> bool:
        """Whether no further step can be made."""
        return self.terminated or self.truncated


class GymnasiumEnvironment(Environment):
    """`GymnasiumEnvironment(env_id="FrozenLake-v1", params={"is_slippery": False}, max_steps=50)`.

    `env_id`: what `gymnasium.make` takes (`module:id` imports the module first), `params` its further arguments.
    `reward`: `success` gives 1 where the episode terminated with a last reward of at least `success_reward` (known for
    the toy_text games), `sum` the sum of rewards; absent: success where that is known. Beware of `sum` where each step
    costs: who does nothing then does best, unless `unfinished_reward` says what an episode is worth that was left.
    """

    gradable_on_timeout = True

    def __init__(
        self,
        *,
        env_id: str,
        params: Mapping[str, Any] | None = None,
        reward: Literal["sum", "success"] | None = None,
        success_reward: float | None = None,
        unfinished_reward: float | None = None,
        max_steps: int | None = None,
        create_params: Mapping[str, Any] | None = None,
    ) -> None:
        if max_steps is not None and max_steps < 1:
            raise ConfigError(f"max_steps: {max_steps} given; accepted: an integer of at least 1")
        self.env_id = env_id
        self.params = dict(params or {})
        self.create_params = dict(create_params or {})
        self.game = known(env_id)
        self.success_reward = success_reward if success_reward is not None or not self.game else self.game.success
        self.reward = reward or ("sum" if self.success_reward is None else "success")
        if self.reward == "success" and self.success_reward is None:
            raise ConfigError(
                f"success_reward: nothing is known of a success in {env_id}; accepted: the last reward that a "
                "successful episode has, or reward: sum"
            )
        self.unfinished_reward = unfinished_reward
        self._draws, self._max_steps = False, max_steps
        probe = self._make()
        try:
            self._draws = "ansi" in (probe.metadata or {}).get("render_modes", ())
            own = probe.spec.max_episode_steps if probe.spec is not None else None
            self._max_steps = max_steps or own or DEFAULT_MAX_STEPS
            self.deterministic = not (probe.spec is not None and probe.spec.nondeterministic)
            self._actions = actions_in_words(probe.action_space, self.game)
        finally:
            probe.close()

    def seed(self, task: dict[str, Any]) -> Play:
        """A fresh environment, reset with the task's `env_seed`."""
        env = self._make()
        try:
            env.reset(seed=int(task["env_seed"]))
        except BaseException:
            env.close()
            raise
        return Play(env)

    @tool
    def step(self, play: Play, action: Annotated[int | list[float], "one of the actions named in the task"]) -> str:
        """Do one action in the game. Returns the reward of the step and what is seen then."""
        if play.over:
            raise ToolError("the episode is over; no further step can be made")
        value = read_action(play.env.action_space, action, self._actions)
        seen, reward, terminated, truncated, _ = play.env.step(value)
        if not math.isfinite(float(reward)):
            raise ValueError(f"{self.env_id} gave the reward {reward}")
        play.last, play.terminated, play.truncated = float(reward), bool(terminated), bool(truncated)
        play.total += play.last
        play.steps += 1
        end = "\nThe episode is over." if play.over else ""
        return f"Reward: {play.last:g}\n{self._seen(play.env, seen)}{end}"

    def verify(self, play: Play, task: dict[str, Any], response: dict[str, Any]) -> Verdict:
        """As `reward` says. The row has `steps`, `return` (the sum of rewards), how it ended, and `success`."""
        success = self.success_reward is not None and play.terminated and play.last >= self.success_reward
        reward = float(success) if self.reward == "success" else play.total
        if not play.over and self.unfinished_reward is not None:
            reward = self.unfinished_reward
        extra = {"steps": play.steps, "return": play.total, "success": success}
        return Verdict(reward=reward, extra={**extra, "terminated": play.terminated, "truncated": play.truncated})

    def release(self, play: Play) -> None:
        """Close the environment."""
        play.env.close()

    def tasks(self, size: int, seed: int) -> Iterable[Task]:
        """`size` episodes, each with a seed of its own; the first observation stands in the question."""
        env = self._make()
        try:
            for index in range(size):
                env_seed = (seed * 1_000_003 + index) % 2**31
                seen, _ = env.reset(seed=env_seed)
                about = (
                    self.game.about if self.game is not None else f"Play {self.env_id} for as much reward as you can."
                )
                text = (
                    f"{about}\n\nCall the tool `step` with one action at a time, at most {self._max_steps} times, "
                    f"until the episode is over. Actions: {self._actions}.\n\n{self._seen(env, seen)}"
                )
                message = {"type": "message", "role": "user", "content": text}
                params = {"input": [message], "tools": self.tool_list(), **self.create_params}
                task_id = TaskId(self.env_id, f"{seed}-{index}")
                yield Task(task_id, {"responses_create_params": params, "task_data": {"env_seed": env_seed}})
        finally:
            env.close()

    def _seen(self, env: Any, observation: Any) -> str:
        return observation_in_words(env, self.env_id, observation, draws=self._draws)

    def _make(self) -> Any:
        given: dict[str, Any] = {"disable_env_checker": True, **self.params}
        if self._draws:
            given["render_mode"] = "ansi"
        if self._max_steps is not None:
            given["max_episode_steps"] = self._max_steps
        try:
            return gymnasium.make(self.env_id, **given)
        except Exception as error:  # its maker's own code, which refuses settings in any way it likes
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"env_id: {self.env_id} cannot be made with {self.params}: {reason}") from error
