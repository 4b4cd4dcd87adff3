"""Small files that are replaced whole: a reader sees the old content or the new, also after a power cut."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def sync_directory(path: Path) -> None:
    """On return the names in the directory `path` survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """On return `path` holds exactly `data`, durably. Blocks; a failure leaves the old content and no scrap.

    `mode` is the permission of the new file, so that a key can be written readable by its owner only.
    """
    scrap = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        handle = os.open(scrap, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            write_all(handle, data)
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(scrap, path)
    except BaseException:
        scrap.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_all(handle: int, data: bytes) -> None:
    """Write all of `data`; the kernel may take it in pieces."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
