"""What may be cut out of a text, however it was quoted there and normalised here; and that reading rows is linear."""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.trajectory.golden import entry
from tests.unit.trajectory.rows import called, result, said

from toprope.tokens.entry import TokenEntry
from toprope.trajectory.content import written_by
from toprope.trajectory.evidence import read
from toprope.trajectory.words import Heap, MarkReader, Text

ANSWERS = st.lists(st.text("aBcé éß4205'\"\\\n-,日", min_size=1, max_size=6), min_size=1, max_size=4).map(" ".join)
QUOTED: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "JSON": lambda text: json.dumps({"answer": text}),
    "JSON in a fence": lambda text: f"So:\n```json\n{json.dumps({'answer': text}, indent=1, ensure_ascii=False)}\n```",
    "JSON in JSON": lambda text: json.dumps({"result": json.dumps([text])}),
    "HTML": lambda text: f"<p>{html.escape(text)}</p>",
    "emphasis": lambda text: f"The answer: **{text}**.",
}
NORMALISED: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "small": str.lower,
    "large": str.upper,
    "stripped": str.strip,
    "without quotes": lambda text: text.replace("'", "").replace('"', ""),
}


def line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("quote", list(QUOTED))
@pytest.mark.parametrize("normalise", list(NORMALISED))
@settings(derandomize=True, deadline=None, max_examples=60)
@given(answer=ANSWERS)
def test_an_answer_is_found_where_it_was_quoted(quote: str, normalise: str, answer: str) -> None:
    shown = line(NORMALISED[normalise](answer))
    assert Text(line(QUOTED[quote](answer))).may_hold(Text(shown))


@pytest.mark.parametrize("value", [0.5, 42, 1400, 1400.5, 1_000_000])
def test_numbers_are_one_however_they_are_written(value: float) -> None:
    written = [
        f"{value:,}",
        f"{value:_}",
        f"{value:.2f}",
        f"${value:,.2f}",
        f"{value:,}".replace(",", " "),
        f"0{value}",
    ]
    for one in written:
        for other in written:
            assert Text(f"It is {other}, I think").may_hold(Text(one)), (one, other)
    assert not any(Text(f"It is 7{value} or {value}7").may_hold(Text(str(value))) for value in (42, 1400))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("So the answer is ] ) .", "])"),
        ('{"answer": "\\u003e"}', ">"),
        ("<b>&lt;</b>", "<"),
        ("Answer: ？", "?"),
        ("Sign: −", "-"),
        ("Sign: —", "–"),
        ("“ ”", '""'),
        ("It is ✔️.", "✔"),
        ("It is ✔.", "✔️"),
    ],
)
def test_an_answer_of_signs_is_found_where_it_was_quoted(text: str, shown: str) -> None:
    assert Text(text).may_hold(Text(shown))
    assert not Text(text).may_hold(Text("@" + shown))
    assert not Text("None of it").may_hold(Text(shown))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[1.0,200.0,300.0]", "[1, 200, 300]"),
        ("₹1,40,000.50", "140000.5"),
        ("Total: 12,34,56,789.0", "123456789"),
        ("الجواب ٤٢", "42"),
        ("١٬٤٠٠٫٥٠", "1400.5"),
        ("= 1.4e3", "1400"),
        ("= 1.40E+03", "1,400.0"),
        ("= 25e-2", "0.25"),
        ("= 25e-3", ".025"),
        ("0.025", "2.5e-2"),
    ],
)
def test_numbers_are_one_in_lists_in_other_scripts_and_with_a_power(text: str, shown: str) -> None:
    assert Text(text).may_hold(Text(shown))
    assert not Text(text).may_hold(Text("7" + shown.lstrip(".")))


def test_a_heap_holds_what_one_of_its_marks_may_say() -> None:
    reader = MarkReader()
    marks = reader.marks([said("It is **done**"), said("14"), called("a"), said("2 pears")])
    shown = reader.marks([said("done"), said("142"), said("14 2"), said("4"), called("b"), said("PEARS")])
    for each in shown:
        assert Heap(marks).may_say(each) == any(mark.may_say(each) for mark in marks), each
    assert [Heap(marks).may_say(each) for each in shown] == [True, False, False, False, True, True]


def chain(name: str, turns: list[list[dict[str, Any]]], start: int) -> list[TokenEntry]:
    made: list[TokenEntry] = []
    seen: list[int] = []
    for at, wrote in enumerate(turns):
        about = {"decision": "resolved" if at else "root", "t": at}
        prompt, sampled = [*seen, start + 2 * at], [start + 2 * at + 1]
        call = entry(f"{name}{at:04}", prompt, sampled, f"{name}{at - 1:04}" if at else None, about)
        made.append(replace(call, output_items=tuple(wrote), token_item_index=None))
        seen = [*prompt, *sampled]
    return made


USER = {"role": "user", "content": "go"}


def a_chat_of_equal_words(turns: int) -> tuple[list[TokenEntry], list[dict[str, Any]]]:
    return chain("m", [[said("ok")]] * turns, 1000), [said("ok")] * (turns // 2)


def a_chat_of_equal_words_and_one_that_nobody_said(turns: int) -> tuple[list[TokenEntry], list[dict[str, Any]]]:
    return chain("m", [[said("ok")]] * turns, 1000), [said("no"), *[said("ok")] * (turns // 2)]


def a_chat_that_forked(turns: int) -> tuple[list[TokenEntry], list[dict[str, Any]]]:
    entries, shown = a_chat_of_equal_words(turns)
    seen = [*entries[-1].prompt_token_ids.tolist(), *entries[-1].generation_token_ids.tolist()]
    for at in range(turns // 4):
        about = {"decision": "resolved", "t": at}
        fork = entry(f"f{at:04}", [*seen, 9000 + 2 * at], [9001 + 2 * at], entries[turns - 1].model_call_id, about)
        entries.append(replace(fork, output_items=(said("ok"),), token_item_index=None))
    return entries, shown


def turns_retold_by_a_sub_agent(turns: int) -> tuple[list[TokenEntry], list[dict[str, Any]]]:
    own = [[said(f"step {at} of it")] for at in range(turns)] + [[said("Done.")]]
    told = [[said(f"I did step {at} of it, and more")] for at in reversed(range(turns))] + [[said("Done.")]]
    row = [item for turn in own for item in (*turn, USER)]
    return chain("m", own, 1000) + chain("s", told, 50_000), row[:-1]


def many_sub_agents(turns: int) -> tuple[list[TokenEntry], list[dict[str, Any]]]:
    own = [[called("x")]] * turns + [[said("Done.")]]
    entries = chain("m", own, 1000)
    for at in range(turns):
        entries += chain(f"s{at}-", [[called("y")], [said("Done.")]], 50_000 + 10 * at)
    return entries, [item for turn in own[:-1] for item in (*turn, result("x"))] + own[-1]


@pytest.mark.parametrize(
    "made",
    [
        a_chat_of_equal_words,
        a_chat_of_equal_words_and_one_that_nobody_said,
        a_chat_that_forked,
        turns_retold_by_a_sub_agent,
        many_sub_agents,
    ],
)
def test_a_rollout_twice_as_long_is_read_in_twice_the_steps(
    made: Callable[[int], tuple[list[TokenEntry], list[dict[str, Any]]]],
) -> None:
    def steps(turns: int) -> int:
        entries, output = made(turns)
        evidence = read("r", entries)
        count = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            count += event == "line"
            return trace if "trajectory" in frame.f_code.co_filename else None

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            written_by(evidence, entries, output)
        finally:
            sys.settrace(before)
        return count

    assert steps(120) < 2.5 * steps(60)
