"""A lock between processes of one machine, fair enough that no writer starves.

Two advisory locks on two files, taken as a turnstile and a room. Who leaves the room and wants back in has to pass the
turnstile, where another process already stands, so that nobody holds the room twice in a row while others wait. (With
one lock the process that lets go usually takes it again before the kernel has woken anybody.) The kernel lets go of
both when a process dies. Threads of one process are excluded too.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FileLock:
    """`with lock.held(): ...`; the files `<path>` and `<path>.turn`, and their directory, are made on first use."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handles: tuple[int, int] | None = None
        self._threads = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, no other process and no other thread is inside. Blocks; never call it on an event loop."""
        with self._threads:
            room, turnstile = self._handles if self._handles is not None else self._open()
            fcntl.flock(turnstile, fcntl.LOCK_EX)
            try:
                fcntl.flock(room, fcntl.LOCK_EX)
            finally:
                fcntl.flock(turnstile, fcntl.LOCK_UN)
            try:
                yield
            finally:
                fcntl.flock(room, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the handles. The files stay: removing a lock file would let two holders in."""
        with self._threads:
            if self._handles is not None:
                for handle in self._handles:
                    os.close(handle)
                self._handles = None

    def _open(self) -> tuple[int, int]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        room = os.open(self._path, flags, 0o644)
        try:
            turnstile = os.open(self._path.with_name(self._path.name + ".turn"), flags, 0o644)
        except BaseException:
            os.close(room)
            raise
        self._handles = (room, turnstile)
        return self._handles
