"""The booking desk of a restaurant: its bookings, its rules, and what has changed. Pure.

Left to others: the tools and the verdict (`environment`), what customers want and say (`customers`).
"""

from __future__ import annotations

import copy
import datetime
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from toprope.errors.tree import ToolError

TIMES = ("18:00", "19:00", "20:00", "21:00")
SEATS = 20
MOST_PEOPLE = 8

Booking = dict[str, Any]


@dataclass
class Desk:
    """Everything that one episode can change. `case` is how the agent closed it, None while it is open."""

    today: str
    bookings: dict[str, Booking] = field(default_factory=dict)
    case: str | None = None
    made: int = 0

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Desk:
        """A desk of its own, from a task's data."""
        return cls(**copy.deepcopy(value))

    def as_json(self) -> dict[str, Any]:
        """The whole desk as JSON values."""
        return {"today": self.today, "bookings": self.bookings, "case": self.case, "made": self.made}

    def free(self, date: str, time: str, *, without: str | None = None) -> int:
        """Seats that are free then, as if the booking `without` were not there."""
        self._check_time(date, time)
        taken = sum(
            int(each["people"])
            for code, each in self.bookings.items()
            if (each["date"], each["time"]) == (date, time) and code != without
        )
        return SEATS - taken

    def find(self, code: str, name: str) -> Booking:
        """The booking, for who knows its code and its name."""
        booking = self.bookings.get(code.strip().upper())
        if booking is None or booking["name"].lower() != name.strip().lower():
            raise ToolError("no booking has this code and this name; ask the customer for both")
        return booking

    def book(self, name: str, date: str, time: str, people: int) -> str:
        """The code of a new booking."""
        self._check_room(date, time, people, None)
        if not name.strip():
            raise ToolError("name: a name is needed")
        self.made += 1
        code = f"NEW{self.made}"
        self.bookings[code] = {"name": name.strip(), "date": date, "time": time, "people": people}
        return code

    def change(self, code: str, name: str, date: str, time: str, people: int) -> Booking:
        """The booking as it is now. Refused on its own day."""
        booking = self.find(code, name)
        self._check_day(booking)
        self._check_room(date, time, people, code.strip().upper())
        booking.update(date=date, time=time, people=people)
        return booking

    def cancel(self, code: str, name: str) -> None:
        """The booking is gone. Refused on its own day."""
        self._check_day(self.find(code, name))
        del self.bookings[code.strip().upper()]

    def _check_day(self, booking: Booking) -> None:
        if booking["date"] == self.today:
            raise ToolError("the booking is for today: it can be neither changed nor cancelled any more")

    def _check_time(self, date: str, time: str) -> None:
        if time not in TIMES:
            raise ToolError(f"no table begins at {time!r}; there are: {', '.join(TIMES)}")
        try:
            day = datetime.date.fromisoformat(date).isoformat()
        except ValueError:
            day = ""
        if day != date or day < self.today:
            raise ToolError(f"{date!r} is no day from {self.today} on; write it as YYYY-MM-DD")

    def _check_room(self, date: str, time: str, people: int, code: str | None) -> None:
        if not 1 <= people <= MOST_PEOPLE:
            raise ToolError(f"{people} people: 1 to {MOST_PEOPLE} are accepted")
        free = self.free(date, time, without=code)
        if people > free:
            raise ToolError(f"only {free} seats are free on {date} at {time}")


def changes(before: Desk, after: Desk) -> Counter[str]:
    """What was done: each field that was set, each booking that is gone, each that is new, how the case was closed."""
    found: Counter[str] = Counter()
    for code, booking in before.bookings.items():
        if code not in after.bookings:
            found[f"{code} is gone"] += 1
            continue
        for name, value in after.bookings[code].items():
            if value != booking[name]:
                found[f"{code}: {name} is {value}"] += 1
    for code in after.bookings.keys() - before.bookings.keys():
        new = {**after.bookings[code], "name": after.bookings[code]["name"].lower()}
        found[f"new {json.dumps(new, sort_keys=True, ensure_ascii=False)}"] += 1
    if after.case != before.case:
        found[f"case {after.case}"] += 1
    return found
