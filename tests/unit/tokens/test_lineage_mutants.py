"""Unsafe variants of lineage: each takes for a parent, or for known, what is none, and a vector or situation tells."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import pytest
from tests.mutants import killer, mutated
from tests.unit.tokens import test_asked, test_deferred, test_items, test_lineage

ROOM = "toprope.tokens"
ORDER = ("asked", "items", "sent", "shown", "strands", "lineage", "deferred")
SUITES = (test_lineage, test_deferred, test_items, test_asked)

MUTANTS: dict[str, tuple[str, str, str]] = {
    "turns_of_unknown_origin_accepted": ("lineage", "if history.accounts_for(node, asked)]", "]"),
    "what_was_added_is_not_looked_up": (
        "lineage",
        "if added is not None and not CountedMarks(sampled=node.own_output).missing(added):",
        "if added is not None:",
    ),
    "the_rest_of_the_conversation_is_not_looked_up": (
        "lineage",
        "return not parent_seen(node).missing(asked.all())",
        "return True",
    ),
    "a_turn_counts_twice_when_sent_back": (
        "lineage",
        "new = parent_seen(parent).missing(said) if parent is not None and said else said",
        "new = asked.all() if asked is not None else said",
    ),
    "a_childs_turns_count_for_its_parent": ("lineage", "        if take:\n            node.seen = None\n", ""),
    "ambiguous_split_guessed": ("lineage", "if len({node.prompt_len for node in found}) > 1:", "if False:"),
    "the_newest_of_equals_taken": ("lineage", "parent = min(fitting,", "parent = max(fitting,"),
    "the_shortest_prefix_taken": (
        "lineage",
        "for strand, reach in reversed(self._walk(prompt)):",
        "for strand, reach in self._walk(prompt):",
    ),
    "a_call_that_ends_beyond_the_prompt_taken": ("lineage", "strand.last_end(reach)", "strand.last_end(reach + 1)"),
    "ids_not_compared": ("strands", "return common_prefix(self.ids[at : at + size], ids[:size])", "return size"),
    "only_the_beginning_of_a_strand_compared": ('strands', '.data.cast("B"), 4 * at)', '.data.cast("B"), 0)'),
    "half_of_the_ids_compared": ("strands", "array(ids[:size]).data", "array(ids[:size // 2]).data"),
    "an_empty_call_is_a_parent": (
        "lineage",
        "        if len(generated) == 0:\n            return  # structural: never anybody's parent\n",
        "",
    ),
    "whatever_continues_nothing_is_a_root": (
        "shown",
        "return self._requests.holds(marks)",
        "return True",
    ),
    "a_first_call_is_a_root_whatever_was_aborted": (
        "lineage",
        "if not certain and not history.is_nobodys_reply(shown):",
        "if not certain and len(history) and not history.is_nobodys_reply(shown):",
    ),
    "what_was_lost_unseen_is_no_matter": (
        "lineage",
        "return not self.unseen and self._shown_turns",
        "return self._shown_turns",
    ),
    "a_lost_retry_vouches_for_what_it_kept": (
        "shown",
        "return all(map(shown.stands_beside, self._lost))",
        "return not self._lost or any(map(shown.stands_beside, self._lost))",
    ),
    "deferred_first_calls_are_roots": (
        "deferred",
        "history.unseen = not told or (",
        "history.unseen = False and (",
    ),
    "the_first_by_its_clock_is_the_first": (
        "deferred",
        "or (len(history) == 0 and _was_said_before(entry, own))",
        "",
    ),
    "whatever_the_first_request_holds_was_said_before": (
        "deferred",
        "said & held - {content_of(mark) for mark in entry.item_digests}",
        "said & held",
    ),
    "clocks_say_who_is_whose_parent": ("deferred", "if _begins(timed[each], entry)]", "if False]"),
    "the_longest_ancestor_comes_first": (
        "deferred",
        "key=lambda each: len(timed[each].prompt_token_ids))",
        "key=lambda each: -len(timed[each].prompt_token_ids))",
    ),
    "ids_of_ancestors_not_compared": ("deferred", "if _begins(timed[each], entry)]", "]"),
    "records_of_other_rollouts_vouch": (
        "deferred",
        "if entry.rollout_id == rollout_id and _is_as_recorded(entry)]",
        "if _is_as_recorded(entry)]",
    ),
    "damaged_records_vouch": (
        "deferred",
        "if entry.rollout_id == rollout_id and _is_as_recorded(entry)]",
        "if entry.rollout_id == rollout_id]",
    ),
    "records_set_aside_are_not_missed": ("deferred", "    missing = missing or len(own) < len(held)\n", ""),
    "marks_not_counted_on_the_way_down": (
        "lineage",
        "if added is not None and not CountedMarks(sampled=node.own_output).missing(added):",
        "if added is not None and {content_of(mark) for mark in added}"
        " <= {content_of(mark) for mark in node.own_output}:",
    ),
    "equal_values_of_other_types_are_the_same": ("sent", "for at in self.exacting)", "for at in ())"),
    "an_uncaptured_turn_is_called_a_rewrite": (
        "lineage",
        "return all(content_of(mark) in self._contents for mark in asked)",
        "return True",
    ),
    "a_foreign_claim_is_believed": (
        "lineage",
        "after = parent if chain is not None or self._is_begun_by(prompt, parent) else None",
        "after = parent",
    ),
    "the_suffix_begins_at_the_parents_prompt": ("lineage", "start=parent.cum_len", "start=parent.prompt_len"),
    "the_hash_leaves_out_ids_between_blocks": (
        "lineage",
        "tail = prompt[done : parent.cum_len]",
        "tail = prompt[:0]",
    ),
    "deferred_calls_decided_as_they_come": (
        "deferred",
        "sorted(entries, key=lambda each: (each.created_at, each.model_call_id))",
        "list(entries)",
    ),
    "as_many_marks_are_the_same_marks": ("asked", "if at is earlier:", "if at.count == earlier.count:"),
    "only_the_last_addition_is_new": (
        "asked",
        "                return _joined(parts)\n",
        "                return _joined(parts[:1])\n",
    ),
    "items_not_counted": (
        "items",
        "if used[content] < self._by_content.get(content, 0):\n                used",
        "if self._by_content.get(content, 0):\n                used",
    ),
    "a_thought_vouches_for_a_reply": ("items", "(content.startswith(_SEALED) and held", "(held"),
    "an_id_vouches_for_other_words": (
        "items",
        "content.startswith(_REFERENCE) or (content",
        'content.startswith((_REFERENCE, "message:")) or (content',
    ),
    "an_id_vouches_for_another_call": (
        "items",
        "content.startswith(_REFERENCE) or (content",
        'content.startswith((_REFERENCE, "function_call:")) or (content',
    ),
    "a_reply_vouches_for_a_thought_without_text": ("items", " and held.startswith(THOUGHT))", ")"),
    "the_id_of_a_shown_item_vouches": (
        "items",
        "        for mark in shown:\n            self._count(mark)\n        for mark in sampled:\n",
        "        for mark in (*shown, *sampled):\n",
    ),
    "all_references_are_one": ("items", 'return value_mark(item.get("id"))', "return value_mark(kind)"),
    "what_stood_before_the_parent_stands_in_for_what_was_added": (
        "lineage",
        "CountedMarks(sampled=node.own_output).missing(added)",
        "CountedMarks((*node.own_request, *node.own_output)).missing(added)",
    ),
    "a_lost_turn_in_shown_words_is_a_shown_one": (
        "lineage",
        "if not certain and not history.is_nobodys_reply(shown):",
        "if False:",
    ),
    "what_was_lost_unseen_is_known_by_what_was_lost": (
        "lineage",
        "return not self.unseen and self._shown_turns",
        "return (not self.unseen or bool(self._shown_turns._lost)) and self._shown_turns",
    ),
    "any_lost_call_makes_shown_words_doubtful": (
        "shown",
        "return all(map(shown.stands_beside, self._lost))",
        "return not self._lost",
    ),
    "shown_words_alone_stand_after_a_lost_call": ("shown", "alike == beginning != ()", "beginning != ()"),
    "any_beginning_is_that_of_a_root": ("shown", "alike == beginning != ()", "bool(self._beginnings)"),
    "beginnings_are_known_as_they_came": ("shown", "self._beginnings.insert(at,", "self._beginnings.insert(0,"),
    "only_a_whole_beginning_is_known": ("shown", "[: len(beginning)]", ""),
    "a_beginning_of_unknown_items_stands": ("shown", "if size == 0 or not lost:", "if not lost:"),
    "a_shown_beginning_is_one_whatever_was_lost": (
        "shown",
        "        if lost[:size] == self.said:\n            return True\n",
        "        if lost:\n            return True\n",
    ),
    "what_a_lost_call_was_asked_is_none": ("shown", "if size == 0 or not lost:", "if size == 0:"),
    "a_lost_call_that_begins_elsewhere_is_elsewhere": ("shown", "first not in lost", "first != lost[0]"),
    "only_the_whole_beginning_of_a_lost_call_counts": (
        "shown",
        "return self.known and not is_mark(first) and first not in lost",
        "return False",
    ),
    "a_first_beginning_stands_where_another_one_was_asked": ("shown", "return self.known and not", "return not"),
    "a_lost_call_says_nothing_at_the_very_beginning": ("shown", "and not is_mark(first) and", "and"),
    "what_lost_requests_were_not_compared_with_vouches": ("shown", "if beginning and not self._cut:", "if beginning:"),
    "the_end_of_a_lost_request_is_not_looked_at": (
        "shown",
        "sorted(firsts.intersection((*start, *rest)))",
        "sorted(firsts.intersection(start))",
    ),
    "what_a_lost_request_begins_with_is_not_looked_at": ("shown", "(*common, _THEN, *sorted", "(_THEN, *sorted"),
    "what_stands_in_a_lost_request_is_what_it_begins_with": (
        "shown",
        "return one[:at]",
        "return other",
    ),
    "the_first_lost_requests_are_compared_with_no_root": ("shown", "        if first:\n", "        if False:\n"),
    "a_loss_between_calls_without_shown_turns_is_none": (
        "shown",
        "self._lost = {()} if not said or len",
        "self._lost = self._lost if not said else {()} if len",
    ),
    "of_too_many_lost_requests_none_counts": (
        "shown",
        "self._lost = {()} if not said or",
        "self._lost = set() if not said or",
    ),
    "developers_items_are_shown": ("shown", '("system", "developer")', '("system",)'),
    "a_request_from_before_any_reply_is_like_any_other": (
        "lineage",
        "if first or before_any_reply or history",
        "if first or history",
    ),
    "a_request_from_before_any_reply_is_doubtful": (
        "lineage",
        "certain = certain or history",
        "certain = history",
    ),
    "no_root_is_doubtful": ("lineage", "shown.said, None if certain else shown)", "shown.said)"),
    "every_root_is_doubtful": ("lineage", "shown.said, None if certain else shown)", "shown.said, shown)"),
    "whatever_a_record_held_was_shown_to_a_root": (
        "lineage",
        'if entry.parent_decision == "root" and said:',
        "if said:",
    ),
    "whoever_speaks_says_the_same": ("items", 'item.get("role"), _said', "_said"),
    "results_of_tools_are_all_the_same": ("items", ', _said(item.get("output"))])', "])"),
    "fields_of_shown_turns_not_compared": ("items", "    if _FIELD not in names:\n", "    if True:\n"),
    "users_items_not_compared": (
        "shown",
        "return said_by_all(items[first:], marks[skipped:])",
        "return tuple(filter(is_mark, said_by_all(items[first:], marks[skipped:])))",
    ),
    "instructions_are_a_part_of_what_is_shown": (
        "shown",
        "said_by_all(items[first:], marks[skipped:])",
        "said_by_all(items, marks)",
    ),
    "marks_of_instructions_are_those_of_what_follows": ("shown", "marks[skipped:]", "marks"),
    "the_task_is_a_part_of_what_is_shown": ("shown", "items[: last + 1]", "items"),
    "the_prompt_of_a_root_is_no_proof": ("shown", "in self._prompts.get(_digest(prompt), ()))", "in ())"),
    "the_prompt_of_a_root_vouches_for_all_it_may_hold": ("shown", "any(not bag.missing(marks) for", "any(True for"),
    "fields_of_calls_not_read": (
        "items",
        'if read is not None and not item.keys() <= read:',
        "if False:",
    ),
    "fields_that_were_recorded_once_stand_twice": (
        "items",
        "return all(used[each] <= self._fields[each] for each in fields)",
        "return all(self._fields[each] for each in fields)",
    ),
    "items_of_unknown_kinds_are_nobodys": (
        "items",
        "    elif kind in TOOL_RESULTS:\n",
        '    elif kind not in ("reasoning", "function_call"):\n',
    ),
    "whatever_ends_like_a_result_is_one": (
        "items",
        "    elif kind in TOOL_RESULTS:\n",
        '    elif kind.endswith(("_output", "_approval_response")):\n',
    ),
    "fields_that_are_not_read_not_compared": (
        "items",
        "if not self._hold_fields(names, used):",
        "if False:",
    ),
    "fields_that_are_not_read_not_counted": ("items", "        used.update(fields)\n", ""),
    "a_turn_in_another_field_alone_is_none": ("items", "if said or unread else None", "if said else None"),
    "fields_of_parts_not_read": (
        "items",
        "for part in content if isinstance(content, list | tuple) else ():",
        "for part in ():",
    ),
    "arguments_not_compared": (
        "items",
        'return value_mark([item.get("name"), _argument_value(item.get("arguments"))])',
        'return value_mark([item.get("name")])',
    ),
    "parts_that_are_no_text_not_compared": ("items", "([text] if text else []) + others", "[text] if text else []"),
}  # fmt: skip


def checks() -> dict[str, Callable[[], object]]:
    """Every test of the suites, once for each of its parameters; those that need fixtures of pytest are left out."""
    found: dict[str, Callable[[], object]] = {}
    for suite in SUITES:
        for name, function in vars(suite).items():
            if not name.startswith("test_"):
                continue
            marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
            wanted = list(inspect.signature(function).parameters)
            if not marks and not wanted:
                found[name] = function
            elif len(marks) == 1:
                names, values = marks[0].args[:2]
                one = isinstance(names, str)
                assert wanted == ([names] if one else list(names)), name
                found |= {f"{name}[{at}]": partial(function, *([v] if one else v)) for at, v in enumerate(values)}
    return found


def killer_of(module: str, old: str, new: str, patch: pytest.MonkeyPatch) -> str | None:
    """The name of the first check that fails where the suites use copies of the modules, if any."""
    room = {f"{ROOM}.{short}": copy for short, copy in mutated(ROOM, ORDER, module, old, new).items()}
    for suite in SUITES:
        for name, value in list(vars(suite).items()):
            copy = room.get(getattr(value, "__module__", ""))
            if copy is not None and name in vars(copy):
                patch.setattr(suite, name, vars(copy)[name])
    return killer(checks())


def test_lineage_itself_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(checks()) > len(test_lineage.GOLDEN) + 80
    assert killer_of("lineage", "Whose continuation is this call?", "Whose is it?", monkeypatch) is None


@pytest.mark.promise("CP-8")
@pytest.mark.parametrize("name", list(MUTANTS))
def test_mutant_is_killed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert killer_of(*MUTANTS[name], monkeypatch) is not None, "an unsafe lineage passes every check"
