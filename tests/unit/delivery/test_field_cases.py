"""Field cases A1, A2, A6, A8, A10 and A11 from the recorder's decision to the row: the right outcome of each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.unit.delivery.test_delivery import Foreign, ForeignSnapshot, a_row, finalize, said

from toprope.tokens.entry import BadRecord, TokenEntry
from toprope.tokens.lineage import LineageHistory, decide


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


@dataclass(frozen=True)
class Call:
    """One call as an agent made it: what it sent, what the engine saw and sampled."""

    name: str
    request: list[dict[str, Any]]
    prompt: list[int]
    gen: list[int]
    output: list[dict[str, Any]]


def recorded(calls: list[Call]) -> list[TokenEntry]:
    """The records of these calls, parents decided in order of arrival."""
    history, entries = LineageHistory(), []
    for call in calls:
        choice = decide(history, call.request, call.prompt)
        entries.append(
            TokenEntry(
                rollout_id="r",
                model_call_id=call.name,
                model="m",
                created_at=float(len(entries)),
                prompt_token_ids=call.prompt,
                generation_token_ids=call.gen,
                generation_log_probs=[-0.5] * len(call.gen),
                output_items=tuple(call.output),
                token_item_index=len(call.output) - 1,
                item_digests=choice.item_digests,
                parent_decision=choice.decision,
                parent_call_id=choice.parent_call_id,
                parent_resolution_reason=choice.reason,
                cum_len=len(call.prompt) + len(call.gen),
                chain_hash=choice.prompt_hash.extend(call.gen).hexdigest(),
            )
        )
        history.add(entries[-1], choice.asked)
    return entries


async def outcome(entries: list[TokenEntry], **row: Any) -> dict[str, Any]:
    return dict(await finalize(a_row(**row), Foreign(ForeignSnapshot("r", list(entries)))))


THINKING = {"type": "reasoning", "content": "hm"}


async def test_a1_history_turned_to_text_and_back_is_masked_with_call_and_position() -> None:
    done = await outcome(
        recorded(
            [
                Call("c1", [user("hi")], [1, 10, 11], [531, 316, 2], [said("x")]),
                Call("c2", [user("hi"), said("x"), user("go")], [1, 10, 11, 393, 302, 2, 9, 12], [7, 2], [said("y")]),
            ]
        )
    )
    assert done["mask_sample"] is True
    assert "history_rewritten" in done["metrics"]["mask_reasons"]
    assert done["metrics"]["parent_link_failures"] == {"c2": "history_rewritten:c1@3"}


async def test_a2_a_template_that_drops_thinking_is_told_from_a_lost_call() -> None:
    first = Call("c1", [user("hi")], [1, 20], [90, 91, 92, 93, 7, 2], [THINKING, said("x")])
    dropped = Call("c2", [user("hi"), said("x"), user("result")], [1, 20, 7, 2, 30, 31], [8, 2], [said("y")])
    rewritten = await outcome(recorded([first, dropped]))
    assert {"unresolved_parent", "history_rewritten"} <= set(rewritten["metrics"]["mask_reasons"])
    extended = replace(dropped, prompt=[1, 20, 90, 91, 92, 93, 7, 2, 30, 31])
    kept = await outcome(recorded([first, extended]))
    assert kept["mask_sample"] is False, "dropping reasoning is allowed where the template agrees"
    ids = kept["rebuilt_response"]["output"][-1]["prompt_token_ids"]
    assert ids[-2:] == [30, 31], "the head of the tool result is never cut"
    lost = await outcome(recorded([first, replace(dropped, request=[user("hi"), said("never recorded"), user("go")])]))
    assert "unrecorded_turn" in lost["metrics"]["mask_reasons"]
    assert "history_rewritten" not in lost["metrics"]["mask_reasons"]


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), None])
async def test_a6_a_logprob_that_is_no_number_masks_with_its_place(value: Any) -> None:
    good = recorded([Call("c1", [user("hi")], [1], [2, 3, 4], [said("x")])])[0]
    bad = {**good.model_dump(), "generation_log_probs": [-0.1, value, -0.3]}
    done = await outcome([bad])  # type: ignore[list-item]
    assert "bad_logprob" in done["metrics"]["mask_reasons"]
    assert done["metrics"]["incomplete_reasons"] == ["bad_logprob:c1: non-finite logprob at 1"]
    with pytest.raises(BadRecord, match="non-finite logprob at 1"):
        replace(good, generation_log_probs=[-0.1, float("nan") if value is None else value, -0.3])


A8 = [
    Call("m1", [user("main")], [1, 10], [50, 2], [said("m1")]),
    Call("s1", [user("sub")], [1, 80], [81, 2], [said("s1")]),
    Call("m2", [user("main"), said("m1"), user("go")], [1, 10, 50, 2, 9, 11], [51, 2], [said("m2")]),
    Call("s2", [user("sub"), said("s1"), user("go")], [1, 80, 81, 2, 9, 82], [83, 2], [said("s2")]),
    Call("k1", [user("summarise")], [1, 12], [60, 2], [said("k1")]),
    Call("k2", [user("summary: k1")], [1, 13, 60], [61, 2], [said("k2")]),
]


async def test_a8_sub_agents_and_compaction_are_found_in_any_order_and_never_merged() -> None:
    entries = recorded(A8)
    for order in itertools.islice(itertools.permutations(entries), 0, 720, 31):
        done = await outcome(list(order))
        assert done["mask_sample"] is True
        assert {"several_roots", "several_chains"} == set(done["metrics"]["mask_reasons"])
        assert (done["metrics"]["n_roots"], done["metrics"]["n_chains"], done["metrics"]["n_calls"]) == (4, 4, 6)
        named = await outcome(list(order), _ng_terminal_model_call_id="m2")
        assert named["mask_sample"] is False
        assert named["rebuilt_response"]["output"][-1]["prompt_token_ids"] == [1, 10, 50, 2, 9, 11]
        # The row's last output speaks too, when the agent answers with what its last call wrote.
        row = a_row()
        row["response"]["output"] = [said("k2")]
        told = await outcome(list(order), response=row["response"])
        assert told["metrics"]["terminal"] == {"method": "content", "call_id": "k2", "reason": None}


async def test_a10_only_recorded_turns_are_trainable_and_no_call_at_all_masks() -> None:
    apology = said("I could not finish.")
    calls = [Call("c1", [user("hi")], [1], [2], [said("x")])]
    row = a_row()
    row["response"]["output"] = [said("x"), apology]
    done = await outcome(recorded(calls), response=row["response"])
    assert done["mask_sample"] is False
    generated = [item for item in done["rebuilt_response"]["output"] if "generation_token_ids" in item]
    assert [item["generation_token_ids"] for item in generated] == [[2]]
    after = Call("c2", [user("hi"), said("x"), apology, user("go")], [1, 2, 7, 3], [4], [said("y")])
    masked = await outcome(recorded([*calls, after]))
    assert "unrecorded_turn" in masked["metrics"]["mask_reasons"]
    assert (await outcome([]))["metrics"]["mask_reasons"] == ["no_generation"]


async def test_a11_image_runs_are_compared_expanded_and_masked_without_their_media() -> None:
    calls = [
        Call("c1", [user("look")], [1, 151655, 151655, 151655, 151655, 10], [50, 2], [said("x")]),
        Call(
            "c2",
            [user("look"), said("x"), user("go")],
            [1, 151655, 151655, 151655, 151655, 10, 50, 2, 9, 11],
            [51, 2],
            [said("y")],
        ),
    ]
    entries = recorded(calls)
    assert entries[1].parent_call_id == "c1"
    assert (await outcome(entries))["mask_sample"] is False
    with_media = [replace(entry, media=True) for entry in entries]
    assert (await outcome(with_media))["metrics"]["mask_reasons"] == ["media_unsupported"]
    short = recorded([calls[0], replace(calls[1], prompt=[1, 151655, 10, 50, 2, 9, 11])])
    assert "history_rewritten" in (await outcome(short))["metrics"]["mask_reasons"]
