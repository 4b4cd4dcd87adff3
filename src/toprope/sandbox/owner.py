"""Who owns something, so that another process can tell whether the owner still lives.

A process id alone is used again after a while; with the time the process started and the boot it started in it names
one process for ever. A process of another pid namespace cannot be seen from here: nothing is concluded about it.
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
        if self.boot != _boot():
            return False
        if self.namespace != _namespace():
            return True
        found = _started(self.pid)
        return found is not None and found == self.started

    def here(self) -> bool:
        """Whether `pid` means this process in the caller's own pid namespace."""
        return self.boot == _boot() and self.namespace == _namespace() and self.alive()


def identify(pid: int) -> ProcessId | None:
    """The identity of a process of this pid namespace; None when there is none with this id."""
    started = _started(pid)
    return None if started is None else ProcessId(pid, started, _boot(), _namespace())


def this_process() -> ProcessId:
    """The identity of the calling process."""
    found = identify(os.getpid())
    if found is None:  # a /proc that hides the process from itself
        raise RuntimeError("/proc does not show this process; sandboxes need a mounted /proc")
    return found


def _started(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    parts = text.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return None if parts[0] in "ZX" else int(parts[19])


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
