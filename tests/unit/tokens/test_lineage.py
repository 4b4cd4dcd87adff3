"""Lineage: every vector of `tests/golden/lineage.jsonl`, and the shapes in which clients send a conversation back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toprope.tokens.entry import TokenEntry
from toprope.tokens.items import item_digests
from toprope.tokens.lineage import LineageHistory, ParentChoice, decide

GOLDEN = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "golden" / "lineage.jsonl").read_text().splitlines()
    if line.strip()
]


def item(shorthand: str) -> dict[str, Any]:
    kind, _, rest = shorthand.partition(":")
    if kind in "sua":
        role = {"s": "system", "u": "user", "a": "assistant"}[kind]
        part = "output_text" if kind == "a" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": part, "text": rest}]}
    if kind == "r":
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": rest}]}
    call_id, _, tail = rest.partition(":")
    if kind == "f":
        return {"type": "function_call", "call_id": call_id, "name": tail, "arguments": "{}"}
    return {"type": "function_call_output", "call_id": call_id, "output": tail}


def record(
    history: LineageHistory,
    call_id: str,
    request: list[dict[str, Any]],
    prompt: list[int],
    gen: list[int],
    output: list[dict[str, Any]],
) -> ParentChoice:
    """What the recorder does: decide, then index the entry made from the decision."""
    choice = decide(history, request, prompt)
    entry = TokenEntry(
        rollout_id="r",
        model_call_id=call_id,
        model="m",
        created_at=0.0,
        prompt_token_ids=prompt,
        generation_token_ids=gen,
        generation_log_probs=[-0.1] * len(gen),
        output_items=tuple(output),
        item_digests=choice.item_digests,
        parent_decision=choice.decision,
        parent_call_id=choice.parent_call_id,
        parent_resolution_reason=choice.reason,
    )
    history.add(entry, item_digests(request))
    return choice


@pytest.mark.promise("CP-8")
@pytest.mark.parametrize("case", GOLDEN, ids=[case["id"] for case in GOLDEN])
def test_golden_lineage(case: dict[str, Any]) -> None:
    history = LineageHistory()
    for call in case["calls"]:
        choice = record(
            history,
            call["id"],
            [item(each) for each in call["request"]],
            call["prompt"],
            call["gen"],
            [item(each) for each in call["output"]],
        )
        if "parent" in call:
            assert choice.parent_call_id == call["parent"]
        if "how" in call:
            assert choice.decision == call["how"]
        if "reason" in call:
            assert choice.reason == call["reason"]
