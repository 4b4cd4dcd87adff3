"""Receipts prove the same whether prompts are whole or deltas, hashed by the recorder or not."""

from __future__ import annotations

from dataclasses import replace

from toprope.tokens.entry import TokenEntry
from toprope.tokens.hashing import ChainHash, logprobs_hash
from toprope.tokens.receipts import receipts_of


def entry(
    call_id: str, prompt: list[int], gen: list[int], parent: str | None = None, *, delta: bool = False
) -> TokenEntry:
    return TokenEntry(
        rollout_id="r",
        model_call_id=call_id,
        model="m",
        created_at=0.0,
        prompt_token_ids=prompt,
        generation_token_ids=gen,
        generation_log_probs=[-0.5] * len(gen),
        parent_decision="resolved" if parent else "root",
        parent_call_id=parent,
        prompt_is_delta=delta,
    )


def test_whole_delta_and_prehashed_records_give_one_receipt() -> None:
    whole = [entry("a", [1, 2], [3]), entry("b", [1, 2, 3, 4], [5, 6], "a"), entry("c", [1, 2, 3, 4, 5, 6], [], "b")]
    deltas = [whole[0], entry("b", [4], [5, 6], "a", delta=True), entry("c", [], [], "b", delta=True)]
    sums = [[1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]
    hashed = [
        replace(e, cum_len=len(ids), chain_hash=ChainHash.of(ids).hexdigest())
        for e, ids in zip(deltas, sums, strict=True)
    ]
    assert receipts_of(whole) == receipts_of(deltas) == receipts_of(hashed)
    b = receipts_of(deltas)[1]
    assert (b.model_call_id, b.parent_call_id, b.prompt_len, b.gen_len) == ("b", "a", 4, 2)
    assert b.chain_hash == ChainHash.of([1, 2, 3, 4, 5, 6]).hexdigest()
    assert b.logprobs_hash == logprobs_hash([-0.5, -0.5])
    assert receipts_of(deltas[::-1]) == receipts_of(deltas)[::-1]


def test_an_orphan_or_a_ring_of_deltas_proves_nothing_and_ends() -> None:
    orphan = entry("x", [4], [5], "gone", delta=True)
    ring = [entry("a", [1], [2], "b", delta=True), entry("b", [3], [4], "a", delta=True)]
    assert [receipt.chain_hash for receipt in receipts_of([orphan, *ring])] == ["", "", ""]


def test_a_thousand_deltas_deep_is_no_depth() -> None:
    chain = [entry("c0", [1], [2])] + [entry(f"c{i}", [3], [4], f"c{i - 1}", delta=True) for i in range(1, 3000)]
    last = receipts_of(chain[::-1])[0]
    assert last.prompt_len == 2 + 2 * 2999 - 1
