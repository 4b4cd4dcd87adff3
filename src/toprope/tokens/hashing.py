"""Hashes of token sequences that grow: the chain hash of a call and the hash of its logprobs.

Format of the chain hash (ours, version 1), over ids as little-endian u32:

    H0     = SHA-256("toprope-chain-1")
    Hk+1   = SHA-256(Hk || 0x01 || block k)            a block is 256 ids, 1 KiB
    digest = SHA-256(Hk || 0x02 || u64 count || tail)   the ids after the last whole block; count is little-endian

It depends on the ids alone, not on where calls began or ended, so a call's hash can be made from its parent's state
(`extend`) and checked against a flat sequence (`of`). Work per extension is the new ids plus at most one block, never
the history. Equal hashes stand for equal sequences; whether one sequence begins another is never asked of a hash:
`begins_with` compares bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = Sequence[int] | NDArray[Any]

BLOCK_IDS = 256
_BLOCK_BYTES = BLOCK_IDS * 4
_START = hashlib.sha256(b"toprope-chain-1").digest()


@dataclass(frozen=True, slots=True)
class ChainHash:
    """The hash of a token sequence, in a form that can be carried on.

    `count` ids so far; `blocks` is Hk (32 bytes); `tail` the bytes of the `count % 256` ids after the last whole block.
    """

    count: int = 0
    blocks: bytes = _START
    tail: bytes = b""

    @classmethod
    def of(cls, ids: Ids) -> ChainHash:
        """The state after `ids`, an (N,) sequence of ids in [0, 2**32)."""
        return cls().extend(ids)

    @classmethod
    def resume(cls, count: int, blocks: bytes, tail_ids: Ids) -> ChainHash:
        """A state from its stored parts; `tail_ids` are the last `count % 256` ids. Raises `ValueError` if not."""
        tail = _bytes(tail_ids)
        if len(blocks) != 32 or len(tail) != count % BLOCK_IDS * 4:
            raise ValueError(f"{len(tail) // 4} tail ids and {len(blocks)} bytes are no chain state of {count} ids")
        return cls(count, blocks, tail)

    def extend(self, ids: Ids) -> ChainHash:
        """The state after `ids` more. Equal to `of` of both parts joined, however they were cut."""
        added = _bytes(ids)
        if not added:
            return self
        data = self.tail + added if self.tail else added
        whole = len(data) - len(data) % _BLOCK_BYTES
        blocks, view, sha256 = self.blocks, memoryview(data), hashlib.sha256
        for start in range(0, whole, _BLOCK_BYTES):
            blocks = sha256(b"".join((blocks, b"\x01", view[start : start + _BLOCK_BYTES]))).digest()
        return ChainHash(self.count + len(added) // 4, blocks, data[whole:])

    def hexdigest(self) -> str:
        """The digest of the whole sequence, 64 hex digits."""
        return hashlib.sha256(self.blocks + b"\x02" + self.count.to_bytes(8, "little") + self.tail).hexdigest()


def logprobs_hash(log_probs: Sequence[float] | NDArray[Any]) -> str:
    """SHA-256 of the values as big-endian float64, 64 hex digits."""
    return hashlib.sha256(np.asarray(log_probs, dtype=">f8").tobytes()).hexdigest()


def begins_with(ids: NDArray[np.uint32], prefix: NDArray[np.uint32]) -> bool:
    """Whether the (N,) ids begin with `prefix`, compared id by id."""
    size = len(prefix)
    return size <= len(ids) and bool((ids[:size] == prefix).all())


def common_prefix(left: NDArray[np.uint32], right: NDArray[np.uint32]) -> int:
    """How many ids both sequences have in common at their beginning."""
    size = min(len(left), len(right))
    if size == 0 or left[0] != right[0]:
        return 0
    differ = left[:size] != right[:size]
    where = int(differ.argmax())
    return where if differ[where] else size


def _bytes(ids: Ids) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()
