"""A till: ring up what the customer wants. The reward is whether the total is right."""

from dataclasses import dataclass, field
from typing import Annotated

from toprope import Environment, ToolError, Verdict, tool

PRICES = {"tea": 3, "cake": 5, "soup": 8}


@dataclass
class Till:
    """What one episode holds."""

    lines: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(PRICES[item] * count for item, count in self.lines.items())


class Shop(Environment):
    """One customer, one till."""

    def seed(self, task: dict) -> Till:
        return Till()

    @tool
    def ring_up(self, till: Till, item: str, count: Annotated[int, "how many"] = 1) -> str:
        """Add an item to the bill."""
        if item not in PRICES:
            raise ToolError(f"no price for {item!r}; there are: {', '.join(PRICES)}")
        till.lines[item] = till.lines.get(item, 0) + count
        return f"the total is {till.total}"

    @tool
    def price_list(self, till: Till) -> dict[str, int]:
        """What everything costs."""
        return PRICES

    def verify(self, till: Till, task: dict, response: dict) -> Verdict:
        return Verdict(reward=float(till.total == task["total"]), extra={"total_rung_up": till.total})
