"""What any sink and source must keep: the conformance suite for capture transports. Needs no test framework.

`connect` opens one more client of the custody under test. For a transport that is named, `capture_endpoints.Endpoints`
is such a `connect`, and what must hold between processes and across their deaths is checked too. A check that fails
takes the checks along that would only fail for the same reason: they are skipped, and say so. Checks of optional verbs
are skipped for transports without them.

`toprope capture conformance` runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toprope.testing import capture_answers as answers
from toprope.testing import capture_checks as checks
from toprope.testing import capture_deaths as deaths
from toprope.testing import capture_keeping as keeping
from toprope.testing import capture_marks as marks
from toprope.testing import capture_reasons as told
from toprope.testing import capture_records as records
from toprope.testing.capture_kit import Check, Scale, Skipped
from toprope.testing.capture_kit import Connect as Connect
from toprope.testing.capture_kit import Nonconforming as Nonconforming
from toprope.testing.capture_kit import Transport as Transport
from toprope.testing.capture_kit import sample_entry as sample_entry
from toprope.testing.capture_table import a_refusal_says_what_it_is, every_cell_of_the_table_holds


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one check: `passed`, `failed` or `skipped`, and why."""

    check: str
    result: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.result:7}  {self.check.replace('_', ' ')}" + (f": {self.detail}" if self.detail else "")


async def run_suite(
    connect: Connect, scale: Scale | None = None, *, tell: Callable[[Outcome], None] = lambda outcome: None
) -> tuple[Outcome, ...]:
    """Every check in order, one outcome each, told as it comes. Never raises for what the transport does."""
    outcomes: list[Outcome] = []
    failed: set[str] = set()
    for check in CHECKS:
        outcome = await _one(check, connect, scale or Scale(), failed)
        if outcome.result == "failed":
            failed.add(outcome.check)
        outcomes.append(outcome)
        tell(outcome)
    return tuple(outcomes)


async def _one(check: Check, connect: Connect, scale: Scale, failed: set[str]) -> Outcome:
    name = check.__name__
    needs = [need.__name__ for need in NEEDS.get(check, ()) if need.__name__ in failed]
    if needs:
        return Outcome(name, "skipped", f"it builds on what failed: {needs[0].replace('_', ' ')}")
    try:
        await check(connect, scale)
    except Skipped as why:
        return Outcome(name, "skipped", str(why))
    except Exception as error:  # a transport may raise anything; the report says what
        kind = "" if isinstance(error, Nonconforming) else f"{type(error).__name__}: "
        return Outcome(name, "failed", " ".join(f"{kind}{error}".split()))
    return Outcome(name, "passed")


_VISIBLE = checks.put_is_visible_to_another_client_at_once
_INTENT = checks.an_open_intent_masks_and_a_put_satisfies_it
_GONE = checks.a_dropped_rollout_stays_gone
_EMPTY = checks.an_unknown_key_freezes_to_nothing_for_good
_SINGLE: tuple[Check, ...] = (
    _VISIBLE,
    checks.put_survives_the_client,
    checks.the_same_put_twice_is_one_entry,
    checks.other_bytes_under_a_call_id_mask_the_rollout,
    checks.a_logprob_that_is_no_number_is_refused,
    checks.floats_and_texts_come_back_bit_for_bit,
    checks.every_field_of_a_record_comes_back,
    records.ids_of_every_size_come_back,
    records.texts_of_every_kind_come_back,
    records.a_call_that_sampled_nothing_is_kept,
    checks.freeze_makes_the_set_final,
    checks.an_unknown_key_freezes_to_nothing_for_good,
    checks.a_mark_after_freeze_makes_the_old_pair_useless,
    checks.a_dropped_rollout_stays_gone,
    checks.an_open_intent_masks_and_a_put_satisfies_it,
    checks.an_aborted_intent_does_not_mask,
    checks.the_journal_tells_every_begun_call_in_order,
    checks.superseding_sets_aside_and_mixes_nothing,
    told.a_mark_keeps_its_reason,
    told.a_reply_that_was_cut_short_is_told,
    told.a_reply_that_was_fetched_again_was_read,
    told.the_pair_of_another_snapshot_drops_nothing,
    told.settle_waits_for_what_is_in_flight,
    marks.a_mark_is_never_taken_back,
    marks.a_lost_call_is_named,
    marks.what_is_set_aside_keeps_its_marks,
    answers.begin_and_put_say_what_the_key_holds,
    answers.entries_are_read_in_the_order_of_their_arrival,
    records.what_is_read_while_open_is_what_was_put,
    answers.a_dropped_payload_is_not_read_again,
    answers.every_capture_is_listed,
    keeping.keys_that_look_alike_do_not_meet,
    a_refusal_says_what_it_is,
)
"""One promise each; the others build on them."""

CHECKS: tuple[Check, ...] = (
    *_SINGLE,
    every_cell_of_the_table_holds,
    checks.a_put_racing_freeze_is_in_or_makes_the_pair_stale,
    checks.the_order_of_puts_does_not_matter,
    checks.many_writers_lose_nothing,
    checks.a_deep_chain_comes_back_whole,
    checks.a_very_long_call_is_kept,
    told.receipts_outlive_the_payload,
    checks.a_swept_rollout_stays_closed,
    checks.reading_leaves_no_trace,
    keeping.a_sweep_takes_nothing_but_tombstones,
    keeping.an_earlier_attempt_stays_out,
    keeping.a_discard_takes_what_it_was_told_and_no_live_one,
    keeping.two_at_once_agree,
    deaths.what_another_process_puts_is_visible_at_once,
    deaths.what_was_acknowledged_survives_the_death_of_its_process,
    deaths.an_intent_survives_the_death_of_its_process,
    deaths.a_tombstone_survives_the_death_of_its_process,
    deaths.what_was_ended_stays_ended_after_a_death,
    deaths.calls_of_dead_writers_are_settled_and_of_live_ones_not,
    deaths.several_processes_write_one_rollout,
    deaths.a_torn_last_write_takes_nothing_along,
)

NEEDS: dict[Check, tuple[Check, ...]] = {
    checks.a_swept_rollout_stays_closed: (_VISIBLE, checks.a_dropped_rollout_stays_gone),
    checks.freeze_makes_the_set_final: (_VISIBLE,),
    checks.an_unknown_key_freezes_to_nothing_for_good: (_VISIBLE,),
    checks.the_journal_tells_every_begun_call_in_order: (checks.an_open_intent_masks_and_a_put_satisfies_it,),
    told.a_mark_keeps_its_reason: (_VISIBLE, checks.a_mark_after_freeze_makes_the_old_pair_useless),
    told.a_reply_that_was_cut_short_is_told: (_VISIBLE, checks.an_aborted_intent_does_not_mask),
    told.a_reply_that_was_fetched_again_was_read: (
        _VISIBLE,
        checks.every_field_of_a_record_comes_back,
        checks.an_aborted_intent_does_not_mask,
    ),
    told.the_pair_of_another_snapshot_drops_nothing: (
        checks.a_mark_after_freeze_makes_the_old_pair_useless,
        checks.a_dropped_rollout_stays_gone,
        checks.superseding_sets_aside_and_mixes_nothing,
    ),
    told.settle_waits_for_what_is_in_flight: (_VISIBLE, checks.an_open_intent_masks_and_a_put_satisfies_it),
    marks.a_mark_is_never_taken_back: (_VISIBLE, _INTENT, checks.other_bytes_under_a_call_id_mask_the_rollout),
    marks.a_lost_call_is_named: (_VISIBLE, _INTENT, told.a_mark_keeps_its_reason),
    marks.what_is_set_aside_keeps_its_marks: (
        _VISIBLE,
        _INTENT,
        _GONE,
        checks.superseding_sets_aside_and_mixes_nothing,
        marks.a_lost_call_is_named,
    ),
    answers.begin_and_put_say_what_the_key_holds: (_VISIBLE, _INTENT, checks.the_same_put_twice_is_one_entry),
    answers.entries_are_read_in_the_order_of_their_arrival: (_VISIBLE,),
    records.ids_of_every_size_come_back: (_VISIBLE,),
    records.texts_of_every_kind_come_back: (_VISIBLE,),
    records.a_call_that_sampled_nothing_is_kept: (_VISIBLE,),
    records.what_is_read_while_open_is_what_was_put: (
        _VISIBLE,
        checks.every_field_of_a_record_comes_back,
        records.ids_of_every_size_come_back,
        records.a_call_that_sampled_nothing_is_kept,
        answers.entries_are_read_in_the_order_of_their_arrival,
    ),
    answers.a_dropped_payload_is_not_read_again: (_GONE,),
    answers.every_capture_is_listed: (_VISIBLE, _INTENT, _GONE, _EMPTY, marks.a_lost_call_is_named),
    keeping.keys_that_look_alike_do_not_meet: (_VISIBLE,),
    every_cell_of_the_table_holds: _SINGLE,
    keeping.a_sweep_takes_nothing_but_tombstones: (
        _VISIBLE,
        _INTENT,
        _GONE,
        _EMPTY,
        marks.what_is_set_aside_keeps_its_marks,
    ),
    keeping.an_earlier_attempt_stays_out: (_VISIBLE, _INTENT, _GONE, checks.a_swept_rollout_stays_closed),
    keeping.a_discard_takes_what_it_was_told_and_no_live_one: (_VISIBLE, _INTENT, _GONE),
    keeping.two_at_once_agree: (
        _VISIBLE,
        _GONE,
        checks.the_same_put_twice_is_one_entry,
        checks.a_mark_after_freeze_makes_the_old_pair_useless,
    ),
    checks.a_put_racing_freeze_is_in_or_makes_the_pair_stale: (
        _VISIBLE,
        checks.a_mark_after_freeze_makes_the_old_pair_useless,
    ),
    checks.many_writers_lose_nothing: (_VISIBLE,),
    checks.a_deep_chain_comes_back_whole: (_VISIBLE, records.what_is_read_while_open_is_what_was_put),
    checks.a_very_long_call_is_kept: (records.ids_of_every_size_come_back,),
    told.receipts_outlive_the_payload: (_VISIBLE, checks.a_dropped_rollout_stays_gone),
    deaths.what_another_process_puts_is_visible_at_once: (_VISIBLE,),
    deaths.an_intent_survives_the_death_of_its_process: (checks.an_open_intent_masks_and_a_put_satisfies_it,),
    deaths.a_tombstone_survives_the_death_of_its_process: (checks.a_dropped_rollout_stays_gone,),
    deaths.what_was_ended_stays_ended_after_a_death: (
        _VISIBLE,
        checks.an_aborted_intent_does_not_mask,
        checks.superseding_sets_aside_and_mixes_nothing,
        deaths.what_was_acknowledged_survives_the_death_of_its_process,
    ),
    deaths.calls_of_dead_writers_are_settled_and_of_live_ones_not: (
        _VISIBLE,
        _INTENT,
        checks.the_journal_tells_every_begun_call_in_order,
        told.settle_waits_for_what_is_in_flight,
        deaths.an_intent_survives_the_death_of_its_process,
    ),
    deaths.several_processes_write_one_rollout: (_VISIBLE,),
    deaths.a_torn_last_write_takes_nothing_along: (deaths.what_was_acknowledged_survives_the_death_of_its_process,),
}
"""A check that would only say again what an earlier one said."""
