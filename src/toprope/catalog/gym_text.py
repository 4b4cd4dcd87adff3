"""Gymnasium in words: what an observation, an action and a picture in colours are as text. Pure but for rendering.

The games of `toy_text` are described by name; of any other environment the observation is given as JSON. Left to
others: playing (`gym_env`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from toprope.canonical import json
from toprope.errors.tree import ConfigError, ToolError

_COLOURED = re.compile(r"\x1b\[(?P<code>[0-9;]+)m(?P<text>.*?)\x1b\[0m", re.DOTALL)
_PLACES = ("R (row 0, column 0)", "G (row 0, column 4)", "Y (row 4, column 0)", "B (row 4, column 3)")


@dataclass(frozen=True, slots=True)
class Game:
    """What is known of an environment: the task in a sentence, its actions, and the last reward of a success."""

    about: str
    actions: tuple[str, ...]
    success: float


KNOWN: Mapping[str, Game] = {
    "FrozenLake": Game(
        "Cross the frozen lake from S to the goal G without falling into a hole H. F is ice, and ice may be slippery: "
        "then you may slide to a side. You are at the place in square brackets.",
        ("left", "down", "right", "up"),
        1.0,
    ),
    "Taxi": Game(
        "Drive the taxi to the passenger, pick them up, drive to the destination and drop them off there. Walls are |.",
        ("south", "north", "east", "west", "pick up", "drop off"),
        20.0,
    ),
    "Blackjack": Game(
        "Play one hand of blackjack: come closer to 21 than the dealer without going over it.", ("stick", "hit"), 1.0
    ),
    "CliffWalking": Game(
        "Walk from the lower left corner to T in the lower right one. C is a cliff: who steps on it is put back to the "
        "start. You are at x.",
        ("up", "right", "down", "left"),
        -1.0,
    ),
}


def known(env_id: str) -> Game | None:
    """What is known of `toy_text` games, whatever their version."""
    return KNOWN.get(env_id.rpartition(":")[2].rpartition("/")[2].partition("-v")[0])


def actions_in_words(space: Any, game: Game | None) -> str:
    """What a model is told of the actions. Raises `ConfigError` for a space that no argument can carry."""
    if isinstance(space, spaces.Discrete):
        numbers = range(int(space.start), int(space.start) + int(space.n))
        if game is not None and len(game.actions) == len(numbers):
            return ", ".join(f"{number} ({name})" for number, name in zip(numbers, game.actions, strict=True))
        return f"an integer from {numbers[0]} to {numbers[-1]}"
    if isinstance(space, spaces.MultiDiscrete) and len(space.shape) == 1:
        return f"a list of {space.shape[0]} integers, each from 0 to below {space.nvec.tolist()}"
    if isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:
        return f"a list of {space.shape[0]} numbers, each 0 or 1"
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return f"a list of {space.shape[0]} numbers, from {space.low.tolist()} to {space.high.tolist()}"
    raise ConfigError(
        f"env_id: its actions are {space}; accepted: Discrete, MultiDiscrete, MultiBinary, Box of one row"
    )


def read_action(space: Any, action: int | list[float], words: str) -> Any:
    """The action as the environment wants it. Raises `ToolError` for what it does not have."""
    value: Any = None
    if isinstance(space, spaces.Discrete):
        value = action if isinstance(action, int) else None
    elif isinstance(action, list) and (action or space.shape == (0,)):
        whole = not isinstance(space, spaces.Box)
        exact = not whole or all(float(each).is_integer() for each in action)
        value = np.array(action, dtype=space.dtype) if exact and len(action) == space.shape[0] else None
    if value is None or not space.contains(value):
        raise ToolError(f"no such action: {action}; there are: {words}")
    return value


def observation_in_words(env: Any, env_id: str, observation: Any, *, draws: bool) -> str:
    """What is seen. `draws`: the environment can be rendered as text."""
    name = env_id.rpartition(":")[2].partition("-v")[0]
    said = ""
    if name == "Taxi":
        row, column, passenger, destination = (int(part) for part in env.unwrapped.decode(observation))
        where = "in the taxi" if passenger == 4 else f"at {_PLACES[passenger]}"
        said = f"The taxi is in row {row}, column {column}. The passenger is {where}, and wants to go to "
        said += f"{_PLACES[destination]}.\n"
    elif name == "Blackjack":
        total, dealer, ace = observation
        usable = "with" if ace else "without"
        return (
            f"You hold {int(total)} {usable} a usable ace. The dealer shows {'an ace' if dealer == 1 else int(dealer)}."
        )
    elif not draws or known(env_id) is None:
        said = f"Observation: {json.dumps(plain(observation)).decode()}\n"
    return (said + (uncoloured(str(env.render())) if draws else "")).strip("\n")


def uncoloured(text: str) -> str:
    """A picture without escape codes: what had a background stands in square brackets."""
    return _COLOURED.sub(_mark, text)


def plain(value: Any) -> Any:
    """An observation as JSON values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | type(None)) else repr(value)


def _mark(match: re.Match[str]) -> str:
    background = any(code[0] == "4" and len(code) == 2 for code in match["code"].split(";"))
    text = str(match["text"])
    return f"[{text}]" if background else text
