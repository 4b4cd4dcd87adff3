"""What a model server refuses in mid-episode: a spent budget leaves a row to train on, a stale rollout a failure."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from toprope import ModelServer
from toprope.capture.sqlite_store import SqliteStore
from toprope.collector.audit import audit
from toprope.launch.config import read_configuration
from toprope.launch.run import RunJob
from toprope.results.layout import RunDir

SCRIPT = [
    {"calls": [{"name": "balance", "arguments": '{"account": "ann"}'}]},
    {"calls": [{"name": "balance", "arguments": '{"account": "bob"}'}]},
    {"text": "done"},
]
PROGRAM = """
import json, os, sys, urllib.error, urllib.request
def ask(text):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as reply:
        return json.load(reply)
ask("one")
try:
    ask("two")
except urllib.error.HTTPError as error:
    if "stubborn" not in sys.argv:
        raise
print("I am done")
"""
"""A program that is refused its second call: it dies of that, or makes light of it."""


class Watched(ModelServer):
    """Its first answer of a rollout makes a trainer give that rollout up."""

    async def after_call(self, call: Any, reply: Any) -> None:
        if call.rollout_id not in Trainer.told:
            Trainer.told.append(call.rollout_id)
            await Trainer.abort(call.rollout_id)


class Trainer:
    """Reaches the model server from outside, over its socket."""

    told: list[str] = []  # noqa: RUF012 (what one test collects)
    url = ""

    @classmethod
    async def abort(cls, key: str) -> None:
        headers = {"x-toprope-admin-key": "trainer"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{cls.url}/admin/abort", json={"rollouts": [key]}, headers=headers) as reply,
        ):
            assert reply.status == 200, await reply.text()


@asynccontextmanager
async def stranger(status: int) -> AsyncIterator[str]:
    """An agent of others: two model calls, then an answer or an error."""

    async def solve(request: web.Request) -> web.Response:
        body = await request.json()
        headers = {"authorization": f"Bearer {body['api_key']}"}
        seen = []
        async with aiohttp.ClientSession() as session:
            for text in ("one", "two"):
                message = {"model": body["model"], "messages": [{"role": "user", "content": text}]}
                url = f"{body['base_url']}/chat/completions"
                async with session.post(url, json=message, headers=headers) as reply:
                    seen.append(reply.status)
        assert seen == [200, 403]
        return web.json_response({"answer": "I am done"} if status == 200 else {"error": "dead"}, status=status)

    app = web.Application()
    app.router.add_post("/solve", solve)
    runner = web.AppRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/solve"
    finally:
        await runner.cleanup()


def configuration(place: Path, agent: dict[str, Any], **policy: Any) -> dict[str, Any]:
    """Every server on a socket of its own."""
    engine = {"kind": "scripted", "script": SCRIPT}
    boxes = {"box": {"kind": "directory", "leases": str(place / "leases")}} if agent["use"] == "command" else {}
    return {
        "sandboxes": boxes,
        "servers": {
            "policy": {"role": "model", "port": 0, "engine": engine, **policy},
            "books": {"role": "resources", "port": 0, "use": "ledger"},
            "clerk": {"role": "agent", "port": 0, "model": "policy", "token_id_capture": True, **agent},
            "episode": {
                "role": "environment",
                "port": 0,
                "resources": "books",
                "agent": "clerk",
                "tools": ["direct_http"],
            },
        },
        "run": {
            "environment": "episode",
            "tasks": {"generate": "books", "size": 1, "seed": 5},
            "out": str(place / "out"),
            "max_attempts": 3,
        },
        "token_id_capture": {"enabled": True},
    }


async def collect(place: Path, values: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The result rows and the failure rows."""
    Trainer.told = []
    job = RunJob(read_configuration(values, file="test.yaml", directory=place))

    def ready(_: Any, world: Any) -> None:
        Trainer.url = world.addresses["policy"].url
        assert Trainer.url.startswith("http://127.0.0.1:")

    async with job.client:
        await job.collect(ready=ready)
    run_dir = RunDir(place / "out")
    results, failures = (
        [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
        for path in (run_dir.results, run_dir.failures)
    )
    return results, failures


async def test_a_spent_budget_ends_a_tool_loop_with_a_row_to_train_on(tmp_path: Path) -> None:
    values = configuration(tmp_path, {"use": "tool_loop"}, limits={"calls": 2})
    (row,), failures = await collect(tmp_path, values)
    assert failures == []
    assert (row["response"]["status"], row["mask_sample"]) == ("incomplete", False)
    assert row["response"]["incomplete_details"] == {"reason": "limit_reached"}
    assert row["_ng_token_capture"]["truncated"] is True
    assert (row["_ng_token_capture"]["n_calls"], row["_ng_token_capture"]["mask_reasons"]) == (2, [])
    assert sum("generation_token_ids" in item for item in row["response"]["output"]) == 2
    report = await audit(RunDir(tmp_path / "out"), None)
    assert report.ok, report.breaches


@pytest.mark.parametrize(
    "agent", ["tool_loop", "stubborn program", "dying program", "stubborn stranger", "dead stranger"]
)
async def test_a_rollout_that_its_trainer_gave_up_is_a_stale_failure_whatever_the_agent_makes_of_it(
    tmp_path: Path, agent: str
) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    async with stranger(500 if "dead" in agent else 200) as url:
        argv = [sys.executable, "agent.py", agent.split()[0]]
        program = {"argv": argv, "stdin": "{prompt}", "copy": {"agent.py": "agent.py"}}
        chosen: dict[str, Any] = {"use": "remote", "config": {"url": url}}
        if agent == "tool_loop":
            chosen = {"use": "tool_loop"}
        elif "program" in agent:
            chosen = {"use": "command", "sandbox": "box", "config": program}
        values = configuration(tmp_path, chosen, use=f"{__name__}:Watched", admin_key="trainer")
        results, failures = await collect(tmp_path, values)
    assert results == []
    (failure,) = failures  # one: it is not tried again
    assert (failure["failure_kind"], failure["terminal"]) == ("stale", True)
    assert len(Trainer.told) == 1
    store = SqliteStore(tmp_path / "out/capture.sqlite")
    (kept,) = await store.list_captures()
    await store.close()
    assert kept.calls >= 2, "what it had done stays as evidence"
    report = await audit(RunDir(tmp_path / "out"), None)
    assert report.ok, report.breaches
