"""Field cases A24 (Unicode), A25 (rewards that are no numbers), A26 (ids used as paths), A-files 9 and 10."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from toprope.collector.collect import Collector
from toprope.collector.settings import RunSettings
from toprope.errors.tree import ConfigError
from toprope.http.client import Client
from toprope.http.reply import Reply
from toprope.results.layout import RunDir
from toprope.results.read import read_values
from toprope.testing.episodes import Run, ScriptedEnvironment, collect_scripted, text_response


def lines(path: Path) -> list[dict[str, Any]]:
    """Read by newline bytes only, with two parsers of different strictness."""
    raw = path.read_bytes().split(b"\n")[:-1]
    for line in raw:
        msgspec.json.decode(line)
    return [json.loads(line, parse_constant=lambda name: pytest.fail(f"bare {name}")) for line in raw]


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def tasks(count: int) -> list[dict[str, Any]]:
    return [{"responses_create_params": {"input": "x"}} for _ in range(count)]


@pytest.mark.promise("CO-7")
async def test_a24_separators_and_lone_surrogates_come_back_equal_and_cost_no_other_row(tmp_path: Path) -> None:
    texts = ["a\u2028b\u0085c\u2029", "half \ud835 of a pair", "plain", "\U0001d465"]

    async def answer(run: Run) -> dict[str, Any]:
        return run.result(1.0, response=text_response(texts[int(run.task_id)]))

    await collect_scripted(tmp_path, answer, tasks(4))
    assert len(lines(RunDir(tmp_path).results)) == 4
    back = {row["_ng_task_index"]: row for row in read_values(RunDir(tmp_path).results) if isinstance(row, dict)}
    assert [back[index]["response"]["output"][0]["content"][0]["text"] for index in range(4)] == texts


async def test_a24_tasks_with_raw_separators_are_read_by_newline_bytes_only(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    row = {"responses_create_params": {"input": "a\u2028b\u0085c\u000b"}, "answer": "\u2029"}
    path.write_bytes(b"\n".join(json.dumps(row, ensure_ascii=False).encode() for _ in range(3)))

    async def answer(run: Run) -> dict[str, Any]:
        return run.result(1.0, echo=run.task_input["responses_create_params"]["input"])

    await collect_scripted(tmp_path / "run", answer, path)
    assert [each["echo"] for each in lines(RunDir(tmp_path / "run").results)] == ["a\u2028b\u0085c\u000b"] * 3


@pytest.mark.promise("CO-7")
@pytest.mark.parametrize("reward", ["NaN", "Infinity", "-Infinity", "null", '"0.5"', "true", "1e400", "[]"])
async def test_a25_a_reward_that_is_no_number_is_a_failure_that_names_it(tmp_path: Path, reward: str) -> None:
    async def answer(run: Run) -> dict[str, Any] | Reply:
        if run.task_id != "1":
            return run.result(0.5)
        body = json.dumps(run.result("REWARD")).replace('"REWARD"', reward)
        return Reply(200, body.encode(), {"content-type": "application/json"})

    summary = await collect_scripted(tmp_path, answer, tasks(3))
    [failed] = lines(RunDir(tmp_path).failures)
    assert "reward" not in failed
    assert "reward" in failed["failure_reason"]
    assert (failed["terminal"], failed["_ng_task_index"]) == (True, 1)
    shown = {"null": "None", '"0.5"': "'0.5'", "true": "True", "1e400": "inf", "NaN": "nan"}
    assert shown.get(reward, reward.lower().replace("infinity", "inf")) in failed["failure_reason"]
    assert (summary.coverage.measured, summary.metrics.measures["reward"].rollouts.mean) == (2, 0.5)


@pytest.mark.promise("CO-7")
async def test_a25_a_nan_in_an_extra_field_is_named_by_its_path(tmp_path: Path) -> None:
    async def answer(run: Run) -> Reply:
        body = json.dumps(run.result(1.0, parts=[1.0, float("nan")]))
        return Reply(200, body.encode(), {"content-type": "application/json"})

    await collect_scripted(tmp_path, answer, tasks(1))
    [failed] = lines(RunDir(tmp_path).failures)
    assert "parts[1]" in failed["failure_reason"]


@pytest.mark.promise("CO-7")
async def test_integers_of_any_size_and_deep_nesting_come_back_whole(tmp_path: Path) -> None:
    deep: Any = "bottom"
    for _ in range(300):
        deep = {"in": deep}

    async def answer(run: Run) -> Reply:
        body = json.dumps(run.result(1.0, big=2**64 + 1, deep=deep, negative=-(10**40)))
        return Reply(200, body.encode(), {"content-type": "application/json"})

    await collect_scripted(tmp_path, answer, tasks(1))
    [row] = lines(RunDir(tmp_path).results)
    assert (row["big"], row["negative"]) == (2**64 + 1, -(10**40))
    assert row["deep"] == deep


BAD_IDS = ["../x", "/etc/x", "a/../../x", "..", ".", ".hidden", "x" * 300, "a\nb", "a%2e", "x-a1", ""]


@pytest.mark.parametrize("bad", BAD_IDS)
async def test_a26_an_id_that_is_none_is_refused_before_anything_runs(tmp_path: Path, bad: str) -> None:
    async def answer(run: Run) -> dict[str, Any]:
        raise AssertionError("dispatched")

    rows = [*tasks(1), {"responses_create_params": {}, "_ng_rollout_id": bad}]
    with pytest.raises(ConfigError) as refused:
        await collect_scripted(tmp_path / "run", answer, rows)
    assert "task 1" in refused.value.message
    assert names_in(tmp_path) == set()


async def test_a26_odd_ids_never_become_paths_and_never_meet(tmp_path: Path) -> None:
    async def answer(run: Run) -> dict[str, Any]:
        return run.result(1.0)

    names = ["CON", "con", "NUL", "a.b", "a-b"]
    rows = [{"responses_create_params": {}, "_ng_rollout_id": name} for name in names]
    rows += [{"responses_create_params": {}, "task_id": odd} for odd in ("../../etc/passwd", "/x", "..", "a\nb")]
    before = names_in(tmp_path.parent)
    summary = await collect_scripted(tmp_path / "run", answer, rows)
    assert summary.coverage.measured == 9
    assert names_in(tmp_path.parent) == before
    assert {row["_ng_rollout_id"] for row in lines(RunDir(tmp_path / "run").results)} >= set(names)
    assert names_in(tmp_path / "run") == {
        "manifest.json",
        "tasks.jsonl",
        "journal.jsonl",
        "results.jsonl",
        "failures.jsonl",
        "summary.json",
    }


async def test_afiles9_task_rows_as_programs_write_them(tmp_path: Path) -> None:
    chat_turns = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {}}]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ]
    odd = [
        {"responses_create_params": {"input": "x", "metadata": None, "tools": None}},
        {"responses_create_params": {"input": "x", "tool_choice": "auto"}},
        {"responses_create_params": {"input": chat_turns}},
    ]
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(row).encode() for row in odd) + b"\r\n\r\n")
    environment = ScriptedEnvironment(measured)
    async with Client(inline={"e": environment.app}) as client:
        collector = Collector(
            run_dir=tmp_path / "not" / "there" / "yet",
            environments={"*": client.peer("inline://e", "environment")},
            settings=RunSettings(run_id="run", concurrency=1),
        )
        summary = await collector.collect(path)
    assert summary.coverage.measured == 3
    sent = [run.task_input["responses_create_params"] for run in environment.runs]
    assert sent == [{"input": "x"}, {"input": "x", "tool_choice": "auto"}, {"input": chat_turns}]


async def measured(run: Run) -> dict[str, Any]:
    return run.result(1.0)


async def test_afiles10_half_a_triple_is_refused_as_a_bundle_and_empty_lists_are_legal(tmp_path: Path) -> None:
    bundles: list[dict[str, Any]] = [
        {"prompt_token_ids": [1], "generation_token_ids": [2]},
        {"prompt_token_ids": [1], "generation_token_ids": [2, 3], "generation_log_probs": [-0.1]},
        {"prompt_token_ids": [], "generation_token_ids": [], "generation_log_probs": []},
        {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.1]},
        {"prompt_token_ids": None, "generation_token_ids": None, "generation_log_probs": None},
    ]

    async def answer(run: Run) -> dict[str, Any]:
        response = text_response("x")
        response["output"][0] |= bundles[int(run.task_id)]
        return run.result(1.0, response=response)

    await collect_scripted(tmp_path, answer, tasks(5))
    assert sorted(row["_ng_task_index"] for row in lines(RunDir(tmp_path).results)) == [2, 3, 4]
    failed = {row["_ng_task_index"]: row["failure_reason"] for row in lines(RunDir(tmp_path).failures)}
    assert "response.output[0].generation_log_probs: missing" in failed[0]
    assert "not one value for each" in failed[1]


async def test_afiles10_a_sidecar_of_an_earlier_run_is_never_counted_as_this_ones(tmp_path: Path) -> None:
    (tmp_path / "failures.jsonl").write_text('{"_ng_rollout_id": "run.0-0", "_ng_attempt_index": 0}\n')
    with pytest.raises(ConfigError, match=r"failures\.jsonl"):
        await collect_scripted(tmp_path, measured, tasks(1))


@pytest.mark.promise("CO-2")
@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (b"not json", "not JSON"),
        (b"[]", "not an object"),
        (b"{}", "episode_id"),
        (b'{"episode_id": {"rollout_id": "other", "attempt": 0}, "task_id": {}}', "other"),
        (b"", "not JSON"),
    ],
)
async def test_a_bad_reply_of_the_environment_server_costs_one_row(tmp_path: Path, reply: bytes, says: str) -> None:
    async def answer(run: Run) -> dict[str, Any] | Reply:
        return Reply(200, reply) if run.task_id == "1" else run.result(1.0)

    summary = await collect_scripted(tmp_path, answer, tasks(3))
    assert (summary.coverage.measured, summary.coverage.failed) == (2, 1)
    [failed] = lines(RunDir(tmp_path).failures)
    assert (failed["failure_kind"], failed["terminal"]) == ("bad_reply", True)
    assert says in failed["failure_reason"]


@pytest.mark.promise("CO-2")
@pytest.mark.parametrize("both", [True, False])
async def test_a_reply_with_both_result_and_failure_or_neither_costs_one_row(tmp_path: Path, both: bool) -> None:
    async def answer(run: Run) -> dict[str, Any] | Reply:
        result = run.result(1.0)
        if run.task_id != "1":
            return result
        failure = {"failure_reason": "x", "terminal": False, "failure_kind": "internal", "stage": "seed"}
        return {**result, "failure": failure} if both else {**result, "result": None}

    summary = await collect_scripted(tmp_path, answer, tasks(3))
    assert (summary.coverage.measured, summary.coverage.failed) == (2, 1)
    [failed] = lines(RunDir(tmp_path).failures)
    assert (failed["failure_kind"], failed["terminal"]) == ("bad_reply", True)
    assert failed["delivery"] == "delivered"
    assert "exactly one of result and failure" in failed["failure_reason"]


@pytest.mark.promise("CO-2")
async def test_a_verdict_that_uses_a_reserved_key_costs_its_row_and_task_id_is_the_environments_own(
    tmp_path: Path,
) -> None:
    async def answer(run: Run) -> dict[str, Any]:
        return run.result(1.0, _ng_secret=1) if run.task_id == "0" else run.result(1.0, task_id="mine", ng_more=2)

    await collect_scripted(tmp_path, answer, tasks(2))
    [row] = lines(RunDir(tmp_path).results)
    assert (row["task_id"], row["ng_more"]) == ("mine", 2)
    [failed] = lines(RunDir(tmp_path).failures)
    assert "_ng_secret" in failed["failure_reason"]
