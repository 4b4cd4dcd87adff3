"""The office: contacts and customers, a calendar, mail. What can be done in it, and what has changed. Pure.

Left to others: which tools a model is offered and the verdict (`environment`), the tasks (`tasks`).
"""

from __future__ import annotations

import copy
import datetime
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from toprope.errors.tree import ToolError

STAGES = ("lead", "qualified", "proposal", "won", "lost")
FOLDERS = ("inbox", "archive")
DAY_BEGINS, DAY_ENDS = "09:00", "17:00"
MOST_FOUND = 20

Record = dict[str, Any]


@dataclass
class Office:
    """Everything that one episode can change. Records by id, each a flat dict of JSON values."""

    today: str
    contacts: dict[str, Record] = field(default_factory=dict)
    events: dict[str, Record] = field(default_factory=dict)
    mails: dict[str, Record] = field(default_factory=dict)
    made: int = 0

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Office:
        """An office of its own, from a task's data."""
        return cls(**copy.deepcopy(value))

    def as_json(self) -> dict[str, Any]:
        """The whole office as JSON values."""
        return {"today": self.today, "contacts": self.contacts, "events": self.events, "mails": self.mails}

    def new_id(self, kind: str) -> str:
        """An id that no record has."""
        self.made += 1
        return f"{kind}-new-{self.made}"

    # -- calendar ------------------------------------------------------------------------------------------------

    def create_event(self, title: str, date: str, start: str, minutes: int, attendees: list[str]) -> Record:
        """A new event. Raises `ToolError` for what cannot be, also where it overlaps another."""
        event = {
            "title": _text(title, "title"),
            "date": _date(date),
            "start": _time(start),
            "minutes": _minutes(minutes),
            "attendees": sorted({self.address(each) for each in attendees}),
        }
        self._no_clash(event, None)
        event_id = self.new_id("event")
        self.events[event_id] = event
        return {"event_id": event_id, **event}

    def move_event(self, event_id: str, date: str, start: str) -> Record:
        """The event at another time."""
        event = self.event(event_id)
        moved = {**event, "date": _date(date), "start": _time(start)}
        self._no_clash(moved, event_id)
        event.update(moved)
        return {"event_id": event_id, **event}

    def cancel_event(self, event_id: str) -> None:
        """The event is gone."""
        self.event(event_id)
        del self.events[event_id]

    def event(self, event_id: str) -> Record:
        """The event of this id."""
        return _known(self.events, event_id, "event")

    def _no_clash(self, event: Record, own_id: str | None) -> None:
        begin, end = span(event)
        for event_id, other in self.events.items():
            if event_id != own_id and other["date"] == event["date"]:
                other_begin, other_end = span(other)
                if begin < other_end and other_begin < end:
                    raise ToolError(f"{event['date']} {event['start']}: {event_id} ({other['title']}) is then")

    # -- mail ----------------------------------------------------------------------------------------------------

    def send(self, to: str, subject: str, body: str) -> Record:
        """A mail that was sent."""
        mail = {
            "folder": "sent",
            "from": "me@office.example",
            "to": self.address(to),
            "subject": _text(subject, "subject"),
            "body": _text(body, "body"),
            "date": self.today,
        }
        mail_id = self.new_id("mail")
        self.mails[mail_id] = mail
        return {"mail_id": mail_id, **mail}

    def move_mail(self, mail_id: str, folder: str) -> None:
        """The mail in another folder."""
        if folder not in FOLDERS:
            raise ToolError(f"no folder is named {folder!r}; there are: {', '.join(FOLDERS)}")
        self.mail(mail_id)["folder"] = folder

    def delete_mail(self, mail_id: str) -> None:
        """The mail is gone."""
        self.mail(mail_id)
        del self.mails[mail_id]

    def mail(self, mail_id: str) -> Record:
        """The mail of this id."""
        return _known(self.mails, mail_id, "mail")

    # -- contacts ------------------------------------------------------------------------------------------------

    def contact(self, contact_id: str) -> Record:
        """The contact of this id."""
        return _known(self.contacts, contact_id, "contact")

    def update_contact(self, contact_id: str, changes: dict[str, str]) -> Record:
        """The contact with other values."""
        contact = self.contact(contact_id)
        stage = changes.get("stage")
        if stage is not None and stage not in STAGES:
            raise ToolError(f"no stage is named {stage!r}; there are: {', '.join(STAGES)}")
        contact.update({name: _text(value, name) for name, value in changes.items()})
        return {"contact_id": contact_id, **contact}

    def address(self, text: str) -> str:
        """`text` if it is the address of a contact."""
        wanted = text.strip().lower()
        if not any(contact["email"] == wanted for contact in self.contacts.values()):
            raise ToolError(f"no contact has the address {text!r}; search the contacts for it")
        return wanted


def changes(before: Office, after: Office) -> Counter[str]:
    """What was done: each field that was set, each record that is gone, each that is new.

    Ids of new records are no part of it, nor is any order, nor case and spaces of their texts.
    """
    found: Counter[str] = Counter()
    for kind in ("contacts", "events", "mails"):
        was, now = getattr(before, kind), getattr(after, kind)
        for record_id, record in was.items():
            if record_id not in now:
                found[f"{kind} {record_id} is gone"] += 1
                continue
            for name, value in now[record_id].items():
                if value != record[name]:
                    found[f"{kind} {record_id}: {name} is {_shown(value)}"] += 1
        for record_id in now.keys() - was.keys():
            found[f"{kind}: new {_shown({name: _loose(value) for name, value in now[record_id].items()})}"] += 1
    return found


def span(event: Record) -> tuple[int, int]:
    """Begin and end of an event in minutes of its day."""
    begin = minute(event["start"])
    return begin, begin + int(event["minutes"])


def minute(time: str) -> int:
    """Minutes since midnight."""
    return int(time[:2]) * 60 + int(time[3:])


def clock(minutes: int) -> str:
    """`HH:MM`."""
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def _shown(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _loose(value: Any) -> Any:
    return " ".join(value.lower().split()).rstrip(".!") if isinstance(value, str) else value


def _known(records: dict[str, Record], record_id: str, noun: str) -> Record:
    if record_id not in records:
        raise ToolError(f"no {noun} has the id {record_id!r}; search for it first")
    return records[record_id]


def _text(value: str, name: str) -> str:
    if not value.strip() or len(value) > 2000:
        raise ToolError(f"{name}: 1 to 2000 characters are accepted")
    return value.strip()


def _date(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise ToolError(f"{text!r} is no date; write it as YYYY-MM-DD") from None


def _time(text: str) -> str:
    try:
        return datetime.datetime.strptime(text, "%H:%M").strftime("%H:%M")
    except ValueError:
        raise ToolError(f"{text!r} is no time of day; write it as HH:MM") from None


def _minutes(value: int) -> int:
    if not 5 <= value <= 480:
        raise ToolError(f"{value} minutes: 5 to 480 are accepted")
    return value
