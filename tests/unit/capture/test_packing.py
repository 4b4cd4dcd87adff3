"""What was put comes back bit for bit, in as few bytes as that takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toprope.capture.packing import pack, unpack
from toprope.capture.prompts import PromptArena
from toprope.testing.capture_suite import sample_entry
from toprope.tokens.entry import BadRecord, TokenEntry, WeightSpan

log_probs = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False).filter(lambda x: x != -9999.0)
text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(log_probs, max_size=20),
    prompt=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20),
    item=st.dictionaries(text, json_values, max_size=4),
    extra=st.dictionaries(text.filter(lambda key: key.startswith("x")), json_values, max_size=3),
    forced=st.booleans(),
    gone=st.booleans(),
)
def test_every_entry_comes_back_bit_for_bit(
    values: list[float], prompt: list[int], item: dict[str, object], extra: dict[str, object], forced: bool, gone: bool
) -> None:
    entry = TokenEntry(
        rollout_id="r\u2028",
        model_call_id="c",
        model="m",
        created_at=1e-3,
        prompt_token_ids=prompt,
        generation_token_ids=range(len(values)),
        generation_log_probs=values,
        output_items=(item,),
        token_item_index=0,
        grammar_forced=np.arange(len(values)) % 3 == 0 if forced else None,
        item_digests=("a:b:c",),
        weight_versions=(WeightSpan(0, len(values), "v1"),),
        client_gone=gone,
        extra=extra,
    )
    back = unpack(pack(entry)).entry()
    assert back == entry
    assert back.generation_log_probs.tobytes() == entry.generation_log_probs.tobytes()
    assert pack(back) == pack(entry)


def test_logprobs_take_four_bytes_only_where_that_loses_nothing() -> None:
    exact = sample_entry("k", "c", generated=0)

    def size(values: list[float]) -> int:
        entry = sample_entry("k", "c", generated=len(values))
        object.__setattr__(entry, "generation_log_probs", np.array(values))
        return len(pack(entry)) - len(pack(exact)) - 4 * len(values)

    assert size([-0.5] * 8) == 4 * 8
    assert size([-0.5] * 7 + [-0.1]) == 8 * 8


def test_arrays_of_routed_experts_keep_type_and_shape() -> None:
    experts = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    back = unpack(pack(sample_entry("k", "c", routed_experts=experts))).entry()
    assert back.routed_experts.dtype == np.uint8
    assert np.array_equal(back.routed_experts, experts)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("extra", {"x": float("inf")}),
        ("sampling", {"x": {"y": float("nan")}}),
        ("routed_experts", object()),
        ("created_at", float("nan")),
        ("model", "\ud800"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(field: str, value: object) -> None:
    entry = sample_entry("k", "c")
    object.__setattr__(entry, field, value)
    with pytest.raises(BadRecord, match="call c") as refused:
        pack(entry)
    assert refused.value.reason == "write_failed"


@pytest.mark.parametrize("cut", [0, 1, 15, 20, 40])
def test_bytes_that_are_no_record_say_so(cut: int) -> None:
    with pytest.raises(BadRecord, match="does not read"):
        unpack(pack(sample_entry("k", "c"))[:cut])


def test_a_chain_of_prompts_shares_memory_and_forks_do_not_touch_each_other() -> None:
    arena, whole = PromptArena(), np.array([1, 2, 3], dtype=np.uint32)
    prompts = {"c0": arena.place("c0", None, whole, np.array([4], dtype=np.uint32))}
    for n in range(1, 2000):
        prompts[f"c{n}"] = arena.place(
            f"c{n}", f"c{n - 1}", np.array([n], dtype=np.uint32), np.array([4], dtype=np.uint32)
        )
    fork = arena.place("fork", "c0", np.array([77], dtype=np.uint32), np.array([78], dtype=np.uint32))
    assert fork.tolist() == [1, 2, 3, 4, 77]
    assert prompts["c2"].tolist() == [1, 2, 3, 4, 1, 4, 2]
    assert prompts["c1999"].tolist()[:7] == [1, 2, 3, 4, 1, 4, 2]
    assert len({id(prompt.base) for prompt in prompts.values()}) < 8
    with pytest.raises(ValueError, match="read-only"):
        fork[0] = 9
