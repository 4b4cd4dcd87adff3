"""The tasks of the workbench: an office by chance, something to do in it, and the office as it should be afterwards.

The goal is made by doing it: each kind of task says in words what is wanted and does it on a copy of the office. Mails
are asked for word by word, so that their text is a fact like any other.
"""

from __future__ import annotations

import copy
import datetime
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from toprope.catalog.workbench.office import DAY_BEGINS, DAY_ENDS, STAGES, Office, changes, clock, minute, span
from toprope.protocol.episode import Task
from toprope.protocol.ids import TaskId

_FIRST = ("Ana", "Bo", "Chen", "Dara", "Emil", "Fay", "Goran", "Hana", "Ivo", "June", "Karim", "Lena", "Milo", "Nia")
_LAST = ("Abel", "Brandt", "Costa", "Duval", "Ekman", "Fuchs", "Garcia", "Holm", "Ito", "Jansen", "Kovacs", "Lund")
_COMPANIES = ("Northwind", "Alder Mills", "Copperline", "Bluefin", "Tessera", "Quarry & Sons")
_OWNERS = ("Priya", "Tom", "Sasha")
_TITLES = ("Review", "Kick-off", "Demo", "Budget talk", "Interview", "Planning")
_SUBJECTS = ("Invoice", "Question about the offer", "Newsletter", "Delivery date", "Holiday notice", "Contract")
_LENGTHS = (30, 45, 60, 90)

SYSTEM = (
    "You look after an office with the tools that you are given. Today is {today}. Working hours are 09:00 to 17:00. "
    "Do what you are asked and nothing else, then say briefly what you did."
)


def make_task(tools: Sequence[dict[str, Any]], create_params: Mapping[str, Any], index: int, seed: int) -> Task:
    """Task `index` of `seed`: its kind goes round, everything else is by chance."""
    kinds = tuple(KINDS.items())
    name, kind = kinds[index % len(kinds)]
    for turn in range(100):
        rng = random.Random(f"workbench.{seed}.{index}.{turn}")
        office = make_office(rng)
        goal = copy.deepcopy(office)
        text = kind(rng, goal)
        if text is not None and changes(office, goal):
            break
    else:
        raise AssertionError(f"task {index} of seed {seed}: no office fits {name}")
    turns = [("system", SYSTEM.format(today=office.today)), ("user", text)]
    params = {
        "input": [{"type": "message", "role": role, "content": content} for role, content in turns],
        "tools": list(tools),
        **create_params,
    }
    data = {"kind": name, "office": office.as_json(), "goal": {**goal.as_json(), "made": goal.made}}
    return Task(TaskId("workbench", f"{seed}-{index}"), {"responses_create_params": params, "task_data": data})


def make_office(rng: random.Random) -> Office:
    """An office: 12 contacts of 6 companies, about 18 events on 5 days, 14 mails."""
    today = datetime.date(2025, 1, 6) + datetime.timedelta(weeks=rng.randrange(40))
    office = Office(today.isoformat())
    names = rng.sample([f"{first} {last}" for first in _FIRST for last in _LAST], 12)
    for number, name in enumerate(names):
        company = _COMPANIES[number % len(_COMPANIES)]
        domain = "".join(letter for letter in company.lower() if letter.isalpha())
        office.contacts[f"contact-{number + 1}"] = {
            "name": name,
            "company": company,
            "email": f"{name.lower().replace(' ', '.')}@{domain}.example",
            "stage": rng.choice(STAGES),
            "owner": rng.choice(_OWNERS),
        }
    addresses = [contact["email"] for contact in office.contacts.values()]
    for day in days(office):
        at = minute(DAY_BEGINS) + 30 * rng.randrange(2)
        while at < minute(DAY_ENDS) - 90:
            length = rng.choice(_LENGTHS)
            office.events[f"event-{len(office.events) + 1}"] = {
                "title": rng.choice(_TITLES),
                "date": day,
                "start": clock(at),
                "minutes": length,
                "attendees": sorted(rng.sample(addresses, rng.randint(1, 2))),
            }
            at += length + 15 * rng.randint(2, 8)
    for number in range(14):
        office.mails[f"mail-{number + 1}"] = {
            "folder": "inbox",
            "from": rng.choice(addresses[:7]),
            "to": "me@office.example",
            "subject": rng.choice(_SUBJECTS),
            "body": f"About number {rng.randint(100, 999)}. Please have a look.",
            "date": (today - datetime.timedelta(days=rng.randint(0, 9))).isoformat(),
        }
    return office


def days(office: Office) -> list[str]:
    """Today and the four days after it, a working week."""
    today = datetime.date.fromisoformat(office.today)
    return [(today + datetime.timedelta(days=number)).isoformat() for number in range(5)]


def first_gap(office: Office, date: str, minutes: int) -> str | None:
    """When the first stretch of free working time of that length begins, on that date."""
    at = minute(DAY_BEGINS)
    for begin, end in sorted(span(event) for event in office.events.values() if event["date"] == date):
        if begin - at >= minutes:
            break
        at = max(at, end)
    return clock(at) if at + minutes <= minute(DAY_ENDS) else None


# Each kind changes the office to the goal and says in words what was done; None where this office does not suit it.


def _book(rng: random.Random, office: Office) -> str | None:
    contact, date = rng.choice(list(office.contacts.values())), rng.choice(days(office)[1:])
    title, length = rng.choice(_TITLES), rng.choice(_LENGTHS)
    start = first_gap(office, date, length)
    if start is None:
        return None
    office.create_event(f"{title} with {contact['name']}", date, start, length, [contact["email"]])
    return (
        f"Book a meeting of {length} minutes with {contact['name']} on {date}, at the first free time of that "
        f"length in working hours. Title: {title} with {contact['name']}"
    )


def _move_all(rng: random.Random, office: Office) -> str | None:
    contact = rng.choice(list(office.contacts.values()))
    mine = [(key, event) for key, event in office.events.items() if contact["email"] in event["attendees"]]
    target = (datetime.date.fromisoformat(days(office)[0]) + datetime.timedelta(days=7)).isoformat()
    if not 1 <= len(mine) <= 3 or len({event["start"] for _, event in mine}) < len(mine):
        return None
    taken = sorted(span(event) for _, event in mine)
    if any(end > begin for (_, end), (begin, _) in pairwise(taken)):
        return None
    for key, event in mine:
        office.move_event(key, target, event["start"])
    return (
        f"{contact['name']} is away this week. Move every event with them to {target}, each at the time of day it has."
    )


def _cancel_day(rng: random.Random, office: Office) -> str | None:
    date, company = rng.choice(days(office)), rng.choice(_COMPANIES)
    people = {each["email"] for each in office.contacts.values() if each["company"] == company}
    doomed = [key for key, event in office.events.items() if event["date"] == date and people & set(event["attendees"])]
    for key in doomed:
        office.cancel_event(key)
    return f"Cancel all events on {date} that somebody from {company} attends." if doomed else None


def _write_to_stage(rng: random.Random, office: Office) -> str | None:
    stage, subject = rng.choice(STAGES), rng.choice(("Our new prices", "An invitation", "Summer break"))
    people = [each for each in office.contacts.values() if each["stage"] == stage]
    if not 1 <= len(people) <= 4:
        return None
    body = f"Dear customer, more about this on {days(office)[2]}."
    for each in people:
        office.send(each["email"], subject, body)
    return f'Send a mail to every contact in the stage {stage}. Subject: "{subject}". Text: "{body}"'


def _promote(rng: random.Random, office: Office) -> str | None:
    company, stage, owner = rng.choice(_COMPANIES), rng.choice(STAGES), rng.choice(_OWNERS)
    people = [(key, each) for key, each in office.contacts.items() if each["company"] == company]
    for key, _ in people:
        office.update_contact(key, {"stage": stage, "owner": owner})
    return f"All contacts at {company} are now in the stage {stage}, and {owner} is their owner. Update them."


def _tidy_mail(rng: random.Random, office: Office) -> str | None:
    subject = rng.choice(_SUBJECTS)
    contact = rng.choice(list(office.contacts.values()))
    archive = [key for key, mail in office.mails.items() if mail["subject"] == subject]
    delete = [key for key, mail in office.mails.items() if mail["from"] == contact["email"] and key not in archive]
    if not archive or not delete:
        return None
    for key in archive:
        office.move_mail(key, "archive")
    for key in delete:
        office.delete_mail(key)
    return (
        f'Move all mails in the inbox with the subject "{subject}" to the archive, and delete those that '
        f"{contact['name']} sent about anything else."
    )


def _answer(rng: random.Random, office: Office) -> str | None:
    contact_id, contact = rng.choice(list(office.contacts.items()))
    mine = [key for key, mail in office.mails.items() if mail["from"] == contact["email"]]
    if len(mine) != 1 or contact["stage"] == "won":
        return None
    subject = office.mails[mine[0]]["subject"]
    body = "Thank you, we will see to it."
    office.send(contact["email"], f"Re: {subject}", body)
    office.move_mail(mine[0], "archive")
    office.update_contact(contact_id, {"stage": "won"})
    return (
        f'{contact["name"]} has written to us. Answer with the subject "Re: {subject}" and the text "{body}", move '
        "their mail to the archive, and set their stage to won."
    )


def _hand_over(rng: random.Random, office: Office) -> str | None:
    old, new = rng.sample(_OWNERS, 2)
    people = [(key, each) for key, each in office.contacts.items() if each["owner"] == old and each["stage"] == "lead"]
    date = days(office)[4]
    start = first_gap(office, date, 30)
    if not 1 <= len(people) <= 3 or start is None:
        return None
    for key, _ in people:
        office.update_contact(key, {"owner": new})
    office.create_event("Hand-over", date, start, 30, [each["email"] for _, each in people])
    return (
        f"{new} takes over all leads of {old}: change their owner. Then book one meeting of 30 minutes with all of "
        f"these contacts on {date}, at the first free time in working hours. Title: Hand-over"
    )


KINDS: Mapping[str, Callable[[random.Random, Office], str | None]] = {
    "book": _book,
    "move_all": _move_all,
    "cancel_day": _cancel_day,
    "write_to_stage": _write_to_stage,
    "promote": _promote,
    "tidy_mail": _tidy_mail,
    "answer": _answer,
    "hand_over": _hand_over,
}
"""What can be asked for, by name."""
