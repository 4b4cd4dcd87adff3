"""Which writers of a store are alive, decided by the kernel and not by a clock.

    <store>.writers/<hash of the epoch>     empty; locked (flock) for as long as its writer lives

A writer takes the lock of its epoch's file before its first intent and holds it until it closes or dies; the kernel
lets go of it in every kind of death. Whoever can take the lock, or finds no file, knows that the writer is gone. The
files carry nothing that must survive a power cut: after one no writer is alive.

A writer that answered a call and could write down neither its record nor its loss says so in the mode of the file,
which takes no space on a full disk: nobody may settle its open intents after its death.

An epoch is used by one writer and never again. Files of one machine only, like the stores that use it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

_UNSAID = stat.S_IXUSR
"""The mode bit of a writer that answered calls whose loss it could not write down."""


class WriterEpochs:
    """The epochs of one store. Nothing is made before the first `hold`. Safe to use from several threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._held: dict[str, int] = {}
        self._guard = threading.Lock()
        self._unsaid = False

    def hold(self, epoch: str) -> None:
        """On return `epoch` counts as alive for every process, until `close` or the death of this process."""
        if epoch in self._held or not epoch:
            return
        with self._guard:
            if epoch in self._held:
                return
            self._directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(self._file(epoch), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)  # an onlooker holds it for microseconds
            except BaseException:
                os.close(handle)
                raise
            self._held[epoch] = handle

    def mine(self, epoch: str) -> bool:
        """Whether this object holds the epoch."""
        return epoch in self._held

    def is_live(self, epoch: str) -> bool:
        """Whether the epoch's writer is alive. Leaves no trace. Of an unknown origin (empty) nobody can tell: True."""
        if not epoch or epoch in self._held:
            return True
        try:
            handle = os.open(self._file(epoch), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    def leave_unsaid(self) -> None:
        """On return the open intents of the epochs held here count as lost whatever becomes of this process."""
        with self._guard:
            self._unsaid = True
            for handle in self._held.values():
                os.fchmod(handle, os.fstat(handle).st_mode | _UNSAID)
                with suppress(OSError):  # the death of a process forgets no mode; this is for a power cut
                    os.fsync(handle)

    def may_have_answered(self, epoch: str) -> bool:
        """Whether a call that the epoch's writer left open may have had its reply: it lives, or left a loss unsaid."""
        if self.is_live(epoch):
            return True
        try:
            return bool(self._file(epoch).stat().st_mode & _UNSAID)
        except FileNotFoundError:
            return False

    def bury(self, epoch: str) -> None:
        """Remove the file of a writer that is known to be dead."""
        with suppress(OSError):  # gone already, or the directory cannot be written: it says the same either way
            self._file(epoch).unlink()

    def close(self) -> None:
        """On return the epochs held here count as ended. Twice: no-op."""
        with self._guard:
            for epoch, handle in self._held.items():
                if not self._unsaid:
                    self.bury(epoch)
                os.close(handle)
            self._held.clear()
            with suppress(OSError):  # other writers are there, or nothing ever was
                self._directory.rmdir()

    def _file(self, epoch: str) -> Path:
        return self._directory / hashlib.blake2b(epoch.encode(), digest_size=16).hexdigest()
