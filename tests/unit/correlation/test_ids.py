"""Rollout ids, attempts, and the capture key that stands for both."""

from __future__ import annotations

import os
import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toprope.correlation.ids import (
    CaptureKey,
    capture_key,
    check_rollout_id,
    mint_close_token,
    mint_model_call_id,
    mint_session_id,
    parse_capture_key,
)

FIRST = string.ascii_letters + string.digits
REST = FIRST + "._-"

REFUSED = {
    "empty": "",
    "slash": "a/b",
    "newline at the end": "a\n",
    "newline inside": "a\nb",
    "leading dot": ".a",
    "leading dash": "-a",
    "two dots": "..",
    "space": "a b",
    "percent-encoded dots": "%2e%2e",
    "percent-encoded slash": "a%2fb",
    "percent-encoded newline": "a%0a",
    "not ASCII": "é",
    "digit of another script": "a\u0663",
    "nul": "a\0",
    "over 200": "a" * 201,
    "reserved suffix": "x-a1",
    "reserved suffix, long": "x-a120",
    "reserved word": "training-token-capture",
}


def generated_pairs(count: int) -> list[tuple[str, int]]:
    """Random pairs, dense where keys could collide: short ids, ids that end almost like an attempt."""
    source = random.Random(20240917)
    pairs: set[tuple[str, int]] = set()
    while len(pairs) < count:
        stem = source.choice(FIRST) + "".join(source.choices(REST, k=source.choice((0, 1, 2, 3, 30, 199))))
        stem = source.choice((stem, stem[:190] + "-a0", stem[:190] + "-a01", stem[:190] + "-a", stem[:190] + "-a1x"))
        try:
            check_rollout_id(stem)
        except ValueError:
            continue
        pairs.add((stem, source.choice((0, 1, 2, 10, source.randrange(10**6)))))
    return sorted(pairs)


@pytest.mark.promise("ID-1")
def test_a_hundred_thousand_pairs_give_as_many_keys_and_come_back() -> None:
    pairs = generated_pairs(100_000)
    keys = {capture_key(*pair) for pair in pairs}
    assert len(keys) == len(pairs) == 100_000
    assert all(parse_capture_key(capture_key(*pair)) == pair for pair in pairs)


@pytest.mark.promise("ID-1")
@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_what_is_no_rollout_id_is_refused_with_its_value_and_never_rewritten(value: str) -> None:
    with pytest.raises(ValueError, match="rollout id") as caught:
        check_rollout_id(value)
    assert repr(value) in str(caught.value)
    with pytest.raises(ValueError, match="rollout id"):
        capture_key(value, 3)


@pytest.mark.parametrize("value", ["x-a0", "x-a01", "x-a", "x-ab1", "a", "0", "A.b_c-d", "a" * 200, "-a1x"[1:]])
def test_ids_that_only_look_reserved_are_plain_ids(value: str) -> None:
    assert check_rollout_id(value) == value
    assert parse_capture_key(value) == CaptureKey(value, 0)
    assert parse_capture_key(capture_key(value, 7)) == CaptureKey(value, 7)


@pytest.mark.parametrize("value", [None, 4, b"a", ["a"]])
def test_an_id_that_is_no_string_is_a_value_error(value: object) -> None:
    with pytest.raises(ValueError, match="expected a string"):
        check_rollout_id(value)
    with pytest.raises(ValueError, match="expected a string"):
        parse_capture_key(value)


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None])
def test_an_attempt_is_an_integer_from_zero_on(value: object) -> None:
    with pytest.raises(ValueError, match="attempt"):
        capture_key("x", value)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["x-a1-a2", "-a1", "x-a1\n", "x-a+1", "x-a 1", "", ".-a1", "a" * 201 + "-a1"])
def test_a_string_that_no_pair_makes_is_no_key(key: str) -> None:
    with pytest.raises(ValueError):
        parse_capture_key(key)


@given(st.text(max_size=30))
def test_every_string_is_refused_or_is_the_key_of_what_it_parses_to(text: str) -> None:
    try:
        pair = parse_capture_key(text)
    except ValueError:
        return
    assert capture_key(*pair) == text


def test_minted_ids_are_unique_and_call_ids_sort_by_time() -> None:
    calls = [mint_model_call_id() for _ in range(2000)]
    assert len(set(calls)) == len(calls)
    stamps = [call[5:17] for call in calls]
    assert stamps == sorted(stamps)
    sessions = {mint_session_id()[2:] for _ in range(2000)} | {mint_close_token() for _ in range(2000)}
    assert len(sessions) == 4000
    assert all(len(value) >= 32 for value in sessions)


def test_call_ids_differ_in_a_forked_child_and_whatever_a_program_seeds() -> None:
    """The random digits alone, since both may be minted in one millisecond."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, mint_model_call_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100).decode()[17:] != mint_model_call_id()[17:]
    os.close(reader)
    os.close(writer)
    tails = set()
    for _ in range(2):
        random.seed(7)
        tails.add(mint_model_call_id()[17:])
    assert len(tails) == 2
