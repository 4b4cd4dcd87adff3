"""Which intents of dead writers are aborted: every branch of the rule, as values."""

from __future__ import annotations

from toprope.tokens.settling import BegunCall, is_doubtful, to_abort


def lost(call: str, **fields: object) -> BegunCall:
    return BegunCall(call, open=True, **{"writer_epoch": "dead", "request_digest": "d", **fields})  # type: ignore[arg-type]


def kept(call: str, **fields: object) -> BegunCall:
    return BegunCall(call, open=False, **{"writer_epoch": "new", "request_digest": "d", **fields})  # type: ignore[arg-type]


def settled(*calls: BegunCall) -> tuple[str, ...]:
    return to_abort(calls, lambda epoch: epoch != "dead")


def test_a_reply_that_was_not_streamed_cannot_have_left_a_dead_writer() -> None:
    assert settled(lost("a"), lost("b")) == ("a", "b")


def test_a_live_writers_call_and_one_of_unknown_origin_stay_open() -> None:
    assert settled(lost("a", writer_epoch="new"), lost("b", writer_epoch="")) == ()


def test_a_streamed_call_without_a_retry_stays_open() -> None:
    assert settled(lost("a", stream=True)) == ()
    assert settled(lost("a", stream=True), kept("b", request_digest="other")) == ()
    assert settled(kept("b"), lost("a", stream=True)) == ()  # what came before is no retry


def test_a_streamed_call_whose_request_came_again_is_aborted() -> None:
    assert settled(lost("a", stream=True), kept("b", retry_count=1)) == ("a",)
    assert settled(lost("a", stream=True), kept("b")) == ("a",)  # many programs mark nothing


def test_an_equal_request_to_the_same_writer_is_a_second_sample_and_no_retry() -> None:
    assert settled(lost("a", stream=True), kept("b", writer_epoch="dead")) == ()


def test_each_retry_answers_for_one_lost_call_only() -> None:
    assert settled(lost("a", stream=True), lost("b", stream=True), kept("c", retry_count=1)) == ("a",)


def test_a_later_request_that_may_hold_a_part_of_the_turn_keeps_the_call_lost() -> None:
    assert settled(lost("a", stream=True), kept("b", retry_count=1), kept("c", doubtful=True)) == ()
    assert settled(kept("z", doubtful=True), lost("a", stream=True), kept("b", retry_count=1)) == ("a",)


def test_a_call_without_a_digest_has_no_retry() -> None:
    assert settled(lost("a", stream=True, request_digest=""), kept("b", request_digest="", retry_count=1)) == ()


def test_only_a_decision_that_leaves_room_for_an_unrecorded_turn_is_doubtful() -> None:
    assert is_doubtful("unresolved", "unrecorded_turn:item 3")
    assert is_doubtful("unresolved", "deferred")
    assert is_doubtful("unresolved", None)
    assert not is_doubtful("unresolved", "history_rewritten")
    assert not is_doubtful("resolved", "longest_prefix")
    assert not is_doubtful("root", "first_call")
