"""Finding the answer in what a model wrote. Pure.

In this order: the last `<answer>...</answer>`; else the last `\\boxed{...}`; else, where the expected answer is a
number, the last number of the text; else its last line that is not blank. Commas between thousands are dropped from a
number that was found by the third rule; what stands in a tag or a box is taken as it is, without outer blanks.
"""

from __future__ import annotations

import re

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(r"(?:(?<![\w.)])-)?\d+(?:,\d{3})*(?:\.\d+)?")
_IS_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def extract_answer(text: str, expected: str | None) -> str | None:
    """The answer in `text`, or None where there is none. `expected` is read for its type only."""
    tagged = _TAG.findall(text)
    if tagged:
        return str(tagged[-1]).strip()
    boxed = _last_box(text)
    if boxed is not None:
        return boxed.strip()
    if expected is not None and _IS_NUMBER.fullmatch(expected.strip()):
        numbers = _NUMBER.findall(text)
        return numbers[-1].replace(",", "") if numbers else None
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return lines[-1] if lines else None


def _last_box(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    begin = start + len("\\boxed{")
    for position in range(begin - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position]
    return None  # the box was never closed: the text was cut
