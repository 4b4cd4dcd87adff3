"""PF-11: tokens per second of the embedded engine, end to end, for 1, 8 and 16 sequences at once.

Every request has a prompt of about 60 tokens that no other shares beyond the system line, and asks for 32 tokens; a run
ends when all have come. Baseline: the NumPy backend in the same process and run, one thread.
"""

from __future__ import annotations

# The baseline's threads; NumPy reads this when it is imported.
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import asyncio
import sys
import time
from typing import Literal

from bench.figures import Figure
from toprope.servers.model.engines.base import EngineRequest
from toprope.servers.model.engines.embedded.engine import EmbeddedEngine
from toprope.wire.responses import ResponsesRequest

NEW = 32
BOUNDS = {1: (25.0, 39.0), 8: (80.0, 148.0), 16: (100.0, 182.0)}
"""Must and aim, tokens/s."""
RUNS = 3


def request(number: int) -> EngineRequest:
    text = (
        f"{number} is the number of this question, and a long answer is wanted: why is the sea salt, and the rain not?"
    )
    item = {"type": "message", "role": "user", "content": text}
    return EngineRequest(ResponsesRequest((item,), max_output_tokens=NEW, seed=number), f"bench-{number}")


async def rate(engine: EmbeddedEngine, sequences: int, first: int) -> float:
    """Generated tokens per second, all requests sent at once."""
    start = time.perf_counter()
    replies = await asyncio.gather(*[engine.generate(request(first + n)) for n in range(sequences)])
    took = time.perf_counter() - start
    return sum(reply.usage.output_tokens or 0 for reply in replies) / took


async def measure(backend: Literal["onnxruntime", "numpy"], threads: int, runs: int) -> dict[int, float]:
    """The best of `runs` for each number of sequences: on a shared machine the others are noise."""
    engine = EmbeddedEngine(backend=backend, threads=threads, context=512)
    await engine.start()
    try:
        await rate(engine, 1, 10_000)
        return {
            count: max([await rate(engine, count, 1000 * run + 100 * count) for run in range(runs)]) for count in BOUNDS
        }
    finally:
        await engine.close()


def main() -> None:
    baseline = asyncio.run(measure("numpy", 1, 1))
    for threads in (1, 2):
        found = asyncio.run(measure("onnxruntime", threads, RUNS))
        print(f"ONNX Runtime, {threads} thread{'s' * (threads > 1)}", file=sys.stderr)
        for count, (must, aim) in BOUNDS.items():
            plural = "s" if count > 1 else ""
            work = f"embedded, {count} sequence{plural}, {threads} thread{'s' if threads > 1 else ''}"
            Figure("PF-11", work, round(found[count], 1), "tokens/s", baseline[count], "NumPy", must, aim).emit()
            print(
                f"  {count:2} sequence{plural:1}  {found[count]:6.1f} tokens/s  must {must:g}, aim {aim:g}"
                f"  {found[count] / baseline[count]:.2f} x NumPy",
                file=sys.stderr,
            )


if __name__ == "__main__":
    main()
