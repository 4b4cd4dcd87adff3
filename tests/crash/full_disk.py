"""What a process does whose disk fills up and empties again: `python -m tests.crash.full_disk WHAT HOW STORE DIR COPY`.

HOW is `limit` (no file may grow: RLIMIT_FSIZE) or `full` (DIR is a small file system of its own, and a ballast file
takes what is left of it). At the end the directory is copied to COPY, where others can see it.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import sys
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from tests.crash.scenes import STORES, TURNS

from toprope.capture.recorder import CallEvidence, Recorder
from toprope.collector.settings import CaptureSettings, RunSettings
from toprope.testing.capture_suite import sample_entry
from toprope.testing.episodes import Run, collect_scripted, sample_calls
from toprope.tokens.sampled import SampledTokens

WORD = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "word"}]}


@contextmanager
def no_space(how: str, directory: Path) -> Iterator[None]:
    """Inside, nothing more fits."""
    if how == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (_largest(directory), resource.RLIM_INFINITY))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield
    ballast.unlink()


def _largest(directory: Path) -> int:
    return max((path.stat().st_size for path in directory.rglob("*") if path.is_file()), default=0)


def evidence(key: str, ids: int = 50) -> CallEvidence:
    tokens = SampledTokens(np.arange(ids, dtype=np.uint32), np.array([7, 8], np.uint32), np.array([-0.1, -0.2]))
    return CallEvidence(
        key=key, call_id="c1", model="m", request_items=[], output_items=[WORD], tokens=tokens, response_id=f"r-{key}"
    )


async def capture(how: str, store: str, directory: Path) -> None:
    made = STORES[store](directory)
    recorder = Recorder(made, reader=made)
    for key in ("victim", "neighbour", "kept", "shown"):
        await recorder.begin(key, "c1")
    for key in ("kept", "shown"):
        await recorder.record(evidence(key))
    kept = await made.freeze("kept")
    pair = {"snapshot_id": kept.snapshot_id, "version": kept.version}

    async def attempt(name: str, verb: Awaitable[Any]) -> None:
        try:
            await verb
            print(f"{name}: done")
        except Exception as error:
            print(f"{name}: refused: {type(error).__name__}: {error}")

    with no_space(how, directory):
        await attempt("record", recorder.record(evidence("victim", 20_000)))
        await attempt("begin", recorder.begin("refused", "c1"))
        await attempt("put", made.put(sample_entry("refused", "c1", prompt=np.arange(20_000))))
        await attempt("freeze", made.freeze("shown"))
        await attempt("drop", made.drop("kept", **pair))
        assert [e.model_call_id for e in await made.open_entries("shown")] == ["c1"]  # reading needs no space
    await recorder.record(evidence("neighbour"))
    await recorder.begin("later", "c1")
    await recorder.record(evidence("later"))
    await recorder.close()
    await made.close()


async def group(how: str, store: str, directory: Path) -> None:
    """One of ten puts that wait together is too large for what is left; the others are not."""
    made = STORES[store](directory)
    await made.put(sample_entry("first", "c1"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_largest(directory) + 300_000, resource.RLIM_INFINITY))
    puts = (made.put(sample_entry(f"k{n}", "c1", prompt=np.arange(200_000 if n == 5 else 10))) for n in range(10))
    for answer in await asyncio.gather(*puts, return_exceptions=True):
        print(type(answer).__name__)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await made.close()


async def ledger(how: str, store: str, directory: Path) -> None:
    """The disk fills up when the second of three rollouts has run."""
    writer, source = STORES[store](directory / "captures"), STORES[store](directory / "captures")
    full = no_space(how, directory)

    async def answer(run: Run) -> dict[str, Any]:
        await sample_calls(writer, run.key, TURNS)
        if run.task_id == "1":
            await source.freeze(run.key)  # so that what fails first is the row
            full.__enter__()
        return run.result(0.5, note="word " * (200_000 if run.task_id == "1" else 1))

    try:
        await collect_scripted(
            directory,
            answer,
            [{"responses_create_params": {"input": str(n)}} for n in range(3)],
            source=source,
            selected=True,
            settings=RunSettings(run_id="run", concurrency=1),
            capture=CaptureSettings(enabled=True, settle_s=0.0),
        )
    except Exception as error:
        print(f"the run ended: {type(error).__name__}: {error}")
    full.__exit__(None, None, None)
    await source.close()
    await writer.close()


if __name__ == "__main__":
    what, how, store, directory, copy = sys.argv[1:]
    asyncio.run({"capture": capture, "group": group, "ledger": ledger}[what](how, store, Path(directory)))
    shutil.copytree(directory, copy)
    os._exit(0)
