"""Take finished rollouts out of a capture store, as rows for a trainer.

    python take_tokens.py served rows.jsonl minutes-1=1.0 minutes-2=0.5

Each rollout is named by its key, with the reward that you give it. The order of the steps is what makes a crash
harmless: build, write the row, sync it, and only then let go of the evidence.
"""

import asyncio
import json
import math
import os
import sys
from typing import BinaryIO

import toprope


async def take(directory: str, out: str, rewards: dict[str, float]) -> None:
    async with toprope.open_store(directory) as store:
        known = {info.rollout_id for info in await store.list_captures(retired=True)}
        for key, reward in rewards.items():
            if key not in known:  # to freeze a key that nobody used would close it for good
                print(f"no capture: {key!r}; `toprope capture ls {directory}` lists the keys", file=sys.stderr)
                continue
            # What you know of the rollout. Add what you like; only these keys are read.
            row = {"_ng_rollout_id": key, "reward": reward, "response": {"output": []}}
            built = await toprope.finalize_rollout_token_capture(row, store, format="trace")
            if built["mask_sample"]:
                print(f"not for training: {built['error']}", file=sys.stderr)
                continue
            row |= {"response": built["rebuilt_response"], "_ng_token_capture": built["metrics"]}
            append(out, row)
            await toprope.retire_rollout_token_capture(key, store, built)
            show(key, row)


def append(out: str, row: dict) -> None:
    """The row is on the disk when this returns, on a line of its own."""
    with open(out, "a+b") as file:
        end_last_line(file)
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    directory = os.open(os.path.dirname(os.path.abspath(out)), os.O_RDONLY)
    try:
        os.fsync(directory)  # a new file's name is on the disk only with its directory
    finally:
        os.close(directory)


def end_last_line(file: BinaryIO) -> None:
    """Cut off a row that a crash left half written. Its evidence was not let go of: it comes out again when asked."""
    at, rest = file.seek(0, os.SEEK_END), b""
    while at > 0 and b"\n" not in rest:
        size = min(at, 65536)
        at -= size
        file.seek(at)
        rest = file.read(size) + rest
    torn = rest.rpartition(b"\n")[2]
    if torn:
        try:
            json.loads(torn)
            file.write(b"\n")  # it is whole, only its end is missing
        except ValueError:
            file.truncate(file.seek(0, os.SEEK_END) - len(torn))


def show(key: str, row: dict) -> None:
    (trace,) = row["response"]["_ng_traces"]
    ids, mask, logprobs = trace["token_ids"], trace["loss_mask"], trace["logprobs"]
    print(f"{key}: {len(trace['call_ids'])} calls, {len(ids)} tokens, {sum(mask)} to train")
    print("  ids      ", *ids)
    print("  loss mask", *mask)
    print("  logprobs ", *logprobs)


def reward_of(argument: str) -> tuple[str, float]:
    key, _, reward = argument.rpartition("=")
    try:
        value = float(reward)
    except ValueError:
        value = math.nan
    if not key or not math.isfinite(value):
        sys.exit(f"{argument!r} is not KEY=REWARD with a finite number\n\n{__doc__}")
    return key, value


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    asyncio.run(take(sys.argv[1], sys.argv[2], dict(map(reward_of, sys.argv[3:]))))
