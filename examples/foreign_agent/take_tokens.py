"""Take finished rollouts out of a capture store, as rows for a trainer.

    python take_tokens.py served rows.jsonl minutes-1=1.0 minutes-2=0.5

Each rollout is named by its key, with the reward that you give it. The order of the steps is what makes a crash
harmless: build, write the row, sync it, and only then let go of the evidence.
"""

import asyncio
import json
import os
import sys

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
    """The row is on the disk when this returns."""
    with open(out, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def show(key: str, row: dict) -> None:
    (trace,) = row["response"]["_ng_traces"]
    ids, mask, logprobs = trace["token_ids"], trace["loss_mask"], trace["logprobs"]
    print(f"{key}: {len(trace['call_ids'])} calls, {len(ids)} tokens, {sum(mask)} to train")
    print("  ids      ", *ids)
    print("  loss mask", *mask)
    print("  logprobs ", *logprobs)


if __name__ == "__main__":
    if len(sys.argv) < 4 or not all("=" in argument for argument in sys.argv[3:]):
        sys.exit(__doc__)
    given = [argument.rpartition("=") for argument in sys.argv[3:]]
    asyncio.run(take(sys.argv[1], sys.argv[2], {key: float(reward) for key, _, reward in given}))
