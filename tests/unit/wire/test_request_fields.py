"""Loose request bodies: what is accepted, and that a refusal names field, value and what would do."""

from __future__ import annotations

import pytest

from toprope.errors.tree import BadRequest
from toprope.wire.fields import int_field, number_field, objects_field, read_object, stop_field


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'"x"', b"{", b'{"a": NaN}', b"\xff", b"[" * 5000])
def test_a_body_that_is_no_json_object_is_a_400(body):
    with pytest.raises(BadRequest) as caught:
        read_object(body)
    assert caught.value.status == 400


def test_numbers_keep_their_digits_and_surrogates_survive():
    assert read_object(b'{"n": 18446744073709551617, "s": "\\ud835"}') == {"n": 2**64 + 1, "s": "\ud835"}


def test_integers_may_be_written_as_floats_but_bools_are_none():
    assert int_field({"n": 3.0}, "n") == 3
    assert number_field({"t": 1}, "t") == 1.0
    for read in (int_field, number_field):
        with pytest.raises(BadRequest, match=r"n: True is not accepted"):
            read({"n": True}, "n")


def test_null_and_absent_are_the_same_everywhere():
    for body in ({}, {"n": None}):
        assert int_field(body, "n") is None
        assert objects_field(body, "n") == []
        assert stop_field(body, "n") == ()


def test_a_wrong_entry_is_named_by_its_place():
    with pytest.raises(BadRequest, match=r"tools\[1\]: 'x' is not accepted; expected an object"):
        objects_field({"tools": [{}, "x"]}, "tools")
