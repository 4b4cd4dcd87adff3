"""Demands on the builder beyond the golden vectors: situations as functions that raise when a builder is unsafe.

Each takes the builder, so that a mutant can be put through them too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from tests.unit.trajectory.golden import entry

from toprope.tokens.entry import TokenEntry, WeightSpan
from toprope.tokens.hashing import ChainHash
from toprope.tokens.items import item_digests
from toprope.tokens.lineage import DEFERRED_ALL_TOLD
from toprope.tokens.snapshot import TokenCaptureSnapshot
from toprope.trajectory.terminal import TerminalWitnesses

Builder = Callable[..., Any]
ROOT = {"decision": "root"}
NEXT = {"decision": "resolved"}
LOST = {"decision": "unresolved"}


def go(
    builder: Builder, entries: list[TokenEntry], *, reasons: tuple[str, ...] = (), lost: bool = False, **how: Any
) -> Any:
    claims = TerminalWitnesses.naming(**{k: v for k, v in how.items() if k not in ("deliver", "terminal")})
    snapshot = TokenCaptureSnapshot("r", tuple(entries), lost, "s", 1, reasons)
    return builder(snapshot, terminal=how.get("terminal", claims), deliver=how.get("deliver", "single"))


def trained(built: Any, *chains: list[str]) -> list[Any]:
    assert type(built).__name__ == "Trainable", built.reasons
    assert [list(trace.call_ids) for trace in built.traces] == list(chains)
    return list(built.traces)


def masked(built: Any, *wanted: str) -> None:
    assert type(built).__name__ == "Masked", [trace.call_ids for trace in built.traces]
    assert set(wanted) <= set(built.reasons), built.reasons


def linear() -> list[TokenEntry]:
    return [
        entry("c1", [1, 2], [3], None, ROOT),
        entry("c2", [1, 2, 3, 4], [5], "c1", NEXT),
        entry("c3", [1, 2, 3, 4, 5, 6], [7], "c2", NEXT),
    ]


def test_a_recorded_hash_that_does_not_fit_sets_the_record_aside(build: Builder) -> None:
    c1, c2, c3 = linear()
    good = replace(c2, chain_hash=ChainHash.of([1, 2, 3, 4, 5]).hexdigest())
    trained(go(build, [c1, good, c3]), ["c1", "c2", "c3"])
    bad = replace(c2, chain_hash=ChainHash.of([1, 2, 3, 4, 6]).hexdigest())
    masked(go(build, [c1, bad]), "hash_mismatch")
    masked(go(build, [c1, bad, c3]), "hash_mismatch", "parent_unusable")
    masked(go(build, [c1, bad], explicit="c2"), "hash_mismatch")
    masked(go(build, [c1, replace(c2, cum_len=6)]), "hash_mismatch")


def test_a_delta_is_verified_against_the_hash_of_its_whole(build: Builder) -> None:
    c1 = entry("c1", [1, 2], [3], None, ROOT)
    delta = entry("c2", [4], [5], "c1", {**NEXT, "delta": True})
    for ids, fits in (([1, 2, 3, 4, 5], True), ([1, 2, 9, 4, 5], False)):
        built = go(build, [c1, replace(delta, chain_hash=ChainHash.of(ids).hexdigest())])
        trained(built, ["c1", "c2"]) if fits else masked(built, "hash_mismatch")


def test_a_delta_on_a_conflicting_parent_is_not_materialised(build: Builder) -> None:
    c1 = entry("c1", [1, 2], [3], None, ROOT)
    other = entry("c1", [1, 2], [8], None, ROOT)
    delta = entry("c2", [4], [5], "c1", {**NEXT, "delta": True})
    masked(go(build, [c1, other, delta], explicit="c2"), "conflict")


def test_a_conflict_off_the_named_path_does_not_mask(build: Builder) -> None:
    c1, c2, _ = linear()
    side = [entry("s", [9], [8], None, ROOT), entry("s", [9], [7], None, ROOT)]
    trained(go(build, [c1, c2, *side], explicit="c2"), ["c1", "c2"])
    masked(go(build, [c1, c2, *side]), "conflict")


def test_conflicting_copies_that_differ_in_logprobs_alone_are_a_conflict(build: Builder) -> None:
    c1 = entry("c1", [1, 2], [3], None, ROOT)
    masked(go(build, [c1, replace(c1, generation_log_probs=[-0.7])], explicit="c1"), "conflict")


def test_what_a_call_of_two_records_said_is_context_of_no_call_decided_late(build: Builder) -> None:
    """Which copy is true nobody knows: what it sampled is no shown turn of a first call, nor of a second beginning."""
    late = {"parent_decision": "unresolved", "parent_resolution_reason": DEFERRED_ALL_TOLD}
    c1 = replace(entry("c1", [1], [777], None, ROOT), **late)
    other = replace(c1, generation_log_probs=[-0.7])
    kept = item_digests(c1.output_items)
    c2 = replace(entry("c2", [1, 777, 5], [6], None, {**ROOT, "t": 2}), item_digests=kept, **late)
    masked(go(build, [c1, other, c2], explicit="c2"), "unresolved_parent", "unrecorded_turn")
    for built in (go(build, [c1, other, c2], deliver="all_chains"), go(build, [other, c2, c1], deliver="all_chains")):
        masked(built, "conflict")


def test_a_decision_that_contradicts_itself_is_a_boundary(build: Builder) -> None:
    c1, c2, _ = linear()
    masked(go(build, [c1, replace(c2, parent_decision="root")], explicit="c2"), "malformed")
    masked(go(build, [c1, replace(c2, parent_call_id=None)], explicit="c2"), "parent_missing")
    masked(go(build, [c1, replace(c2, parent_decision="maybe")], explicit="c2"), "malformed")  # type: ignore[arg-type]
    masked(go(build, [replace(c1, rollout_id="other")]), "malformed")


def test_a_reason_of_loss_masks_even_without_the_flag(build: Builder) -> None:
    c1, _, _ = linear()
    masked(go(build, [c1], reasons=("dangling_intent:c9",)), "incomplete", "dangling_intent")
    masked(go(build, [c1], lost=True), "incomplete")
    built = go(build, [c1], reasons=("truncated:context",))
    trained(built, ["c1"])
    assert built.metrics.truncated


def test_incomplete_masks_every_chain_too(build: Builder) -> None:
    masked(go(build, linear(), lost=True, deliver="all_chains"), "incomplete")


def test_the_reason_of_an_unresolved_call_reaches_the_row(build: Builder) -> None:
    c1, c2, _ = linear()
    left = replace(
        c2, parent_decision="unresolved", parent_call_id=None, parent_resolution_reason="history_rewritten:c1@3"
    )
    built = go(build, [c1, left])
    masked(built, "unresolved_parent", "history_rewritten")
    assert built.metrics.parent_link_failures == {"c2": "history_rewritten:c1@3"}


def test_images_on_the_path_mask_and_off_it_do_not(build: Builder) -> None:
    c1, c2, c3 = linear()
    masked(go(build, [c1, replace(c2, media=True), c3]), "media_unsupported")
    trained(go(build, [c1, c2, replace(c3, media=True)], explicit="c2"), ["c1", "c2"])


def test_a_child_of_an_empty_call_continues_the_call_that_its_tokens_show(build: Builder) -> None:
    root = entry("root", [1, 2], [3], None, ROOT)
    empty = entry("e", [1, 2, 3, 4], [], "root", NEXT)
    retry = entry("retry", [1, 2, 3, 4], [5], "root", NEXT)
    child = entry("ch", [1, 2, 3, 4, 5, 6], [7], "e", NEXT)
    (trace,) = trained(go(build, [root, empty, retry, child]), ["root", "retry", "ch"])
    assert trace.loss_mask.tolist() == [0, 0, 1, 0, 1, 0, 1]


def test_a_first_call_that_came_back_empty_is_no_root(build: Builder) -> None:
    first = entry("e", [1, 2], [], None, ROOT)
    built = go(build, [first, entry("x", [1, 2], [3], None, ROOT), entry("y", [1, 2, 3, 4], [5], "e", NEXT)])
    trained(built, ["x", "y"])
    assert built.metrics.n_roots == 1
    assert built.metrics.empty_generation_calls == 1


def test_splits_that_fit_equally_well_are_not_chosen_from(build: Builder) -> None:
    first = entry("e", [1], [], None, ROOT)
    twins = [entry("x", [1, 2], [3], "e", NEXT), entry("y", [1], [2, 3], "e", NEXT)]
    child = entry("z", [1, 2, 3, 4], [5], "e", NEXT)
    masked(go(build, [first, *twins, child], explicit="z"), "ambiguous_parent")


def test_an_unread_leaf_is_cut_but_its_boundary_still_counts(build: Builder) -> None:
    c1 = entry("c1", [1], [2], None, ROOT)
    gone = entry("c2", [1, 2, 3], [4], None, {**LOST, "client_gone": True})
    masked(go(build, [c1, gone]), "unresolved_parent")
    trained(go(build, [c1, gone], explicit="c1"), ["c1"])


def test_a_reply_that_somebody_continued_was_read_even_if_the_next_one_was_not(build: Builder) -> None:
    c1 = entry("c1", [1], [2], None, ROOT)
    gone = {**NEXT, "client_gone": True}
    built = go(build, [c1, entry("c2", [1, 2, 3], [4], "c1", gone), entry("c3", [1, 2, 3, 4, 5], [6], "c2", gone)])
    trained(built, ["c1", "c2"])
    assert built.metrics.cut == ("c3",)


def test_an_unread_attempt_yields_to_its_retry(build: Builder) -> None:
    c1 = entry("c1", [1], [2], None, ROOT)
    gone = entry("a", [1, 2, 3], [4], "c1", {**NEXT, "client_gone": True})
    trained(go(build, [c1, gone, entry("b", [1, 2, 3], [5], "c1", NEXT)]), ["c1", "b"])


def test_a_retry_continued_by_an_empty_call_counts_as_continued(build: Builder) -> None:
    root = entry("root", [1], [2], None, ROOT)
    twins = [entry("a", [1, 2, 3], [4], "root", NEXT), entry("b", [1, 2, 3], [5], "root", NEXT)]
    built = go(build, [root, *twins, entry("e", [1, 2, 3, 5, 6], [], "b", NEXT)])
    trained(built, ["root", "b"])
    assert built.metrics.quarantined == ("a",)


def test_three_samples_of_which_two_are_equal_stay_unresolved(build: Builder) -> None:
    root = entry("root", [1], [2], None, ROOT)
    three = [entry(name, [1, 2, 3], [last], "root", NEXT) for name, last in (("a", 4), ("b", 4), ("c", 5))]
    built = go(build, [root, *three])
    masked(built, "unresolved_retry")
    assert "several_chains" not in built.reasons


def test_witnesses_that_name_twins_agree(build: Builder) -> None:
    root = entry("root", [1], [2], None, ROOT)
    twins = [entry("a", [1, 2, 3], [4], "root", NEXT), entry("b", [1, 2, 3], [4], "root", NEXT)]
    trained(go(build, [root, *twins], explicit="b", response_id="a"), ["root", "b"])


def test_witnesses_of_equal_replies_to_other_prompts_contradict(build: Builder) -> None:
    entries = [entry("c1", [1], [7], None, ROOT), entry("c2", [1, 7, 2], [7], "c1", NEXT)]
    masked(go(build, entries, explicit="c2", response_id="c1"), "terminal_contradiction")


def test_an_unread_leaf_that_a_witness_names_is_delivered_in_every_mode(build: Builder) -> None:
    c1 = entry("c1", [1], [2], None, ROOT)
    gone = entry("c2", [1, 2, 3], [4], "c1", {**NEXT, "client_gone": True})
    trained(go(build, [c1, gone], explicit="c2", deliver="all_chains"), ["c1", "c2"])
    trained(go(build, [c1, gone], deliver="all_chains"), ["c1"])


def test_an_ambiguous_weak_witness_abstains_and_an_ambiguous_declaration_masks(build: Builder) -> None:
    weak = TerminalWitnesses(response_id=("c1", "c2"), content=("c1", "c3"))
    trained(go(build, linear(), terminal=weak), ["c1", "c2", "c3"])
    declared = TerminalWitnesses(declared=("c1", "c2"))
    masked(go(build, linear(), terminal=declared), "terminal_ambiguous")


def test_a_claim_of_two_calls_of_which_one_is_not_believed_names_neither(build: Builder) -> None:
    one = entry("s", [9], [8], None, ROOT)
    copies = [entry("m", [1], [2], None, ROOT), entry("m", [1], [3], None, ROOT)]
    for weak in (TerminalWitnesses(content=("m", "s")), TerminalWitnesses(response_id=("m", "s"))):
        masked(go(build, [one, *copies], terminal=weak), "conflict")
    masked(go(build, [one, *copies], terminal=TerminalWitnesses(declared=("m", "s"))), "terminal_ambiguous")


def test_a_terminal_that_sampled_nothing_masks(build: Builder) -> None:
    c1, c2, _ = linear()
    empty = entry("e", [1, 2, 3, 4, 5, 9], [], "c2", NEXT)
    masked(go(build, [c1, c2, empty], explicit="e"), "terminal_empty")


def test_a_declared_last_call_that_is_not_held_masks_whatever_else_speaks(build: Builder) -> None:
    masked(go(build, linear(), declared="nope", response_id="c3"), "terminal_not_captured")


def test_no_record_at_all_masks(build: Builder) -> None:
    masked(go(build, []), "no_generation")
    masked(go(build, [], deliver="all_chains"), "no_generation")


def test_all_chains_leave_out_what_is_not_safe(build: Builder) -> None:
    c1, c2, _ = linear()
    lost = entry("s", [1, 2, 3, 4, 5, 8, 9], [10], "gone", NEXT)
    behind = entry("s2", [1, 2, 3, 4, 5, 8, 9, 10, 11], [12], "s", NEXT)
    built = go(build, [c1, c2, lost, behind], deliver="all_chains")
    trained(built, ["c1", "c2"])
    masked(go(build, [lost, behind], deliver="all_chains"), "parent_missing")
    masked(go(build, [c1, c2, lost], deliver="all_chains", explicit="s"), "parent_missing")


def test_all_chains_have_roles_and_own_each_span_once(build: Builder) -> None:
    def at(time: float, record: TokenEntry) -> TokenEntry:
        return replace(record, created_at=time)

    entries = [
        at(1, entry("m1", [1], [50], None, ROOT)),
        at(2, entry("m2", [1, 50, 9], [51], "m1", NEXT)),
        at(3, entry("m2x", [1, 50, 9], [52], "m1", NEXT)),
        at(4, entry("m3", [1, 50, 9, 52, 10], [53], "m2x", NEXT)),
        at(5, entry("k1", [2], [60], None, ROOT)),
        at(6, entry("s1", [3], [70], None, ROOT)),
        at(7, entry("k2", [2, 60, 9], [61], "k1", NEXT)),
        at(8, entry("k3", [2, 60, 9, 61, 9], [62], "k2", NEXT)),
    ]
    built = go(build, entries, explicit="k2", deliver="all_chains")
    traces = trained(built, ["k1", "k2"], ["m1", "m2"], ["m1", "m2x", "m3"], ["s1"])
    assert (built.metrics.n_chains, built.metrics.n_roots) == (4, 3)
    single = go(build, entries, explicit="k2")
    assert (single.metrics.n_chains, single.metrics.n_roots) == (1, 1)
    assert [trace.role for trace in traces] == ["terminal", "abandoned_retry", "before_compaction", "sub_agent"]
    assert [trace.loss_mask.astype(int).tolist() for trace in traces[1:3]] == [[0, 1, 0, 1], [0, 0, 0, 1, 0, 1]]


def test_the_terminals_trace_owns_what_it_shares_whatever_the_leaves_are_called(build: Builder) -> None:
    """A span is trained on once: in the chain that was scored, not in one whose leaf's id happens to be smaller."""
    root = entry("root", [1], [50], None, ROOT)
    shared = entry("m", [1, 50, 9], [51], "root", NEXT)
    forks = [entry("a", [1, 50, 9, 51, 8], [52], "m", NEXT), entry("z", [1, 50, 9, 51, 7], [53], "m", NEXT)]
    entries = [root, shared, *forks]
    for named, other in (("z", "a"), ("a", "z")):
        path = ["root", "m"]
        traces = trained(go(build, entries, explicit=named, deliver="all_chains"), [*path, named], [*path, other])
        assert [trace.loss_mask.astype(int).tolist() for trace in traces] == [[0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 0, 1]]
    unnamed = trained(go(build, entries, deliver="all_chains"), ["root", "m", "a"], ["root", "m", "z"])
    assert [int(trace.loss_mask.sum()) for trace in unnamed] == [3, 1]


def test_the_only_chain_that_is_left_is_the_terminal_one(build: Builder) -> None:
    def roles(entries: list[TokenEntry], **how: Any) -> dict[str, str]:
        return {t.call_ids[-1]: t.role for t in go(build, entries, deliver="all_chains", **how).traces}

    firsts = [entry("a", [1], [2], None, ROOT), entry("b", [1], [2], None, ROOT)]
    assert roles(firsts) == {"a": "terminal"}
    kept = entry("k", [1, 2, 3], [4], "a", NEXT)
    assert roles([*firsts, kept]) == {"k": "terminal"}
    retried = [
        entry("p", [1], [2], None, ROOT),
        entry("q", [1], [3], None, ROOT),
        entry("z", [1, 3, 4], [5], "q", NEXT),
    ]
    assert roles(retried) == {"z": "terminal", "p": "abandoned_retry"}
    gone = entry("g", [1, 3, 4, 5, 6], [7], "z", {**NEXT, "client_gone": True})
    assert roles([*retried, gone]) == {"z": "terminal", "p": "abandoned_retry"}
    lost = entry("l", [1, 3, 9], [8], "nowhere", NEXT)
    assert roles([*retried, lost]) == {"z": "sub_agent", "p": "abandoned_retry"}
    two = [*retried, entry("s", [50], [51], None, ROOT)]
    assert roles(two) == {"z": "sub_agent", "p": "abandoned_retry", "s": "sub_agent"}
    assert roles(two, explicit="s") == {"s": "terminal", "z": "sub_agent", "p": "abandoned_retry"}


def test_what_twins_sampled_is_trained_on_once_in_every_mode(build: Builder) -> None:
    root = entry("root", [1], [2], None, ROOT)
    a, b = (entry(name, [1, 2, 3], [4], "root", NEXT) for name in "ab")
    trained(go(build, [root, a, b], deliver="all_chains"), ["root", "a"])
    trained(go(build, [root, a, b], deliver="all_chains", explicit="b"), ["root", "b"])
    firsts = [entry("a", [1], [2], None, ROOT), entry("b", [1], [2], None, ROOT)]
    trained(go(build, firsts, deliver="all_chains"), ["a"])
    x, y = entry("x", [1, 2, 3, 4, 5], [6], "a", NEXT), entry("y", [1, 2, 3, 4, 7], [8], "b", NEXT)
    for named, other in (("x", "y"), ("y", "x")):
        via = {"x": "a", "y": "b"}
        first, second = trained(
            go(build, [root, a, b, x, y], deliver="all_chains", explicit=named),
            ["root", via[named], named],
            ["root", via[other], other],
        )
        assert first.loss_mask.astype(int).tolist() == [0, 1, 0, 1, 0, 1]
        assert second.loss_mask.astype(int).tolist() == [0, 0, 0, 0, 0, 1]
    # The same ids with another split are two calls, of which one saw as context what the other sampled.
    split = [entry("m", [1], [2, 3], None, ROOT), entry("n", [1, 2], [3], None, ROOT)]
    assert len(go(build, split, deliver="all_chains").traces) == 2


def test_all_chains_never_deliver_an_undecided_retry(build: Builder) -> None:
    root = entry("root", [1], [2], None, ROOT)
    twins = [entry("a", [1, 2, 3], [4], "root", NEXT), entry("b", [1, 2, 3], [5], "root", NEXT)]
    fork = entry("f", [1, 2, 8], [9], "root", NEXT)
    trained(go(build, [root, *twins, fork], deliver="all_chains"), ["root", "f"])
    masked(go(build, [root, *twins], deliver="all_chains"), "unresolved_retry")


def test_weight_versions_split_spans_and_nonsense_says_nothing(build: Builder) -> None:
    c1 = entry("c1", [1], [2, 3, 4], None, ROOT)
    (trace,) = trained(go(build, [replace(c1, weight_versions=(WeightSpan(1, 3, "7"),))]), ["c1"])
    assert [(s.start, s.end, s.weight_version) for s in trace.spans] == [(1, 2, None), (2, 4, "7")]
    assert trace.stretches() == [("c1", 1, 4)]
    (trace,) = trained(go(build, [replace(c1, weight_versions=(WeightSpan(2, 9, "7"),))]), ["c1"])
    assert [(s.start, s.end, s.weight_version) for s in trace.spans] == [(1, 4, None)]


def test_logprobs_come_back_bit_exact_and_forced_ids_stay_flagged(build: Builder) -> None:
    odd = [-0.1, -5e-324, -1.2345678901234567]
    c1 = replace(entry("c1", [1], [2, 3, 4], None, ROOT), generation_log_probs=odd, grammar_forced=[True, False, True])
    (trace,) = trained(go(build, [c1]), ["c1"])
    assert trace.logprobs[1:].tobytes() == np.array(odd).tobytes()
    assert trace.as_json()["grammar_forced"] == [0, 1, 0, 1]


CASES = {name.removeprefix("test_"): value for name, value in list(globals().items()) if name.startswith("test_")}
