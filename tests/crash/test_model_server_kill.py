"""The model server is killed in the middle of a call and started again; a real client retries and goes on.

Not streamed: no reply of the lost call can have left, so that the retry leaves the rollout clean; two records of one
request are a retry, told apart by what the agent ended with.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from tests.crash.scenes import STORES
from tests.crash.syscalls import ROOT

from toprope.capture.delivery import finalize_rollout_token_capture
from toprope.testing.upstream import ScriptedUpstream, UpstreamReply, UpstreamRequest, completion, serving

pytestmark = [pytest.mark.promise("CP-1"), pytest.mark.promise("CP-6")]

PROMPT = [1, 10, 11]
FIRST = [50, 2]


class Servers:
    """One model server after another at one address."""

    def __init__(self, store: str, directory: Path, upstream: str) -> None:
        self._store, self._directory, self._upstream = store, directory, upstream
        self._port = "0"
        self.process: subprocess.Popen[str] | None = None
        self.codes: list[int] = []

    async def start(self, *, dying: bool = False) -> str:
        command = [sys.executable, "-m", "tests.crash.model_process", self._store, str(self._directory)]
        told = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command += [self._upstream, self._port, *(["die"] if dying else [])]
        self.process = await asyncio.to_thread(
            subprocess.Popen, command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=told
        )
        assert self.process.stdout is not None
        url = (await asyncio.to_thread(self.process.stdout.readline)).strip()
        self._port = url.rpartition(":")[2]
        return url

    async def end(self, *, kill: bool) -> None:
        assert self.process is not None
        if kill:
            self.process.kill()
        self.codes.append(await asyncio.to_thread(self.process.wait))
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.mark.parametrize("moment", ["in the engine", "before the reply"])
@pytest.mark.parametrize("store", sorted(STORES))
async def test_a_call_over_which_the_model_server_died_is_retried_and_the_rollout_stays_clean(
    tmp_path: Path, store: str, moment: str
) -> None:
    asked: list[Any] = []

    async def die_in_the_engine() -> None:
        await servers.end(kill=True)
        await servers.start()

    def answer(request: UpstreamRequest) -> UpstreamReply:
        asked.append(request.json())
        number = len(asked)
        # What is sampled again differs, in words and in ids.
        word = {"role": "assistant", "content": f"answer {number}"}
        turn = sum(message["role"] == "user" for message in asked[-1]["messages"])
        prompt = PROMPT if turn == 1 else [*PROMPT, 100 + retried, *FIRST, 12, 13]
        generated = [100 + number, *FIRST]
        reply = completion(word, prompt_token_ids=prompt, token_ids=generated, log_probs=[-0.1] * 3)
        hold = die_in_the_engine if number == 1 and moment == "in the engine" else None
        return UpstreamReply(reply.body, reply.status, reply.headers, hold)

    retried = 2  # the call of the upstream whose answer the agent got first
    async with serving(ScriptedUpstream(answer=answer)) as upstream:
        servers = Servers(store, tmp_path, upstream)
        url = await servers.start(dying=moment == "before the reply")
        watcher = asyncio.create_task(_again_when_dead(servers)) if moment == "before the reply" else None
        base = f"{url}/ng-rollout/r/training-token-capture/v1"
        async with AsyncOpenAI(base_url=base, api_key="none", max_retries=12) as client:
            history: list[Any] = [{"role": "user", "content": "go"}]
            first = await client.chat.completions.create(model="m", messages=history)
            assert first.choices[0].message.content == f"answer {retried}"
            history += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "on"}]
            second = await client.chat.completions.create(model="m", messages=history)
        if watcher is not None:
            await watcher
        await servers.end(kill=True)
    assert servers.codes == [-9, -9]
    custody = STORES[store](tmp_path)
    text = [{"type": "output_text", "text": second.choices[0].message.content}]
    output = [{"type": "message", "role": "assistant", "content": text}]
    row = {"_ng_rollout_id": "r", "_ng_attempt_index": 0, "response": {"id": "x", "output": output}}
    delivered = await finalize_rollout_token_capture(row, custody, settle_s=0)
    await custody.close()
    assert delivered is not None
    metrics = delivered["metrics"]
    assert (metrics["mask_reasons"], metrics["incomplete_reasons"]) == ([], [])
    assert metrics["n_calls"] == (2 if moment == "in the engine" else 3)
    assert delivered["rebuilt_response"] is not None
    items = [each for each in delivered["rebuilt_response"]["output"] if "generation_token_ids" in each]
    assert [each["generation_token_ids"] for each in items] == [[100 + retried, *FIRST], [103, *FIRST]]
    assert [each["prompt_token_ids"] for each in items] == [PROMPT, [*PROMPT, 100 + retried, *FIRST, 12, 13]]


async def _again_when_dead(servers: Servers) -> None:
    await servers.end(kill=False)  # it kills itself
    await servers.start()
