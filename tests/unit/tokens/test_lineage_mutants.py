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
        "if len(history) == 0 and history.first_request_is_accounted_for(asked.all()):",
        "if len(history) == 0:",
    ),
    "what_was_lost_unseen_is_no_matter": (
        "lineage",
        "nothing_before = not (self.unseen or self._shown_turns.any_lost)",
        "nothing_before = not self._shown_turns.any_lost",
    ),
    "a_lost_retry_vouches_for_what_it_kept": (
        "lineage",
        "if self.first_request_is_accounted_for(tuple(request_digests)):",
        "if True:",
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
        "            if history.begins_a_conversation(marks, prompt, beginning):\n",
        "            if True:\n",
    ),
    "a_lost_call_unseen_vouches_for_shown_words": ("lineage", "beginning, unseen=self.unseen)", "beginning, unseen=0)"),
    "any_lost_call_makes_shown_words_doubtful": ("shown", "return all(each and (", "return False and all(each and ("),
    "shown_words_alone_stand_after_a_lost_call": (
        "shown",
        "if not any(size and each[:size] == beginning for each in self._beginnings):",
        "if not beginning:",
    ),
    "a_shown_beginning_is_one_whatever_was_lost": ("shown", "return all(each and (", "return True or all(each and ("),
    "what_a_lost_call_was_asked_is_none": ("shown", "return all(each and (", "return all(not each or ("),
    "a_lost_call_that_begins_elsewhere_is_elsewhere": ("shown", "first not in each)", "first != each[0])"),
    "only_the_whole_beginning_of_a_lost_call_counts": ("shown", " or (elsewhere and first not in each)", ""),
    "a_lost_call_says_nothing_at_the_very_beginning": ("shown", "elsewhere = not is_mark(first)", "elsewhere = True"),
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
        'if kind == "function_call" and not item.keys() <= ABOUT_A_CALL:',
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
