"""reasoning-gym as an environment: its tasks, its own scorer, from any of its data sets."""

from __future__ import annotations

from typing import Any

import pytest
from reasoning_gym.factory import create_dataset

from toprope.canonical import json
from toprope.catalog.reasoning import ReasoningGym
from toprope.errors.tree import ConfigError, ToolError
from toprope.servers.environment.turns import read_input

ADDITION = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ["+"],
    "allow_parentheses": False,
}


def response(text: str) -> dict[str, Any]:
    return {"output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]}


@pytest.mark.parametrize(
    "dataset", ["basic_arithmetic", "word_sorting", "arc_agi", "rearc", "graph_color", "maze", "countdown"]
)
def test_the_oracle_answer_scores_in_full_after_a_trip_through_json(dataset: str) -> None:
    environment = ReasoningGym(dataset=dataset)
    source = create_dataset(dataset, size=2, seed=5)
    for index, task in enumerate(environment.tasks(2, 5)):
        answer = source[index]["answer"]
        data = json.loads(json.dumps(task.task_input["task_data"]))
        if answer is not None:
            assert environment.verify(None, data, response(f"<answer>{answer}</answer>")).reward == 1.0
        assert environment.verify(None, data, response("<answer>nonsense</answer>")).reward < 1.0


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others() -> None:
    environment = ReasoningGym(dataset="chain_sum")
    one, two, other = (list(environment.tasks(4, seed)) for seed in (1, 1, 2))
    assert one == two != other
    assert [task.task_id.task_id for task in one] == ["1-0", "1-1", "1-2", "1-3"]
    assert {task.task_id.taskset for task in one} == {"chain_sum"}


def test_a_task_asks_its_question_and_nothing_of_the_answer_reaches_the_agent() -> None:
    environment = ReasoningGym(
        dataset="basic_arithmetic", params=ADDITION, system="Be brief.", create_params={"max_output_tokens": 32}
    )
    task = next(iter(environment.tasks(1, 1)))
    given = read_input(task.task_input)
    assert given.responses_create_params == {
        "input": [
            {"type": "message", "role": "system", "content": "Be brief."},
            {"type": "message", "role": "user", "content": "Calculate 4 + 1."},
        ],
        "max_output_tokens": 32,
    }
    assert given.task_data["entry"]["answer"] == "5"


def test_with_the_add_tool_the_first_turn_is_forced_to_call_it_strictly() -> None:
    environment = ReasoningGym(dataset="basic_arithmetic", params=ADDITION, tool="add")
    params = next(iter(environment.tasks(1, 1))).task_input["responses_create_params"]
    assert params["tool_choice"] == {"type": "function", "name": "add"}
    (tool,) = params["tools"]
    assert (tool["name"], tool["strict"], tool["parameters"]["required"]) == ("add", True, ["a", "b"])
    assert environment.add(None, 2, 3) == 5
    with pytest.raises(ToolError):
        environment.add(None, 10**31, 0)


def test_without_it_no_tool_is_served() -> None:
    assert dict(ReasoningGym(dataset="chain_sum").tools) == {}


def test_the_verdict_tells_what_was_read_and_what_was_expected() -> None:
    environment = ReasoningGym(dataset="basic_arithmetic", params=ADDITION)
    data = next(iter(environment.tasks(1, 1))).task_input["task_data"]
    verdict = environment.verify(None, data, response("4 + 1 is 5."))
    assert (verdict.reward, verdict.extra) == (1.0, {"extracted_answer": "5", "expected_answer": "5"})
    assert environment.verify(None, data, response("I don't know")).reward == 0.0
    assert environment.verify(None, data, {"output": []}).reward == 0.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dataset": "basic_aritmetic"}, "basic_arithmetic"),
        ({"dataset": "chain_sum", "params": {"max_term": 2}}, "max_term"),
        ({"dataset": "chain_sum", "params": {"seed": 2}}, "task source"),
        ({"dataset": "chain_sum", "tool": "multiply"}, "accepted: add"),
        ({"dataset": "chain_sum", "params": {"min_terms": 5, "max_terms": 2}}, "refuses its parameters"),
    ],
)
def test_a_wrong_setting_is_refused_when_the_environment_is_made(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ReasoningGym(**settings)
