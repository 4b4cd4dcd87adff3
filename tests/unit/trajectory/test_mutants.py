"""Unsafe variants of the builder: each must be caught by a golden vector, a situation of `cases` or a labelled tree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.machine.call_trees import breaches, grow, must_train, witnesses
from tests.mutants import killer, mutated
from tests.unit.trajectory import cases, golden

ROOM = "toprope.trajectory"
ORDER = ("evidence", "terminal", "trace", "retries", "build")
TREES = 400

MUTANTS: dict[str, tuple[str, str, str]] = {
    "boundary_ignored_on_the_path": (
        "build",
        "        for fault in call.faults_here():\n            found |= _reasons_of_fault(fault)\n",
        "        pass\n",
    ),
    "boundary_ignored_without_terminal": (
        "build",
        "        if call.fault is not None:\n            found |= _reasons_of_fault(call)\n",
        "        pass\n",
    ),
    "records_set_aside_are_forgotten": ("build", "set(case.evidence.aside.values())", "set()"),
    "incomplete_ignored": ("build", "if snapshot.incomplete or said else set()", "if said else set()"),
    "reasons_of_loss_ignored": (
        "build",
        "if snapshot.incomplete or said else set()",
        "if snapshot.incomplete else set()",
    ),
    "incomplete_ignored_when_a_terminal_is_named": (
        "build",
        "| _lost(snapshot) |",
        "| (_lost(snapshot) if chosen.call is None else set()) |",
    ),
    "first_copy_kept": ("evidence", "first is not entry and first != entry", "False"),
    "copies_compared_by_ids_alone": (
        "evidence",
        "first != entry",
        "first.generation_token_ids.tolist() != entry.generation_token_ids.tolist()",
    ),
    "conflicting_parent_is_used": ("evidence", "if call_id not in conflicts}, frozenset", "}, frozenset"),
    "a_conflict_is_not_missed_by_late_decisions": ("evidence", ", missing=bool(conflicts))", ")"),
    "parent_claim_not_verified": (
        "evidence",
        "if claimed is not None and not _continues(prompt, claimed):",
        "if False:",
    ),
    "empty_parent_not_verified": (
        "evidence",
        "if claimed is not None and not _continues(prompt, claimed):",
        "if claimed is not None and not claimed.is_empty and not _continues(prompt, claimed):",
    ),
    "only_the_prompt_of_the_parent_is_compared": (
        "evidence",
        "begins_with(prompt, claimed.prompt()) and begins_with(prompt[cut:], claimed.generated)",
        "begins_with(prompt, claimed.prompt())",
    ),
    "missing_parent_is_a_root": (
        "evidence",
        'return reasons.PARENT_MISSING, f"{reasons.PARENT_MISSING}:{claim}"',
        "return None, None",
    ),
    "boundary_behind_an_empty_call_forgotten": (
        "evidence",
        "            if each.fault is not None:\n                yield each\n",
        "            pass\n",
    ),
    "child_of_an_empty_call_hangs_from_the_call_before": ("evidence", "open_ends = list(", "open_ends = [] and list("),
    "split_guessed": ("evidence", "if len({each.prompt_len for each in best}) > 1:", "if False:"),
    "hash_not_verified": ("evidence", "return _state(call).hexdigest() == entry.chain_hash", "return True"),
    "length_not_verified": ("evidence", "entry.cum_len is not None and entry.cum_len != call.cum_len", "False"),
    "ring_is_followed_as_roots": (
        "evidence",
        "        return reasons.PARENT_CYCLE, None\n",
        "        return None, None\n",
    ),
    "contradicting_root_accepted": ("evidence", "if entry.parent_call_id is None else (reasons.MALFORMED, None)", ""),
    "unresolved_is_a_root": ("evidence", 'if entry.parent_decision == "unresolved":', "if False:"),
    "records_of_other_rollouts_accepted": ("evidence", "if entry.rollout_id != rollout_id:", "if False:"),
    "explicit_beats_contradiction": (
        "terminal",
        "            found.add(reasons.TERMINAL_CONTRADICTION)\n",
        "            pass\n",
    ),
    "unknown_terminal_ignored": (
        "terminal",
        "        if fault is not None:\n",
        "        if fault == 'terminal_empty':\n",
    ),
    "empty_terminal_accepted": ("terminal", "if all(call.is_empty for call in calls) else None", "if False else None"),
    "ambiguous_declaration_takes_the_first": (
        "terminal",
        "            found.add(reasons.TERMINAL_AMBIGUOUS)\n",
        "            pass\n",
    ),
    "ambiguous_content_takes_the_first": (
        "terminal",
        "                continue\n            found",
        "                pass\n            found",
    ),
    "a_claim_forgets_the_records_set_aside": ("terminal", "not (all_held and all(", "not (all("),
    "twins_by_generation_alone": (
        "terminal",
        "np.array_equal(left.generated, right.generated) and np.array_equal(left.prompt(), right.prompt())",
        "np.array_equal(left.generated, right.generated)",
    ),
    "retry_resolved_by_smallest_id": ("retries", "if not kept and _all_equal(members):", "if not kept:"),
    "retries_not_grouped": ("retries", "        if len(members) > 1:\n", "        if False:\n"),
    "continued_retries_collapse_to_one": (
        "retries",
        "[call for call in members if call.extended]",
        "[call for call in members if call.extended][:1]",
    ),
    "terminal_path_loses_its_retry": ("retries", "[call for call in members if call.id in path] or ", ""),
    "retries_of_different_parents_mixed": (
        "retries",
        "groups[call.parent.id if call.parent else None, call.lead.tobytes()]",
        "groups[None, call.lead.tobytes()]",
    ),
    "unread_leaf_kept": ("retries", "if call.is_unread and", "if False and"),
    "unread_leaf_cut_though_continued": (
        "evidence",
        "self.entry.client_gone and not self.extended",
        "self.entry.client_gone",
    ),
    "unread_leaf_cut_though_named": ("retries", " and call.id not in named and call.id not in path", ""),
    "calls_behind_a_quarantined_one_stay": ("retries", "{call.id} | call.descendants()", "{call.id}"),
    "several_roots_accepted": ("build", "        found.add(reasons.SEVERAL_ROOTS)\n", "        pass\n"),
    "several_chains_take_the_first": (
        "build",
        "        found.add(reasons.SEVERAL_CHAINS)\n",
        "        leaves[:] = leaves[:1]\n",
    ),
    "undecided_retry_accepted": ("build", "        found.add(reasons.UNRESOLVED_RETRY)\n", "        pass\n"),
    "images_trained_blind": ("build", "        if call.entry.media:\n", "        if False:\n"),
    "terminal_ignored_for_the_last_leaf": (
        "build",
        'chains = [(path, "terminal")]',
        'chains = [(case.leaves()[-1].path(), "terminal")]',
    ),
    "spans_owned_twice": ("build", "        owned |= {", "        owned & {"),
    "twins_own_a_span_each": ("build", "return call.prompt_len, call.digest()", "return 0, call.id"),
    "equal_ids_are_equal_samples": ("build", "return call.prompt_len, call.digest()", "return 0, call.digest()"),
    "a_trace_may_own_nothing": ("build", "        if mine:\n", "        if True:\n"),
    "retries_left_behind_are_counted_as_chains": (
        "build",
        "leaves = case.leaves() if case.terminal.call is None else",
        "leaves = [c for c in case.sampling if not c.children] if case.terminal.call is None else",
    ),
    "undecided_retries_in_all_chains": ("build", "any(call.id in undecided for call in path) or ", ""),
    "unsafe_chains_in_all_chains": ("build", " or _reasons_on_path(path):\n", ":\n"),
    "the_smallest_leaf_owns_what_the_terminal_shares": (
        "build",
        'key=lambda chain: (chain[1] != "terminal", chain[0][-1].id)',
        "key=lambda chain: chain[0][-1].id",
    ),
    "owners_by_leaf_whatever_the_order": (
        "build",
        "traces = []\n    for path, role in chains:",
        "traces = []\n    for path, role in sorted(chains, key=lambda chain: chain[0][-1].id):",
    ),
    "calls_after_the_terminal_in_all_chains": ("build", "case.terminal.call.descendants()", "set()"),
    "interstitial_tokens_trained": ("trace", "loss_mask[start:end] = True", "loss_mask[at:end] = True"),
    "logprobs_shifted": ("trace", "log_probs[start:end] = call.entry", "log_probs[start:end] = -0.1 + call.entry"),
    "first_id_of_a_generation_lost": ("trace", "loss_mask[start:end] = True", "loss_mask[start + 1:end] = True"),
    "last_generation_dropped": ("evidence", "return calls[::-1]", "return calls[:0:-1] or calls"),
}


def builder(module: str, old: str, new: str) -> Callable[..., Any]:
    """`build` of a copy of the room in which `old` reads `new` in one module."""
    found: Callable[..., Any] = mutated(ROOM, ORDER, module, old, new)["build"].build
    return found


def checks(build: Callable[..., Any]) -> dict[str, Callable[[], object]]:
    """Everything that a builder must pass."""
    found: dict[str, Callable[[], object]] = {
        case["id"]: partial(golden.check, case, build) for case in golden.CASES if case["expect"] != "refused"
    }
    found |= {name: partial(situation, build) for name, situation in cases.CASES.items()}
    return found | {f"tree {seed}": partial(_tree, seed, build) for seed in range(TREES)}


def _tree(seed: int, build: Callable[..., Any]) -> None:
    tree = grow(seed)
    for deliver in ("single", "all_chains"):
        built = build(tree.snapshot, terminal=witnesses(tree), deliver=deliver)
        assert not breaches(tree, built)
        assert not must_train(tree) or type(built).__name__ == "Trainable"


def test_the_builder_itself_survives() -> None:
    assert killer(checks(builder("build", "Nothing of this rollout", "Nothing of this rollout"))) is None


@pytest.mark.promise("CP-8", "CP-9")
@pytest.mark.parametrize("name", list(MUTANTS))
def test_mutant_is_killed(name: str) -> None:
    assert killer(checks(builder(*MUTANTS[name]))) is not None, "an unsafe builder passes every check"
