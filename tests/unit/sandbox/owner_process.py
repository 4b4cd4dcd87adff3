"""An owner in a process of its own: makes a sandbox, prints how to borrow it, runs a program in it until it is killed.

Run as `python owner_process.py LEASES MARKER`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from toprope.sandbox.bubblewrap import Bubblewrap
from toprope.sandbox.spec import MIB, Limits, SandboxSpec


async def main(leases: Path, marker: str) -> None:
    limits = Limits(memory_bytes=96 * MIB, processes=24)
    sandbox = await Bubblewrap(leases).create(SandboxSpec(limits=limits, lease_s=300))
    run = asyncio.ensure_future(sandbox.run(["sh", "-c", f"echo > began; sleep 1000 & sleep 1000 # {marker}"]))
    while True:
        try:
            await sandbox.read_file("began")
            break
        except FileNotFoundError:
            assert not run.done(), run.result()
    print(json.dumps({"id": sandbox.sandbox_id, **sandbox.access().connection.descriptor}), flush=True)
    await run


asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
