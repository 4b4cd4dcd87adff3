"""The workbench: what counts is the office as it is left, whatever was said and in whichever order it was done."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from toprope.catalog.workbench.environment import Workbench
from toprope.catalog.workbench.office import Office, Record, changes
from toprope.catalog.workbench.tasks import KINDS, first_gap
from toprope.errors.tree import ToolError
from toprope.servers.resources.environment import Verdict

BENCH = Workbench()
TASKS = [task.task_input["task_data"] for task in BENCH.tasks(24, seed=11)]
IDS = [f"{number}-{task['kind']}" for number, task in enumerate(TASKS)]


def steps(task: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Tool calls that bring the office to the goal, found from the two offices and not from the task's maker."""
    before, goal = task["office"], task["goal"]
    calls: list[tuple[str, dict[str, Any]]] = []
    for event_id in before["events"]:
        now = goal["events"].get(event_id)
        if now is None:
            calls.append(("cancel_event", {"event_id": event_id}))
        elif now != before["events"][event_id]:
            calls.append(("move_event", {"event_id": event_id, "date": now["date"], "start": now["start"]}))
    for mail_id in before["mails"]:
        now = goal["mails"].get(mail_id)
        if now is None:
            calls.append(("delete_mail", {"mail_id": mail_id}))
        elif now != before["mails"][mail_id]:
            calls.append(("move_mail", {"mail_id": mail_id, "folder": now["folder"]}))
    for contact_id, contact in goal["contacts"].items():
        was = before["contacts"][contact_id]
        calls += [
            ("update_contact", {"contact_id": contact_id, name: contact[name]})
            for name in ("stage", "owner")
            if contact[name] != was[name]
        ]
    for event_id in goal["events"].keys() - before["events"].keys():
        calls.append(("create_event", dict(goal["events"][event_id])))
    for mail_id in goal["mails"].keys() - before["mails"].keys():
        calls.append(("send_mail", {name: goal["mails"][mail_id][name] for name in ("to", "subject", "body")}))
    return calls


def done(task: dict[str, Any], calls: list[tuple[str, dict[str, Any]]]) -> Verdict:
    office = BENCH.seed(task)
    for name, arguments in calls:
        spec = BENCH.tools[name]
        getattr(BENCH, name)(office, **spec.read(json.dumps(arguments).encode()))
    return BENCH.verify(office, task, {})


@pytest.mark.parametrize("task", TASKS, ids=IDS)
def test_every_order_of_the_right_steps_is_worth_everything_and_no_step_nothing(task: dict[str, Any]) -> None:
    calls = steps(task)
    rng = random.Random(0)
    for _ in range(4):
        rng.shuffle(calls)
        verdict = done(task, calls)
        assert (verdict.reward, verdict.extra["missed"], verdict.extra["unwanted"]) == (1.0, [], [])
    assert done(task, []).reward == 0.0


@pytest.mark.parametrize("task", TASKS[:8], ids=IDS[:8])
def test_a_side_effect_beyond_the_task_costs_and_a_missed_step_costs(task: dict[str, Any]) -> None:
    calls = steps(task)
    victim = next(key for key, event in task["office"]["events"].items() if task["goal"]["events"].get(key) == event)
    spoiled = done(task, [*calls, ("cancel_event", {"event_id": victim})])
    assert spoiled.reward < 1.0
    assert spoiled.extra["unwanted"] == [f"events {victim} is gone"]
    partly = done(task, calls[1:])
    assert partly.reward < 1.0
    assert len(partly.extra["missed"]) >= 1
    assert done(task, [("cancel_event", {"event_id": victim})]).reward == 0.0


def test_what_was_undone_again_costs_nothing() -> None:
    task = TASKS[4]
    contact_id, contact = next(iter(task["office"]["contacts"].items()))
    there = ("update_contact", {"contact_id": contact_id, "stage": "won" if contact["stage"] != "won" else "lost"})
    back = ("update_contact", {"contact_id": contact_id, "stage": contact["stage"]})
    assert done(task, [there, back, *steps(task)]).reward == 1.0


def test_a_thing_done_twice_costs() -> None:
    task = next(each for each in TASKS if each["kind"] == "write_to_stage")
    calls = steps(task)
    assert 0.0 <= done(task, [*calls, calls[0]]).reward < 1.0


def test_words_that_differ_in_case_or_a_full_stop_are_the_same_title() -> None:
    task = next(each for each in TASKS if each["kind"] == "book")
    ((name, arguments),) = steps(task)
    assert done(task, [(name, {**arguments, "title": f" {arguments['title'].upper()}. "})]).reward == 1.0
    assert done(task, [(name, {**arguments, "title": "Something else"})]).reward == 0.0


def test_tasks_are_the_same_for_a_seed_cover_every_kind_and_keep_the_goal_from_the_agent() -> None:
    one, two = (list(BENCH.tasks(20, seed)) for seed in (5, 5))
    assert one == two != list(BENCH.tasks(20, 6))
    assert {task.task_input["task_data"]["kind"] for task in one} == set(KINDS)
    for task in one:
        seen = json.dumps(task.task_input["responses_create_params"])
        assert "goal" not in seen
        assert "contact-1" not in seen


def test_the_gap_is_the_first_that_is_long_enough() -> None:
    office = Office("2025-01-06")
    for start, minutes in (("09:15", 30), ("10:00", 60), ("11:30", 300)):
        office.create_event("x", "2025-01-06", start, minutes, [])
    gaps = {minutes: first_gap(office, "2025-01-06", minutes) for minutes in (15, 30, 45, 60)}
    assert gaps == {15: "09:00", 30: "11:00", 45: None, 60: None}


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("create_event", {"title": "x", "date": "2025-13-01", "start": "09:00", "minutes": 30}),
    ("create_event", {"title": "x", "date": "2030-01-01", "start": "25:00", "minutes": 30}),
    ("create_event", {"title": "x", "date": "2030-01-01", "start": "09:00", "minutes": 0}),
    ("create_event", {"title": " ", "date": "2030-01-01", "start": "09:00", "minutes": 30}),
    ("create_event", {"title": "x", "date": "2030-01-01", "start": "09:00", "minutes": 30, "attendees": ["nobody@x"]}),
    ("move_event", {"event_id": "event-999", "date": "2030-01-01", "start": "09:00"}),
    ("cancel_event", {"event_id": "none"}),
    ("send_mail", {"to": "nobody@x", "subject": "s", "body": "b"}),
    ("move_mail", {"mail_id": "none", "folder": "archive"}),
    ("delete_mail", {"mail_id": "none"}),
    ("update_contact", {"contact_id": "none", "stage": "won"}),
    ("update_contact", {"contact_id": "contact-1"}),
]


@pytest.mark.parametrize(("name", "arguments"), REFUSED, ids=[name for name, _ in REFUSED])
def test_what_cannot_be_is_refused_in_words_and_changes_nothing(name: str, arguments: dict[str, Any]) -> None:
    office = BENCH.seed(TASKS[0])
    with pytest.raises(ToolError):
        getattr(BENCH, name)(office, **arguments)
    assert not changes(Office.from_json(TASKS[0]["office"]), office)


def test_two_events_never_overlap() -> None:
    office = BENCH.seed(TASKS[0])
    event_id, event = next(iter(office.events.items()))
    with pytest.raises(ToolError, match=event_id):
        office.create_event("x", event["date"], event["start"], 30, [])
    office.move_event(event_id, event["date"], event["start"])  # onto itself


def test_searches_find_by_text_date_attendee_and_folder() -> None:
    office = BENCH.seed(TASKS[0])
    contact: Record = office.contacts["contact-1"]
    (found,) = BENCH.search_contacts(office, text=contact["email"].upper())
    assert found == {"contact_id": "contact-1", **contact}
    assert {each["stage"] for each in BENCH.search_contacts(office, stage=contact["stage"])} == {contact["stage"]}
    events = BENCH.search_events(office, attendee=contact["email"])
    assert all(contact["email"] in each["attendees"] for each in events)
    assert BENCH.search_mails(office, folder="archive") == []
    assert len(BENCH.search_mails(office)) == 14
