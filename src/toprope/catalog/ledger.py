"""A stateful environment with tools: accounts, and a goal that is checked in the final state, never in the text."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Annotated, Any

from toprope.errors.tree import ToolError
from toprope.protocol.episode import Task
from toprope.protocol.ids import TaskId
from toprope.servers.resources.environment import Environment, Verdict
from toprope.tools.spec import tool


class Ledger(Environment):
    """Accounts with whole amounts. The reward is the share of accounts that end with the balance of the goal."""

    def seed(self, task: dict[str, Any]) -> dict[str, int]:
        return dict(task["accounts"])

    @tool
    def balance(self, state: dict[str, int], account: str) -> int:
        """The balance of an account."""
        if account not in state:
            raise ToolError(f"no account is named {account!r}; there are: {', '.join(sorted(state))}")
        return state[account]

    @tool
    def deposit(self, state: dict[str, int], account: str, amount: Annotated[int, "a positive whole number"]) -> int:
        """Put money into an account. Returns the new balance."""
        if amount <= 0:
            raise ToolError(f"the amount must be positive, not {amount}")
        state[account] = self.balance(state, account) + amount
        return state[account]

    @tool
    def transfer(self, state: dict[str, int], source: str, target: str, amount: int) -> str:
        """Move money from one account to another."""
        held = self.balance(state, source)
        if not 0 < amount <= held:
            raise ToolError(f"{source} holds {held}: {amount} cannot be moved")
        state[target] = self.balance(state, target) + amount
        state[source] -= amount
        return f"{source}: {state[source]}, {target}: {state[target]}"

    def verify(self, state: dict[str, int], task: dict[str, Any], response: dict[str, Any]) -> Verdict:
        met = {name: float(state.get(name) == goal) for name, goal in task["goal"].items()}
        return Verdict(reward=sum(met.values()) / len(met), reward_components=met, extra={"balances": state})

    # The lines above are the environment; below are its tasks.

    def tasks(self, size: int, seed: int) -> Iterable[Task]:
        """Tasks with one transfer and one deposit, over three accounts."""
        for index in range(size):
            yield _task(self, random.Random(f"{seed}.{index}"), f"{seed}-{index}")


def _task(ledger: Ledger, rng: random.Random, task_id: str) -> Task:
    accounts = {name: rng.randint(20, 90) for name in ("ann", "ben", "cleo")}
    source, target, third = rng.sample(sorted(accounts), 3)
    moved, added = rng.randint(1, accounts[source]), rng.randint(1, 50)
    goal = accounts | {
        source: accounts[source] - moved,
        target: accounts[target] + moved,
        third: accounts[third] + added,
    }
    text = f"Move {moved} from {source} to {target}, then put {added} into the account of {third}. Use the tools."
    params = {"input": [{"type": "message", "role": "user", "content": text}], "tools": ledger.tool_list()}
    data = {"accounts": accounts, "goal": goal}
    return Task(TaskId("ledger", task_id), {"responses_create_params": params, "task_data": data})
