"""Processes that write to a store for as long as they are told to: `python -m tests.crash.writers MODE STORE DIR NAME`.

They speak in lines: a mode begins with `ready`, goes on at each line of standard input, and ends with it.

    pace    at `go` writes eight rollouts at once until `stop`; then says what it wrote and how long a put waited
    device  the same period with one 4 KiB write and sync after another, beside the store
    visible each line `key call` is put, then said back
    race    each line of keys is put into, all at once, while somebody freezes them; says what became of each
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from tests.crash.scenes import STORES

from toprope.errors.tree import CaptureClosed
from toprope.testing.capture_suite import sample_entry

_CALLS = 20  # of one rollout
_WIDTH = 8  # rollouts at once


class Told:
    """The parent's side of one such process."""

    def __init__(self, mode: str, store: str, directory: Path, name: str) -> None:
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.writers", mode, store, str(directory), name],
            cwd=root,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(root)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


@contextmanager
def told(*wanted: tuple[str, str, Path, str]) -> Iterator[list[Told]]:
    """So many processes, all ready; on leaving they have ended, well."""
    made = [Told(*each) for each in wanted]
    try:
        assert [each.hear() for each in made] == ["ready"] * len(made)
        yield made
    except BaseException:
        for each in made:
            each.process.kill()
        raise
    finally:
        for each in made:
            each.process.communicate()
    assert [each.process.returncode for each in made] == [0] * len(made)


def _say(text: str) -> None:
    print(text, flush=True)


async def _line() -> str:
    return (await asyncio.to_thread(sys.stdin.readline)).rstrip("\n")


async def pace(store: Any, directory: Path, name: str) -> None:
    stop = threading.Event()
    acked: dict[str, int] = {}
    waits: list[float] = []

    async def rollouts(lane: int) -> None:
        number = 0
        while not stop.is_set():
            key = f"{name}-{lane}-{number}"
            prompt, parent = [1, 2, 3], None
            for n in range(_CALLS):
                more: dict[str, Any] = {"parent_decision": "resolved", "parent_call_id": parent} if parent else {}
                entry = sample_entry(key, f"c{n:02}", prompt=prompt, generated=40, **more)
                started = time.perf_counter()
                await store.begin_call(key, entry.model_call_id)
                between = time.perf_counter()
                await store.put(entry)
                waits.extend((between - started, time.perf_counter() - between))
                acked[key] = n + 1
                prompt, parent = [*prompt, *entry.generation_token_ids.tolist(), n], entry.model_call_id
                if stop.is_set():
                    return
            number += 1

    _say("ready")
    await _line()
    work = asyncio.gather(*(rollouts(lane) for lane in range(_WIDTH)))
    await _line()
    stop.set()
    await work
    _say(json.dumps({"acked": acked, "worst_s": max(waits)}))


async def device(store: Any, directory: Path, name: str) -> None:
    handle = os.open(directory / name, os.O_RDWR | os.O_CREAT)
    stop, waits = threading.Event(), [0.0]

    def work() -> None:
        while not stop.is_set():
            started = time.perf_counter()
            os.pwrite(handle, os.urandom(4096), 4096 * (len(waits) % 4096))
            os.fdatasync(handle)
            waits.append(time.perf_counter() - started)

    _say("ready")
    await _line()
    thread = asyncio.create_task(asyncio.to_thread(work))
    await _line()
    stop.set()
    await thread
    _say(json.dumps({"worst_s": max(waits), "syncs": len(waits) - 1}))


async def visible(store: Any, directory: Path, name: str) -> None:
    _say("ready")
    while line := await _line():
        key, call = line.split()
        await store.put(sample_entry(key, call))
        _say(line)


async def race(store: Any, directory: Path, name: str) -> None:
    random = Random(name)

    async def one(key: str) -> tuple[str, str]:
        for _ in range(random.randrange(60)):
            await asyncio.sleep(0)
        try:
            await store.put(sample_entry(key, "c2"))
        except CaptureClosed:
            try:
                await store.mark_incomplete(key, "c2")
            except CaptureClosed:
                return key, "late"  # delivered before the loss could be said
            return key, "marked"
        return key, "accepted"

    _say("ready")
    while line := await _line():
        keys = line.split()
        await asyncio.gather(*(store.put(sample_entry(key, "c1")) for key in keys))
        _say("put")
        await _line()
        _say(json.dumps(dict(await asyncio.gather(*map(one, keys)))))


async def main(mode: str, store: str, directory: Path, name: str) -> None:
    made = STORES[store](directory)
    await {"pace": pace, "device": device, "visible": visible, "race": race}[mode](made, directory, name)
    await made.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4]))
