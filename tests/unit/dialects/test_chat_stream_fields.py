"""Fields that nobody reads, in pieces: joined as the public Chat libraries join them, at a linear cost."""

from __future__ import annotations

import copy

import pytest

from toprope.dialects.chat_stream_fields import grown, is_told, whole


def _joined(pieces):
    node = None
    for piece in pieces:
        node = grown(node, piece)
    return node


def _entry(text, index=0, **more):
    return {"type": "reasoning.text", "text": text, "index": index, "format": "f", **more}


@pytest.mark.parametrize(
    ("pieces", "value"),
    [
        ([[_entry("a")], [_entry("b")], [_entry("c")]], [_entry("abc")]),
        ([[_entry("a"), _entry("b")]], [_entry("ab")]),  # one chunk may have two pieces of an entry
        ([[_entry("a", 1)], [_entry("b", 0)], [_entry("c", 1)]], [_entry("b", 0), _entry("ac", 1)]),
        ([[_entry("a", id="x", signature=None)], [_entry("b", id="x", signature="s")]],
         [_entry("ab", id="x", signature="s")]),
        ([[{"index": 0, "type": "a", "data": "1"}], [{"index": 0, "type": "b", "data": "2"}]],
         [{"index": 0, "type": "b", "data": "12"}]),
        ([[{"a": 1}], [{"a": 1}]], [{"a": 1}, {"a": 1}]),
        ([[{"index": "0", "a": "1"}], [{"index": True, "a": "2"}], [{"index": 1, "a": "3"}]],
         [{"index": "0", "a": "1"}, {"index": True, "a": "2"}, {"index": 1, "a": "3"}]),
        ([{"d": {"l": ["a"]}}, {"d": {"l": ["b"], "t": "x"}}, {"d": {"t": "y"}}], {"d": {"l": ["a", "b"], "t": "xy"}}),
        ([{"t": "x"}, {"t": None}, {"t": "y"}, None], {"t": "xy"}),
        ([{"name": "add", "arguments": ""}, {"name": "add", "arguments": "{"}, {"arguments": "}"}],
         {"name": "add", "arguments": "{}"}),
        ([{"index": 3, "type": "t"}, {"index": 4, "type": None}], {"index": 4, "type": "t"}),
        ([7, 8], 8),
        (["a", ["b"], ["c"]], ["b", "c"]),
        ([["a"], "b"], "b"),
        ([{"a": "b"}, "c", "d"], "cd"),
    ],
)  # fmt: skip
def test_pieces_make_up_one_value_and_stay_as_they_came(pieces, value):
    before = copy.deepcopy(pieces)
    node = _joined(pieces)
    assert whole(node) == whole(node) == value
    assert pieces == before
    assert is_told(node, value)
    assert not any(is_told(node, other) for other in (None, [], {}, "", [value], {**value, "x": 1}
                                                      if isinstance(value, dict) else {"x": value}))  # fmt: skip


def test_what_grows_is_not_copied_for_every_piece():
    for piece in ([{"type": "thinking", "thinking": "a"}], [_entry("a")], {"a": "b"}, "a"):
        node = grown(grown(None, piece), piece)
        assert grown(node, piece) is node


def test_a_text_in_an_entry_that_grows_by_other_than_it_is_is_not_told():
    node = _joined([{"a": "b"}, {"a": "c"}])
    assert is_told(node, {"a": "bc"})
    assert not is_told(node, {"a": "bd"})
    assert not is_told(_joined([["a"], ["b"]]), ["a", "c"])
