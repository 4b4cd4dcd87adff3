"""CP-9: whatever an agent, a network and a transport do to a rollout, what is delivered is what was sampled."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tests.campaigns import campaign
from tests.machine.call_trees import breaches, grow, must_train, witnesses
from tests.machine.recorders import KINDS, Recorders

from toprope.trajectory.build import Masked, Trainable, build


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("trees", campaign(5000, 50_000))
@pytest.mark.parametrize("deliver", ["single", "all_chains"])
def test_no_unsampled_token_is_trained_and_no_lost_one_is_context(deliver: str, trees: int) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(trees):
        tree = grow(seed)
        built = build(tree.snapshot, terminal=witnesses(tree), deliver=deliver)  # type: ignore[arg-type]
        assert breaches(tree, built) == [], f"seed {seed}"
        if must_train(tree):
            assert isinstance(built, Trainable), f"seed {seed}: {built.reasons}"
            assert built.traces[0].call_ids[-1] == tree.terminal, f"seed {seed}"
            outcomes["had to train"] += 1
        if isinstance(built, Masked):
            assert built.reasons, f"seed {seed}"
            outcomes.update(built.reasons)
            outcomes["masked"] += 1
        else:
            outcomes["trained"] += 1
    # The trees must be worth reading: each kind of trouble occurs, and a good share trains.
    assert outcomes["trained"] > trees / 4
    assert outcomes["masked"] > trees / 10
    assert outcomes["had to train"] > trees / 20
    wanted = {"incomplete", "unresolved_parent", "terminal_not_captured", "terminal_empty", "conflict"}
    if deliver == "single":
        wanted |= {"several_chains", "several_roots", "unresolved_retry", "parent_missing", "parent_mismatch"}
        wanted |= {"unrecorded_turn", "history_rewritten", "parent_cycle", "hash_mismatch"}
    assert {name for name in wanted if not outcomes[name]} == set()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("trees", campaign(400, 10_000))
@pytest.mark.parametrize("kind", KINDS)
def test_what_recorders_make_of_a_tree_is_safe_whatever_their_store_tells_them(
    kind: str, trees: int, loop: asyncio.AbstractEventLoop
) -> None:
    """Real recorders: alone or several, with a reader, without or with one that fails, on stores that answer or not."""
    outcomes: Counter[str] = Counter()
    for seed in range(trees):
        tree = grow(seed, lambda dice: Recorders(kind, dice, loop))
        for deliver in ("single", "all_chains"):
            built = build(tree.snapshot, terminal=witnesses(tree), deliver=deliver)  # type: ignore[arg-type]
            assert breaches(tree, built) == [], f"seed {seed}"
            outcomes["trained" if isinstance(built, Trainable) else "masked"] += 1
        if must_train(tree):
            built = build(tree.snapshot, terminal=witnesses(tree))
            assert isinstance(built, Trainable), f"seed {seed}: {built.reasons}"
            outcomes["had to train"] += 1
        first = next(iter(tree.turns.values()))
        outcomes["first call lost"] += not first.recorded and not tree.snapshot.incomplete
    assert outcomes["trained"] > trees / 4
    assert outcomes["masked"] > trees / 10
    assert outcomes["had to train"] > trees / 20
    assert outcomes["first call lost"] > trees / 80 or kind == "plain"


def test_the_oracle_itself_finds_a_planted_breach() -> None:
    """Training on given ids, on a span twice, or on a lost call's context is seen by labels alone."""
    tree, built = next(
        (tree, built)
        for tree in map(grow, range(200))
        if isinstance(built := build(tree.snapshot, terminal=witnesses(tree)), Trainable)
    )
    (trace,) = built.traces
    everything = replace(trace, loss_mask=np.ones_like(trace.loss_mask))
    assert any("was not sampled" in said for said in breaches(tree, replace(built, traces=(everything,))))
    assert any("times" in said for said in breaches(tree, replace(built, traces=(trace, trace))))
    tree.book.lost.update(tree.turns)
    assert any("lost call" in said for said in breaches(tree, built))
