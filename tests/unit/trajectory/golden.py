"""The builder's golden vectors as records, and what each demands of a builder. Shared by tests, no test itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toprope.tokens.entry import TokenEntry
from toprope.tokens.snapshot import TokenCaptureSnapshot
from toprope.trajectory.build import Built, Masked, Trainable, build
from toprope.trajectory.terminal import TerminalWitnesses

GOLDEN = Path(__file__).parents[2] / "golden"
CASES: list[dict[str, Any]] = [
    json.loads(line) for line in (GOLDEN / "builder.jsonl").read_text().splitlines() if line.strip()
]


def entry(
    call_id: str, prompt: list[int], gen: list[int], parent: str | None, about: dict[str, Any], **more: Any
) -> TokenEntry:
    """One record in the vectors' shorthand; logprobs are -0.1 * (1 + position)."""
    return TokenEntry(
        rollout_id="r",
        model_call_id=call_id,
        model="m",
        created_at=float(about.get("t", 0)),
        prompt_token_ids=prompt,
        generation_token_ids=gen,
        generation_log_probs=[-0.1 * (1 + at) for at in range(len(gen))],
        output_items=({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": call_id}]},),
        token_item_index=0,
        parent_decision=about["decision"],
        parent_call_id=parent,
        prompt_is_delta=about.get("delta", False),
        client_gone=about.get("client_gone", False),
        **more,
    )


def entries_of(case: dict[str, Any]) -> list[TokenEntry]:
    return [entry(*each) for each in case["entries"]]


def snapshot_of(case: dict[str, Any], entries: list[TokenEntry]) -> TokenCaptureSnapshot:
    lost = tuple(case.get("incomplete", ()))
    return TokenCaptureSnapshot("r", tuple(entries), bool(lost), "s1", 1, lost)


def witnesses_of(case: dict[str, Any]) -> TerminalWitnesses:
    claims = dict(case.get("witnesses", {}))
    if "terminal" in case:
        claims["explicit"] = case["terminal"]
    return TerminalWitnesses.naming(**claims)


def run(
    case: dict[str, Any], entries: list[TokenEntry] | None = None, *, deliver: Any = "single", builder: Any = build
) -> Built:
    held = entries_of(case) if entries is None else entries
    built: Built = builder(snapshot_of(case, held), terminal=witnesses_of(case), deliver=deliver)
    return built


def check(case: dict[str, Any], builder: Any = build) -> None:
    """Raise `AssertionError` where a builder does not do what the vector demands."""
    built = run(case, builder=builder)
    if case["expect"] == "masked":
        assert type(built).__name__ == Masked.__name__
        assert built.reasons  # type: ignore[union-attr]
        if "reason" in case:
            assert case["reason"] in built.reasons  # type: ignore[union-attr]
    else:
        _check_trace(case, built)
    if "quarantined" in case:
        assert sorted(built.metrics.quarantined) == sorted(case["quarantined"])
    if "collapsed" in case:
        assert list(built.metrics.collapsed) == case["collapsed"]
    if "all_chains" in case:
        _check_all_chains(case, run(case, deliver="all_chains", builder=builder))


def _check_trace(case: dict[str, Any], built: Any) -> None:
    assert type(built).__name__ == Trainable.__name__, getattr(built, "reasons", None)
    (trace,) = built.traces
    out = trace.as_json()
    if "chain" in case:
        assert out["call_ids"] == case["chain"]
    if "ids" in case:
        assert out["token_ids"] == case["ids"]
    if "mask" in case:
        assert out["loss_mask"] == case["mask"]
    if "usage" in case:
        assert [trace.spans[0].start, sum(out["loss_mask"])] == case["usage"]
    assert out["logprobs"] == [p for p, m in zip(trace.logprobs.tolist(), out["loss_mask"], strict=True) if m]
    for call, start, end in trace.stretches():
        assert trace.logprobs[start:end].tolist() == [-0.1 * (1 + at) for at in range(end - start)], call


def _check_all_chains(case: dict[str, Any], built: Any) -> None:
    assert type(built).__name__ == Trainable.__name__, getattr(built, "reasons", None)
    got = [trace.as_json() for trace in built.traces]
    assert len(got) == len(case["all_chains"])
    for wanted in case["all_chains"]:
        names = {"calls": "call_ids", "ids": "token_ids", "mask": "loss_mask"}
        assert any(all(trace[names[key]] == value for key, value in wanted.items()) for trace in got), (wanted, got)
