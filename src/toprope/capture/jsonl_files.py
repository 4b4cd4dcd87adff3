"""The file operations that the jsonl store is made of, and the durable steps made from them.

`Files` is small on purpose: whoever implements it (the operating system here, a layer that loses unsynced writes in
`toprope.testing.lossy_files`) decides what survives a power cut. What the files mean is `jsonl_captures`' affair.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from toprope.storage.atomic import sync_directory, write_all
from toprope.storage.lock import FileLock

_SCRAP = ".tokens-"


@dataclass(frozen=True, slots=True)
class FileStat:
    """What tells whether a file is still the one that was read: `inode`, `size` in bytes, `mtime_ns`."""

    inode: int
    size: int
    mtime_ns: int


class Files(Protocol):
    """A directory tree of small files. Blocking; never called on an event loop. Raises `OSError` as the disk does."""

    def stat(self, path: Path) -> FileStat | None:
        """None where there is no such file."""

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        """The bytes from `start` (up to `size` of them); nothing where there is no such file."""

    def names(self, directory: Path) -> list[str]:
        """The names in a directory; none where it does not exist."""

    def append(self, path: Path, data: bytes) -> None:
        """On return `data` stands at the end of the file, durably; the name of a new file may not be durable yet."""

    def write(self, path: Path, data: bytes) -> None:
        """On return a new file holds `data`, durably; its name may not be durable yet."""

    def sync(self, path: Path) -> None:
        """On return what the file holds now is durable."""

    def truncate(self, path: Path, size: int) -> None:
        """On return the file has `size` bytes, durably."""

    def rename(self, old: Path, new: Path) -> None:
        """On return `new` is what `old` was, for every reader; durably only after `sync_directory`."""

    def remove(self, path: Path) -> None:
        """On return the name is gone (it may not have been there); durably only after `sync_directory`."""

    def sync_directory(self, directory: Path) -> None:
        """On return the names in the directory are durable."""

    def make_directory(self, directory: Path) -> None:
        """On return the directory and those above it exist, durably."""

    def writable(self, directory: Path) -> bool:
        """Whether files can be made there; an archive's cannot."""

    def lock(self, path: Path) -> AbstractContextManager[None]:
        """Inside, nobody else is inside, in no process of this machine."""


class OsFiles:
    """`Files` of the operating system."""

    def stat(self, path: Path) -> FileStat | None:
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return None
        return FileStat(found.st_ino, found.st_size, found.st_mtime_ns)

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        try:
            with path.open("rb") as file:
                file.seek(start)
                return file.read() if size is None else file.read(size)
        except FileNotFoundError:
            return b""

    def names(self, directory: Path) -> list[str]:
        try:
            return os.listdir(directory)
        except FileNotFoundError:
            return []

    def append(self, path: Path, data: bytes) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            before = os.fstat(handle).st_size
            try:
                write_all(handle, data)
                os.fsync(handle)
            except BaseException as failure:
                _name(failure, path)
                # After a failed sync the kernel may call lost pages clean; what stays behind is cut by the next writer.
                with suppress(OSError):
                    os.ftruncate(handle, before)
                    os.fsync(handle)
                raise
        finally:
            os.close(handle)

    def write(self, path: Path, data: bytes) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            write_all(handle, data)
            os.fsync(handle)
        except OSError as failure:
            _name(failure, path)
            raise
        finally:
            os.close(handle)

    def sync(self, path: Path) -> None:
        with self._opened(path) as handle:
            os.fsync(handle)

    def truncate(self, path: Path, size: int) -> None:
        with self._opened(path) as handle:
            os.ftruncate(handle, size)
            os.fsync(handle)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_directory(self, directory: Path) -> None:
        sync_directory(directory)

    def make_directory(self, directory: Path) -> None:
        missing = [each for each in (directory, *directory.parents) if not each.exists()]
        for each in reversed(missing):
            each.mkdir(exist_ok=True)
            sync_directory(each.parent)

    def writable(self, directory: Path) -> bool:
        return not directory.exists() or os.access(directory, os.W_OK)

    @contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        # A lock of its own for every use: thousands of rollouts would hold two descriptors each for ever.
        lock = FileLock(path)
        try:
            with lock.held():
                yield
        finally:
            lock.close()

    @contextmanager
    def _opened(self, path: Path) -> Iterator[int]:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            yield handle
        finally:
            os.close(handle)


def _name(failure: BaseException, path: Path) -> None:
    """Say where: "no space left on device" alone does not."""
    if isinstance(failure, OSError) and failure.filename is None:
        failure.filename = str(path)


def replace_durably(files: Files, path: Path, data: bytes) -> None:
    """On return `path` holds exactly `data`, durably; before, and after a failure, what it held."""
    scrap = path.with_name(f"{_SCRAP}{secrets.token_hex(8)}.tmp")
    try:
        files.write(scrap, data)
        files.rename(scrap, path)
    except BaseException:
        with suppress(OSError):
            files.remove(scrap)
        raise
    files.sync_directory(path.parent)


def is_scrap(name: str) -> bool:
    """Whether a name is of a file that a writer died over before it got its name."""
    return name.startswith(_SCRAP) and name.endswith(".tmp")
