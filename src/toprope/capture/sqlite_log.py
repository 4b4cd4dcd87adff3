"""Whether the write-ahead log beside a sqlite store was damaged where it had been synced. Reads bytes, changes nothing.

SQLite ends a log at the first frame whose checksum does not fit, and says nothing: right for the last transaction,
which a crash may tear, and a silent loss of acknowledged transactions anywhere before. A transaction is written only
after the one before it was synced, so a commit that other frames follow was durable once. (That the end of a log was
cut off, at a place that had been synced, shows nowhere in it.) Format: "WAL File Format" in SQLite's documentation.
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_HEAD, _FRAME = 32, 24
_LITTLE, _BIG = 0x377F0682, 0x377F0683
_WORD = 1 << 32


def damage_in(log: Path) -> str | None:
    """What is wrong with `log`, in words; None for a sound log, one with a torn end, or none at all.

    Call it where nobody commits. Linear in the file: 20 ms for the 16 MB between checkpoints.
    """
    try:
        data = log.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) <= _HEAD or not any(data):
        return None
    magic, _, size, _, *salts, first, second = struct.unpack(">8I", data[:_HEAD])
    order = {_LITTLE: "<u4", _BIG: ">u4"}.get(magic)
    if order is None or _sum(np.frombuffer(data[:24], order)[None], [[0, 0]]).tolist() != [[first, second]]:
        return "its first bytes are damaged, and SQLite reads nothing of it" if any(data[_HEAD:]) else None
    count = (len(data) - _HEAD) // (_FRAME + size)
    if count == 0:
        return None
    frames = np.frombuffer(data, np.uint8, count * (_FRAME + size), _HEAD).reshape(count, _FRAME + size)
    told = frames[:, :_FRAME].copy().view(">u4").astype(np.int64)  # page, size after commit or 0, salts, checksums
    words = np.concatenate([frames[:, :8], frames[:, _FRAME:]], axis=1).view(order)
    before = np.concatenate([[[first, second]], told[:-1, 4:]])
    ours = (told[:, 2:4] == salts).all(axis=1)
    sound = ours & (_sum(words, before) == told[:, 4:]).all(axis=1)
    if sound.all():
        return None
    end = int(sound.argmin())
    # Of the broken frame itself its size is believed only where it lies between those of the commits around it.
    sizes = np.where(sound, told[:, 1], 0)
    least, most = sizes[:end].max(initial=1), sizes[end:].max(initial=0)
    sizes[end] = told[end, 1] if ours[end] and least <= told[end, 1] <= most else 0
    commits = np.flatnonzero(sizes[end:]) + end
    if len(commits) == 0 or not sound[int(commits[0]) + 1 :].any():
        return None
    place = _HEAD + end * (_FRAME + size)
    return f"byte {place} or one of the {_FRAME + size} after it is damaged, and SQLite reads nothing of what follows"


def _sum(words: NDArray[np.uint32], start: object) -> NDArray[np.int64]:
    """SQLite's running checksum of each row of `words`, an even number of 32-bit words, from `start` (rows, 2)."""
    weights, jump = _weights(words.shape[1] // 2)
    added = [(words * weight).sum(axis=1, dtype=np.uint32) for weight in weights]
    carried = np.asarray(start, dtype=np.uint64) @ jump.T
    total: NDArray[np.int64] = ((np.stack(added, axis=1) + carried) % _WORD).astype(np.int64)
    return total


@cache
def _weights(pairs: int) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    """What each word adds to either sum after `pairs` steps, and what the sums before become.

    A step is s0 += x0 + s1, s1 += x1 + s0: linear, so a page needs no loop.
    """
    weights = np.zeros((2, 2 * pairs), dtype=np.uint32)
    a, b, c, d = 1, 0, 0, 1
    for at in range(2 * pairs - 2, -1, -2):
        weights[:, at] = (a + b) % _WORD, (c + d) % _WORD
        weights[:, at + 1] = b, d
        a, b, c, d = (a + b) % _WORD, (a + 2 * b) % _WORD, (c + d) % _WORD, (c + 2 * d) % _WORD
    return weights, np.array([[a, b], [c, d]], dtype=np.uint64)
