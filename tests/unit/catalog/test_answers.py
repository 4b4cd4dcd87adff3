"""Where an answer is found: tag, box, last number, last line; in this order."""

from __future__ import annotations

import pytest

from toprope.catalog.answers import extract_answer


@pytest.mark.parametrize(
    ("text", "expected", "found"),
    [
        ("<answer>3</answer> no, <answer> 4 </answer> or 5", "4", "4"),
        ("so \\boxed{7} and 9", "7", "7"),
        ("\\boxed{\\frac{1}{2}}", "1/2", "\\frac{1}{2}"),
        ("\\boxed{12", "12", "12"),
        ("The sum of 4 and 1 is 5.", "5", "5"),
        ("5 - 9 = -4", "-4", "-4"),
        ("5-9", "3", "9"),
        ("It is 1,234,567 in all", "1234567", "1234567"),
        ("about 2.50", "2.5", "2.50"),
        ("no number here", "5", None),
        ("first\nlast line \n\n", "word", "last line"),
        ("", "word", None),
        ("", None, None),
        ("7", None, "7"),
    ],
)
def test_the_answer_is_found_as_the_module_says(text: str, expected: str | None, found: str | None) -> None:
    assert extract_answer(text, expected) == found
