"""Files of a work directory, touched from outside while hostile code may be changing it.

Every component of a path is opened on its own, below the handle of the one before, and none may be a link: there is
no moment between a check and a use. Only regular files are read; a file is written beside its place and renamed into
it, so that nothing that stands there (a link, a pipe) is ever opened for writing.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from toprope.sandbox.spec import WORKDIR, FileTooLarge, OutsideWorkdir
from toprope.storage.atomic import write_all

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BATCH = 4096  # entries read before they are removed: a directory that changes while it is read may skip some
_WHOLE = None
_AGAIN = 100  # each time for an entry that came in meanwhile, of which every other remover or writer makes a few
_LINK_ERRORS = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR)


def parts_of(path: str, workdir: str = WORKDIR) -> list[str]:
    """The components of `path` below the work directory; raises `OutsideWorkdir` for one that leaves it."""
    inner = path
    if path.startswith("/"):
        prefix = workdir.rstrip("/") + "/"
        if not path.startswith(prefix):
            raise OutsideWorkdir(f"{path!r} is outside the work directory {workdir}")
        inner = path[len(prefix) :]
    parts = [part for part in inner.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or "\0" in path:
        raise OutsideWorkdir(f"{path!r} names no file below the work directory {workdir}")
    return parts


def read(root: Path, path: str, limit: int, workdir: str = WORKDIR) -> bytes:
    """The content of a regular file below `root`. Raises `FileNotFoundError`, `OutsideWorkdir`, `FileTooLarge`."""
    *parents, name = parts_of(path, workdir)
    with _refusing(path), _directory(root, parents) as above:
        # Not blocking: a pipe without a writer would wait for ever.
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=above)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OutsideWorkdir(f"{path!r} is no regular file")
            data = bytearray()
            while chunk := os.read(handle, min(1 << 20, limit + 1 - len(data))):
                data += chunk
                if len(data) > limit:
                    raise FileTooLarge(f"{path!r} has more than {limit} bytes, the limit of this read")
            return bytes(data)
        finally:
            os.close(handle)


def write(
    root: Path, path: str, data: bytes, *, owner: int | None, executable: bool = False, workdir: str = WORKDIR
) -> None:
    """On return the file below `root` holds `data` and belongs to user `owner` (None: the caller)."""
    *parents, name = parts_of(path, workdir)
    with _refusing(path), _directory(root, parents, make=True, owner=owner) as above:
        scrap = f".{secrets.token_hex(8)}.new"
        handle = os.open(
            scrap, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=above
        )
        try:
            try:
                write_all(handle, data)
                os.fchmod(handle, 0o755 if executable else 0o644)
                if owner is not None:
                    os.fchown(handle, owner, owner)
            finally:
                os.close(handle)
            os.rename(scrap, name, src_dir_fd=above, dst_dir_fd=above)
        except BaseException:
            os.unlink(scrap, dir_fd=above)
            raise


def remove_tree(path: Path) -> None:
    """On return nothing is left of `path`, however deep its directories are nested and whatever modes they have.

    Only for a tree in which nothing runs any more. Others may remove it too, and what they make in it meanwhile (the
    mark that a sandbox is ended, a file whose writing had begun) goes as well. Files at the top go last: whoever is
    killed while it removes a sandbox leaves the lease, and the next one goes on.
    """
    for again in range(_AGAIN, -1, -1):
        try:
            _empty_tree(path)
            os.rmdir(path)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or not again:
                raise


def _empty_tree(path: Path) -> None:
    """On return everything is gone that was in the directory. Directories below others are moved up to the top, one
    after the other, so that neither calls, names nor open handles nest."""
    top = _open_for_removal(path, None)
    try:
        mark, number = secrets.token_hex(8), 0
        while pending := [name for name, nested in _entries(top, _WHOLE) if nested]:
            while pending:
                moved = _empty(top, pending.pop(), f".{mark}-{number}")
                number += 1
                pending += moved
        for name, _ in _entries(top, _WHOLE):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=top)
    finally:
        os.close(top)


def _empty(top: int, name: str, mark: str) -> list[str]:
    """On return the directory `name` of `top` is gone, and those that were in it are in `top` under the names that
    are returned. What another remover takes meanwhile is gone too. Raises ENOTEMPTY for what comes in meanwhile."""
    moved: list[str] = []
    try:
        handle = _open_for_removal(name, top)
    except FileNotFoundError:
        return moved
    try:
        while batch := _entries(handle, _BATCH):
            for inner, nested in batch:
                with suppress(FileNotFoundError):
                    if nested:
                        os.close(_open_for_removal(inner, handle))  # to move a directory takes the right to write it
                        up = f"{mark}-{len(moved)}"
                        os.rename(inner, up, src_dir_fd=handle, dst_dir_fd=top)
                        moved.append(up)
                    else:
                        os.unlink(inner, dir_fd=handle)
    finally:
        os.close(handle)
    with suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=top)
    return moved


def _entries(handle: int, most: int | None) -> list[tuple[str, bool]]:
    """At most `most` entries of a directory, and which of them are directories (a link is none)."""
    with os.scandir(handle) as found:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in islice(found, most)]


def _open_for_removal(name: str | Path, above: int | None) -> int:
    """A handle of a directory that may have been closed to its own owner; its mode is 0700 on return."""
    place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        with suppress(PermissionError):  # another user's: what cannot be removed then says so itself
            os.chmod(f"/proc/self/fd/{place}", 0o700)
        return os.open(".", _DIRECTORY, dir_fd=place)
    finally:
        os.close(place)


@contextmanager
def _refusing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _LINK_ERRORS:
            raise OutsideWorkdir(
                f"{path!r} goes through a link, or is no regular file below a directory; links are not followed"
            ) from None
        raise


@contextmanager
def _directory(root: Path, parents: list[str], *, make: bool = False, owner: int | None = None) -> Iterator[int]:
    handle = os.open(root, _DIRECTORY)
    try:
        for part in parents:
            if make:
                try:
                    os.mkdir(part, 0o755, dir_fd=handle)
                    made = True
                except FileExistsError:
                    made = False
            below = os.open(part, _DIRECTORY, dir_fd=handle)
            os.close(handle)
            handle = below
            if make and made and owner is not None:
                os.fchown(handle, owner, owner)
        yield handle
    finally:
        os.close(handle)
