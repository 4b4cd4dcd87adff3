"""Digests: of JSON values, of token sequences (NeMo Gym's form), and the chain hash of a growing sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toprope.canonical.json import canonical

_TOKENS_DOMAIN = b"nemo-gym-tokens"


def digest_bytes(data: bytes) -> str:
    """SHA-256 of `data` as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


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
