"""Rows as trainers read them: contiguous triples, captured content, sizes known before anything is built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.unit.trajectory.cases import NEXT, ROOT, go, linear
from tests.unit.trajectory.golden import entry

from toprope.tokens.entry import TokenEntry
from toprope.trajectory.build import build
from toprope.trajectory.project import content_only, is_native, project, size, usage, without_tokens


def trainer(output: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """The walk that NeMo-RL and the verl recipe make over `response.output`: ids and loss mask."""
    seen: list[int] = []
    mask: list[int] = []
    for item in output:
        if "generation_token_ids" in item:
            prompt = item["prompt_token_ids"]
            assert prompt[: len(seen)] == seen
            assert len(item["generation_log_probs"]) == len(item["generation_token_ids"])
            mask += [0] * (len(prompt) - len(seen)) + [1] * len(item["generation_token_ids"])
            seen = [*prompt, *item["generation_token_ids"]]
    return seen, mask


def projected(entries: list[TokenEntry]) -> tuple[list[dict[str, Any]], Any]:
    (trace,) = go(build, entries).traces
    return project(trace, {e.model_call_id: e for e in entries}), trace


def test_a_trainer_reads_the_trace_from_the_items() -> None:
    output, trace = projected(linear())
    ids, mask = trainer(output)
    assert ids == trace.token_ids.tolist()
    assert mask == trace.loss_mask.astype(int).tolist()
    assert [item["content"][0]["text"] for item in output] == ["c1", "c2", "c3"]


def test_the_last_item_of_a_call_carries_and_the_others_do_not() -> None:
    items = (
        {"type": "reasoning", "content": "t", "routed_experts": [9]},
        {"role": "assistant", "content": "x"},
        {"type": "function_call_output", "call_id": "c", "output": "not the model's"},
    )
    c1 = replace(entry("c1", [1, 2], [3, 4], None, ROOT), output_items=items, token_item_index=1)
    forced = replace(c1, grammar_forced=[False, True], routed_experts=[[1], [2]])
    output, _ = projected([forced])
    assert output == [
        {"type": "reasoning", "content": "t"},
        {
            "role": "assistant",
            "content": "x",
            "type": "message",
            "prompt_token_ids": [1, 2],
            "generation_token_ids": [3, 4],
            "generation_log_probs": [-0.1, -0.2],
            "routed_experts": [[1], [2]],
            "grammar_forced": [0, 1],
        },
    ]
    assert "routed_experts" in items[0], "the record itself is left as it was"


def test_a_generation_without_any_item_still_has_a_carrier() -> None:
    c1 = replace(entry("c1", [1], [2], None, ROOT), output_items=(), token_item_index=None)
    output, _ = projected([c1])
    assert [(item["type"], item["role"], item["generation_token_ids"]) for item in output] == [
        ("message", "assistant", [2])
    ]


def test_the_size_is_known_before_it_is_built() -> None:
    dice = np.random.default_rng(3)
    entries, prompt = [], dice.integers(0, 2**32, 300, dtype=np.uint32)
    for at in range(20):
        gen = dice.integers(0, 200_000, 30, dtype=np.uint32)
        c = entry(f"c{at:02d}", prompt, gen, f"c{at - 1:02d}" if at else None, NEXT if at else ROOT)  # type: ignore[arg-type]
        entries.append(replace(c, generation_log_probs=-dice.random(30)))
        prompt = np.concatenate([prompt, gen, dice.integers(0, 9, 11, dtype=np.uint32)])
    output, trace = projected(entries)
    really = len(msgspec.json.encode(output))
    assert abs(size(trace, {e.model_call_id: e for e in entries}) - really) < 100 * 20


def test_usage_is_first_prompt_and_all_generated() -> None:
    traces = go(build, linear()).traces
    details = {"input_tokens_details": {"cached_tokens": 7}}
    out = usage(traces, {**details, "input_tokens": 99})
    assert (out["input_tokens"], out["output_tokens"], out["total_tokens"]) == (2, 3, 5)
    assert out["input_tokens_details"] == {"cached_tokens": 7}
    assert usage(traces, "nonsense")["output_tokens_details"] == {"reasoning_tokens": 0}


def test_content_without_ids_for_rows_whose_ids_stand_in_a_trace() -> None:
    entries = linear()
    items = content_only(go(build, entries).traces, {e.model_call_id: e for e in entries})
    assert [set(item) for item in items] == [{"type", "role", "content"}] * 3


def test_routed_experts_that_came_as_an_array_stand_in_the_row_as_json() -> None:
    experts = np.arange(8, dtype=np.uint8).reshape(2, 2, 2)
    entries = [replace(each, routed_experts=experts) for each in linear()]
    output, trace = projected(entries)
    assert [item["routed_experts"] for item in output] == [experts.tolist()] * 3
    exact = len(msgspec.json.encode(output))
    assert abs(size(trace, {e.model_call_id: e for e in entries}) - exact) <= 100 * len(output)


TRIPLE = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.1]}
EMPTY: dict[str, Any] = {"prompt_token_ids": [], "generation_token_ids": [], "generation_log_probs": []}


@pytest.mark.parametrize(
    ("output", "native"),
    [
        ([{"type": "message", **TRIPLE}], True),
        ([{"type": "message"}, {"type": "message", **TRIPLE}], True),
        ([{"type": "message"}], False),
        ([{"type": "message", "prompt_token_ids": [1]}], False),
        ([{"type": "message", **TRIPLE}, {"generation_token_ids": [1]}], False),
        ([{"type": "message", **TRIPLE}, {"type": "message", **TRIPLE, "generation_token_ids": "abc"}], False),
        ([{"type": "message", **TRIPLE, "generation_log_probs": []}], False),
        ([{"type": "message", **TRIPLE, "generation_log_probs": ["-0.1"]}], False),
        ([{"type": "message", **TRIPLE, "generation_log_probs": [float("nan")]}], False),
        ([{"type": "message", **TRIPLE, "prompt_token_ids": []}], False),
        ([{"type": "message", **TRIPLE, "generation_token_ids": [2**32]}], False),
        ([{"type": "message", **TRIPLE, "generation_token_ids": [], "generation_log_probs": []}], False),
        ([{"type": "message", **EMPTY}], False),
        ([{"type": "message", **EMPTY}, {"type": "message", **TRIPLE}], True),
        ([], False),
        (None, False),
        (["x"], False),
    ],
)
def test_native_rows_are_those_with_whole_triples_only(output: Any, native: bool) -> None:
    assert is_native(output) is native


def test_token_fields_are_stripped_and_nothing_else() -> None:
    clean = [{"type": "message", "content": "x"}, "odd"]
    assert without_tokens(clean) is clean
    assert without_tokens([{"type": "message", "prompt_token_ids": [1]}, "odd"]) == [{"type": "message"}, "odd"]
    assert without_tokens(None) is None
