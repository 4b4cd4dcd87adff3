"""The protocol `interactive`: a user and an agent take turns in one session until the user is done; then verify.

    seed resources -> grants, seed agent -> [user speaks ->] activate 1 -> user speaks -> activate 2 ... -> close agent
    -> verify

Every activation is asked with the whole conversation so far; verify sees it as one response, the user's messages among
its items. The agent speaks first where the task's input ends with a message of the user, else the user does. Left to
others: what a user is (`users`), what each step is (`turns`), deadlines and clean-up (`episode`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toprope.errors.kinds import Kind, Stage
from toprope.errors.tree import BadRequest, ConfigError
from toprope.servers.environment.base import EpisodeProtocol
from toprope.servers.environment.episode import DeadlinePassed, Episode
from toprope.servers.environment.turns import Opened, TurnInput, activate, finish, open_sessions, read_input
from toprope.servers.environment.users import ModelUser, ScriptedUser, User, UserInput, read_user
from toprope.wire.responses import NOT_SAMPLING

USER_DONE = "user_done"
MAX_TURNS = "max_turns"
AGENT_STOPPED = "agent_stopped"


@dataclass(frozen=True, slots=True)
class Talk:
    """A task's input in the protocol's own form."""

    turn: TurnInput
    user: UserInput


class Interactive(EpisodeProtocol):
    """`Interactive(user_model=None, max_turns=10, stop="###STOP###", user_timeout_s=120, user_sampling={})`.

    `user_model` names the model server that plays users with `instructions`; `max_turns` bounds the activations.
    Raises `ConfigError` for a setting that is out of bounds.
    """

    name = "interactive"

    def __init__(
        self,
        *,
        user_model: str | None = None,
        max_turns: int = 10,
        stop: str = "###STOP###",
        user_timeout_s: float = 120.0,
        user_sampling: dict[str, Any] | None = None,
    ) -> None:
        if max_turns < 1:
            raise ConfigError(f"max_turns: {max_turns} given; accepted: an integer of at least 1")
        if not stop:
            raise ConfigError("stop: '' given; accepted: a text that no user says by chance")
        if not user_timeout_s > 0:
            raise ConfigError(f"user_timeout_s: {user_timeout_s:g} given; accepted: seconds above 0")
        for field in sorted(NOT_SAMPLING & set(user_sampling or {})):
            raise ConfigError(
                f"user_sampling.{field}: this is no setting of sampling; the conversation makes the user's request, "
                "and its reply is whole. Accepted: temperature, top_p, max_output_tokens and the like"
            )
        self.models = () if user_model is None else (user_model,)
        self._user_model = user_model
        self._max_turns = max_turns
        self._stop = stop
        self._user_timeout_s = user_timeout_s
        self._user_sampling = dict(user_sampling or {})

    def read(self, task_input: Mapping[str, Any]) -> Talk:
        """As `read_input`, and the `user` among the task's data. Raises `BadRequest` naming the field."""
        turn = read_input(task_input)
        user = read_user(turn.task_data.get("user"))
        if user.instructions is not None and self._user_model is None:
            raise BadRequest("task_input.task_data.user.instructions: needs `user_model` in the protocol's settings")
        if user.script == () and not _ends_with_user(turn):
            raise BadRequest("task_input.task_data.user.script: is empty, and the input has no message of the user")
        return Talk(turn, user)

    async def run(self, episode: Episode, given: Talk) -> dict[str, Any]:
        """The result of a verified conversation. Raises what went wrong; `episode.stage` says where.

        `termination` says what ended it: user_done, max_turns, agent_stopped (a turn that failed or was incomplete) or
        agent_timeout.
        """
        opened = await open_sessions(episode, given.turn)
        late, ended_by = await self._talk(episode, opened, given)
        result = await finish(episode, opened, given.turn, late)
        if late is None:
            result["termination"] = ended_by
        return result

    async def _talk(self, episode: Episode, opened: Opened, given: Talk) -> tuple[DeadlinePassed | None, str]:
        """Turns until one side is done; the conversation is the episode's partial response."""
        user = self._user(episode, given.user)
        deadline = episode.agent_deadline
        opening = _items(given.turn.responses_create_params["input"])
        said: list[dict[str, Any]] = []
        usage: list[Any] = []
        agent_next = _ends_with_user(given.turn)
        for number in range(1, self._max_turns + 1):
            if not agent_next:
                words = await user.say(episode, [*opening, *said], deadline)
                if words.text is not None:
                    said.append({"type": "message", "role": "user", "content": words.text})
                    _extend(episode, said)
                if words.done:
                    return None, USER_DONE
            agent_next = False
            episode.earlier = list(said)
            request = {**given.turn.responses_create_params, "input": [*opening, *said]}
            if episode.now >= deadline:  # the user took what was left
                return DeadlinePassed("agent: its time was used up between two turns", kind=Kind.AGENT_TIMEOUT), ""
            late = await activate(episode, opened.agent, number, request, deadline)
            if late is not None:
                return late, ""
            response = episode.partial_response or {}
            said = list(response["output"])
            usage.append(response.get("usage"))
            response["usage"] = total(usage)
            if response.get("status") in ("failed", "incomplete"):
                return None, AGENT_STOPPED
        return None, MAX_TURNS

    def _user(self, episode: Episode, given: UserInput) -> User:
        if given.instructions is None:
            return ScriptedUser(given.script or ())
        assert self._user_model is not None  # `read` requires it
        return ModelUser(
            name=self._user_model,
            peer=episode.plan.models[self._user_model],
            instructions=given.instructions,
            stop=self._stop,
            timeout_s=self._user_timeout_s,
            sampling=self._user_sampling,
        )


def _extend(episode: Episode, said: list[dict[str, Any]]) -> None:
    """The user's words end the conversation so far, if the agent ever spoke."""
    if episode.partial_response is not None:
        episode.partial_response = {**episode.partial_response, "output": list(said)}
    episode.stage = Stage.AGENT


def _items(given: str | list[Any]) -> list[dict[str, Any]]:
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else list(given)


def _ends_with_user(turn: TurnInput) -> bool:
    items = _items(turn.responses_create_params["input"])
    return bool(items) and isinstance(items[-1], Mapping) and items[-1].get("role") == "user"


def total(usages: list[Any]) -> Any:
    """The sum of the turns' usages, leaf by leaf; None where a turn told nothing (unknown is not zero)."""
    if all(isinstance(usage, Mapping) for usage in usages):
        return {key: total([usage.get(key) for usage in usages]) for key in usages[0]}
    if all(isinstance(usage, int) and not isinstance(usage, bool) for usage in usages):
        return sum(usages)
    return None
