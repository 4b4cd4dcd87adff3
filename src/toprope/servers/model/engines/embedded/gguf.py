"""Reads the model file: GGUF version 2 or 3, tensors of kind F32, Q4_1 and Q8_0, as float32 arrays.

The format is the one of ggml's `docs/gguf.md`. Only what our weights use is read; another kind of tensor is refused by
name. Left to others: what a tensor means (`weights`) and what the vocabulary means (`tokenizer`).

    file    = magic "GGUF", version u32, tensors u64, keys u64, keys x (name, kind u32, value), tensors x header, pad
    header  = name, dims u32, dims x u64 (fastest first), kind u32, offset u64 from the end of the pad
    Q4_1    = 20 bytes for 32 values: scale f16, minimum f16, 16 bytes; byte i has value i (low) and value i + 16 (high)
    Q8_0    = 34 bytes for 32 values: scale f16, 32 int8
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"GGUF"
F32, Q4_1, Q8_0 = 0, 3, 8
BLOCK = 32
_BLOCK_BYTES = {Q4_1: 20, Q8_0: 34}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufError(ValueError):
    """The file is not a GGUF file that this reader knows; the text says what it found and where."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Where one tensor lies: `shape` slowest axis first (as NumPy has it), `offset` in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open model file: its keys, and its tensors on demand."""

    path: Path
    keys: Mapping[str, Any]
    headers: Mapping[str, TensorHeader]
    raw: NDArray[np.uint8]

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The tensor as a new float32 array. Raises `GgufError` if it is absent or of a kind not known here."""
        header = self.headers.get(name)
        if header is None:
            raise GgufError(f"{self.path}: no tensor named {name!r}.")
        count = int(np.prod(header.shape, dtype=np.int64))
        if header.kind == F32:
            data = self.raw[header.offset : header.offset + 4 * count]
            return np.frombuffer(data.tobytes(), dtype="<f4").reshape(header.shape)
        size = _BLOCK_BYTES.get(header.kind)
        if size is None or count % BLOCK:
            raise GgufError(
                f"{self.path}: tensor {name!r} has kind {header.kind}; known are F32 (0), Q4_1 (3), Q8_0 (8)."
            )
        end = header.offset + count // BLOCK * size
        if end > len(self.raw):
            raise GgufError(
                f"{self.path}: tensor {name!r} ends at byte {end}, the file at {len(self.raw)}; is it whole?"
            )
        blocks = self.raw[header.offset : end].reshape(-1, size)
        unpack = _unpack_q4_1 if header.kind == Q4_1 else _unpack_q8_0
        return unpack(blocks).reshape(header.shape)


def _unpack_q4_1(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    head = np.ascontiguousarray(blocks[:, :4]).view("<f2").astype(np.float32)
    codes = blocks[:, 4:]
    values = np.empty((len(blocks), BLOCK), dtype=np.float32)
    values[:, :16] = codes & 0x0F
    values[:, 16:] = codes >> 4
    values *= head[:, :1]
    values += head[:, 1:]
    return values


def _unpack_q8_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    codes = np.ascontiguousarray(blocks[:, 2:]).view(np.int8)
    return np.multiply(codes, scale, dtype=np.float32)


class _Cursor:
    """A place in the header; every read moves it on."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self._data = data
        self._path = path
        self.at = 4

    def scalar(self, code: str) -> Any:
        try:
            (value,) = struct.unpack_from("<" + code, self._data, self.at)
        except struct.error:
            raise GgufError(f"{self._path}: the header ends at byte {len(self._data)}; is the file whole?") from None
        self.at += struct.calcsize("<" + code)
        return value

    def text(self) -> str:
        size = self.scalar("Q")
        start, self.at = self.at, self.at + size
        if self.at > len(self._data):
            raise GgufError(f"{self._path}: the header ends at byte {len(self._data)}; is the file whole?")
        return str(self._data[start : self.at], "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            return [self.value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise GgufError(f"{self._path}: a key at byte {self.at} has the unknown kind {kind}.")
        return self.scalar(_SCALARS[kind])


def read_gguf(path: Path) -> GgufFile:
    """The file's keys and tensor headers; tensor data stays on disk (memory-mapped) until asked for.

    Raises `GgufError` if it is not a GGUF file of version 2 or 3, `OSError` if it cannot be read.
    """
    if path.stat().st_size < 24:
        raise GgufError(f"{path}: not a GGUF file (shorter than its header).")
    raw: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
    data = raw.data
    if bytes(data[:4]) != MAGIC:
        raise GgufError(f"{path}: not a GGUF file (it starts with {bytes(data[:4])!r}).")
    cursor = _Cursor(data, path)
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise GgufError(f"{path}: GGUF version {version}; versions 2 and 3 are read.")
    tensors, count = cursor.scalar("Q"), cursor.scalar("Q")
    keys: dict[str, Any] = {}
    for _ in range(count):
        name = cursor.text()
        keys[name] = cursor.value(cursor.scalar("I"))
    found: list[TensorHeader] = []
    for _ in range(tensors):
        name = cursor.text()
        dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
        found.append(TensorHeader(name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")))
    step = int(keys.get("general.alignment", 32))
    start = -(-cursor.at // step) * step
    headers = {h.name: TensorHeader(h.name, h.shape, h.kind, start + h.offset) for h in found}
    return GgufFile(path, keys, headers, raw)
