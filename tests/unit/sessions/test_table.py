"""The session table itself: total for requests, closed for ever, no dead ends."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toprope.servers.session_table import TABLE, Action, Event, ImpossibleStep, State, step

REQUESTS = (Event.SEED, Event.USE, Event.CLOSE)


def test_every_request_has_an_answer_in_every_state() -> None:
    for state, event in itertools.product(State, REQUESTS):
        step(state, event)
    for state in set(State) - {State.ABSENT}:
        step(state, Event.SEED_OTHER)


def test_a_pair_outside_the_table_is_refused() -> None:
    for pair in set(itertools.product(State, Event)) - set(TABLE):
        with pytest.raises(ImpossibleStep):
            step(*pair)


@given(st.lists(st.sampled_from(list(Event)), max_size=30))
def test_after_a_close_nothing_but_forgetting_leads_to_an_allocation(events: list[Event]) -> None:
    state, closed, held = State.ABSENT, False, 0
    for event in events:
        if (state, event) not in TABLE:
            continue
        before = state
        state, action = step(state, event)
        if event is Event.FORGET:
            closed = False
        assert not (closed and action in (Action.ALLOCATE, Action.REPLAY, Action.ADMIT))
        closed = closed or event is Event.CLOSE
        held += event is Event.SEEDED
        held -= event is Event.RELEASED
        assert held == (state in (State.OPEN, State.CLOSING, State.UNRELEASED)), (before, event, state)


def test_every_state_that_holds_something_can_be_released() -> None:
    for state in (State.OPEN, State.UNRELEASED):
        assert step(state, Event.CLOSE) == step(state, Event.EXPIRE) == (State.CLOSING, Action.RELEASE)
