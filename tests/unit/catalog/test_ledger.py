"""The ledger: its state decides the reward, and its author wrote no more than was promised."""

from __future__ import annotations

import inspect

import pytest

from toprope.catalog.ledger import Ledger
from toprope.errors.tree import ToolError


@pytest.mark.promise("EP-15")
def test_the_environment_itself_is_at_most_forty_lines() -> None:
    body = inspect.getsource(Ledger).partition("# The lines above are the environment")[0]
    assert len([line for line in body.splitlines() if line.strip()]) <= 40


def test_the_reward_is_the_share_of_accounts_that_meet_the_goal() -> None:
    ledger = Ledger()
    state = ledger.seed({"accounts": {"ann": 50, "ben": 10, "cleo": 0}})
    assert ledger.transfer(state, "ann", "ben", 20) == "ann: 30, ben: 30"
    assert ledger.deposit(state, "cleo", 5) == 5
    goal = {"ann": 30, "ben": 30, "cleo": 6}
    verdict = ledger.verify(state, {"goal": goal}, {})
    assert verdict.reward == pytest.approx(2 / 3)
    assert verdict.reward_components == {"ann": 1.0, "ben": 1.0, "cleo": 0.0}


def test_impossible_moves_are_refused_in_words_and_change_nothing() -> None:
    ledger = Ledger()
    state = ledger.seed({"accounts": {"ann": 5, "ben": 1}})
    for call in (
        lambda: ledger.transfer(state, "ann", "ben", 6),
        lambda: ledger.transfer(state, "ann", "nobody", 1),
        lambda: ledger.transfer(state, "nobody", "ann", 1),
        lambda: ledger.deposit(state, "ann", 0),
        lambda: ledger.balance(state, "nobody"),
    ):
        with pytest.raises(ToolError):
            call()
    assert state == {"ann": 5, "ben": 1}


def test_a_generated_task_can_be_solved() -> None:
    ledger = Ledger()
    for task in ledger.tasks(20, seed=3):
        data = task.task_input["task_data"]
        state = ledger.seed(data)
        text = task.task_input["responses_create_params"]["input"][0]["content"]
        words = text.split()
        ledger.transfer(state, words[3], words[5].rstrip(","), int(words[1]))
        ledger.deposit(state, words[13].rstrip("."), int(words[8]))
        assert ledger.verify(state, data, {}).reward == 1.0
