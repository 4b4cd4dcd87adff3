"""The model server is killed at twenty points of a turn and started again; its client sends the request once more.

Whatever the point: one recorded call a turn. What was durable is never sampled again, what was not is; and the rollout
trains, since a retry vouches for a turn that was thrown away.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.crash.model_process import PHASES
from tests.crash.scenes import STORES
from tests.crash.syscalls import ROOT
from tests.unit.model.wire import RawCall

from toprope.capture.delivery import finalize_rollout_token_capture
from toprope.testing.upstream import ScriptedUpstream, UpstreamReply, UpstreamRequest, completion, serving

pytestmark = [pytest.mark.promise("MS-4"), pytest.mark.promise("CP-1"), pytest.mark.promise("CP-6")]

POINTS = 20
PATH = "/ng-rollout/r/training-token-capture/v1/chat/completions"


class Stable:
    """The parent's side of a process that forks servers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, **told: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told).encode() + b"\n")
        return await self.hear()

    async def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return found


@asynccontextmanager
async def stable() -> AsyncIterator[Stable]:
    told = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.crash.model_process",
        cwd=ROOT,
        env=told,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        limit=1 << 22,  # all points of a call are one line
    )
    try:
        yield Stable(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


class Samples:
    """An upstream whose every answer differs, in words and in ids; each prompt holds what was said before."""

    def __init__(self) -> None:
        self.asked: list[list[Any]] = []

    def __call__(self, request: UpstreamRequest) -> UpstreamReply:
        messages = request.json()["messages"]
        self.asked.append(messages)
        prompt: list[int] = []
        for message in messages:
            mine = message["role"] == "assistant"
            prompt += [*ids_of(int(message["content"].split()[1]))] if mine else [1, 10, 11]
        number = len(self.asked)
        word = {"role": "assistant", "content": f"answer {number}"}
        return completion(word, prompt_token_ids=prompt, token_ids=ids_of(number), log_probs=[-0.1] * 3)


def ids_of(number: int) -> list[int]:
    return [100 + number, 50, 2]


async def send(port: int, data: bytes, count: int, key: str | None = None) -> RawCall:
    """One request of a client library, its `count`-th retry; with a `key` of its own it does not count."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    mark = f"x-stainless-retry-count: {count}" if key is None else f"idempotency-key: {key}"
    writer.write(f"{head}{mark}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    return RawCall(reader, writer)


async def ask(port: int, messages: list[Any], stream: bool, risen: asyncio.Future[Any]) -> str:
    """The text of a reply that came whole, asked for again and again, each time marked as the next retry."""
    data = json.dumps({"model": "m", "messages": messages, "stream": stream}).encode()
    for count in range(5):
        try:
            call = await send(port, data, count)
            body = (await call.end()).decode()
            call.close()
        except (EOFError, ConnectionError):
            await risen
            continue
        assert call.status == 200, body
        if not stream:
            return str(json.loads(body)["choices"][0]["message"]["content"])
        chunks = [json.loads(line[6:]) for line in body.split("\n") if line.startswith("data: {")]
        return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    raise AssertionError("five servers died")


async def two_turns(
    servers: Stable, directory: Path, stream: bool, turn: int, kill_at: int
) -> tuple[Samples, list[str], str]:
    """Two turns with a server that dies at a point of one; what was sampled, what the client read, and the point."""
    samples, said = Samples(), []
    deaths: list[str] = []
    async with serving(ScriptedUpstream(answer=samples)) as upstream:
        told = {"directory": str(directory), "upstream": upstream}
        first = await servers.ask(**told, port=0, turn=turn, kill_at=kill_at)
        port = int(first["url"].rpartition(":")[2])

        async def again() -> Any:
            deaths.append((await servers.hear())["died"])
            assert await servers.ask(wait=first["pid"]) == {"code": -9}
            return await servers.ask(**told, port=port, kill_at=0)

        risen = asyncio.create_task(again())
        messages: list[Any] = [{"role": "user", "content": "go"}]
        for _ in range(2):
            said.append(await ask(port, messages, stream, risen))
            messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": "on"}]
        second = await risen
        os.kill(second["pid"], 9)
        await servers.ask(wait=second["pid"])
    return samples, said, deaths[0]


@pytest.mark.parametrize("turn", [1, 2], ids=["first turn", "second turn"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_a_server_killed_at_any_of_twenty_points_leaves_one_recorded_call_a_turn(
    tmp_path: Path, stream: bool, turn: int, say: Callable[[str], None]
) -> None:
    outcomes, phases = set(), Counter[str]()
    async with stable() as servers:
        points = await _points(servers, tmp_path, stream, turn)
        for number, kill_at in enumerate(_chosen(points)):
            directory = tmp_path / str(number)
            samples, said, died = await two_turns(servers, directory, stream, turn, kill_at)
            store = STORES["sqlite"](directory)
            kept = [entry.generation_token_ids.tolist() for entry in await store.open_entries("r")]
            output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said[-1]}]}]
            row = {"_ng_rollout_id": "r", "_ng_attempt_index": 0, "response": {"id": "x", "output": output}}
            delivered = await finalize_rollout_token_capture(row, store, settle_s=0)
            await store.close()
            assert delivered is not None
            # The last sample of a turn is the one that the client read, and the only one on record.
            turns = [len(messages) for messages in samples.asked]
            last = [max(at for at, size in enumerate(turns, 1) if size == turn) for turn in (1, 3)]
            where = (died, turns, said, delivered["metrics"])
            assert said == [f"answer {each}" for each in last], where
            assert kept == [ids_of(each) for each in last], where
            assert delivered["metrics"]["mask_reasons"] == [], where
            assert delivered["rebuilt_response"] is not None, where
            assert turns.count((3, 1)[turn - 1]) == 1, where  # the other turn was never in danger
            outcomes.add(turns.count((1, 3)[turn - 1]))
            phases[died.partition(" ")[0]] += 1
    assert outcomes == {1, 2}  # some died before the record and some after it
    # By name: what the upstream had finished and nobody had begun to write down was killed too.
    assert phases.keys() == {"read", *PHASES.values()}
    assert phases.total() == POINTS
    told = ", ".join(f"{count} {phase}" for phase, count in sorted(phases.items()))
    say(f"model server killed at points of turn {turn}, {'streamed' if stream else 'plain'}: {told}")


def _chosen(points: list[str]) -> list[int]:
    """The points to die at, counted from 1: two inside each phase, the others at even distances over the whole call."""
    assert len(points) > 10 * POINTS
    chosen: set[int] = set()
    for phase in ("read", *PHASES.values()):
        inside = [at for at, point in enumerate(points, 1) if point.startswith(f"{phase} ")]
        chosen |= {inside[len(inside) // 3], inside[2 * len(inside) // 3]}
    step = 1
    while len(chosen) < POINTS:
        chosen.add(1 + step * 7919 % len(points))
        step += 1
    return sorted(chosen)


async def _points(servers: Stable, folder: Path, stream: bool, turn: int) -> list[str]:
    """The points that a call has of a server that nobody kills."""
    async with serving(ScriptedUpstream(answer=Samples())) as upstream:
        made = await servers.ask(directory=str(folder / "count"), upstream=upstream, port=0, turn=turn, kill_at=None)
        risen: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        messages: list[Any] = [{"role": "user", "content": "go"}]
        for _ in range(turn):
            text = await ask(int(made["url"].rpartition(":")[2]), messages, stream, risen)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "on"}]
        points: list[str] = (await servers.hear())["points"]
        os.kill(made["pid"], 9)
        await servers.ask(wait=made["pid"])
    return points


@pytest.mark.parametrize("fate", ["it ends", "it dies"])
async def test_a_retry_at_another_worker_waits_for_the_first_one_or_learns_of_its_death(
    tmp_path: Path, fate: str
) -> None:
    asked, go = asyncio.Event(), asyncio.Event()
    samples = Samples()

    def answer(request: UpstreamRequest) -> UpstreamReply:
        reply = samples(request)
        asked.set()
        return reply if len(samples.asked) > 1 else UpstreamReply(reply.body, before=go.wait)

    data = json.dumps({"model": "m", "messages": [{"role": "user", "content": "go"}]}).encode()
    async with stable() as servers, serving(ScriptedUpstream(answer=answer)) as upstream:
        told = {"directory": str(tmp_path), "upstream": upstream, "port": 0, "kill_at": 0}
        workers = [await servers.ask(**told) for _ in range(2)]
        one, two = (int(worker["url"].rpartition(":")[2]) for worker in workers)
        first = await send(one, data, 0)
        await asked.wait()
        first.leave()
        again = await send(two, data, 1)
        store = STORES["sqlite"](tmp_path)
        async with asyncio.timeout(20):
            while len(await store.begun_calls("r")) < 2:  # noqa: ASYNC110 - the journal is all there is to wait for
                await asyncio.sleep(0.005)
        if fate == "it dies":
            os.kill(workers[0]["pid"], 9)
        go.set()
        reply = json.loads(await again.end())["choices"][0]["message"]["content"]
        for worker in workers[fate == "it dies" :]:
            os.kill(worker["pid"], 9)
        for worker in workers:
            await servers.ask(wait=worker["pid"])
        kept = [entry.generation_token_ids.tolist() for entry in await store.open_entries("r")]
        snapshot = await store.freeze("r")
        await store.close()
    number = 1 if fate == "it ends" else 2
    assert (reply, kept) == (f"answer {number}", [ids_of(number)])
    assert len(samples.asked) == number
    assert not snapshot.incomplete


@pytest.mark.parametrize("key", ["k", None], ids=["keyed", "marked"])
@pytest.mark.parametrize("deaths", [1, 2])
async def test_repeats_that_died_while_they_waited_take_no_answer_away(
    tmp_path: Path, key: str | None, deaths: int
) -> None:
    asked, go = asyncio.Event(), asyncio.Event()
    samples = Samples()

    def answer(request: UpstreamRequest) -> UpstreamReply:
        reply = samples(request)
        asked.set()
        return reply if len(samples.asked) > 1 else UpstreamReply(reply.body, before=go.wait)

    data = json.dumps({"model": "m", "messages": [{"role": "user", "content": "go"}]}).encode()
    store = STORES["sqlite"](tmp_path)

    async def begun(number: int, recorded: bool = False) -> None:
        async with asyncio.timeout(20):
            while True:  # the journal is all there is to wait for
                calls = await store.begun_calls("r")
                if len(calls) >= number and calls[0].recorded >= recorded:
                    return
                await asyncio.sleep(0.005)

    async with stable() as servers, serving(ScriptedUpstream(answer=answer)) as upstream:
        told = {"directory": str(tmp_path), "upstream": upstream, "port": 0, "kill_at": 0}
        first = await servers.ask(**told)
        port = int(first["url"].rpartition(":")[2])
        left = await send(port, data, 0, key)
        await asked.wait()
        left.leave()
        for number in range(1, deaths + 1):
            other = await servers.ask(**told)
            waiting = await send(int(other["url"].rpartition(":")[2]), data, number, key)
            await begun(number + 1)
            os.kill(other["pid"], 9)
            await servers.ask(wait=other["pid"])
            waiting.close()
        go.set()
        await begun(deaths + 1, recorded=True)
        reply = json.loads(await (await send(port, data, deaths + 1, key)).end())["choices"][0]["message"]["content"]
        os.kill(first["pid"], 9)
        await servers.ask(wait=first["pid"])
    kept = [entry.generation_token_ids.tolist() for entry in await store.open_entries("r")]
    await store.close()
    assert (reply, kept, len(samples.asked)) == ("answer 1", [ids_of(1)], 1)
