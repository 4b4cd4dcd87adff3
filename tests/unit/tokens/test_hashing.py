"""The chain hash: independent of cuts, resumable, sensitive to every id; the hash of logprobs bit by bit."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toprope.tokens.hashing import BLOCK_IDS, ChainHash, begins_with, common_prefix, logprobs_hash


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3 * BLOCK_IDS + 5), st.lists(st.integers(0, 400), max_size=5), st.integers(0, 2**32))
def test_the_hash_does_not_depend_on_where_calls_began(count: int, cuts: list[int], seed: int) -> None:
    ids = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    grown, at = ChainHash(), 0
    for cut in sorted(cuts):
        grown, at = grown.extend(ids[at:cut]), max(at, min(cut, count))
    grown = grown.extend(ids[at:])
    assert grown == ChainHash.of(ids)
    assert grown.count == count


def test_the_format_is_the_documented_one() -> None:
    ids = list(range(BLOCK_IDS + 2))
    packed = b"".join(i.to_bytes(4, "little") for i in ids)
    start = hashlib.sha256(b"toprope-chain-1").digest()
    block = hashlib.sha256(start + b"\x01" + packed[: 4 * BLOCK_IDS]).digest()
    whole = hashlib.sha256(block + b"\x02" + len(ids).to_bytes(8, "little") + packed[4 * BLOCK_IDS :]).hexdigest()
    assert ChainHash.of(ids).hexdigest() == whole


def test_a_state_resumes_from_its_parts_and_refuses_others() -> None:
    ids = np.arange(2 * BLOCK_IDS + 7, dtype=np.uint32)
    state = ChainHash.of(ids)
    assert ChainHash.resume(state.count, state.blocks, ids[2 * BLOCK_IDS :]).extend([1]) == state.extend([1])
    with pytest.raises(ValueError, match="no chain state"):
        ChainHash.resume(state.count, state.blocks, ids[2 * BLOCK_IDS + 1 :])


def test_every_changed_swapped_or_missing_id_changes_the_hash() -> None:
    ids = list(range(1, 600))
    seen = {ChainHash.of(ids).hexdigest()}
    for at in random.Random(1).sample(range(598), 60):
        for other in ([*ids[:at], ids[at] + 1000, *ids[at + 1 :]], ids[:at] + ids[at + 1 :], ids[:at]):
            seen.add(ChainHash.of(other).hexdigest())
        seen.add(ChainHash.of([*ids[:at], ids[at + 1], ids[at], *ids[at + 2 :]]).hexdigest())
    assert len(seen) == 1 + 60 * 4
    assert ChainHash.of([0]).hexdigest() != ChainHash.of([0, 0]).hexdigest() != ChainHash().hexdigest()


def test_extension_costs_the_new_ids_and_one_block_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ChainHash.of(np.zeros(100_000, dtype=np.uint32))
    fed: list[int] = []

    class Counting:
        @staticmethod
        def sha256(data: bytes) -> object:
            fed.append(len(data))
            return hashlib.sha256(data)

    monkeypatch.setattr("toprope.tokens.hashing.hashlib", Counting)
    state.extend([1, 2, 3]).hexdigest()
    assert sum(fed) < 3 * 4 * BLOCK_IDS


def test_the_hash_of_logprobs_is_of_their_big_endian_bytes() -> None:
    assert logprobs_hash([-0.5]) == hashlib.sha256(bytes.fromhex("bfe0000000000000")).hexdigest()
    assert logprobs_hash([0.0]) != logprobs_hash([-0.0])


def test_prefixes_are_compared_id_by_id() -> None:
    ids = np.array([1, 2, 3], dtype=np.uint32)
    assert begins_with(ids, ids[:0])
    assert begins_with(ids, ids)
    assert not begins_with(ids[:2], ids)
    assert [common_prefix(ids, np.array(o, dtype=np.uint32)) for o in ([], [9], [1, 2, 9], [1, 2, 3, 4])] == [
        0,
        0,
        2,
        3,
    ]
