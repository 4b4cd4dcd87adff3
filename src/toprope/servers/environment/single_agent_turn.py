"""The protocol `single_agent_turn`: one activation of one agent, then verify.

    seed resources -> grants, seed agent -> activate -> close agent -> verify

Left to others: what each step is (`turns`), admission, clean-up and what a failure looks like (`base`, `episode`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toprope.servers.environment.base import EpisodeProtocol
from toprope.servers.environment.episode import Episode
from toprope.servers.environment.turns import TurnInput, activate, finish, open_sessions, read_input


class SingleAgentTurn(EpisodeProtocol):
    """The order of calls of `single_agent_turn`."""

    name = "single_agent_turn"

    def read(self, task_input: Mapping[str, Any]) -> TurnInput:
        """As `read_input`."""
        return read_input(task_input)

    async def run(self, episode: Episode, given: TurnInput) -> dict[str, Any]:
        """The result of a verified episode. Raises what went wrong; `episode.stage` says where."""
        opened = await open_sessions(episode, given)
        late = await activate(episode, opened.agent, 1, given.responses_create_params, episode.agent_deadline)
        return await finish(episode, opened, given, late)
