"""The office as an environment: tools over one office an episode, and a verdict from how it was left.

The reward compares what the episode changed with what the task wanted changed, one by one: the share of wanted changes
that were made, less those that nobody wanted. Words are not judged, nor the order of the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from toprope.catalog.changes import judged_by_changes
from toprope.catalog.workbench.office import MOST_FOUND, Office, Record, changes
from toprope.catalog.workbench.tasks import make_task
from toprope.errors.tree import ToolError
from toprope.protocol.episode import Task
from toprope.servers.resources.environment import Environment, Verdict
from toprope.tools.spec import tool

Stage = Literal["lead", "qualified", "proposal", "won", "lost"]
Folder = Literal["inbox", "archive"]


class Workbench(Environment):
    """`Workbench(create_params={...})`: further fields of `responses_create_params` of every task."""

    gradable_on_timeout = True

    def __init__(self, *, create_params: Mapping[str, Any] | None = None) -> None:
        self.create_params = dict(create_params or {})

    def seed(self, task: dict[str, Any]) -> Office:
        """The office as the task finds it."""
        return Office.from_json(task["office"])

    @tool
    def search_contacts(self, office: Office, text: str = "", stage: Stage | None = None) -> list[Record]:
        """Contacts whose name, company or address contains the text, in one stage if given. No text finds all."""
        found = [
            {"contact_id": contact_id, **contact}
            for contact_id, contact in office.contacts.items()
            if _has(contact, ("name", "company", "email"), text) and stage in (None, contact["stage"])
        ]
        return found[:MOST_FOUND]

    @tool
    def update_contact(
        self, office: Office, contact_id: str, stage: Stage | None = None, owner: str | None = None
    ) -> Record:
        """Change the stage or the owner of a contact. What is not given stays."""
        given = {"stage": stage, "owner": owner}
        changed: dict[str, str] = {name: str(value) for name, value in given.items() if value is not None}
        if not changed:
            raise ToolError("nothing to change: give a stage or an owner")
        return office.update_contact(contact_id, changed)

    @tool
    def search_events(
        self, office: Office, date: Annotated[str, "YYYY-MM-DD"] = "", attendee: Annotated[str, "an address"] = ""
    ) -> list[Record]:
        """Events in order of time, on one date and with one attendee if these are given."""
        found = [
            {"event_id": event_id, **event}
            for event_id, event in office.events.items()
            if date in ("", event["date"]) and (not attendee or attendee.strip().lower() in event["attendees"])
        ]
        return sorted(found, key=lambda event: (event["date"], event["start"]))[:MOST_FOUND]

    @tool
    def create_event(
        self,
        office: Office,
        title: str,
        date: Annotated[str, "YYYY-MM-DD"],
        start: Annotated[str, "HH:MM, 24 hours"],
        minutes: int,
        attendees: Annotated[list[str], "addresses of contacts"] = [],  # noqa: B006
    ) -> Record:
        """Put an event into the calendar. It must not overlap another."""
        return office.create_event(title, date, start, minutes, attendees)

    @tool
    def move_event(self, office: Office, event_id: str, date: str, start: str) -> Record:
        """Move an event to another date (YYYY-MM-DD) and time (HH:MM)."""
        return office.move_event(event_id, date, start)

    @tool
    def cancel_event(self, office: Office, event_id: str) -> str:
        """Take an event out of the calendar."""
        office.cancel_event(event_id)
        return f"{event_id} is cancelled"

    @tool
    def search_mails(self, office: Office, text: str = "", sender: str = "", folder: str = "inbox") -> list[Record]:
        """Mails in a folder (inbox, archive or sent) by sender and by a text in subject or body. No text finds all."""
        found = [
            {"mail_id": mail_id, **mail}
            for mail_id, mail in office.mails.items()
            if mail["folder"] == folder
            and sender.strip().lower() in mail["from"]
            and _has(mail, ("subject", "body"), text)
        ]
        return found[:MOST_FOUND]

    @tool
    def send_mail(self, office: Office, to: Annotated[str, "an address"], subject: str, body: str) -> str:
        """Send a mail to one contact."""
        return f"sent as {office.send(to, subject, body)['mail_id']}"

    @tool
    def move_mail(self, office: Office, mail_id: str, folder: Folder) -> str:
        """Put a mail into another folder."""
        office.move_mail(mail_id, folder)
        return f"{mail_id} is in {folder}"

    @tool
    def delete_mail(self, office: Office, mail_id: str) -> str:
        """Delete a mail for good."""
        office.delete_mail(mail_id)
        return f"{mail_id} is deleted"

    def verify(self, office: Office, task: dict[str, Any], response: dict[str, Any]) -> Verdict:
        """The reward is max(0, made - unwanted) / wanted, each a count of changes. The row lists what was missed."""
        before, goal = Office.from_json(task["office"]), Office.from_json(task["goal"])
        return judged_by_changes(changes(before, goal), changes(before, office))

    def tasks(self, size: int, seed: int) -> Iterable[Task]:
        """`size` tasks, of each kind in turn; the same for the same seed."""
        for index in range(size):
            yield make_task(self.tool_list(), self.create_params, index, seed)


def _has(record: Record, names: Iterable[str], text: str) -> bool:
    return any(text.strip().lower() in str(record[name]).lower() for name in names)
