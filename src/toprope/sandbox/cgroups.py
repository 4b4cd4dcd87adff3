"""Control groups: the kernel counts, limits and lists the processes of a sandbox.

Version 2 (one tree) where its controllers may be used, else version 1 (a tree for each controller):

    <own group>/toprope-<id>          the sandbox: memory and number of processes, over all its runs
                    /run-<n>          one run: CPU time, and who is to be killed

A process joins before it becomes the sandbox, by writing to `cgroup.procs`; it cannot leave, since it sees no cgroup
file. Left to others: CPU time and OOM counts are read here, but acted on in `execute`.
"""

from __future__ import annotations

import errno
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from toprope.sandbox.owner import ProcessId, this_process
from toprope.sandbox.spec import Limits

OVERHEAD_PROCESSES = 6
"""Of the sandbox's own: two of bubblewrap, the forwarder with its threads of connections, a shell while it starts."""

_EMPTY_S = 5.0
_TRIAL = "toprope-try-"
_SANDBOX = "toprope-" + "[0-9a-f]" * 16
FORGOTTEN_S = 7 * 86400.0
"""Age at which an empty group of a sandbox is nobody's: its lease is gone, or it would have been removed with it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where groups can be made: the directory for each controller (all the same one in version 2)."""

    version: int
    memory: Path
    pids: Path
    cpu: Path

    @property
    def parents(self) -> tuple[Path, ...]:
        """Every directory once."""
        return tuple(dict.fromkeys((self.memory, self.pids, self.cpu)))


@dataclass(frozen=True, slots=True)
class Run:
    """The group of one run. `joins` are the files that the starting process writes 0 to."""

    place: Place
    groups: tuple[Path, ...]
    joins: tuple[Path, ...]

    def cpu_s(self) -> float:
        """CPU seconds used so far by all of the run, the dead included. Raises `FileNotFoundError` when gone."""
        if self.place.version == 1:
            return int(_read(self.groups[1] / "cpuacct.usage")) / 1e9
        return _field(self.groups[0] / "cpu.stat", "usage_usec") / 1e6

    def kill(self) -> None:
        """On return every process of the run was sent SIGKILL, those that it forked meanwhile included."""
        _kill(self.groups[0])

    def remove(self) -> None:
        """On return the group is gone; what still ran in it is killed."""
        for group in self.groups:
            _remove(group)


class Group:
    """The groups of one sandbox."""

    def __init__(self, place: Place, name: str) -> None:
        self.place = place
        self.memory = place.memory / name
        self.pids = place.pids / name
        self.cpu = place.cpu / name

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every directory of it once."""
        return tuple(dict.fromkeys((self.memory, self.pids, self.cpu)))

    def make(self, limits: Limits) -> None:
        """On return the groups exist and hold `limits`. Raises `FileNotFoundError` if they are removed meanwhile."""
        for path in self.paths:
            path.mkdir(exist_ok=True)
        _write(self.pids / "pids.max", str(limits.processes + OVERHEAD_PROCESSES))
        if self.place.version == 1:
            _write(self.memory / "memory.limit_in_bytes", str(limits.memory_bytes))
            swap = self.memory / "memory.memsw.limit_in_bytes"
            if swap.exists():
                _write(swap, str(limits.memory_bytes))
        else:
            _write(self.memory / "memory.max", str(limits.memory_bytes))
            swap = self.memory / "memory.swap.max"
            if swap.exists():
                _write(swap, "0")

    def run(self) -> Run:
        """A group for one more run. Raises `FileNotFoundError` when the sandbox's is gone, or just going."""
        name = f"run-{secrets.token_hex(4)}"
        groups = (self.pids / name,) if self.place.version == 2 else (self.pids / name, self.cpu / name)
        for group in groups:
            with _gone_is_absent(group):
                group.mkdir()
        joins = groups if self.place.version == 2 else (*groups, self.memory)
        return Run(self.place, groups, tuple(path / "cgroup.procs" for path in joins))

    def oom_kills(self) -> int:
        """How often the kernel killed for lack of memory in this sandbox."""
        file = "memory.oom_control" if self.place.version == 1 else "memory.events"
        return _field(self.memory / file, "oom_kill")

    def refused_forks(self) -> int:
        """How often a fork was refused in this sandbox."""
        return _field(self.pids / "pids.events", "max")

    def remove(self) -> None:
        """On return every process in it is dead and the groups are gone."""
        for path in self.paths:
            remove(path)


def remove(path: Path) -> None:
    """On return the group at `path`, and those below it, are empty and gone. One that never was is gone too."""
    try:
        below = [each for each in path.iterdir() if each.is_dir()]
    except FileNotFoundError:
        return
    for each in below:
        _remove(each)
    _remove(path)


def find(mountinfo: str, own: str) -> Place | str:
    """Where groups can be made, tried by making one and moving a process into it; or why none can.

    `mountinfo`: text of `/proc/self/mountinfo`; `own`: text of `/proc/self/cgroup`.
    """
    mounts = _mounts(mountinfo)
    groups = {
        name: path for line in own.splitlines() for _, names, path in [line.split(":", 2)] for name in names.split(",")
    }
    reasons: list[str] = []
    if "" in mounts:
        for directory in _upwards(mounts[""], groups.get("", "/")):
            place = Place(2, directory, directory, directory)
            reason = _usable_v2(directory) or _try(place)
            if reason is None:
                return place
            reasons.append(f"{directory}: {reason}")
    if all(name in mounts for name in ("memory", "pids", "cpuacct")):
        place = Place(
            1, *(next(_upwards(mounts[name], groups.get(name, "/"))) for name in ("memory", "pids", "cpuacct"))
        )
        reason = _try(place)
        if reason is None:
            return place
        reasons.append(reason)
    return "; ".join(reasons[-2:]) or "no control groups are mounted"


def _mounts(mountinfo: str) -> Mapping[str, tuple[str, Path]]:
    """For each v1 controller, and for v2 under the empty name: (the group at the mount point, the mount point)."""
    found: dict[str, tuple[str, Path]] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")
        if kind[0] == "cgroup2":
            found.setdefault("", (fields[3], Path(fields[4])))
        elif kind[0] == "cgroup" and len(kind) > 2:
            for name in kind[2].split(","):
                found.setdefault(name, (fields[3], Path(fields[4])))
    return found


def _upwards(mount: tuple[str, Path], own: str) -> Iterator[Path]:
    """The process's own group as a directory, then those above it up to the mount point."""
    root, point = mount
    inner = own[len(root) :] if own.startswith(root) else ""
    directory = point / inner.strip("/")
    if not directory.is_dir():
        directory = point
    yield directory
    while directory != point:
        directory = directory.parent
        yield directory


def _usable_v2(directory: Path) -> str | None:
    control = directory / "cgroup.subtree_control"
    try:
        needed = {"memory", "pids"} - set(control.read_text().split())
        if not needed:
            return None
        if missing := needed - set((directory / "cgroup.controllers").read_text().split()):
            return f"no {' and '.join(sorted(missing))} controller of version 2 here"
        control.write_text(" ".join(f"+{name}" for name in sorted(needed)))
    except OSError as error:
        return f"controllers cannot be switched on: {error.strerror}"
    return None


def _try(place: Place) -> str | None:
    for parent in place.parents:
        if not (parent / "cgroup.procs").exists():
            return f"{parent} is no control group"
    me = this_process()
    _sweep(place, me)
    sweep_forgotten(place)
    group = Group(place, f"{_TRIAL}{me.namespace}-{me.pid}-{me.started}-{secrets.token_hex(4)}")
    try:
        group.make(Limits())
        run = group.run()
        script = 'for f in "$@"; do echo 0 >"$f" || exit 1; done'
        done = subprocess.run(
            ["/bin/sh", "-c", script, "try", *map(str, run.joins)], env={}, capture_output=True, timeout=10, check=False
        )
        run.cpu_s()
        return None if done.returncode == 0 else done.stderr.decode("utf-8", "replace").strip()[-200:]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"{getattr(error, 'strerror', None) or error}: {getattr(error, 'filename', '')}"
    finally:
        try:
            group.remove()
        except OSError:
            pass  # not a place for groups: the reason returned says so


def _sweep(place: Place, me: ProcessId) -> None:
    """Remove trial groups of processes that were killed while they tried."""
    for parent in place.parents:
        for path in parent.glob(f"{_TRIAL}*-*-*-*"):
            namespace, pid, started, _ = path.name.removeprefix(_TRIAL).split("-")
            if namespace == str(me.namespace) and not replace(me, pid=int(pid), started=int(started)).alive():
                remove(path)


def sweep_forgotten(place: Place) -> None:
    """Remove groups of sandboxes that have been there for `FORGOTTEN_S` and hold no process.

    A group says nothing of its lease, which may stand in a directory that this process does not know: so only age and
    emptiness count. A sandbox that lives longer, and loses its group between two runs, is lost as a reaped one is.
    """
    for parent in place.parents:
        for path in parent.glob(_SANDBOX):
            try:
                if time.time() - path.stat().st_mtime > FORGOTTEN_S and not _holds_a_process(path):
                    remove(path)
            except OSError:
                continue  # removed meanwhile, or no longer ours to remove


def _holds_a_process(group: Path) -> bool:
    return any(_read(each).strip() for each in (group / "cgroup.procs", *group.glob("*/cgroup.procs")))


@contextmanager
def _gone_is_absent(file: Path) -> Iterator[None]:
    """A group that another process removes between our opening of its file and our use of it is `FileNotFoundError`, as
    one that was gone before is; the kernel says "no such device" of it."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENODEV:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file)) from error
        raise


def _read(file: Path) -> str:
    with _gone_is_absent(file):
        return file.read_text()


def _write(file: Path, text: str) -> None:
    with _gone_is_absent(file):
        file.write_text(text)


def _field(file: Path, name: str) -> int:
    for line in _read(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _kill(group: Path) -> None:
    switch = group / "cgroup.kill"
    try:
        if switch.exists():
            _write(switch, "1")
            return
        for _ in range(50):  # a fork bomb forks while we read; `remove` comes again
            pids = [int(line) for line in _read(group / "cgroup.procs").split()]
            if not pids:
                return
            for pid in pids:
                if pid > 0:  # 0: a process of a namespace that this one does not see
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
    except FileNotFoundError:
        return


def _remove(group: Path) -> None:
    """Kill and remove; a group can be removed once the kernel has let go of its last process."""
    end = time.monotonic() + _EMPTY_S
    while True:
        _kill(group)
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.002)
