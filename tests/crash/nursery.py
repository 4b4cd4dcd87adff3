"""Processes that are killed with SIGKILL at a step of their own choosing, and cheap enough to kill a thousand of them.

One process has everything imported and forks a victim for each scene. In a victim, every call that changes a file is a
point: SQLite's writing statements, and the operating system's write, sync, truncate, rename, unlink and mkdir. The
points are found, not named by the product, so that a step which somebody adds to a store is killed without being told.
A victim reports each point before it dies there; what it says otherwise are its acknowledgements.

Scenes are async functions `scene(directory, points, **told)` in `tests.crash.scenes`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WRITING = ("BEGIN", "SAVEPOINT", "INSERT", "UPDATE", "DELETE", "RELEASE", "COMMIT", "ROLLBACK", "PRAGMA JOURNAL_MODE")
_CALLS = ("write", "pwrite", "fsync", "fdatasync", "truncate", "ftruncate", "replace", "rename", "unlink", "mkdir")
_SCRAP = re.compile(r"^\..*[.-][0-9a-f]{12,16}(\.tmp)?$")  # random names of files that are about to replace another
_write, _readlink = os.write, os.readlink


@dataclass(frozen=True)
class Fate:
    """How a victim ended: its return code (-9: killed), the points it reached, what it said, its traceback."""

    code: int
    points: list[str]
    said: list[str]
    error: str


class Points:
    """Inside a victim. Nothing counts before `arm`; the point number `kill_at` (from 1) is the last thing it does."""

    def __init__(self, out: int, kill_at: int | None) -> None:
        self._out, self._kill_at, self._count, self._armed = out, kill_at, 0, False

    def arm(self) -> None:
        self._armed = True

    def reached(self, label: str) -> None:
        if not self._armed:
            return
        self._count += 1
        self._tell("point", label)
        if self._count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def say(self, text: str) -> None:
        self._tell("said", text)

    def _tell(self, kind: str, text: str) -> None:
        _write(self._out, json.dumps([kind, text]).encode() + b"\n")

    def install(self) -> None:
        """Make points of everything in this process that changes a file."""
        reached = self.reached

        class Connection(sqlite3.Connection):
            def _told(self, verb: str, sql: str, *args: Any) -> Any:
                words = " ".join(sql.split()[:3]).rstrip(";")
                writes = words.upper().startswith(_WRITING)
                if writes:
                    reached(words)
                answer = getattr(super(), verb)(sql, *args)
                if words == "COMMIT":
                    reached("after COMMIT")
                return answer

            def execute(self, sql: str, *args: Any) -> Any:
                return self._told("execute", sql, *args)

            def executemany(self, sql: str, *args: Any) -> Any:
                return self._told("executemany", sql, *args)

            def executescript(self, sql: str) -> Any:
                return self._told("executescript", sql)

            def close(self) -> None:
                reached("close")
                super().close()
                reached("after close")

        connect = sqlite3.connect
        sqlite3.connect = lambda *args, **told: connect(*args, factory=Connection, **told)  # type: ignore[assignment]
        for name in _CALLS:
            setattr(os, name, _pointed(getattr(os, name), name, reached))


def _pointed(call: Callable[..., Any], name: str, reached: Callable[[str], None]) -> Callable[..., Any]:
    def told(first: Any, *args: Any, **more: Any) -> Any:
        where = _readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else os.fspath(first)
        if not where.startswith("/"):
            return call(first, *args, **more)  # a pipe or a socket
        if not (name == "mkdir" and os.path.isdir(where)):
            reached(f"{name} {_SCRAP.sub('scrap', os.path.basename(where))}")
        return call(first, *args, **more)  # a kill after it is a kill before the next

    return told


class Nursery:
    """The parent's side: `run` starts a victim and waits for its end."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        told = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(root)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.nursery"],
            cwd=root,
            env=told,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, scene: str, directory: Path, *, kill_at: int | None = None, **told: Any) -> Fate:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        json.dump({"scene": scene, "directory": str(directory), "kill_at": kill_at, "told": told}, self._process.stdin)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Fate(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


@contextmanager
def nursery() -> Iterator[Nursery]:
    """A nursery for as long as the `with` statement."""
    made = Nursery()
    try:
        yield made
    finally:
        made.close()


def _raise_one(order: dict[str, Any]) -> Fate:
    """Fork a victim, let it play its scene, and collect what it left."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        _live(order, theirs)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        lines = [json.loads(line) for line in pipe]
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found: dict[str, list[str]] = {"point": [], "said": [], "error": []}
    for kind, text in lines:
        found[kind].append(text)
    return Fate(code, found["point"], found["said"], "".join(found["error"]))


def _live(order: dict[str, Any], out: int) -> None:
    points = Points(out, order["kill_at"])
    code = 1
    try:
        points.install()
        scene = getattr(importlib.import_module("tests.crash.scenes"), order["scene"])
        asyncio.run(scene(Path(order["directory"]), points, **order["told"]))
        code = 0
    except BaseException:
        points._tell("error", traceback.format_exc())
    finally:
        os._exit(code)


def main() -> None:
    importlib.import_module("tests.crash.scenes")
    for line in sys.stdin:
        fate = _raise_one(json.loads(line))
        print(json.dumps(fate.__dict__), flush=True)


if __name__ == "__main__":
    main()
