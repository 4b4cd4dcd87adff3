"""Names and lines of the jsonl store: what goes in comes out, and what was damaged never passes for whole."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toprope.canonical.digest import digest_tokens
from toprope.capture.jsonl_lines import Damaged, decode_line, encode_entry, scan, seal, text_line, text_lines, unseal
from toprope.capture.jsonl_names import STATE, foreign_stem_of, key_of, stem_of
from toprope.capture.jsonl_state import State, decode_state
from toprope.testing.capture_suite import sample_entry
from toprope.tokens.entry import BadRecord, TokenEntry, WeightSpan

AWKWARD = ["../x", "/etc/x", "a/../../x", "..", ".", "", "CON", "con", "x" * 300, "X" * 300, "a\nb", "Task", "task"]
AWKWARD += ["tasK", "\u00e9", "e\u0301", "%54ask", "a~1", "a~b", "a~1~2", "~1", "\ud800", "a b", ".hidden"]
AWKWARD += ["x" * 300 + "~1"]


def full(call_id: str = "c1") -> TokenEntry:
    """An entry with every field away from its default."""
    fields: dict[str, Any] = {
        "parent_decision": "resolved",
        "parent_call_id": "c0",
        "parent_resolution_reason": "prefix",
        "logprobs_mode": "processed",
        "grammar_forced": [True, False],
        "routed_experts": np.arange(6, dtype=np.int16).reshape(2, 3),
        "response_id": "resp_1",
        "request_digest": "d" * 64,
        "item_digests": ("message:a:", "function_call:b:c"),
        "cum_len": 5,
        "chain_hash": "h" * 64,
        "finish_reason": "stop",
        "sampling": {"top_p": 0.9, "temperature": 1.0},
        "weight_versions": (WeightSpan(0, 2, "step-7"),),
        "client_gone": True,
        "media": True,
        "dialect": "chat",
        "extra": {"z": 2**70, "a": {"z": 1, "a": [1.5, None, "\u2028", "\ud800"]}, "digest": "mine", "extra": 1},
    }
    return sample_entry("k", call_id, **fields)


@pytest.mark.parametrize("entry", [sample_entry("k", "c1"), full()], ids=["plain", "full"])
def test_an_entry_comes_back_from_its_line_as_it_was(entry: TokenEntry) -> None:
    line = decode_line(encode_entry(entry, digest="x"))
    assert line.sealed
    back = line.entry()
    experts, told = back.routed_experts, entry.routed_experts
    assert np.array_equal(experts, told)
    object.__setattr__(back, "routed_experts", told)
    assert back == entry
    assert list(back.sampling) == list(entry.sampling)
    kept, given = ({name: json.dumps(value) for name, value in each.extra.items()} for each in (back, entry))
    assert kept == given  # to the order of keys inside; a line sorts its own


def test_a_line_has_nemo_gyms_fields_with_sorted_keys() -> None:
    entry = sample_entry("k", "c1", parent_decision="resolved", parent_call_id="c0", cum_len=5)
    digest = digest_tokens([1, 2, 3, 100, 101])
    values = json.loads(encode_entry(entry, digest=digest))
    assert list(values) == sorted(values)
    assert {name: values[name] for name in ("prompt_token_ids", "generation_token_ids", "generation_log_probs")} == {
        "prompt_token_ids": [1, 2, 3],
        "generation_token_ids": [100, 101],
        "generation_log_probs": [-0.1, -0.2],
    }
    told = ("schema_version", "rollout_id", "model_call_id", "parent_resolution", "parent_call_id", "cum_len", "digest")
    assert [values[name] for name in told] == [1, "k", "c1", "resolved", "c0", 5, digest]
    assert values["output_items"] == list(entry.output_items)
    assert (values["token_item_index"], values["prompt_is_delta"], values["created_at"]) == (0, False, 1.5)


@pytest.mark.parametrize("extra", [{"x": float("nan")}, {"x": object()}])
def test_what_json_cannot_carry_is_refused_with_its_name(extra: dict[str, Any]) -> None:
    with pytest.raises(BadRecord, match="c1"):
        encode_entry(sample_entry("k", "c1", extra=extra))


@pytest.mark.promise("CP-2")
def test_no_flipped_byte_of_a_line_passes() -> None:
    line = encode_entry(sample_entry("k", "c1", extra={"n": 1}), digest="x")
    for at in range(len(line)):
        for mask in (0x01, 0x20, 0x5A, 0x80):
            flipped = bytearray(line)
            flipped[at] ^= mask
            with pytest.raises(Damaged):
                decode_line(bytes(flipped))


@pytest.mark.promise("CP-2")
def test_a_file_cut_at_any_byte_keeps_the_records_before_and_names_no_damage() -> None:
    lines = [encode_entry(sample_entry("k", f"c{n}")) + b"\n" for n in range(3)]
    data = b"".join(lines)
    start = len(lines[0]) + len(lines[1])
    for at in range(start, len(data) + 1):
        found = scan(data[:at])
        wanted = ["c0", "c1"] + ["c2"] * (at >= len(data) - 1)
        assert [each.line.call_id for each in found.found] == wanted
        assert found.damage == []
        assert found.torn == (start < at < len(data) - 1)
        assert found.unended == (at == len(data) - 1)


@pytest.mark.promise("CP-2")
def test_a_flip_anywhere_in_the_last_line_keeps_the_records_before() -> None:
    first, last = (encode_entry(sample_entry("k", call)) + b"\n" for call in ("c1", "c2"))
    for at in range(len(first), len(first) + len(last)):
        data = bytearray(first + last)
        data[at] ^= 0x2A
        found = scan(bytes(data))
        assert found.found[0].line.call_id == "c1"
        rest = [each.line.entry() for each in found.found[1:]]
        assert rest in ([], [sample_entry("k", "c2")])
        assert rest or found.damage or found.torn


def test_objects_glued_together_are_all_found_and_a_torn_one_between_is_named() -> None:
    one, two, three = (encode_entry(sample_entry("k", f"c{n}")) for n in range(3))
    glued = scan(one + two + b"\n" + three + b"\n")
    assert [each.line.call_id for each in glued.found] == ["c0", "c1", "c2"]
    assert glued.damage == []
    for cut in (1, 2, len(one) // 2, len(one) - 1):
        torn = scan(one[:cut] + two + b"\n" + three + b"\n")
        assert [each.line.call_id for each in torn.found] == ["c1", "c2"]
        assert torn.damage == ["write_failed:line 1 of the token file holds a torn record"]
    places = [(each.offset, each.size) for each in glued.found]
    data = one + two + b"\n" + three + b"\n"
    assert [data[at : at + size] for at, size in places] == [one, two, three]


@pytest.mark.parametrize("damage", [b"\0" * 50, b"not json", b'{"a": 1}', b"[]", b"\xff\xfe", b'{"model_call_id": 1}'])
def test_a_line_that_is_no_record_is_named_and_its_neighbours_stay(damage: bytes) -> None:
    one, two = (encode_entry(sample_entry("k", f"c{n}")) for n in range(2))
    found = scan(one + b"\n" + damage + b"\n" + two + b"\n")
    assert [each.line.call_id for each in found.found] == ["c0", "c1"]
    assert len(found.damage) == 1
    assert found.damage[0].startswith("write_failed:line 2 of the token file is damaged")


def test_sealed_values_come_back_and_a_lost_seal_is_damage() -> None:
    line = seal({"b": 1, "a": [1, 2]})
    assert unseal(line) == {"a": [1, 2], "b": 1}
    bare = json.dumps({"a": 1}).encode()
    assert unseal(bare, foreign=True) == {"a": 1}
    for broken in (bare, line[:-1], b"[]", line.replace(b"~blake2b", b"~blake3b")):
        with pytest.raises(Damaged):
            unseal(broken)


@given(st.lists(st.text()))
def test_texts_of_any_kind_stand_on_one_line_each(texts: list[str]) -> None:
    data = b"".join(map(text_line, texts))
    assert data.count(b"\n") == len(texts)
    assert text_lines(data + b"torn") == texts


@given(st.text(max_size=300))
@settings(max_examples=300)
def test_a_stem_is_a_safe_name_that_tells_its_key(key: str) -> None:
    stem = stem_of(key)
    assert stem == stem.lower()
    assert "/" not in stem
    assert "\0" not in stem
    assert not stem.startswith(".")
    assert 0 < len((stem + STATE).encode()) < 250
    assert key_of(stem) in (key, None)
    assert (key_of(stem) is None) == ("%-" in stem)


def test_no_two_awkward_keys_share_a_stem_even_where_case_does_not_count() -> None:
    stems = [stem_of(key) for key in AWKWARD]
    assert len({stem.casefold() for stem in stems}) == len(AWKWARD)


def test_plain_keys_are_named_as_nemo_gym_names_them() -> None:
    assert stem_of("rollout.7-0-a2") == "rollout.7-0-a2"
    assert foreign_stem_of("rollout.7-0-a2") is None
    assert foreign_stem_of("Task-1") == "Task-1"
    assert foreign_stem_of("../x") is None
    assert stem_of("rollout.7-0~3") == "rollout.7-0~3"


def test_a_state_comes_back_and_keeps_what_others_wrote_into_it() -> None:
    state = State("k", True, False, True, "s", 3, {"c1": "d"}, 10, "id", 1.5, reasons=("conflict:c1",), calls=2)
    assert decode_state(state.encode()) == state
    foreign = json.loads(state.encode()) | {"theirs": [1]}
    back = decode_state(json.dumps(foreign).encode())
    assert back is not None
    assert json.loads(back.encode())["theirs"] == [1]


def test_bytes_that_are_no_state_are_none() -> None:
    whole = State("k", True, False, False, "s", 3).encode()
    broken = [b"", b"{}", b"[]", b"\0\0", whole[:-3], whole.replace(b'"retired"', b'"retirdd"')]
    broken += [whole.replace(b'"version":3', b'"version":-3'), whole.replace(b'"snapshot_id":"s"', b'"snapshot_id":""')]
    assert [decode_state(each) for each in broken] == [None] * len(broken)
