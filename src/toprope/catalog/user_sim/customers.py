"""Customers of the booking desk: what they want, what they say turn by turn, and the desk as it should be afterwards.

Each kind is one function: it does what should happen to the desk, and gives the lines of a scripted customer and, for a
customer that a model plays, what they know. No customer says everything at once; some change their mind.
"""

from __future__ import annotations

import copy
import datetime
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toprope.catalog.user_sim.desk import MOST_PEOPLE, TIMES, Desk
from toprope.protocol.episode import Task
from toprope.protocol.ids import TaskId

SYSTEM = f"""\
You look after the bookings of a restaurant and talk with one customer. Today is {{today}}. Tables begin at \
{", ".join(TIMES)}; a booking is for 1 to {MOST_PEOPLE} people. A booking is changed or cancelled only for who gives \
its code and its name, and never on its own day. Ask for what you need to know, use the tools, and tell the customer \
what you did. When nothing more is to be done, close the case: done, or refused where the rules forbid it."""

PLAY = """\
You are a customer of a restaurant. What you want: {wish}
Say first only what it is about, in one sentence. Give a fact (name, code, day, time, number of people) only when you \
are asked for it, or when the assistant has it wrong. {more}You are content when the assistant says that it is \
done, or explains that it cannot be done."""

_NAMES = ("Abel", "Brandt", "Costa", "Duval", "Ekman", "Fuchs", "Garcia", "Holm", "Ito", "Jansen", "Kovacs", "Lund")
_LETTERS = "BCDFGHKLMPRTW"

Mode = Literal["script", "model"]


@dataclass(frozen=True, slots=True)
class Customer:
    """Lines in order, and for a model what is wanted and what else to play."""

    lines: Sequence[str]
    wish: str
    more: str = ""


def make_task(
    tools: Sequence[dict[str, Any]], create_params: Mapping[str, Any], mode: Mode, index: int, seed: int
) -> Task:
    """Task `index` of `seed`: its kind goes round, everything else is by chance."""
    kinds = tuple(KINDS.items())
    name, kind = kinds[index % len(kinds)]
    rng = random.Random(f"user_sim.{seed}.{index}")
    desk = make_desk(rng)
    goal = copy.deepcopy(desk)
    customer = kind(rng, desk, goal)
    user: dict[str, Any] = {"script": list(customer.lines)}
    if mode == "model":
        more = f"{customer.more} " if customer.more else ""
        user = {"instructions": PLAY.format(wish=customer.wish, more=more)}
    message = {"type": "message", "role": "system", "content": SYSTEM.format(today=desk.today)}
    params = {"input": [message], "tools": list(tools), **create_params}
    data = {"kind": name, "user": user, "desk": desk.as_json(), "goal": goal.as_json()}
    return Task(TaskId("user_sim", f"{seed}-{index}"), {"responses_create_params": params, "task_data": data})


def make_desk(rng: random.Random) -> Desk:
    """A desk with about 30 bookings on 6 days."""
    today = datetime.date(2025, 3, 3) + datetime.timedelta(days=rng.randrange(200))
    desk = Desk(today.isoformat())
    for _ in range(30):
        date, time, people = _day(desk, rng.randrange(6)), rng.choice(TIMES), rng.randint(2, 6)
        if desk.free(date, time) >= people:
            code = "".join(rng.sample(_LETTERS, 3)) + str(rng.randint(10, 99))
            desk.bookings[code] = {"name": rng.choice(_NAMES), "date": date, "time": time, "people": people}
    return desk


def _day(desk: Desk, later: int) -> str:
    return (datetime.date.fromisoformat(desk.today) + datetime.timedelta(days=later)).isoformat()


def _pick(rng: random.Random, desk: Desk, *, of_today: bool) -> tuple[str, dict[str, Any]]:
    """A booking of today, made if there is none, or one of another day."""
    found = [(code, each) for code, each in desk.bookings.items() if (each["date"] == desk.today) == of_today]
    return rng.choice(found)


def _place(rng: random.Random, desk: Desk, people: int) -> tuple[str, str]:
    """A day, not today, and a time with room."""
    free = [(_day(desk, later), time) for later in range(1, 8) for time in TIMES]
    return rng.choice([each for each in free if desk.free(*each) >= people])


def _book(rng: random.Random, desk: Desk, goal: Desk) -> Customer:
    name, people = rng.choice(_NAMES), rng.randint(2, MOST_PEOPLE)
    date, time = _place(rng, desk, people)
    goal.book(name, date, time, people)
    goal.case = "done"
    lines = [
        "Hello, I would like to book a table.",
        f"On {date}, there will be {people} of us.",
        f"At {time}, please. The name is {name}.",
        "That is all, thank you.",
    ]
    return Customer(lines, f"a table for {people} people on {date} at {time}, under the name {name}.")


def _cancel(rng: random.Random, desk: Desk, goal: Desk) -> Customer:
    code, booking = _pick(rng, desk, of_today=False)
    goal.cancel(code, booking["name"])
    goal.case = "done"
    lines = ["Hi, I have to cancel my table.", f"The name is {booking['name']}.", f"The code? {code}.", "Thanks, bye."]
    return Customer(lines, f"to cancel your booking with the code {code}, under the name {booking['name']}.")


def _move_if_full(rng: random.Random, desk: Desk, goal: Desk) -> Customer:
    code, booking = _pick(rng, desk, of_today=False)
    date, second = _place(rng, desk, booking["people"])
    first = rng.choice([time for time in TIMES if time != second])
    if rng.random() < 0.5:  # somebody has taken the room at the time that the customer likes best
        for each in (desk, goal):
            taken = each.free(date, first, without=code)
            for part in range(0, taken, MOST_PEOPLE):
                people = min(MOST_PEOPLE, taken - part)
                each.bookings[f"{code}F{part}"] = {"name": "Party", "date": date, "time": first, "people": people}
    room = goal.free(date, first, without=code) >= booking["people"]
    goal.change(code, booking["name"], date, first if room else second, booking["people"])
    goal.case = "done"
    lines = [
        "Good evening, can I move my booking to another day?",
        f"It is under {booking['name']}, code {code}.",
        f"To {date}, best at {first}. If that is full, at {second}.",
        "As many people as before. Do whatever is possible, thank you.",
    ]
    wish = (
        f"to move your booking {code} (name {booking['name']}) to {date} at {first}, or at {second} if {first} is full."
    )
    return Customer(lines, wish)


def _change_of_mind(rng: random.Random, desk: Desk, goal: Desk) -> Customer:
    name, people = rng.choice(_NAMES), rng.randint(2, MOST_PEOPLE - 1)
    date, time = _place(rng, desk, people + 1)
    goal.book(name, date, time, people + 1)
    goal.case = "done"
    lines = [
        f"A table for {people} on {date} at {time}, please.",
        f"{name} is the name.",
        f"Oh, wait. My sister comes too, so we are {people + 1}. Same day and time.",
        "Good, nothing else.",
    ]
    wish = f"a table on {date} at {time} under the name {name}, first for {people} people."
    more = f"As soon as it is booked, or when you were asked twice, say that you are {people + 1} people after all."
    return Customer(lines, wish, more)


def _too_late(rng: random.Random, desk: Desk, goal: Desk) -> Customer:
    if not any(each["date"] == desk.today for each in desk.bookings.values()):
        for each in (desk, goal):
            each.bookings["TOD11"] = {"name": "Holm", "date": desk.today, "time": TIMES[1], "people": 2}
    code, booking = _pick(rng, desk, of_today=True)
    goal.case = "refused"
    lines = [
        "I must cancel my booking, something came up.",
        f"{booking['name']}, code {code}.",
        "Can you not make an exception? It is for tonight, I know.",
        "All right then. Goodbye.",
    ]
    wish = f"to cancel your booking of tonight, code {code}, name {booking['name']}."
    return Customer(lines, wish, "Ask once for an exception. If it is refused again, accept it.")


def _wrong_code(rng: random.Random, desk: Desk, goal: Desk) -> Customer:
    code, booking = _pick(rng, desk, of_today=False)
    wrong = next(text for text in ("XXX11", "XXX12") if text not in desk.bookings)
    people = booking["people"] - 1 if booking["people"] > 1 else booking["people"] + 1
    goal.change(code, booking["name"], booking["date"], booking["time"], people)
    goal.case = "done"
    lines = [
        f"Our number has changed: we will be {people}. My code is {wrong}.",
        f"The name is {booking['name']}.",
        f"Sorry, I looked at the wrong mail. The code is {code}. Day and time stay.",
        "Thank you.",
    ]
    wish = f"to change the number of people of your booking {code} (name {booking['name']}) to {people}."
    return Customer(lines, wish, f"When you are asked for the code the first time, say {wrong} by mistake.")


KINDS: Mapping[str, Callable[[random.Random, Desk, Desk], Customer]] = {
    "book": _book,
    "cancel": _cancel,
    "move_if_full": _move_if_full,
    "change_of_mind": _change_of_mind,
    "too_late": _too_late,
    "wrong_code": _wrong_code,
}
"""What customers come for, by name."""
