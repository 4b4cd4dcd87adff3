"""Evidence of no plausible origin: the builder answers, answers the same in any order, and never trains nonsense."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.unit.trajectory.cases import NEXT, ROOT
from tests.unit.trajectory.golden import entry

from toprope.tokens.entry import TokenEntry
from toprope.tokens.hashing import ChainHash
from toprope.tokens.lineage import DEFERRED
from toprope.tokens.receipts import receipts_of
from toprope.tokens.snapshot import TokenCaptureSnapshot
from toprope.trajectory.build import Masked, Trainable, build
from toprope.trajectory.evidence import Call
from toprope.trajectory.project import TRACES
from toprope.trajectory.proof import check_row_against_receipts
from toprope.trajectory.terminal import TerminalWitnesses

NAMES = ["a", "b", "c", "d", "e", "f"]


def anything(dice: random.Random) -> TokenEntry:
    """A record that construction accepts and nothing else vouches for; few ids and names, so that much collides."""
    parent = dice.choice([*NAMES, "gone", None, None])
    delta = parent is not None and dice.random() < 0.3
    ids = [dice.randrange(2) for _ in range(dice.randrange(0 if delta else 1, 4))]
    about = {
        "decision": dice.choice(["root", "resolved", "unresolved", "resolved"]),
        "delta": delta,
        "client_gone": dice.random() < 0.2,
        "t": dice.randrange(3),
    }
    record = entry(dice.choice(NAMES), ids, [dice.randrange(2) for _ in range(dice.randrange(3))], parent, about)
    odd: list[dict[str, Any]] = [
        {"media": True},
        {"cum_len": dice.randrange(6)},
        {"chain_hash": ChainHash.of(ids).hexdigest()},
        {"rollout_id": "other"},
        {"parent_resolution_reason": DEFERRED},
        {"output_items": ({"type": "tomorrow"},), "token_item_index": None},
    ]
    return replace(record, **dice.choice(odd)) if dice.random() < 0.2 else record


def packed(entries: list[TokenEntry], terminal: TerminalWitnesses, deliver: Any) -> bytes:
    built = build(TokenCaptureSnapshot("r", tuple(entries), False, "s", 1), terminal=terminal, deliver=deliver)
    if isinstance(built, Masked):
        assert built.reasons
        return msgspec.json.encode([built.reasons, built.metrics])
    assert built.traces
    for trace in built.traces:
        assert len(trace.token_ids) == len(trace.loss_mask) == len(trace.logprobs) == trace.spans[-1].end
    assert any(trace.loss_mask.any() for trace in built.traces)
    row = {"response": {TRACES: [each.as_json() for each in built.traces]}}
    # With two ids to choose from, what one garbage call sampled is another's first prompt.
    breaches = check_row_against_receipts(row, receipts_of(entries))
    assert [each for each in breaches if each.kind != "left_out"] == []
    return msgspec.json.encode([[trace.as_json() for trace in built.traces], built.metrics])


@pytest.mark.promise("CP-8")
@pytest.mark.parametrize("deliver", ["single", "all_chains"])
def test_garbage_is_answered_the_same_in_any_order(deliver: str) -> None:
    trained = 0
    for seed in range(1500):
        dice = random.Random(seed)
        entries = [anything(dice) for _ in range(dice.randint(1, 7))]
        claims = {method: dice.choice(NAMES) for method in ("explicit", "content") if dice.random() < 0.3}
        terminal = TerminalWitnesses.naming(**claims)
        expected = packed(entries, terminal, deliver)
        trained += b'"trace_id"' in expected
        for _ in range(2):
            again = entries + dice.choices(entries, k=dice.randrange(3))
            dice.shuffle(again)
            assert packed(again, terminal, deliver) == expected, f"seed {seed}"
    assert trained > 10  # garbage that happens to be sound


def test_a_rollout_of_thousands_of_calls_is_no_depth() -> None:
    """Chains of deltas, of empty calls and of claims in a ring are walked, not descended."""
    deep = [entry("c00000", [1], [2], None, ROOT)]
    deep += [entry(f"c{at:05d}", [3], [4], f"c{at - 1:05d}", {**NEXT, "delta": True}) for at in range(1, 5000)]
    built = build(TokenCaptureSnapshot("r", tuple(deep), False, "s", 1))
    assert isinstance(built, Trainable)
    assert built.metrics.generated_tokens_delivered == 5000
    empties = [*deep[:1], *(replace(each, generation_token_ids=[], generation_log_probs=[]) for each in deep[1:1500])]
    assert isinstance(build(TokenCaptureSnapshot("r", tuple(empties), False, "s", 1)), Trainable)
    ring = [replace(deep[0], parent_decision="resolved", parent_call_id="c04999"), *deep[1:]]
    masked = build(TokenCaptureSnapshot("r", tuple(ring), False, "s", 1))
    assert isinstance(masked, Masked)
    assert "parent_cycle" in masked.reasons


def test_forks_off_one_long_trunk_are_each_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that asks something aside after every turn: as many leaves as turns, and no named last call."""
    turns = 400
    entries = [entry("c0", [1], [2], None, ROOT)]
    for at in range(1, turns):
        entries.append(entry(f"c{at}", [3], [4], f"c{at - 1}", {**NEXT, "delta": True}))
        entries.append(entry(f"x{at}", [5], [6], f"c{at - 1}", {**NEXT, "delta": True}))
    looks = 0
    real = Call.faults_here

    def counted(call: Call) -> Iterator[Call]:
        nonlocal looks
        looks += 1
        return real(call)

    monkeypatch.setattr(Call, "faults_here", counted)
    built = build(TokenCaptureSnapshot("r", tuple(entries), False, "s", 1))
    assert isinstance(built, Masked)
    assert built.reasons == ("several_chains",)
    assert looks <= 5 * len(entries)
