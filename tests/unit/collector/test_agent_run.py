"""An agent's own `/run`: what goes out flat, and what its reply is taken for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toprope.collector.collect import Collector
from toprope.collector.settings import Destination, RunSettings
from toprope.errors.tree import ConfigError
from toprope.http.app import Route, build_app
from toprope.http.client import Client
from toprope.http.reply import Reply, json_reply, text_reply
from toprope.http.request import Request
from toprope.servers.environment.turns import read_input

ROW = {"responses_create_params": {"input": "x"}, "goal": 5, "agent_ref": {"name": "harness"}}


async def run(
    place: Path, *replies: Reply | None, rows: Any = None, **settings: Any
) -> tuple[list[Any], list[Any], list[Any]]:
    """Bodies that the agent got, result rows, failure rows. None: a good verify response."""
    asked: list[Any] = []

    async def answer(request: Request) -> Reply:
        body = await request.json()
        assert request.rollout is None, "an agent's own /run has no prefix"
        asked.append(body)
        reply = replies[min(len(asked), len(replies)) - 1]
        return reply or json_reply({**_without_identity(body), "response": {"output": []}, "reward": 1.0})

    app = build_app(name="harness", role="agent", routes=[Route("POST", "/run", answer)])
    async with Client(inline={"harness": app}, transport_attempts=1) as client:
        await app.start()
        collector = Collector(
            run_dir=place / "run",
            environments={
                "*": Destination(
                    peer=client.peer("inline://harness", "agent"), name="harness", agent_run=True, read=read_input
                )
            },
            settings=RunSettings(run_id="run", backoff_s=0.0, **settings),
        )
        await collector.collect([ROW] if rows is None else rows)
        await app.stop()
    return asked, _rows(place / "run/results.jsonl"), _rows(place / "run/failures.jsonl")


def _without_identity(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if not key.startswith("_ng_")}


def _rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.mark.promise("EP-18")
async def test_the_row_goes_out_flat_with_its_identity_and_the_reply_is_the_row(tmp_path: Path) -> None:
    asked, (row,), failures = await run(tmp_path, None)
    assert asked == [{**ROW, "_ng_task_index": 0, "_ng_rollout_index": 0, "_ng_rollout_id": "run.0-0"}]
    assert (row["reward"], row["goal"], row["agent_ref"]) == (1.0, 5, {"name": "harness"})
    assert (row["_ng_rollout_id"], row["_ng_attempt_index"]) == ("run.0-0", 0)
    assert failures == []


async def test_a_materialised_row_goes_out_as_a_flat_one(tmp_path: Path) -> None:
    task_input = {"responses_create_params": {"input": "x"}, "task_data": {"goal": 5}}
    row = {"task_id": {"taskset": "t", "task_id": "one"}, "task_input": task_input}
    asked, results, _ = await run(tmp_path, None, rows=[row])
    assert _without_identity(asked[0]) == {"responses_create_params": {"input": "x"}, "goal": 5}
    assert len(results) == 1


async def test_a_retry_says_which_attempt_it_is_and_nothing_else_changes(tmp_path: Path) -> None:
    asked, (row,), (failure,) = await run(tmp_path, text_reply("fell over", 503), None)
    assert [body.get("_ng_attempt_index") for body in asked] == [None, 1]
    assert row["_ng_attempt_index"] == 1
    told = (failure["failure_kind"], failure["stage"], failure["terminal"], failure["upstream_status"])
    assert told == ("agent_failed", "agent", False, 503)
    assert "fell over" in failure["failure_reason"]


@pytest.mark.parametrize(
    ("reply", "kind", "stage", "said"),
    [
        (text_reply("no", 400), "agent_failed", "agent", "no"),
        (text_reply("<html>"), "bad_reply", "verification", "not JSON"),
        (json_reply([1]), "bad_reply", "verification", "list"),
        (json_reply({"score": 1}), "bad_reward", "verification", "reward"),
        (json_reply({"reward": "0.5"}), "bad_reward", "verification", "'0.5'"),
        (json_reply({"reward": 1.0, "_ng_rollout_id": "run.9-9"}), "bad_reply", "verification", "run.9-9"),
        (json_reply({"reward": 1.0, "_ng_task_index": 3}), "bad_reply", "verification", "_ng_task_index 3"),
    ],
)
async def test_a_reply_that_is_no_verdict_for_this_rollout_is_a_terminal_failure_that_names_it(
    tmp_path: Path, reply: Reply, kind: str, stage: str, said: str
) -> None:
    asked, results, (failure,) = await run(tmp_path, reply)
    assert (failure["failure_kind"], failure["stage"], failure["terminal"]) == (kind, stage, True)
    assert said in failure["failure_reason"]
    assert (len(asked), results) == (1, [])


async def test_an_agent_that_has_no_room_uses_up_no_attempt(tmp_path: Path) -> None:
    busy = json_reply({"error": {"kind": "capacity", "message": "full", "retryable": True}}, 429)
    asked, results, failures = await run(tmp_path, busy, None, max_attempts=1)
    assert (len(asked), len(results)) == (2, 1)
    assert (failures[0]["failure_kind"], failures[0]["stage"]) == ("capacity", "admission")


async def test_a_row_that_no_agent_could_read_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="input"):
        await run(tmp_path, None, rows=[{"responses_create_params": {"input": 3}}])
