"""Files of a container's work directory, through the engine's archive calls.

The engine resolves every path inside the container, so a link can lead nowhere but to the container's own files; links
are refused all the same, as everywhere in this room.
"""

from __future__ import annotations

import importlib
import io
import posixpath
import tarfile
from typing import Any

from toprope.sandbox.spec import WORKDIR, FileTooLarge, OutsideWorkdir
from toprope.sandbox.workdir import parts_of

_DIRECTORY = 1 << 31  # Go's file mode bits, as the engine sends them
_IRREGULAR = 0b1000_1111_0010_1000 << 16  # directory, link, device, pipe, socket, character device, irregular


def tar_of_workdir(user: str) -> bytes:
    """An archive that makes the work directory below the root."""
    return _tar([_entry(WORKDIR.strip("/"), user, directory=True)], b"")


def write(api: Any, container: str, path: str, data: bytes, *, user: str, executable: bool) -> None:
    """See `BorrowedSandbox.write_file`. Blocks."""
    parts = parts_of(path)
    _check_parents(api, container, path, parts)
    there = _archive(api, container, parts, content=False)
    if there is not None and there[1]["mode"] & _DIRECTORY:
        raise OutsideWorkdir(f"{path!r} is a directory, no regular file")
    entries = [_entry("/".join(parts[:depth]), user, directory=True) for depth in range(1, len(parts))]
    last = _entry("/".join(parts), user, directory=False)
    last.size, last.mode = len(data), 0o755 if executable else 0o644
    api.put_archive(container, WORKDIR, _tar([*entries, last], data))


def read(api: Any, container: str, path: str, limit: int) -> bytes:
    """See `BorrowedSandbox.read_file`. Blocks."""
    parts = parts_of(path)
    _check_parents(api, container, path, parts)
    found = _archive(api, container, parts)
    if found is None:
        raise FileNotFoundError(f"no file {path!r} in the work directory")
    chunks, stat = found
    if stat.get("linkTarget") or stat["mode"] & _IRREGULAR:
        raise OutsideWorkdir(f"{path!r} is no regular file; links are not followed")
    if stat["size"] > limit:
        raise FileTooLarge(f"{path!r} has more than {limit} bytes, the limit of this read")
    data = bytearray()
    for chunk in chunks:
        data += chunk
        if len(data) > limit + 64 * 1024:  # it grew since; the archive's own frame is far smaller
            raise FileTooLarge(f"{path!r} has more than {limit} bytes, the limit of this read")
    with tarfile.open(fileobj=io.BytesIO(bytes(data))) as archive:
        member = archive.next()
        file = None if member is None or not member.isreg() else archive.extractfile(member)
        if file is None:
            raise OutsideWorkdir(f"{path!r} is no regular file")
        return file.read()


def _check_parents(api: Any, container: str, path: str, parts: list[str]) -> None:
    for depth in range(1, len(parts)):
        found = _archive(api, container, parts[:depth], content=False)
        if found is None:
            return  # it and what is below do not exist
        if found[1].get("linkTarget") or not found[1]["mode"] & _DIRECTORY:
            raise OutsideWorkdir(f"{path!r} goes through a link, or through what is no directory")


def _archive(api: Any, container: str, parts: list[str], *, content: bool = True) -> tuple[Any, dict[str, Any]] | None:
    errors = importlib.import_module("docker.errors")
    try:
        chunks, stat = api.get_archive(container, posixpath.join(WORKDIR, *parts))
    except errors.NotFound:
        return None
    if not content:
        chunks.close()
    return chunks, stat


def _entry(name: str, user: str, *, directory: bool) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    uid, _, gid = user.partition(":")
    entry.uid, entry.gid = int(uid), int(gid or uid)
    if directory:
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
    return entry


def _tar(entries: list[tarfile.TarInfo], data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for entry in entries:
            archive.addfile(entry, io.BytesIO(data) if entry.isreg() else None)
    return buffer.getvalue()
