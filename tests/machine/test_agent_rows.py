"""CP-9 for the witnesses that are read out of a row: named is the agent's own last call, or nothing is trained."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from tests.campaigns import campaign
from tests.machine.agent_rows import FORMS, HABITS, Handed, hand_in
from tests.machine.recorders import KINDS, Recorders

from toprope.tokens.entry import TokenEntry
from toprope.tokens.items import item_digests
from toprope.trajectory import terminal
from toprope.trajectory.content import Reading
from toprope.trajectory.evidence import Evidence


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def breach(handed: Handed, done: dict[str, Any]) -> str | None:
    """What the truth says against a delivered row; None where it is safe."""
    if done["mask_sample"]:
        return None
    first = done["rebuilt_response"]["_ng_traces"][0]
    method = done["metrics"]["terminal"]["method"]
    seen = handed.truth.seen
    if first["role"] != "terminal" or first["token_ids"] == seen:
        return None
    if method == "only_chain" and handed.followed and first["token_ids"][: len(seen)] == seen:
        return None  # nobody is named, so that what was asked after the end counts as well
    return f"{method} names {first['call_ids'][-1]}, and it was {handed.truth.call_id}"


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("rows", campaign(250, 10_000))
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_names_the_last_call_of_its_own_agent_or_trains_nothing(
    kind: str, rows: int, loop: asyncio.AbstractEventLoop
) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(rows):
        recorders = Recorders(kind, random.Random(seed), loop)
        handed = hand_in(seed, recorders)
        for deliver in ("all_chains", "single"):
            done = recorders.delivered(handed.row, deliver=deliver)
            assert breach(handed, done) is None, f"seed {seed}, {handed.form}: {breach(handed, done)}"
        method = done["metrics"]["terminal"]["method"]
        named = not done["mask_sample"] and method in ("content", "response_id")
        outcomes["masked" if done["mask_sample"] else method] += 1
        outcomes[f"{handed.form}: named"] += named
        outcomes.update(handed.habits if named else ())
        if handed.plain:
            outcomes["had to be named"] += 1
            assert named, f"seed {seed}, {handed.form}: {done}"
    # To mask everything would be safe too.
    assert outcomes["content"] > rows / 5
    assert outcomes["response_id"] > rows / 50
    assert outcomes["had to be named"] > rows / 20
    assert {form for form in FORMS if outcomes[f"{form}: named"] < rows / 100} == set()
    assert {habit for habit in HABITS if outcomes[habit] < rows / 100} == set()


def the_last_that_said_it(evidence: Evidence, entries: Sequence[TokenEntry], output: Any) -> tuple[str, ...]:
    said = [entry for entry in entries if item_digests(output[-1:]) == item_digests(entry.output_items[-1:])]
    return (max(said, key=lambda entry: entry.created_at).model_call_id,) if said else ()


def the_only_one_that_said_it(evidence: Evidence, entries: Sequence[TokenEntry], output: Any) -> tuple[str, ...]:
    said = [entry for entry in entries if item_digests(output[-1:]) == item_digests(entry.output_items[-1:])]
    return (said[0].model_call_id,) if len(said) == 1 else ()


@pytest.mark.parametrize("guess", [the_last_that_said_it, the_only_one_that_said_it])
def test_the_rows_are_hard_to_read(
    guess: Callable[..., tuple[str, ...]], loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that guesses is wrong in one row of fifty, whatever share of them the real one masks."""
    monkeypatch.setattr(terminal, "read_row", lambda *about: Reading(guess(*about)))
    wrong = 0
    for seed in range(300):
        recorders = Recorders("unread", random.Random(seed), loop)
        handed = hand_in(seed, recorders)
        wrong += breach(handed, recorders.delivered(handed.row)) is not None
    assert wrong >= 6
