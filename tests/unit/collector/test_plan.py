"""The plan: ids, groups, collisions, routes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from toprope.collector.plan import Plan, Route, make_plan
from toprope.collector.tasks import read_tasks
from toprope.errors.tree import BadRequest, ConfigError

ALL = {"*": Route("*", selected=False, weight=1.0, sampling={})}


class Speechless(Exception):
    """An error whose own text fails."""

    def __str__(self) -> str:
        return str(1 // 0)


def flat(**keys: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": "x"}, **keys}


def plan(*rows: dict[str, Any], repeats: int = 1, routes: dict[str, Route] = ALL, taskset: str | None = None) -> Plan:
    return make_plan(read_tasks(rows, taskset=taskset), routes, run_id="run", repeats=repeats)


def ids(planned: Plan) -> list[str]:
    return [rollout.rollout_id for rollout in planned.rollouts()]


def test_default_ids_are_run_task_and_repeat() -> None:
    planned = plan(flat(), flat(), repeats=2)
    assert ids(planned) == ["run.0-0", "run.0-1", "run.1-0", "run.1-1"]
    assert planned.expected == 4


def test_a_rows_own_rollout_id_wins_and_gets_the_repeat_where_there_are_several() -> None:
    assert ids(plan(flat(_ng_rollout_id="mine"), flat())) == ["mine", "run.1-0"]
    assert ids(plan(flat(_ng_rollout_id="mine"), repeats=2)) == ["mine.0", "mine.1"]


def test_expanded_rows_of_one_task_form_one_group() -> None:
    rows = [flat(_ng_task_index=3, _ng_rollout_index=repeat) for repeat in range(3)]
    planned = plan(*rows)
    assert ids(planned) == ["run.3-0", "run.3-1", "run.3-2"]
    assert {rollout.task.index for rollout in planned.rollouts()} == {3}


@pytest.mark.promise("CO-6")
def test_two_tasks_with_one_id_are_refused_with_both_places() -> None:
    with pytest.raises(ConfigError) as refused:
        plan(flat(task_id="a"), flat(task_id="b"), flat(task_id="a"))
    assert "task 0" in refused.value.message
    assert "task 2" in refused.value.message


@pytest.mark.promise("CO-6")
def test_big_ids_keep_their_digits_and_differ_in_the_last_one() -> None:
    planned = plan(flat(task_id=2**64 + 1), flat(task_id=2**64 + 2))
    assert [task.task_id.task_id for task in planned.tasks] == ["18446744073709551617", "18446744073709551618"]
    assert json.loads(planned.tasks[0].body)["task_input"]["task_data"]["task_id"] == 2**64 + 1


def test_two_rollouts_with_one_id_are_refused_with_both_places() -> None:
    with pytest.raises(ConfigError, match=r"'run\.1-0': task 0, and task 1"):
        plan(flat(_ng_rollout_id="run.1-0"), flat())


def test_one_task_index_for_two_tasks_is_refused() -> None:
    with pytest.raises(ConfigError, match="task index 1"):
        plan(flat(task_id="a", _ng_task_index=1), flat(task_id="b"))


def test_a_task_set_without_environment_is_refused_with_those_there_are() -> None:
    routes = {"sums": Route("sums", False, 1.0, {}), "code": Route("code", False, 1.0, {})}
    with pytest.raises(ConfigError, match=r"'poems'.*code, sums"):
        plan(flat(task_source="poems"), routes=routes)


def test_no_task_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is none"):
        plan()


def test_sampling_settings_of_a_task_set_reach_its_tasks_only() -> None:
    routes = {"a": Route("a", False, 1.0, {"temperature": 0.5}), "b": Route("b", False, 1.0, {})}
    planned = plan(flat(task_source="a"), flat(task_source="b"), routes=routes)
    params = [json.loads(task.body)["task_input"]["responses_create_params"] for task in planned.tasks]
    assert params == [{"input": "x", "temperature": 0.5}, {"input": "x"}]


def test_weights_interleave_task_sets_and_keep_each_ones_order() -> None:
    routes = {"a": Route("a", False, 2.0, {}), "b": Route("b", False, 1.0, {})}
    rows = [flat(task_source="a") for _ in range(4)] + [flat(task_source="b") for _ in range(4)]
    planned = plan(*rows, routes=routes)
    order = [rollout.task.route for rollout in planned.rollouts()]
    assert order[:6] == ["a", "b", "a", "a", "b", "a"]
    for key in "ab":
        mine = [rollout.task.index for rollout in planned.rollouts() if rollout.task.route == key]
        assert mine == sorted(mine)


def test_the_digest_of_the_tasks_does_not_depend_on_weights_and_does_on_content() -> None:
    rows = [flat(task_source="a"), flat(task_source="b")]
    light = {"a": Route("a", False, 1.0, {}), "b": Route("b", False, 1.0, {})}
    heavy = {"a": Route("a", False, 1.0, {}), "b": Route("b", False, 9.0, {})}
    digest = plan(*rows, routes=light).tasks_digest
    assert plan(*rows, routes=heavy).tasks_digest == digest
    assert plan(rows[0], {**rows[1], "more": 1}, routes=light).tasks_digest != digest


def test_a_planned_line_is_a_task_again() -> None:
    planned = plan(flat(_ng_rollout_id="mine", agent_ref={"name": "solver"}, answer=4))
    [line] = [json.loads(task.line()) for task in planned.tasks]
    again = plan(line)
    assert ids(again) == ["mine"]
    assert again.tasks_digest == planned.tasks_digest


@pytest.mark.promise("UX-2")
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (BadRequest("task_input.x: is needed"), "task_input.x: is needed"),
        (KeyError("x"), "cannot read the task: KeyErr"),
        (SystemExit(3), "cannot read the task: SystemExit: 3"),
        (Speechless(), "cannot read the task: Speechless .its text cannot be had: ZeroDivisionError"),
    ],
)
def test_a_task_that_its_protocol_cannot_read_is_refused_with_its_place(error: BaseException, told: str) -> None:
    seen: list[Any] = []

    def read(task_input: Mapping[str, Any]) -> None:
        seen.append(task_input["responses_create_params"])
        if len(seen) == 2:
            raise error

    routes = {"*": Route("*", selected=False, weight=1.0, sampling={"seed": 3}, read=read)}
    with pytest.raises(ConfigError, match=f"task 1: .*{told}"):
        plan(flat(), flat(), flat(), routes=routes)
    assert seen[0] == {"input": "x", "seed": 3}, "what is judged is what would be sent"
