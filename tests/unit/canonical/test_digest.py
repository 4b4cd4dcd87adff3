"""Digests made in pieces: the same digest, and pieces for which hashlib keeps the interpreter lock."""

from __future__ import annotations

import hashlib

import pytest

from toprope.canonical.digest import digest_bytes, hash_on

SIZES = (0, 1, 1983, 1984, 1985, 2047, 2048, 3968, 16_000, 65_536, 65_537, 200_000)


class Pieces:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def update(self, piece: bytes | memoryview) -> None:
        self.sizes.append(len(piece))


@pytest.mark.parametrize("size", SIZES)
def test_a_digest_made_in_pieces_is_that_of_the_whole(size: int) -> None:
    data = bytes(at * 31 % 251 for at in range(size))
    assert digest_bytes(data) == hashlib.sha256(data).hexdigest()
    grown = hashlib.sha256(b"before")
    hash_on(grown, memoryview(data))
    assert grown.hexdigest() == hashlib.sha256(b"before" + data).hexdigest()


@pytest.mark.parametrize("size", [size for size in SIZES if size <= 65_536])
def test_no_piece_of_a_short_text_is_one_for_which_the_lock_is_let_go(size: int) -> None:
    pieces = Pieces()
    hash_on(pieces, bytes(size))
    assert sum(pieces.sizes) == size
    assert max(pieces.sizes, default=0) < 2048  # HASHLIB_GIL_MINSIZE of CPython
