"""Digests: of JSON values, of token sequences (NeMo Gym's form), and the chain hash of a growing sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toprope.canonical.json import canonical

_TOKENS_DOMAIN = b"nemo-gym-tokens"


_LOCK_KEPT = 1984
"""Bytes for which hashlib keeps the interpreter lock (it lets go from 2,048 on), in whole blocks of SHA-256."""
_LONG = 65536


def digest_bytes(data: bytes) -> str:
    """SHA-256 of `data` as 64 hex digits."""
    if len(data) <= _LOCK_KEPT:
        return hashlib.sha256(data).hexdigest()
    hashed = hashlib.sha256()
    hash_on(hashed, data)
    return hashed.hexdigest()


def hash_on(hashed: Any, data: bytes | memoryview) -> None:
    """Put `data` into a running SHA-256 without letting go of the interpreter lock, up to 64 KiB.

    16 KB are hashed in 13 us. An event loop that lets go of the lock for them gets it back when another thread does
    the same: 50 to 180 us later beside a store that writes.
    """
    if len(data) > _LONG:
        hashed.update(data)
        return
    view = memoryview(data)
    for at in range(0, len(view), _LOCK_KEPT):
        hashed.update(view[at : at + _LOCK_KEPT])


def digest_value(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value`: equal values, whatever their key order, have equal digests."""
    return digest_bytes(canonical(value))


def digest_tokens(ids: Sequence[int] | NDArray[np.uint32]) -> str:
    """NeMo Gym's digest of a full token sequence: SHA-256 of the domain, byte 1, u64 count, each id as u64.

    Big-endian throughout; the empty sequence is SHA-256 of the domain alone.
    """
    array = np.asarray(ids, dtype=">u8")
    if array.size == 0:
        return digest_bytes(_TOKENS_DOMAIN)
    return digest_bytes(_TOKENS_DOMAIN + b"\x01" + int(array.size).to_bytes(8, "big") + array.tobytes())
