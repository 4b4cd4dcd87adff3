"""Who owns something, so that another process can tell whether the owner still lives.

A process id alone is used again after a while; with the time the process started and the boot it started in it names
one process for ever. A process of another pid namespace cannot be seen from here: nothing is concluded about it. Nor is
anything where this host refuses the look, for want of handles say: only "there is none" means dead.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process: `started` in clock ticks since the boot `boot`, `namespace` the inode of its pid namespace."""

    pid: int
    started: int
    boot: str
    namespace: int

    def alive(self) -> bool:
        """False only if the process is surely dead (or a zombie)."""
        try:
            if self.boot != _boot():
                return False
            return self.namespace != _namespace() or _started(self.pid) == self.started
        except OSError:
            return True

    def here(self) -> bool:
        """Whether `pid` surely means this process in the caller's own pid namespace."""
        try:
            return self.boot == _boot() and self.namespace == _namespace() and _started(self.pid) == self.started
        except OSError:
            return False


def identify(pid: int) -> ProcessId | None:
    """The identity of a process of this pid namespace; None when there is none with this id. Raises `OSError` where
    that cannot be told."""
    started = _started(pid)
    return None if started is None else ProcessId(pid, started, _boot(), _namespace())


def this_process() -> ProcessId:
    """The identity of the calling process. Raises `OSError` where this host has no handle left for the look."""
    found = identify(os.getpid())
    if found is None:  # a /proc that hides the process from itself
        raise RuntimeError("/proc does not show this process; sandboxes need a mounted /proc")
    return found


def _started(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):  # also "no such process", of one that ends while it is read
        return None
    parts = text.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return None if parts[0] in "ZX" else int(parts[19])


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
