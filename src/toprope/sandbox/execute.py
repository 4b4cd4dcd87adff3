"""One run of a program under watch: its output is bounded, its time is bounded, and when it is over nobody waits.

Left to others: what the program is (a sandbox's starter, or the bare program), how it is counted and how it is killed.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toprope.sandbox.spec import Aspect, Kept

WATCH_S = 0.1
"""Seconds between two looks at what a run uses. A limit that is watched can be passed by what fits into one."""

_CHUNK = 64 * 1024
_LINGER_S = 5.0
_SOFT_S = 1.0


@dataclass(frozen=True, slots=True)
class Start:
    """How a run is started: the command, its whole environment, its directory, the handles it inherits. `mark` stands
    in the environment of all that the run starts, where nothing else keeps track of it."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str = "/"
    handles: Sequence[int] = ()
    mark: str | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """`wall_s` seconds; `output_bytes` in all; `keep_bytes` of each stream are kept."""

    wall_s: float
    output_bytes: int
    keep_bytes: int


@dataclass(frozen=True, slots=True)
class Ended:
    """`status`: as a shell gives it. `killed_by`: why we killed it, or None."""

    status: int
    stdout: Kept
    stderr: Kept
    killed_by: str | None
    wall_s: float


class _Output:
    """Both streams of one run, counted together."""

    def __init__(self, bounds: Bounds, too_much: Callable[[], None]) -> None:
        self._bounds = bounds
        self._too_much = too_much
        self._all = 0

    async def read(self, stream: asyncio.StreamReader) -> Kept:
        data, total = bytearray(), 0
        while chunk := await stream.read(_CHUNK):
            total += len(chunk)
            self._all += len(chunk)
            data += chunk[: self._bounds.keep_bytes - len(data)]
            if self._all > self._bounds.output_bytes:
                self._too_much()
        return Kept(bytes(data), total)


async def execute(
    start: Start,
    bounds: Bounds,
    *,
    stdin: bytes | None,
    check: Callable[[int], str | None],
    kill: Callable[[int, bool], None],
    started: Callable[[int], None] = lambda pid: None,
    left_behind: Callable[[], None] = lambda: None,
) -> Ended:
    """Run to the end. On return, also by cancellation, the process has ended and was waited for.

    `check(pid)` is asked every `WATCH_S` and names the limit that is passed; `kill(pid, hard)` ends the run; it may be
    called again, `hard` when the first time did not help. `started(pid)` is called once, before anything else.
    `left_behind()` ends what holds the output open although the process itself has ended: asyncio does not see that
    end before.
    """
    began = time.monotonic()
    process = await _spawn(start, kill, left_behind, piped=stdin is not None)
    reason: str | None = None
    ended_at: float | None = None
    killed_at = 0.0

    def end(why: str) -> None:
        nonlocal reason, killed_at
        if process.returncode is not None:
            return
        if reason is None:
            reason, killed_at = why, time.monotonic()
        kill(process.pid, time.monotonic() - killed_at > _SOFT_S)

    output = _Output(bounds, lambda: end(Aspect.OUTPUT))
    assert process.stdout is not None
    assert process.stderr is not None
    tasks: list[asyncio.Task[Kept]] = [
        asyncio.create_task(output.read(process.stdout)),
        asyncio.create_task(output.read(process.stderr)),
    ]
    feeding = None if process.stdin is None else asyncio.create_task(_feed(process.stdin, stdin or b""))
    try:
        started(process.pid)
        waiting = asyncio.create_task(process.wait())
        while not waiting.done():
            left = began + bounds.wall_s - time.monotonic()
            if process.returncode is not None:
                ended_at = ended_at or time.monotonic()
                if time.monotonic() - ended_at > _SOFT_S:
                    left_behind()
            elif reason is not None:
                end(reason)
            elif left <= 0:
                end(Aspect.WALL_TIME)
            elif (passed := check(process.pid)) is not None:
                end(passed)
            await asyncio.wait({waiting}, timeout=WATCH_S if left <= 0 else min(WATCH_S, left))
        await asyncio.wait(tasks, timeout=_LINGER_S)
    finally:
        # Also when cancelled: a child that is not waited for stays as a zombie.
        await asyncio.shield(_finish(process, kill, left_behind, [*tasks, *([feeding] if feeding else [])]))
    stdout, stderr = (task.result() if not task.cancelled() else Kept(b"", 0) for task in tasks)
    status = process.returncode if process.returncode is not None else -signal.SIGKILL
    return Ended(status if status >= 0 else 128 - status, stdout, stderr, reason, time.monotonic() - began)


async def _spawn(
    start: Start, kill: Callable[[int, bool], None], left_behind: Callable[[], None], *, piped: bool
) -> asyncio.subprocess.Process:
    spawning = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *start.argv,
            stdin=asyncio.subprocess.PIPE if piped else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(start.env),
            cwd=start.cwd,
            pass_fds=tuple(start.handles),
            start_new_session=True,
            limit=_CHUNK,
        )
    )
    try:
        return await asyncio.shield(spawning)
    except asyncio.CancelledError:
        # The process may run before the call returns; asyncio would kill it alone, and not what it started.
        await asyncio.wait({spawning})
        if not spawning.cancelled() and spawning.exception() is None:
            process = spawning.result()
            streams = (each for each in (process.stdout, process.stderr) if each is not None)
            # Read on: asyncio sees the end of a process only when it has seen the end of its output.
            await _finish(process, kill, left_behind, [asyncio.ensure_future(_drain(each)) for each in streams])
        raise


async def _finish(
    process: asyncio.subprocess.Process,
    kill: Callable[[int, bool], None],
    left_behind: Callable[[], None],
    tasks: Sequence[asyncio.Future[Any]],
) -> None:
    waiting = asyncio.ensure_future(process.wait())
    hard = False
    while not waiting.done():
        if process.returncode is None:
            kill(process.pid, hard)
        else:
            left_behind()
        await asyncio.wait({waiting}, timeout=_SOFT_S)
        hard = True
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(_CHUNK):
        pass


async def _feed(pipe: asyncio.StreamWriter, data: bytes) -> None:
    try:
        pipe.write(data)
        await pipe.drain()
        pipe.close()
        await pipe.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        pass  # it ended, or closed its input, before it read everything
