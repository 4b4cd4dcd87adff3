"""Planted breaches: each kind is found, and an untouched run is proven."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from toprope.canonical.digest import digest_bytes, digest_value
from toprope.capture.sqlite_store import SqliteStore
from toprope.cli.audit import _verdict
from toprope.collector.audit import AuditReport, audit
from toprope.collector.settings import CaptureSettings, RunSettings
from toprope.collector.summary import summarise, write_summary
from toprope.correlation.ids import capture_key
from toprope.errors.tree import ConfigError
from toprope.results.layout import RunDir
from toprope.testing.episodes import Run, collect_scripted, sample_calls

Rows = list[dict[str, Any]]


@pytest.fixture
async def run_dir(tmp_path: Path) -> RunDir:
    """A run of four captured rollouts, of which the last is masked, and one failure before a success."""
    store = SqliteStore(tmp_path / "capture.sqlite")

    async def answer(run: Run) -> dict[str, Any]:
        index = int(run.task_id)
        if index == 2 and run.attempt == 0:
            return run.failure()
        await sample_calls(store, run.key, [([1, 10, 11 + index], [50, 60 + index]), ([9], [51, 2])])
        if index == 3:
            await store.mark_incomplete(run.key, "lost")
        return run.result(1.0)

    tasks = [{"responses_create_params": {"input": str(index)}} for index in range(4)]
    settings = RunSettings(run_id="run", backoff_s=0.0)
    capture = CaptureSettings(enabled=True, settle_s=0.0)
    await collect_scripted(tmp_path, answer, tasks, source=store, selected=True, settings=settings, capture=capture)
    await store.close()
    return RunDir(tmp_path)


async def prove(run_dir: RunDir) -> AuditReport:
    store = SqliteStore(run_dir.capture_db)
    try:
        return await audit(run_dir, store)
    finally:
        await store.close()


def kinds(report: AuditReport) -> set[str]:
    return {breach.kind for breach in report.breaches}


def edit(path: Path, change: Callable[[Rows], Rows | None]) -> None:
    """Rewrite a file of rows as somebody with an editor would."""
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    changed = change(rows)
    rows = rows if changed is None else changed
    path.write_bytes(b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows))


def trained(rows: Rows) -> dict[str, Any]:
    """The first item of the first row that carries ids."""
    items = [item for row in rows for item in row["response"]["output"] if "generation_token_ids" in item]
    return dict(items[0]) and items[0]


async def test_an_untouched_run_is_proven_with_its_counts(run_dir: RunDir) -> None:
    report = await prove(run_dir)
    assert report.ok, report.breaches
    counts = report.counts
    assert (counts["results"], counts["failures"], counts["dispatches"]) == (4, 1, 5)
    assert (counts["captured"], counts["proven"], counts["kept_evidence"], counts["unverifiable"]) == (4, 3, 1, 0)
    assert (counts["expected"], counts["measured"], counts["masked"]) == (4, 3, 1)
    assert (counts["not_proven"], counts["sampled_tokens"], counts["delivered_tokens"]) == (0, 12, 12)


@pytest.mark.promise("CP-17")
async def test_one_changed_generated_id_is_found(run_dir: RunDir) -> None:
    edit(run_dir.results, lambda rows: trained(rows)["generation_token_ids"].__setitem__(0, 77))
    assert {"changed", "not_sampled"} <= kinds(await prove(run_dir))


@pytest.mark.promise("CP-17")
async def test_one_changed_id_is_found_though_every_digest_in_the_rows_was_recomputed(run_dir: RunDir) -> None:
    def forge(rows: Rows) -> None:
        trained(rows)["generation_token_ids"][0] = 77
        for row in rows:
            # Whatever looks like a digest is made to fit what the row says now.
            said = digest_value(row["response"])
            text, changed = re.subn(r"\b[0-9a-f]{32,64}\b", said, json.dumps(row["_ng_token_capture"]))
            assert changed
            row["_ng_token_capture"] = json.loads(text)

    edit(run_dir.results, forge)
    report = await prove(run_dir)
    assert "not_sampled" in kinds(report)


@pytest.mark.promise("CP-17")
async def test_a_forger_who_also_rewrites_the_journal_is_still_found_by_the_receipts(run_dir: RunDir) -> None:
    edit(run_dir.results, lambda rows: trained(rows)["generation_token_ids"].__setitem__(0, 77))
    digests, offset = {}, 0
    for line in run_dir.results.read_bytes().split(b"\n")[:-1]:
        digests[json.loads(line)["_ng_rollout_id"]] = (digest_bytes(line), offset)
        offset += len(line) + 1

    def rewrite(lines: Rows) -> None:
        for line in lines:
            if line["type"] == "outcome" and line["file"] == "results":
                line["digest"], line["offset"] = digests[line["rollout_id"]]

    edit(run_dir.journal, rewrite)
    found = kinds(await prove(run_dir))
    assert "not_sampled" in found
    assert "changed" not in found


def strip_metrics(rows: Rows) -> None:
    del rows[0]["_ng_token_capture"]
    trained(rows)["generation_token_ids"][0] += 1


def strip_everything(rows: Rows) -> None:
    del rows[0]["_ng_token_capture"]
    for item in rows[0]["response"]["output"]:
        for key in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
            item.pop(key, None)


@pytest.mark.promise("UX-5")
async def test_a_captured_row_that_lost_its_capture_metrics_is_found_or_named(run_dir: RunDir) -> None:
    before = (run_dir.path / "results.jsonl").read_bytes()
    edit(run_dir.path / "results.jsonl", strip_metrics)
    assert any("no recorded call bears out" in note for note in (await prove(run_dir)).notes)
    (run_dir.path / "results.jsonl").write_bytes(before)
    edit(run_dir.path / "results.jsonl", strip_everything)
    assert "calls_unaccounted_for" in kinds(await prove(run_dir))


async def test_a_row_made_to_look_native_is_not_called_proven_though_the_journal_was_rewritten(run_dir: RunDir) -> None:
    def forge(rows: Rows) -> None:
        del rows[0]["_ng_token_capture"]
        trained(rows)["generation_log_probs"][0] = -0.25

    edit(run_dir.results, forge)
    rejournal(run_dir)
    run_dir.summary.unlink(missing_ok=True)
    report = await prove(run_dir)
    assert (report.ok, report.counts["proven"], report.counts["not_proven"]) == (True, 2, 1)
    assert _verdict(report).startswith(
        "no breach found; proven 2, not proven 1 (rows with token ids of the agent's own"
    )


async def test_a_native_row_whose_ids_recorded_calls_bear_out_is_proven(run_dir: RunDir) -> None:
    edit(run_dir.results, lambda rows: rows[0].__delitem__("_ng_token_capture"))
    rejournal(run_dir)
    report = await prove(run_dir)
    assert (report.counts["proven"], report.counts["not_proven"]) == (3, 0)


def take_out_a_generation(rows: Rows) -> None:
    """A generation that a trainer would have seen is context now, and everything that counts it was adjusted."""
    row = next(row for row in rows if not row["mask_sample"])
    taken = next(item for item in row["response"]["output"] if "generation_token_ids" in item)
    metrics = row["_ng_token_capture"]
    metrics["generated_tokens_delivered"] -= len(taken["generation_token_ids"])
    metrics["delivered_fraction"] = metrics["generated_tokens_delivered"] / metrics["generated_tokens_captured"]
    for key in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
        del taken[key]


@pytest.mark.promise("CP-17")
async def test_a_generation_taken_out_of_a_row_is_found_though_the_journal_was_rewritten(run_dir: RunDir) -> None:
    edit(run_dir.results, take_out_a_generation)
    rejournal(run_dir)
    run_dir.summary.unlink(missing_ok=True)
    assert kinds(await prove(run_dir)) == {"left_out"}


async def test_two_rows_that_exchanged_responses_and_capture_metrics_are_found(run_dir: RunDir) -> None:
    def swap(rows: Rows) -> None:
        first, second = [row for row in rows if not row["mask_sample"]][:2]
        for key in ("response", "_ng_token_capture"):
            first[key], second[key] = second[key], first[key]

    edit(run_dir.results, swap)
    report = await prove(run_dir)
    assert {"changed", "not_sampled"} <= kinds(report)
    assert len({breach.where for breach in report.breaches if breach.kind == "not_sampled"}) == 2


async def test_rows_that_were_only_written_anew_with_other_white_space_are_no_breach(run_dir: RunDir) -> None:
    rows = [json.loads(line) for line in run_dir.results.read_bytes().split(b"\n")[:-1]]
    run_dir.results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = await prove(run_dir)
    assert report.ok, report.breaches
    assert any("other bytes" in note for note in report.notes)


async def test_a_key_that_was_added_a_second_time_is_found(run_dir: RunDir) -> None:
    data = run_dir.results.read_bytes()
    run_dir.results.write_bytes(data.replace(b'"reward":1.0', b'"reward":0.0,"reward":1.0', 1))
    assert kinds(await prove(run_dir)) == {"changed"}


def change_reward(rows: Rows) -> None:
    rows[0]["reward"] = 0.0


def delete(rows: Rows) -> Rows:
    return rows[1:]


def duplicate(rows: Rows) -> Rows:
    return [*rows, rows[0]]


def change_logprob(rows: Rows) -> None:
    trained(rows)["generation_log_probs"][0] = -0.5


def change_prompt(rows: Rows) -> None:
    trained(rows)["prompt_token_ids"][0] = 3


def unmask(rows: Rows) -> None:
    next(row for row in rows if row["mask_sample"])["mask_sample"] = False


def forget_a_call(rows: Rows) -> None:
    next(row for row in rows if not row["mask_sample"])["_ng_token_capture"]["n_calls"] = 1


def unaligned(rows: Rows) -> None:
    trained(rows)["generation_log_probs"].pop()


def another_attempt(rows: Rows) -> None:
    rows[0]["_ng_attempt_index"] = 7


def garble(rows: Rows) -> None:
    rows[0]["response"] = "gone"


def rejournal(run_dir: RunDir) -> None:
    """Write the digest of every result row into its outcome line, as a forger of both files would."""
    rows = {
        (row["_ng_rollout_id"], row["_ng_attempt_index"]): line
        for line in run_dir.results.read_bytes().splitlines()
        for row in [json.loads(line)]
    }
    journal = [json.loads(line) for line in run_dir.journal.read_bytes().splitlines()]
    for line in journal:
        if line["type"] == "outcome" and line["file"] == "results":
            line["digest"] = digest_bytes(rows[line["rollout_id"], line["attempt"]])
    run_dir.journal.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in journal))


@pytest.mark.promise("UX-5")
@pytest.mark.parametrize(
    ("key", "value", "witness"),
    [
        ("_ng_episode_id", {"rollout_id": "run.0-0", "attempt": 1}, "the row's own id"),
        ("_ng_episode_id", None, "the row's own id"),
        ("_ng_task_index", 3, "the dispatch"),
        ("_ng_rollout_index", 1, "the dispatch"),
        ("_ng_rollout_index", False, "the dispatch"),
        ("_ng_task_id", {"taskset": "tasks", "task_id": "3"}, "task 0 of tasks.jsonl"),
    ],
)
async def test_an_identity_that_dispatch_or_tasks_speak_against_is_found_though_the_journal_was_rewritten(
    run_dir: RunDir, key: str, value: object, witness: str
) -> None:
    def change(rows: Rows) -> None:
        next(row for row in rows if row["_ng_rollout_id"] == "run.0-0")[key] = value

    edit(run_dir.results, change)
    rejournal(run_dir)
    (breach,) = [each for each in (await prove(run_dir)).breaches if each.kind != "changed"]
    assert breach.kind == "identity_differs"
    assert key in breach.message
    assert witness in breach.message


async def test_a_dispatch_of_a_task_that_was_never_planned_is_found(run_dir: RunDir) -> None:
    edit(run_dir.tasks, lambda rows: [[], *rows[1:]])
    found = {breach.kind: breach for breach in (await prove(run_dir)).breaches}
    assert set(found) == {"changed", "identity_differs"}
    assert "tasks.jsonl has no task 0" in found["identity_differs"].message


@pytest.mark.promise("UX-5")
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (change_reward, "changed"),
        (delete, "deleted"),
        (duplicate, "attempt_used_twice"),
        (change_logprob, "logprobs_differ"),
        (change_prompt, "not_sampled"),
        (unmask, "changed"),
        (forget_a_call, "calls_unaccounted_for"),
        (unaligned, "malformed"),
        (another_attempt, "never_dispatched"),
        (garble, "count_differs"),
    ],
)
async def test_each_planted_breach_of_a_row_is_found(
    run_dir: RunDir, change: Callable[[Rows], Rows | None], kind: str
) -> None:
    edit(run_dir.results, change)
    assert kind in kinds(await prove(run_dir))


@pytest.mark.promise("UX-5")
async def test_a_changed_reward_is_found_though_the_summary_was_made_anew(run_dir: RunDir) -> None:
    edit(run_dir.results, change_reward)
    write_summary(run_dir, summarise(run_dir))
    assert "changed" in kinds(await prove(run_dir))


async def test_a_changed_summary_is_found(run_dir: RunDir) -> None:
    summary = summarise(run_dir)
    coverage = msgspec.structs.replace(summary.coverage, measured=4, masked=0)
    write_summary(run_dir, msgspec.structs.replace(summary, coverage=coverage))
    [breach] = (await prove(run_dir)).breaches
    assert breach.where == "summary.json"
    assert "coverage" in breach.message


async def test_a_failure_row_with_a_reward_is_found(run_dir: RunDir) -> None:
    edit(run_dir.failures, lambda rows: rows[0].__setitem__("reward", 0.0))
    assert {"changed", "reward_of_a_failure"} <= kinds(await prove(run_dir))


async def test_masked_evidence_that_is_gone_is_found(run_dir: RunDir) -> None:
    run_dir.capture_db.unlink()
    report = await prove(run_dir)
    assert "evidence_missing" in kinds(report)
    assert report.counts["unverifiable"] == 4


async def test_calls_under_a_key_that_was_never_dispatched_are_found(run_dir: RunDir) -> None:
    store = SqliteStore(run_dir.capture_db)
    await sample_calls(store, "stranger", [([1], [2])])
    await store.close()
    report = await prove(run_dir)
    assert [(breach.kind, breach.where) for breach in report.breaches] == [("calls_unaccounted_for", "stranger")]


async def test_an_attempt_number_used_twice_is_found(run_dir: RunDir) -> None:
    edit(run_dir.journal, lambda lines: [*lines, next(line for line in lines if line["type"] == "dispatch")])
    assert "attempt_used_twice" in kinds(await prove(run_dir))


@pytest.mark.promise("UX-5")
async def test_a_row_that_was_journalled_for_the_other_file_is_found(run_dir: RunDir) -> None:
    """A failure put among the results, or a result whose outcome says that it failed."""

    def as_failure(lines: Rows) -> None:
        next(line for line in lines if line["type"] == "outcome" and line["file"] == "results")["file"] = "failures"

    edit(run_dir.journal, as_failure)
    (breach,) = [each for each in (await prove(run_dir)).breaches if each.kind == "changed"]
    assert breach.where.startswith("results.jsonl, line ")
    assert breach.message.endswith("was written to failures.jsonl")


async def journal_receipts(run_dir: RunDir, change: Callable[[Rows], Rows]) -> None:
    """As for a source that keeps none: the journal has the receipts of every capture."""
    store = SqliteStore(run_dir.capture_db)
    lines = []
    for key in (capture_key("run.0-0", 0), capture_key("run.1-0", 0), capture_key("run.2-0", 1)):
        receipts = await store.receipts(key)
        assert receipts
        line = {"type": "receipts", "at": "2030-01-01T00:00:00+00:00", "key": key, "snapshot_id": "s", "version": 1}
        lines.append({**line, "receipts": change(msgspec.to_builtins(receipts))})
    await store.close()
    with run_dir.journal.open("ab") as journal:
        journal.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))


@pytest.mark.promise("CP-17")
async def test_receipts_that_a_source_gave_twice_count_once(run_dir: RunDir) -> None:
    """Transports deliver at least once, and a row counts each call once."""
    await journal_receipts(run_dir, lambda receipts: [*receipts, *receipts[:1]])
    report = await audit(run_dir, None)
    assert report.ok, report.breaches
    assert (report.counts["proven"], report.counts["calls"], report.counts["sampled_tokens"]) == (3, 6, 12)


@pytest.mark.promise("CP-17")
async def test_a_call_whose_copies_differ_counts_as_one(run_dir: RunDir) -> None:
    """It was set aside, and the named last call does not hang on it: the row trains and counts it once."""

    def beside_a_conflict(rows: Rows) -> None:
        for row in rows:
            row["_ng_token_capture"]["n_calls"] += 1
            row["_ng_token_capture"]["parent_link_failures"] = {"z": "conflict"}

    edit(run_dir.results, beside_a_conflict)
    rejournal(run_dir)
    copy = {"model_call_id": "z", "parent_call_id": None, "prompt_len": 1, "chain_hash": "", "logprobs_hash": ""}
    await journal_receipts(run_dir, lambda receipts: [*receipts, {**copy, "gen_len": 1}, {**copy, "gen_len": 2}])
    report = await audit(run_dir, None)
    assert not [each for each in report.breaches if each.kind != "changed"], report.breaches
    assert report.counts["proven"] == 3


@pytest.mark.promise("CP-17")
async def test_a_receipt_too_few_or_too_many_is_found(run_dir: RunDir) -> None:
    stranger = {"model_call_id": "stranger", "parent_call_id": None, "prompt_len": 1, "gen_len": 0}
    stranger |= {"chain_hash": "", "logprobs_hash": ""}
    await journal_receipts(run_dir, lambda receipts: [*receipts, stranger])
    assert kinds(await audit(run_dir, None)) == {"calls_unaccounted_for"}


@pytest.mark.promise("CP-17")
@pytest.mark.parametrize("more", [-1, 1])
async def test_a_row_that_counts_other_tokens_than_its_calls_sampled_is_found(run_dir: RunDir, more: int) -> None:
    """As many calls, of which one sampled more or less than the row says."""

    def count(rows: Rows) -> None:
        next(row for row in rows if not row["mask_sample"])["_ng_token_capture"]["generated_tokens_captured"] += more

    edit(run_dir.results, count)
    rejournal(run_dir)
    assert kinds(await prove(run_dir)) - {"changed"} == {"calls_unaccounted_for"}


async def test_a_damaged_middle_line_is_found_with_its_number(run_dir: RunDir) -> None:
    lines = run_dir.results.read_bytes().split(b"\n")
    lines[1] = lines[1][: len(lines[1]) // 2]
    run_dir.results.write_bytes(b"\n".join(lines))
    report = await prove(run_dir)
    assert ("damaged_line", "results.jsonl, line 2") in {(breach.kind, breach.where) for breach in report.breaches}


def journal_session(run_dir: RunDir, key: str, session: str, event: str, role: str = "resources") -> None:
    line = {"type": "session", "at": "2030-01-01T00:00:00+00:00", "key": key, "role": role, "event": event}
    with run_dir.journal.open("ab") as journal:
        journal.write(json.dumps({**line, "session_id": session}).encode() + b"\n")


async def test_a_session_of_a_finished_attempt_that_was_never_closed_is_found(run_dir: RunDir) -> None:
    journal_session(run_dir, "run.0-0", "s-closed", "opened")
    journal_session(run_dir, "run.0-0", "s-closed", "closed")
    assert kinds(await prove(run_dir)) == set()
    journal_session(run_dir, "run.1-0", "s-open", "opened")
    report = await prove(run_dir)
    assert [(breach.kind, breach.where) for breach in report.breaches] == [("session_open", "run.1-0")]
    assert "s-open" in report.breaches[0].message


async def test_an_open_session_of_an_attempt_that_a_kill_cut_off_is_a_note(run_dir: RunDir) -> None:
    journal_session(run_dir, "run.0-0", "s-closed", "opened")
    journal_session(run_dir, "run.0-0", "s-closed", "closed")
    journal_session(run_dir, "run.9-0", "s-cut", "opened")
    report = await prove(run_dir)
    assert report.ok, report.breaches
    assert any("1 sessions of attempts without an outcome" in note for note in report.notes)


async def test_changed_tasks_are_found(run_dir: RunDir) -> None:
    edit(run_dir.tasks, lambda rows: rows[0].__setitem__("more", 1))
    assert ("changed", "tasks.jsonl") in {(breach.kind, breach.where) for breach in (await prove(run_dir)).breaches}


async def test_a_row_whose_outcome_a_kill_cut_off_is_no_breach_until_the_run_went_on(run_dir: RunDir) -> None:
    last = [line for line in run_dir.journal.read_bytes().split(b"\n")[:-1] if b'"outcome"' in line][-1]
    edit(run_dir.journal, lambda lines: [line for line in lines if line != json.loads(last) and line["type"] != "end"])
    run_dir.summary.unlink(missing_ok=True)
    report = await prove(run_dir)
    assert report.ok, report.breaches
    assert any("killed" in note for note in report.notes)


async def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        await audit(RunDir(tmp_path), None)


async def test_without_a_store_captured_rows_are_unverifiable_and_said_so(run_dir: RunDir) -> None:
    report = await audit(run_dir, None)
    assert report.ok
    assert report.counts["unverifiable"] == 4


async def test_rows_that_no_receipts_stand_behind_are_held_to_their_structure(run_dir: RunDir) -> None:
    edit(run_dir.results, unaligned)
    assert "malformed" in kinds(await audit(run_dir, None))

    def as_if_never_captured(rows: Rows) -> None:
        for row in rows:
            del row["_ng_token_capture"]

    edit(run_dir.results, as_if_never_captured)
    report = await prove(run_dir)
    assert {"changed", "malformed"} <= kinds(report)
