"""Which witnesses a flat row yields: what the caller, the agent, the response id and the content say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.unit.trajectory.rows import called, claims, held, result, row, said, thought

from toprope.trajectory.terminal import TerminalWitnesses


def test_the_caller_and_the_agent_speak_by_name() -> None:
    entries = held([said("a")], [said("b")])
    assert claims(row([], _ng_terminal_model_call_id="c1"), entries).explicit == ("c1",)
    for place in ({"terminal_response_id": "resp-0"}, {"response": {"metadata": {"terminal_response_id": "resp-0"}}}):
        assert claims(row([], **place), entries).declared == ("c0",)
    assert claims(row([], terminal_response_id="resp-9"), entries).declared == ("response:resp-9",)


def test_a_response_id_speaks_only_if_a_record_has_it() -> None:
    entries = held([said("a")], [said("b")])
    assert claims(row([], id="resp-1"), entries).response_id == ("c1",)
    assert claims(row([]), entries).response_id == ()
    assert claims(row([], id=None), [replace(entries[0], response_id=None)]).response_id == ()


def test_the_final_output_names_the_call_that_wrote_it() -> None:
    entries = held([called("x")], [called("y")], [thought("t"), said("done")])
    final = [said("done")]
    transcript = [called("1"), result("1"), called("2"), result("2"), thought("t"), said("done")]
    for output in (final, transcript, transcript[:-2] + final, [thought("t"), *final]):
        assert claims(row(output), entries).content == ("c2",)
    # Agents end transcripts with a tool's result when they run out of steps.
    assert claims(row(transcript[:2]), held([called("x")])).content == ("c0",)


def test_equal_replies_are_told_apart_by_the_whole_transcript_or_not_at_all() -> None:
    entries = held([said("more")], [called("x")], [said("more")])
    whole = [said("more"), {"role": "user", "content": "go"}, called("x"), result("x"), said("more")]
    assert claims(row(whole), entries).content == ("c2",)
    # An agent that hands in its last reply alone says just this of c2; that it is all c0's conversation is chance.
    assert claims(row([said("more")]), entries).content == ()
    twins = held([called("x")], [said("more")], [said("more")])
    assert claims(row([said("more")]), twins).content == ()


def test_a_rewritten_final_output_says_nothing() -> None:
    entries = held([said("a")], [said("b")])
    for output in ([said("a summary of it all")], [], None, "text", [3], [{}], [result("x")]):
        assert claims(row(output), entries).content == ()


def test_nothing_in_a_row_makes_it_raise() -> None:
    entries = held([said("a")])
    strange: list[Any] = [None, 3, [], "x", {"a": 1}, float("nan")]
    for value in strange:
        assert isinstance(claims({"response": value}, entries), TerminalWitnesses)
        odd = {"response": {"id": value, "output": value, "metadata": value}, "ng_agent_observations": value}
        odd |= {"_ng_terminal_model_call_id": value, "terminal_response_id": value}
        assert isinstance(claims(odd, entries), TerminalWitnesses)
