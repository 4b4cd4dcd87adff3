"""The booking desk with a customer: facts come out over several turns, and what counts is the desk as it is left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toprope.catalog.user_sim.customers import KINDS
from toprope.catalog.user_sim.desk import TIMES, Desk, changes
from toprope.catalog.user_sim.environment import UserSim
from toprope.errors.tree import ToolError
from toprope.servers.environment.users import read_user
from toprope.servers.resources.environment import Verdict
from toprope.testing.environment_suite import check_environment

SIM = UserSim()
TASKS = [task.task_input["task_data"] for task in SIM.tasks(24, seed=2)]
IDS = [f"{number}-{task['kind']}" for number, task in enumerate(TASKS)]


def served(task: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a good agent, found from the desk before and after."""
    before, goal = task["desk"]["bookings"], task["goal"]["bookings"]
    calls: list[tuple[str, dict[str, Any]]] = []
    for code, booking in before.items():
        if code not in goal:
            calls.append(("cancel_booking", {"code": code, "name": booking["name"]}))
        elif goal[code] != booking:
            calls.append(("change_booking", {"code": code.lower(), **goal[code]}))
    calls += [("book", goal[code]) for code in goal.keys() - before.keys()]
    return [*calls, ("close_case", {"outcome": task["goal"]["case"]})]


def done(task: dict[str, Any], calls: list[tuple[str, dict[str, Any]]]) -> Verdict:
    desk = SIM.seed(task)
    for name, arguments in calls:
        getattr(SIM, name)(desk, **SIM.tools[name].read(json.dumps(arguments).encode()))
    return SIM.verify(desk, task, {})


@pytest.mark.parametrize("task", TASKS, ids=IDS)
def test_a_served_customer_is_worth_everything_in_either_order_and_an_idle_agent_nothing(task: dict[str, Any]) -> None:
    calls = served(task)
    assert done(task, calls).reward == 1.0
    assert done(task, calls[::-1]).reward == 1.0
    assert done(task, []).reward == 0.0


@pytest.mark.parametrize("task", TASKS, ids=IDS)
def test_every_customer_says_what_they_want_over_several_turns_and_never_at_once(task: dict[str, Any]) -> None:
    lines = read_user(task["user"]).script
    assert lines is not None
    assert len(lines) >= 4
    code = next((code for code in task["desk"]["bookings"] if task["goal"]["bookings"].get(code) is None), None)
    assert code is None or code not in lines[0]


def test_a_side_effect_costs_and_so_does_a_case_closed_wrongly() -> None:
    task = next(each for each in TASKS if each["kind"] == "cancel")
    calls = served(task)
    other = next(
        (code, each)
        for code, each in task["desk"]["bookings"].items()
        if code in task["goal"]["bookings"] and each["date"] != task["desk"]["today"]
    )
    spoiled = done(task, [*calls, ("cancel_booking", {"code": other[0], "name": other[1]["name"]})])
    assert spoiled.reward == 0.5
    assert spoiled.extra["unwanted"] == [f"{other[0]} is gone"]
    assert done(task, [calls[0], ("close_case", {"outcome": "refused"})]).reward == 0.0
    late = next(each for each in TASKS if each["kind"] == "too_late")
    assert done(late, [("close_case", {"outcome": "done"})]).reward == 0.0


def test_the_rules_hold_whoever_asks() -> None:
    desk = Desk("2025-05-05", {"AAA11": {"name": "Holm", "date": "2025-05-05", "time": "19:00", "people": 2}})
    desk.bookings["BBB11"] = {"name": "Ito", "date": "2025-05-06", "time": "19:00", "people": 8}
    desk.bookings["CCC11"] = {"name": "Ito", "date": "2025-05-06", "time": "19:00", "people": 8}
    before = Desk.from_json(desk.as_json())
    for call in (
        lambda: desk.cancel("AAA11", "Holm"),
        lambda: desk.change("AAA11", "Holm", "2025-05-06", "20:00", 2),
        lambda: desk.cancel("BBB11", "Holm"),
        lambda: desk.cancel("ZZZ99", "Ito"),
        lambda: desk.book("Costa", "2025-05-06", "19:00", 5),
        lambda: desk.book("Costa", "2025-05-06", "19:30", 2),
        lambda: desk.book("Costa", "2025-05-04", "19:00", 2),
        lambda: desk.book("Costa", "2025-13-04", "19:00", 2),
        lambda: desk.book("Costa", "2025-05-06", "18:00", 9),
        lambda: desk.book(" ", "2025-05-06", "18:00", 2),
    ):
        with pytest.raises(ToolError):
            call()
    assert not changes(before, desk)
    assert SIM.free_seats(desk, "2025-05-06") == dict.fromkeys(TIMES, 20) | {"19:00": 4}
    assert desk.change("bbb11", "ito", "2025-05-06", "19:00", 7)["people"] == 7  # its own seats are free for it


def test_tasks_are_the_same_for_a_seed_and_cover_every_kind_and_the_agent_sees_no_customer() -> None:
    one, two = (list(SIM.tasks(12, seed)) for seed in (5, 5))
    assert one == two != list(SIM.tasks(12, 6))
    assert {task.task_input["task_data"]["kind"] for task in one} == set(KINDS)
    for task in one:
        seen = json.dumps(task.task_input["responses_create_params"])
        assert not any(line in seen for line in task.task_input["task_data"]["user"]["script"])


def test_a_customer_for_a_model_knows_the_same_facts() -> None:
    for scripted, played in zip(SIM.tasks(6, 4), UserSim(user="model").tasks(6, 4), strict=True):
        one, two = scripted.task_input["task_data"], played.task_input["task_data"]
        assert (one["desk"], one["goal"]) == (two["desk"], two["goal"])
        assert read_user(two["user"]).instructions


@pytest.mark.promise("EP-15")
async def test_it_conforms() -> None:
    assert await check_environment(SIM, size=6) == []
    assert await check_environment(UserSim(user="model"), size=6) == []


POLICY = '''
"""A clerk who serves customers that cancel, and asks for what is missing; everybody else is refused."""
import re
from toprope.testing.scripted import ScriptedReply, ScriptedCall

def play(call):
    items = call.request.request.input
    said = " ".join(item["content"] for item in items if item.get("role") == "user")
    outputs = sum(item.get("type") == "function_call_output" for item in items)
    name = re.search(r"name is (\\w+)", said)
    code = re.search(r"code\\? (\\w+)", said)
    if not (name and code):
        return "Which code, and which name?"
    if outputs == 0:
        return ScriptedReply(calls=[ScriptedCall("cancel_booking", {"code": code[1], "name": name[1]})])
    if outputs == 1:
        return ScriptedReply(calls=[ScriptedCall("close_case", {"outcome": "done"})])
    return "It is cancelled."
'''
CONFIG = """
servers:
  policy: {role: model, engine: {kind: scripted, script: "policy:play"}}
  desk: {role: resources, use: "toprope.catalog.user_sim.environment:UserSim"}
  clerk: {role: agent, use: tool_loop, model: policy, token_id_capture: true}
  talk: {role: environment, use: interactive, resources: desk, agent: clerk, tools: [direct_http]}
run: {environment: talk, tasks: {generate: desk, size: 2, seed: 3}, max_attempts: 1}
token_id_capture: {enabled: true}
"""


def test_in_a_run_the_customer_reveals_the_facts_and_the_desk_is_scored(tmp_path: Path) -> None:
    (tmp_path / "policy.py").write_text(POLICY)
    (tmp_path / "talk.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "toprope", "run", "talk.yaml", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = {row["kind"]: row for row in map(json.loads, (tmp_path / "out/results.jsonl").read_text().splitlines())}
    assert rows["cancel"]["reward"] == 1.0
    assert rows["book"]["reward"] == 0.0
    output = rows["cancel"]["response"]["output"]
    said = [item["content"][0]["text"] for item in output if item["type"] == "message"]
    assert said == ["Which code, and which name?"] * 2 + ["It is cancelled."] * 2  # one turn for each line
    assert rows["cancel"]["mask_sample"] is False
    assert rows["cancel"]["termination"] == "user_done"


def test_in_a_run_a_model_can_play_the_customer(tmp_path: Path) -> None:
    (tmp_path / "policy.py").write_text(POLICY)
    person = '  person: {role: model, engine: {kind: scripted, script: ["Hello.", "No, I forgot.", "###STOP###"]}}\n'
    text = CONFIG.replace("servers:\n", f"servers:\n{person}")
    text = text.replace('environment:UserSim"', 'environment:UserSim", config: {user: model}')
    text = text.replace("use: interactive,", "use: interactive, config: {user_model: person},")
    (tmp_path / "talk.yaml").write_text(text)
    command = [sys.executable, "-m", "toprope", "run", "talk.yaml", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert [(row["reward"], row["termination"], row["mask_sample"]) for row in rows] == [(0.0, "user_done", False)] * 2
    calls = [json.loads(line) for line in (tmp_path / "out/logs/model_calls.jsonl").open()]
    assert {(call["server"], call["captured"]) for call in calls} == {("person", False), ("policy", True)}
