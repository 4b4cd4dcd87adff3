"""What a process asked of the kernel, as strace saw it: which bytes were on the device when a line was printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.parts import needs, not_here

ROOT = Path(__file__).parents[2]
_WRITES = {"pwrite64", "write", "writev", "ftruncate"}
_SYNCS = {"fsync", "fdatasync"}
WATCHED = ("pwrite64", "write", "writev", "ftruncate", "fsync", "fdatasync", "openat", "rename", "unlink")
_LINE = re.compile(r"^(?P<pid>\d+)\s+(?P<name>\w+)\((?P<rest>.*)$")
_RESUMED = re.compile(r"^(?P<pid>\d+)\s+<\.\.\. (?P<name>\w+) resumed>(?P<rest>.*)$")
_RESULT = re.compile(r"= (?P<value>-?\d+)\S*( .*)?$")
_PLACE = re.compile(r"^-?\d+<(?P<path>[^>]*)>")
_NAMES = re.compile(r'"(?P<path>[^"]*)"')

needs_strace = needs("strace")


@dataclass(frozen=True)
class Call:
    """One system call: seen when it began (`done` False) and when it returned successfully (`done` True)."""

    pid: int
    name: str
    rest: str
    done: bool

    @property
    def path(self) -> str:
        """The file that a descriptor argument stands for, or the first path argument."""
        found = _PLACE.match(self.rest) or _NAMES.search(self.rest)
        return found["path"] if found else ""


def parse(trace: str) -> list[Call]:
    """The calls of a trace of several threads, beginnings and successful ends in their true order."""
    calls: list[Call] = []
    begun: dict[int, str] = {}
    for line in trace.splitlines():
        if (found := _LINE.match(line)) is not None:
            pid, name, rest = int(found["pid"]), found["name"], found["rest"]
            calls.append(Call(pid, name, rest, done=False))
            if "<unfinished ...>" in rest:
                begun[pid] = rest
                continue
            result = _RESULT.search(rest)
        elif (found := _RESUMED.match(line)) is not None:
            pid, name, result = int(found["pid"]), found["name"], _RESULT.search(found["rest"])
            rest = begun.pop(pid, "")
        else:
            continue
        if result is not None and int(result["value"]) >= 0:
            calls.append(Call(pid, name, rest, done=True))
    return calls


def unsynced(calls: Sequence[Call], directory: Path, marker: str = '"ack') -> tuple[int, list[str]]:
    """How many acknowledgements (writes to standard output with `marker`) there are, and what was not safe at each.

    A sync makes safe what was written before it began, once it has returned. A new or renamed file is safe when its
    directory was synced after. Locks and shared memory hold nothing that must survive.
    """
    acks, breaches = 0, []
    written: dict[str, int] = {}
    named: dict[str, tuple[str, int]] = {}
    syncing: dict[tuple[int, str], int] = {}
    synced: defaultdict[str, int] = defaultdict(int)
    for clock, call in enumerate(calls, 1):
        path = call.path
        if call.name in _WRITES and not call.done:
            if _holds(directory, path):
                written[path] = clock
            elif call.name == "write" and marker in call.rest:
                acks += 1
                breaches += [f"ack {acks}: bytes of {each}" for each, at in written.items() if synced[each] < at]
                breaches += [f"ack {acks}: name of {each}" for each, (up, at) in named.items() if synced[up] < at]
        elif call.name in _SYNCS:
            if call.done:
                synced[path] = max(synced[path], syncing.pop((call.pid, path)))
            else:
                syncing[call.pid, path] = clock
        elif call.name == "unlink" and call.done:
            written.pop(path, None)
            named.pop(path, None)
        elif call.name == "rename" and call.done:
            old, new = (found["path"] for found in _NAMES.finditer(call.rest))
            named.pop(old, None)
            named[new] = os.path.dirname(new), clock
            if old in written:
                written[new] = written.pop(old)
                synced[new] = synced[old]
        elif call.name == "openat" and call.done and "O_CREAT" in call.rest:
            path = next(_NAMES.finditer(call.rest))["path"]
            known = path in written or path in named
            if _holds(directory, path) and not known:
                named[path] = os.path.dirname(path), clock
    return acks, breaches


def _holds(directory: Path, path: str) -> bool:
    """Whether `path` is a file of the directory whose bytes must survive: no lock, no shared memory."""
    scaffold = path.endswith(("-shm", ".lock", ".turn")) or os.path.dirname(path).endswith(".writers")
    return path.startswith(f"{directory}/") and not scaffold


def traced(trace: Path, program: Sequence[str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program under strace, with every watched call in `trace`. Needs the permission to trace."""
    told = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    calls = ["-e", "trace=" + ",".join(WATCHED)]
    command = ["strace", "-f", "-y", "-s", "24", "-o", str(trace), *calls, *options, sys.executable, *program]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=told, check=False)
    if "ptrace" in ran.stderr and ran.returncode > 0:
        not_here("tracing is not permitted here")
    return ran
