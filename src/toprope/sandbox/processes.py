"""What the processes of a sandbox use, seen from outside, where no control group counts it.

Whatever runs in a pid namespace descends from the process that made the namespace: orphans inside are adopted by its
first process. So a walk over parents in /proc finds all of it, and nothing inside can hide from it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MARKED_S = 5.0


@dataclass(frozen=True, slots=True)
class Usage:
    """`processes`: threads. `resident_bytes`: pages that processes share are counted for each. `cpu_s`: of the living,
    and of the dead that were waited for. `family`: the ids of the processes."""

    processes: int
    resident_bytes: int
    cpu_s: float
    family: tuple[int, ...]


def children_of(pid: int) -> list[int]:
    """The processes that `pid` started, or adopted, and that still live."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(name)) is not None and int(fields[1]) == pid and fields[0] not in "ZX":
            found.append(int(name))
    return found


def kill_sandbox(pid: int, *, hard: bool) -> None:
    """Kill the sandbox whose outermost process is `pid`, a leader of its process group.

    Its child, the first process of the pid namespace, goes first: with it the kernel kills everything inside, and `pid`
    still waits for it, so that no zombie is left to whoever is process 1 of this host. `hard`, or a sandbox that has no
    child yet: `pid` and its group too. They are stopped first: one that starts its child while we look would leave it
    behind, since a child in the making is not yet bound to its parent's life.
    """
    below = [] if hard else children_of(pid)
    if not below:
        _signal(os.killpg, pid, signal.SIGSTOP)
        below = children_of(pid)
        hard = True
    for child in below:
        _signal(os.kill, child, signal.SIGKILL)
    if hard:
        _signal(os.killpg, pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Processes of this host whose environment began with `mark` in it, as far as we may look."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and int(name) != os.getpid():
                with open(f"/proc/{name}/environ", "rb") as file:
                    if mark.encode() in file.read():
                        found.append(int(name))
        except OSError:
            continue  # it ended meanwhile, or belongs to somebody else
    return found


def kill_marked(mark: str) -> None:
    """On return no process that `marked` finds is alive; gives up after some seconds. Blocks."""
    end = time.monotonic() + _MARKED_S
    while (found := marked(mark)) and time.monotonic() < end:
        for pid in found:
            _signal(os.kill, pid, signal.SIGKILL)
        time.sleep(0.005)


def _signal(send: Callable[[int, int], None], pid: int, number: int) -> None:
    try:
        send(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # it ended meanwhile


def _stat(name: str) -> list[str] | None:
    """The fields after the name in `/proc/<pid>/stat`: state, parent, ..."""
    try:
        with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None  # it ended meanwhile


def usage_below(pid: int) -> Usage:
    """What `pid` and all its descendants use."""
    rows: dict[int, tuple[int, int, int]] = {}
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or (fields := _stat(name)) is None:
            continue
        rows[int(name)] = (sum(map(int, fields[11:15])), int(fields[17]), int(fields[21]) * _PAGE)
        children.setdefault(int(fields[1]), []).append(int(name))
    family, waiting = [], [pid]
    while waiting:
        each = waiting.pop()
        if each in rows:
            family.append(each)
        waiting += children.get(each, ())
    ticks, processes, resident = (sum(rows[each][column] for each in family) for column in range(3))
    return Usage(processes, resident, ticks / _TICK, tuple(family))


def memory_of(family: Sequence[int]) -> int:
    """Bytes of memory of these processes, pages that several share counted once. Slower than a sum of resident sizes,
    which counts a page once for each process that a fork gave it to."""
    return sum(_proportional(pid) for pid in family)


def _proportional(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii", errors="replace") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except OSError:
        return 0  # it ended meanwhile
