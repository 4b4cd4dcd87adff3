"""How rows are delivered: bounds on the source, forms of a row, what is said of them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toprope.capture.bounds import NoAnswer, within
from toprope.capture.delivery import finalize_rollout_token_capture, retire_rollout_token_capture
from toprope.capture.memory_store import MemoryStore
from toprope.collector.events import Event, Warned
from toprope.collector.settings import CaptureSettings
from toprope.errors.tree import ConfigError
from toprope.launch.config import read_configuration
from toprope.results.layout import RunDir
from toprope.testing.episodes import Run, collect_scripted, sample_calls, text_response
from toprope.tokens.behaviour import differing
from toprope.tokens.entry import TokenEntry
from toprope.tokens.snapshot import TokenCaptureSnapshot

TURNS = [([1, 10], [50, 2]), ([9], [51, 2])]


def tasks(count: int) -> list[dict[str, Any]]:
    return [{"responses_create_params": {"input": str(index)}} for index in range(count)]


def rows(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in RunDir(path).results.read_bytes().splitlines()]
    return {row["_ng_rollout_id"]: row for row in found}


def answering(store: MemoryStore) -> Any:
    async def answer(run: Run) -> dict[str, Any]:
        await sample_calls(store, run.key, TURNS)
        return run.result(1.0)

    return answer


class HangsFor(MemoryStore):
    """A source whose freeze of one key never comes back, not even when it is cancelled."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._hangs = key
        self.let_go = asyncio.Event()

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        while rollout_id == self._hangs and not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                continue
        return await super().freeze(rollout_id)


@pytest.mark.promise("CP-11")
async def test_a_source_that_hangs_in_freeze_masks_one_row_and_its_evidence_stays(tmp_path: Path) -> None:
    store = HangsFor("run.1-0")
    capture = CaptureSettings(enabled=True, settle_s=0.0, source_timeout_s=0.2)
    summary = await collect_scripted(tmp_path, answering(store), tasks(3), source=store, selected=True, capture=capture)
    store.let_go.set()
    assert (summary.coverage.measured, summary.coverage.masked) == (2, 1)
    capture_of = rows(tmp_path)["run.1-0"]["_ng_token_capture"]
    assert capture_of["mask_reasons"] == ["source_failed"]
    assert "no answer within 0.2 s" in capture_of["error"]
    assert [info.rollout_id for info in await store.list_captures()] == ["run.1-0"]


async def test_a_source_that_hangs_in_drop_keeps_the_evidence_and_fails_nothing() -> None:
    class Hanging(MemoryStore):
        async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
            await asyncio.Event().wait()
            return True

    built = {"mask_sample": False, "metrics": {"snapshot_id": "s", "version": 1}}
    assert await retire_rollout_token_capture("k", Hanging(), built, timeout_s=0.01) is False


async def test_what_answers_in_time_is_returned_and_what_it_raises_is_raised() -> None:
    async def answer() -> int:
        return 7

    async def fail() -> int:
        raise ConnectionError("down")

    assert await within(None, answer(), "it") == 7
    with pytest.raises(ConnectionError):
        await within(60.0, fail(), "it")
    with pytest.raises(NoAnswer):
        await within(0.01, asyncio.Event().wait(), "it")


@pytest.mark.promise("CP-11")
async def test_a_supersede_that_fails_masks_its_row_and_not_the_run(tmp_path: Path) -> None:
    class Failing(MemoryStore):
        async def supersede(self, rollout_id: str) -> str | None:
            if rollout_id == "run.0-0":
                raise ConnectionError("transport down")
            return await super().supersede(rollout_id)

    store = Failing()
    capture = CaptureSettings(enabled=True, settle_s=0.0)
    summary = await collect_scripted(tmp_path, answering(store), tasks(2), source=store, selected=True, capture=capture)
    assert (summary.coverage.measured, summary.coverage.masked) == (1, 1)
    assert rows(tmp_path)["run.0-0"]["_ng_token_capture"]["mask_reasons"] == ["source_failed"]


async def test_all_chains_are_delivered_when_the_configuration_says_so(tmp_path: Path) -> None:
    store = MemoryStore()

    async def answer(run: Run) -> dict[str, Any]:
        for name, prompt in (("call-a", [1, 2]), ("call-b", [7, 8])):  # two conversations: no single chain
            await store.put(entry_of(run.key, name, prompt))
        return run.result(1.0)

    single = CaptureSettings(enabled=True, settle_s=0.0)
    every = replace(single, deliver="all_chains")
    for name, capture in (("single", single), ("all", every)):
        await collect_scripted(tmp_path / name, answer, tasks(1), source=store, selected=True, capture=capture)
    assert "several_roots" in rows(tmp_path / "single")["run.0-0"]["_ng_token_capture"]["mask_reasons"]
    row = rows(tmp_path / "all")["run.0-0"]
    assert (row["mask_sample"], row["_ng_token_capture"]["format"]) == (False, "trace")
    assert [trace["call_ids"] for trace in row["response"]["_ng_traces"]] == [["call-a"], ["call-b"]]


def entry_of(key: str, call: str, prompt: list[int], **fields: Any) -> TokenEntry:
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": call}]}
    return TokenEntry(
        rollout_id=key,
        model_call_id=call,
        model="m",
        created_at=1.0,
        prompt_token_ids=prompt,  # type: ignore[arg-type]
        generation_token_ids=[50, 2],  # type: ignore[arg-type]
        generation_log_probs=[-0.5, -0.25],  # type: ignore[arg-type]
        output_items=(item,),
        token_item_index=0,
        **fields,
    )


def test_the_configuration_reaches_format_deliver_and_the_bound() -> None:
    servers = {"policy": {"role": "model", "engine": {"kind": "scripted"}}}
    told = {"enabled": True, "format": "trace", "deliver": "all_chains", "source_timeout_s": 3}
    read = read_configuration({"servers": servers, "token_id_capture": told}, file="c.yaml", directory=Path())
    assert (read.capture.format, read.capture.deliver, read.capture.source_timeout_s) == ("trace", "all_chains", 3)
    with pytest.raises(ConfigError, match=r"token_id_capture\.deliver"):
        read_configuration(
            {"servers": servers, "token_id_capture": {"deliver": "both"}}, file="c.yaml", directory=Path()
        )
    with pytest.raises(ConfigError, match=r"token_id_capture\.source_timeout_s"):
        CaptureSettings(source_timeout_s=0.0)


async def test_rows_in_trace_form_carry_the_native_trace_and_no_triples(tmp_path: Path) -> None:
    store = MemoryStore()
    capture = CaptureSettings(enabled=True, settle_s=0.0, format="trace")
    await collect_scripted(tmp_path, answering(store), tasks(1), source=store, selected=True, capture=capture)
    response = rows(tmp_path)["run.0-0"]["response"]
    assert response["_ng_traces"][0]["token_ids"] == [1, 10, 50, 2, 9, 51, 2]
    assert not any("prompt_token_ids" in item for item in response["output"])


async def test_a_row_too_large_for_items_is_written_as_a_trace_and_said() -> None:
    store = MemoryStore()
    await sample_calls(store, "0-0", TURNS)
    row = {"_ng_rollout_id": "0-0", "response": text_response("done")}
    delivered = await finalize_rollout_token_capture(row, store, settle_s=0.0, size_limit=100)
    assert delivered is not None
    assert (delivered["metrics"]["format"], delivered["mask_sample"]) == ("trace", False)
    assert delivered["metrics"]["projected_bytes"] > 100


async def test_raw_logprobs_of_another_policy_are_warned_of_once_and_counted(tmp_path: Path) -> None:
    store = MemoryStore()
    events: list[Event] = []

    async def answer(run: Run) -> dict[str, Any]:
        await store.put(entry_of(run.key, "call-a", [1, 2], sampling={"temperature": 0.7, "top_p": 1.0}))
        return run.result(1.0)

    capture = CaptureSettings(enabled=True, settle_s=0.0)
    summary = await collect_scripted(
        tmp_path, answer, tasks(2), source=store, selected=True, capture=capture, observers=[events.append]
    )
    [warning] = [event for event in events if isinstance(event, Warned)]
    assert "temperature 0.7" in warning.message
    assert summary.tokens.raw_logprobs_differ == 2
    assert "2 rows carry raw logprobs" in summary.message
    assert rows(tmp_path)["run.0-0"]["_ng_token_capture"]["raw_logprobs_differ"] == ["temperature 0.7"]


def test_only_settings_that_change_the_distribution_differ_and_only_of_raw_logprobs() -> None:
    assert differing({"temperature": 1.0, "top_p": 1, "top_k": -1, "seed": 3}, "raw") == ()
    assert differing({}, "raw") == ()
    assert differing({"temperature": 0, "top_k": 20}, "raw") == ("temperature 0", "top_k 20")
    assert differing({"temperature": 0.7}, "processed") == ()
