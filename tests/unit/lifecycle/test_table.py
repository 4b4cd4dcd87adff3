"""The life cycle as data: complete, refusing by default, and drawn in the docs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from toprope.tokens.lifecycle import (
    TABLE,
    Abort,
    Begin,
    Call,
    Head,
    Mark,
    Phase,
    Put,
    Reaction,
    Verb,
    Verdict,
    step,
    typed_reason,
)

ROOT = Path(__file__).parents[3]


@pytest.mark.promise("CP-4")
@pytest.mark.parametrize("phase", [Phase.RETIRED, Phase.FENCED])
@pytest.mark.parametrize("event", [Begin(), Put("c"), Put("c", same=True), Abort("x"), Mark("write_failed")])
def test_nothing_is_written_to_an_ended_key(phase: Phase, event: Begin | Put | Abort | Mark) -> None:
    head = Head(phase=phase, version=7, snapshot_id="s")
    for call in (Call(), Call(intent=True), Call(put=True), Call(abort="x")):
        done = step(head, call, event)
        assert done.verdict is Verdict.REFUSED
        assert (done.head, done.call, done.reasons) == (head, call, ())


def test_every_verb_has_a_cell_for_a_new_key_and_every_reaction_is_used() -> None:
    assert {verb for verb, phase in TABLE if phase is Phase.ABSENT} == set(Verb)
    assert set(TABLE.values()) | {Reaction.REFUSE} == set(Reaction)


def test_a_refused_or_useless_event_changes_nothing() -> None:
    head = Head(phase=Phase.FROZEN, version=3, snapshot_id="s", entries=1, calls=1)
    assert step(head, Call(put=True), Put("c", same=True)).head == head
    assert step(head, Call(), Put("c")).verdict is Verdict.REFUSED
    assert step(head, Call(put=True), Abort("late")).head == head


@pytest.mark.parametrize(
    ("reason", "call_id", "typed"),
    [
        (None, "", "write_failed"),
        (None, "c1", "write_failed:c1"),
        ("bad_logprob", "bad", "bad_logprob:bad"),
        ("bad_logprob:c1", "c1", "bad_logprob:c1"),
        ("unobserved_path:POST /v1/x", "", "unobserved_path:POST /v1/x"),
        ("whatever", "c1", "write_failed:whatever:c1"),
    ],
)
def test_reasons_begin_with_a_typed_one(reason: str | None, call_id: str, typed: str) -> None:
    assert typed_reason(reason, call_id) == typed


def test_the_drawing_in_the_docs_is_the_table() -> None:
    drawn = subprocess.run(
        [sys.executable, "-m", "toprope.testing.lifecycle_drawing"], capture_output=True, text=True, check=True
    ).stdout
    page = (ROOT / "docs/explanation/custody.md").read_text()
    begin, end = "<!-- drawn: begin -->\n", "<!-- drawn: end -->"
    assert page[page.index(begin) + len(begin) : page.index(end)] == drawn, (
        "docs/explanation/custody.md is behind the table: python -m toprope.testing.lifecycle_drawing --write"
    )
