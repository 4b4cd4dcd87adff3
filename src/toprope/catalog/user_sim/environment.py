"""A booking desk with a customer who talks: tools over one desk an episode, and a verdict from how it was left.

For the protocol `interactive`: the task's `user` holds the customer, as lines in order or as instructions for a model.
The reward compares what changed at the desk with what the customer should get: the share of wanted changes that were
made, less those that nobody wanted. What was said is not judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from toprope.catalog.changes import judged_by_changes
from toprope.catalog.user_sim.customers import Mode, make_task
from toprope.catalog.user_sim.desk import TIMES, Booking, Desk, changes
from toprope.errors.tree import ConfigError, ToolError
from toprope.protocol.episode import Task
from toprope.servers.resources.environment import Environment, Verdict
from toprope.tools.spec import tool

Day = Annotated[str, "YYYY-MM-DD"]
Time = Annotated[str, "HH:MM"]


class UserSim(Environment):
    """`UserSim(user="script", create_params={...})`.

    `user`: `script`, a customer with lines, or `model`, one that the protocol's `user_model` plays. `create_params`:
    further fields of `responses_create_params` of every task.
    """

    gradable_on_timeout = True

    def __init__(self, *, user: Mode = "script", create_params: Mapping[str, Any] | None = None) -> None:
        if user not in ("script", "model"):
            raise ConfigError(f"user: {user!r} given; accepted: script, model")
        self.user: Mode = user
        self.create_params = dict(create_params or {})

    def seed(self, task: dict[str, Any]) -> Desk:
        """The desk as the task finds it."""
        return Desk.from_json(task["desk"])

    @tool
    def find_booking(self, desk: Desk, code: str, name: str) -> Booking:
        """The booking with this code and this name."""
        return dict(desk.find(code, name))

    @tool
    def free_seats(self, desk: Desk, date: Day) -> dict[str, int]:
        """How many seats are free at each time of a day."""
        return {time: desk.free(date, time) for time in TIMES}

    @tool
    def book(self, desk: Desk, name: str, date: Day, time: Time, people: int) -> str:
        """Make a new booking. Gives its code."""
        return f"booked, the code is {desk.book(name, date, time, people)}"

    @tool
    def change_booking(self, desk: Desk, code: str, name: str, date: Day, time: Time, people: int) -> Booking:
        """Change a booking. Everything is given, also what stays as it is."""
        return dict(desk.change(code, name, date, time, people))

    @tool
    def cancel_booking(self, desk: Desk, code: str, name: str) -> str:
        """Cancel a booking."""
        desk.cancel(code, name)
        return f"{code} is cancelled"

    @tool
    def close_case(self, desk: Desk, outcome: Literal["done", "refused"]) -> str:
        """Say how the conversation ended, once nothing more is to be done. May be said again; the last counts."""
        if outcome not in ("done", "refused"):
            raise ToolError(f"no outcome is named {outcome!r}; there are: done, refused")
        desk.case = outcome
        return f"closed as {outcome}"

    def verify(self, desk: Desk, task: dict[str, Any], response: dict[str, Any]) -> Verdict:
        """The reward is max(0, made - unwanted) / wanted, each a count of changes. The row lists what was missed."""
        before, goal = Desk.from_json(task["desk"]), Desk.from_json(task["goal"])
        return judged_by_changes(changes(before, goal), changes(before, desk))

    def tasks(self, size: int, seed: int) -> Iterable[Task]:
        """`size` customers, of each kind in turn; the same for the same seed."""
        for index in range(size):
            yield make_task(self.tool_list(), self.create_params, self.user, index, seed)
