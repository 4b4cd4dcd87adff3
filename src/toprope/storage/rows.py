r"""Append-only files of JSON objects, one a line, for what must survive.

    {"a": 1}\n{"b": 2}\n{"c": ...       the last line has no newline: whole (the newline is added) or torn (it is cut)

A row is acknowledged only after a device sync; a group of waiting rows shares one. Nothing is ever appended behind a
fragment: under the file's own lock every append first looks whether the end is still where this process left it, and
repairs it if not. Knows bytes and lines; what a row means is its reader's affair.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from toprope.canonical.json import NotJson, loads
from toprope.errors.tree import TopropeError
from toprope.storage.atomic import sync_directory, write_all
from toprope.storage.group_commit import GroupCommit

_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a file: `line_no` counts from 1, `offset` is its first byte, `end` the first byte after it.

    `data` has no newline. `damage` is None, or says why the line cannot be an object: `torn` (the last line, cut
    short) or `not an object`. A row without damage still has to be parsed by whoever knows what it means.
    """

    line_no: int
    offset: int
    end: int
    data: bytes
    damage: str | None = None


def read_rows(path: Path, *, offset: int = 0, line_no: int = 1) -> Iterator[Row]:
    """The rows of `path` from byte `offset` (the beginning of line `line_no`), damaged ones included; blank lines not.

    Lines end at newline bytes only. A whole last object without its newline is a row like any other. Reads, repairs
    nothing; a missing file has no rows. Memory is that of the longest line.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        for number, line in enumerate(file, line_no):
            end = offset + len(line)
            data = line.rstrip(b"\r\n")
            if data.strip():
                yield Row(number, offset, end, data, _damage(line, data))
            offset = end


def _damage(line: bytes, data: bytes) -> str | None:
    if not line.endswith(b"\n"):
        return None if is_object(data) else "torn"
    return None if data[:1] == b"{" and data[-1:] == b"}" else "not an object"


def is_object(data: bytes) -> bool:
    """Whether `data` is one whole JSON object: no proper prefix of an object is one, so a torn row never passes."""
    if data[:1] != b"{" or data[-1:] != b"}":
        return False
    try:
        return isinstance(loads(data), dict)
    except NotJson:
        return False


class DurableRows:
    """The appending side of one file. Opens (and repairs the end) on its writer thread, with the first use.

    Several processes may append to one file. Use from any event loop; only `close` ends it.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._handle: int | None = None
        self._end = 0
        self._broken: str | None = None
        self._group: GroupCommit[bytes | None, int] = GroupCommit(
            f"rows-{self.path.name}", self._commit, finish=self._finish
        )

    async def open(self) -> int:
        """On return the file exists and its end is repaired; the value is its size in bytes. Optional."""
        return await self._group.submit(None)

    async def append(self, row: bytes) -> int:
        """On return `row` (one JSON object, no newline) survives a power cut; returns the offset of its first byte.

        Raises `ValueError` for bytes that are no single line of an object, `OSError` when the disk refuses (the file
        then ends as it did before), `TopropeError` when the file was cut or removed under us. A cancelled caller does
        not know whether the row is there.
        """
        if row[:1] != b"{" or row[-1:] != b"}" or b"\n" in row:
            raise ValueError(f"{self.path.name}: a row must be one JSON object on one line, got {row[:60]!r}")
        return await self._group.submit(row)

    async def close(self) -> None:
        """On return every row submitted before is durable and the file is closed. Twice: no-op."""
        await self._group.close()

    def _finish(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _commit(self, items: Sequence[bytes | None]) -> Sequence[int]:
        if self._broken is not None:
            raise TopropeError(self._broken)
        handle = self._handle if self._handle is not None else self._open()
        with _locked(handle):
            self._find_end(handle)
            start = at = self._end
            offsets: list[int] = []
            for item in items:
                offsets.append(at)
                at += 0 if item is None else len(item) + 1
            if at > start:
                self._write(handle, b"".join(item + b"\n" for item in items if item is not None), start)
                self._end = at
        return offsets

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            sync_directory(self.path.parent)
            with _locked(handle):
                self._end = repair_end(handle)
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle
        return handle

    def _find_end(self, handle: int) -> None:
        now = os.fstat(handle)
        if now.st_nlink == 0 or now.st_size < self._end:
            what = "removed" if now.st_nlink == 0 else f"cut from {self._end} to {now.st_size} bytes"
            raise TopropeError(f"{self.path}: the file was {what} while it was open; nothing more is appended to it")
        if now.st_size > self._end:  # another process appended, and may have died while it did
            self._end = repair_end(handle)

    def _write(self, handle: int, data: bytes, start: int) -> None:
        try:
            write_all(handle, data)
            os.fdatasync(handle)
        except BaseException as failure:
            if isinstance(failure, OSError) and failure.filename is None:
                failure.filename = str(self.path)  # "no space left on device" alone does not say where
            # After a failed sync the kernel may call lost pages clean: take all of it back, or stop for good.
            try:
                os.ftruncate(handle, start)
                os.fsync(handle)
            except OSError as error:
                self._broken = f"{self.path}: an append failed and could not be taken back ({error})"
            raise


def repair_end(handle: int) -> int:
    """Make the file end at a line's end, durably, and return its size: add a lacking newline, or cut a torn line."""
    size = os.fstat(handle).st_size
    start = _last_line_start(handle, size)
    if start == size:
        return size
    if is_object(_read(handle, start, size)):
        write_all(handle, b"\n")
        size += 1
    else:
        os.ftruncate(handle, start)
        size = start
    os.fsync(handle)
    return size


def _last_line_start(handle: int, size: int) -> int:
    """The offset after the last newline in the first `size` bytes."""
    at = size
    while at > 0:
        begin = max(0, at - _BLOCK)
        found = _read(handle, begin, at).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        at = begin
    return 0


def _read(handle: int, begin: int, end: int) -> bytes:
    pieces = []
    while begin < end:
        piece = os.pread(handle, end - begin, begin)
        if not piece:
            break
        pieces.append(piece)
        begin += len(piece)
    return b"".join(pieces)


@contextmanager
def _locked(handle: int) -> Iterator[None]:
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)
