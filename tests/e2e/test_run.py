"""`toprope` as its users run it: a process, a configuration, files, exit statuses, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CONFIG = """
servers:
  policy: {role: model, engine: {kind: scripted, script: [{calls: [{name: balance, arguments: '{"account": "ann"}'}]}, {text: done}]}}
  books: {role: resources, use: ledger}
  clerk: {role: agent, use: tool_loop, model: policy, token_id_capture: true}
  episode: {role: environment, use: single_agent_turn, resources: books, agent: clerk, tools: [direct_http]}
run: {environment: episode, tasks: {generate: books, size: 3, seed: 5}, repeats: 2}
token_id_capture: {enabled: true}
"""  # noqa: E501

HELD = '''
import json, os, pathlib
from toprope import Environment
from toprope.protocol.episode import Task
from toprope.protocol.ids import TaskId

LOG = pathlib.Path(os.environ["HELD_LOG"])

def note(what):
    with LOG.open("a") as log:
        log.write(what + "\\n")

class Held(Environment):
    """Verifies only when a file says so; notes what it holds and what it releases."""

    def seed(self, task):
        note(f"seed {task['number']}")
        return {"number": task["number"]}

    async def verify(self, state, task, response):
        import asyncio
        note(f"verify {state['number']}")
        if state["number"] >= int(os.environ.get("HELD_FROM", "2")):
            await asyncio.Event().wait()
        return 1.0

    def release(self, state):
        note(f"release {state['number']}")

    def tasks(self, size, seed):
        for n in range(size):
            yield Task(TaskId("held", str(n)), {"responses_create_params": {"input": "hi"}, "task_data": {"number": n}})
'''


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "ledger.yaml").write_text(CONFIG)
    return tmp_path


def toprope(place: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the program to its end."""
    return subprocess.run(
        [sys.executable, "-m", "toprope", *arguments],
        cwd=place,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def assert_one_paragraph(result: subprocess.CompletedProcess[str], *parts: str, status: int = 2) -> None:
    """The program's last word is one line on stderr with every part in it, and no traceback."""
    assert result.returncode == status, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("toprope: ")
    assert [part for part in parts if part not in last] == [], last
    assert "Traceback" not in result.stderr


# -- the whole path ----------------------------------------------------------------------------------------------------


def test_a_run_brings_back_every_rollout_with_its_tokens_and_is_proven(place: Path) -> None:
    result = toprope(place, "run", "ledger.yaml", "--out", "out")
    assert result.returncode == 0, result.stderr
    found = rows(place / "out/results.jsonl")
    assert len(found) == 6
    for row in found:
        assert row["_ng_token_capture"]["mask_reasons"] == []
        seen: list[int] = []
        items = [item for item in row["response"]["output"] if "generation_token_ids" in item]
        assert len(items) == 2
        for item in items:
            prompt, generation = item["prompt_token_ids"], item["generation_token_ids"]
            assert prompt[: len(seen)] == seen
            assert len(generation) == len(item["generation_log_probs"]) > 0
            assert all(value <= 0 for value in item["generation_log_probs"])
            seen = prompt + generation
    proof = toprope(place, "audit", "out")
    assert proof.returncode == 0, proof.stdout
    assert "proven 6" in proof.stdout
    assert proof.stdout.endswith("audit: proven\n")


def test_a_run_whose_receipts_are_gone_is_not_called_proven(place: Path) -> None:
    assert toprope(place, "run", "ledger.yaml", "--out", "out").returncode == 0
    for file in (place / "out").glob("capture.sqlite*"):
        file.unlink()
    proof = toprope(place, "audit", "out")
    assert proof.stdout.endswith("no breach found; unverifiable: 6 (captured rows whose receipts are gone)\n")


@pytest.mark.promise("UX-5")
def test_one_changed_id_in_the_results_makes_the_audit_fail(place: Path) -> None:
    assert toprope(place, "run", "ledger.yaml", "--out", "out").returncode == 0
    path = place / "out/results.jsonl"
    path.write_text(re.sub(r'("generation_token_ids":\[)(\d)', r"\g<1>1\2", path.read_text(), count=1))
    proof = toprope(place, "audit", "out", "--json")
    assert proof.returncode == 1
    report = json.loads(proof.stdout)
    assert not report["ok"]
    assert any(breach["kind"] != "changed" for breach in report["breaches"]), "the record itself speaks against it"


def test_what_a_run_left_can_be_shown_in_every_way(place: Path) -> None:
    assert toprope(place, "run", "ledger.yaml", "--out", "out").returncode == 0
    listed = toprope(place, "show", "out", "--json")
    lines = [json.loads(line) for line in listed.stdout.splitlines()]
    assert [(line["outcome"], line["calls"]) for line in lines] == [("measured", 2)] * 6
    assert all(line["tokens"] > 0 and line["seconds"] > 0 for line in lines)
    assert len(toprope(place, "show", "out").stdout.splitlines()) == 8
    one = toprope(place, "show", "out", "1-1")
    assert one.returncode == 0, one.stderr
    for part in ("user  Move", 'balance({"account": "ann"})', "balance: ok", "sampled", "done", "reward", "responses"):
        assert part in one.stdout
    captures = toprope(place, "capture", "ls", "out", "--retired", "--json")
    keys = [json.loads(line)["rollout_id"] for line in captures.stdout.splitlines()]
    assert sorted(keys) == sorted(line["rollout_id"] for line in lines)
    receipts = toprope(place, "capture", "show", "out", keys[0], "--json")
    assert receipts.returncode == 0
    assert [json.loads(line)["state"] for line in receipts.stdout.splitlines()] == ["retired", "retired"]
    summary = json.loads(toprope(place, "summary", "out", "--json").stdout)
    assert summary["coverage"] == json.loads((place / "out/summary.json").read_bytes())["coverage"]


def test_several_environments_and_task_sources_share_one_run(place: Path) -> None:
    (place / "more.jsonl").write_text(
        json.dumps({"task_id": {"taskset": "more", "task_id": "x"}, "task_input": _hello(10)})
        + "\n"
        + json.dumps({"task_id": {"taskset": "more", "task_id": "y"}, "task_input": _hello(20)})
        + "\n"
    )
    sets = [
        "servers.plain={role: agent, use: tool_loop, model: policy}",
        "servers.second={role: environment, resources: books, agent: plain}",
        "run.environment={books: episode, more: {environment: second, sampling: {temperature: 0.5}}}",
        "run.tasks=[{generate: books, size: 2}, more.jsonl]",
    ]
    result = toprope(place, "run", "ledger.yaml", "--out", "out", *(word for s in sets for word in ("--set", s)))
    assert result.returncode == 0, result.stderr
    by_set: dict[str, list[dict[str, Any]]] = {}
    for row in rows(place / "out/results.jsonl"):
        by_set.setdefault(row["_ng_task_id"]["taskset"], []).append(row)
    assert {name: len(found) for name, found in by_set.items()} == {"books": 4, "more": 4}
    assert all("_ng_token_capture" in row for row in by_set["books"])
    assert all("_ng_token_capture" not in row for row in by_set["more"]), "its agent is not selected"
    assert all(row["responses_create_params"]["temperature"] == 0.5 for row in by_set["more"])
    assert toprope(place, "audit", "out").returncode == 0


def _hello(amount: int) -> dict[str, Any]:
    task_data = {"accounts": {"ann": amount}, "goal": {"ann": amount}}
    return {"responses_create_params": {"input": "hello"}, "task_data": task_data}


# -- what is shown meanwhile -------------------------------------------------------------------------------------------


@pytest.mark.promise("UX-3")
def test_piped_progress_is_plain_lines_with_counts_rate_and_time_left(place: Path) -> None:
    result = toprope(place, "run", "ledger.yaml", "--out", "out")
    assert "\x1b" not in result.stdout
    assert "\r" not in result.stdout
    assert re.search(r"6/6 done, 0 failed, 0 masked, reward [\d.]+, [\d.]+/s, \d+ s left", result.stdout)


@pytest.mark.promise("UX-3")
def test_json_progress_is_one_event_a_line(place: Path) -> None:
    result = toprope(place, "run", "ledger.yaml", "--out", "out", "--json")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    names = [event["event"] for event in events]
    assert names[0] == "run_started"
    assert names[-1] == "run_finished"
    assert (names.count("dispatched"), names.count("finished")) == (6, 6)
    assert events[-1]["summary"]["exit_status"] == 0


def test_when_everything_fails_the_reason_is_told_at_once_and_the_status_is_1(place: Path) -> None:
    fault = "servers.policy.engine.script=[{fault: {status: 400, message: no such thing, kind: model_rejected}}]"
    result = toprope(place, "run", "ledger.yaml", "--out", "out", "--set", fault)
    assert result.returncode == 1
    assert result.stdout.count("(model_rejected): ") == 6
    assert "0 of 6 rollouts have a verdict" in result.stdout
    assert re.search(r"Commonest failure: model_rejected \(6 times\): .*no such thing", result.stdout)
    assert result.stderr == "", "what servers log is in logs/toprope.log"
    assert "no such thing" in (place / "out/logs/toprope.log").read_text()
    failures = rows(place / "out/failures.jsonl")
    assert len(failures) == 6
    assert all("reward" not in row and "no such thing" in row["failure_reason"] for row in failures)
    one = toprope(place, "show", "out", "0-0").stdout
    assert "failed: model_rejected at agent; it would not be tried again" in one


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.promise("UX-2")
@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("run.repeets=2", ["ledger.yaml: run.repeets", "did you mean 'repeats'"]),
        ("servers.policy.engine.modl=x", ["servers.policy.engine.modl", "did you mean 'model'"]),
        ("servers.policy.engine.kind=scriptd", ["servers.policy.engine.kind", "did you mean 'scripted'"]),
        ("servers.books.use=ledgr", ["servers.books.use", "did you mean 'ledger'"]),
        ("servers.books.config={size: 3}", ["servers.books.config.size"]),
        ("servers.episode.episode_timeout_s=5", ["servers.episode", "no time is left for the agent"]),
        ("run.tasks=nowhere.jsonl", ["run.tasks", "nowhere.jsonl"]),
        ("servers.policy.engine.returns_ids=false", ["servers.policy", "no token ids", "clerk"]),
        ("run.environment={other: episode}", ["task set 'books'", "other"]),
    ],
)
def test_bad_configuration_is_one_paragraph_exit_2_and_leaves_nothing(
    place: Path, setting: str, parts: list[str]
) -> None:
    result = toprope(place, "run", "ledger.yaml", "--out", "out", "--set", setting)
    assert_one_paragraph(result, *parts)
    assert sorted(path.name for path in place.iterdir()) == ["ledger.yaml"]


@pytest.mark.promise("UX-2")
def test_a_malformed_task_line_names_file_and_line(place: Path) -> None:
    (place / "tasks.jsonl").write_text('{"responses_create_params": {"input": "a"}}\n{"responses_create_params": 3}\n')
    result = toprope(place, "run", "ledger.yaml", "--tasks", "tasks.jsonl", "--out", "out")
    assert_one_paragraph(result, "tasks.jsonl, line 2", "responses_create_params")
    assert not (place / "out").exists()


def test_a_dead_engine_is_named_with_its_url_and_nothing_is_left(place: Path) -> None:
    with socket.socket() as held:  # bound and not listening: refused, and nobody else can take the port
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}/v1"
        engine = f"servers.policy.engine={{kind: openai, base_url: '{url}', return_token_ids: true}}"
        for command in (["run", "ledger.yaml", "--out", "out"], ["check", "ledger.yaml"]):
            assert_one_paragraph(toprope(place, *command, "--set", engine), url, "cannot be reached")
    assert not (place / "out").exists()


def test_a_directory_that_holds_a_run_is_refused_and_left_alone(place: Path) -> None:
    assert toprope(place, "run", "ledger.yaml", "--out", "out").returncode == 0
    before = {path.name: path.read_bytes() for path in (place / "out").iterdir() if path.is_file()}
    assert_one_paragraph(toprope(place, "run", "ledger.yaml", "--out", "out"), "already holds a run")
    assert {path.name: path.read_bytes() for path in (place / "out").iterdir() if path.is_file()} == before


def test_a_bug_is_named_in_one_paragraph_and_shown_whole_only_with_debug(place: Path) -> None:
    head = "from toprope import Environment\n\nclass Broken(Environment):\n"
    (place / "broken.py").write_text(head + "    def __init__(self):\n        raise KeyError('inside')\n")
    command = ["run", "ledger.yaml", "--set", "servers.books.use=broken:Broken"]
    assert_one_paragraph(toprope(place, *command), "internal error: KeyError: 'inside'", "--debug", status=1)
    assert "Traceback" in toprope(place, *command, "--debug").stderr


def test_check_says_what_every_server_is_and_runs_nothing(place: Path) -> None:
    result = toprope(place, "check", "ledger.yaml")
    assert result.returncode == 0, result.stderr
    for part in ("ScriptedEngine answers", "returns token ids", "tools: balance, deposit, transfer", "direct_http"):
        assert part in result.stdout
    assert "3 tasks and 6 rollouts" in result.stdout
    assert sorted(path.name for path in place.iterdir()) == ["ledger.yaml"]


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def held(place: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a run whose rollouts from the third on hang in verify."""
    (place / "held.py").write_text(HELD)
    (place / "held.yaml").write_text(CONFIG.replace("use: ledger", "use: 'held:Held'").replace("size: 3", "size: 9"))
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "toprope", *arguments],
            cwd=place,
            env={**os.environ, "HELD_LOG": str(place / "held.log")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def until(process: subprocess.Popen[str], enough: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """Read events until `enough` of them came."""
    assert process.stdout is not None
    events: list[dict[str, Any]] = []
    for line in process.stdout:
        events.append(json.loads(line))
        if enough(events):
            return events
    raise AssertionError(f"the run ended first: {events[-3:]}")


def count(events: list[dict[str, Any]], name: str) -> int:
    return sum(event["event"] == name for event in events)


COMMAND = ("run", "held.yaml", "--out", "out", "--json", "--repeats", "1", "--concurrency", "3")


@pytest.mark.promise("CO-8")
def test_sigint_closes_sessions_keeps_finished_rows_and_exits_130(
    place: Path, held: Callable[..., subprocess.Popen[str]]
) -> None:
    process = held(*COMMAND)
    until(process, lambda events: count(events, "finished") == 2 and count(events, "dispatched") == 5)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    summary = json.loads(out.splitlines()[-1])["summary"]
    assert summary["exit_status"] == 130
    assert "2 of 9 rollouts have a verdict" in summary["message"]
    assert "4 not started" in summary["message"]
    assert len(rows(place / "out/results.jsonl")) == 2
    log = (place / "held.log").read_text().split("\n")
    seeds = {line.split()[1] for line in log if line.startswith("seed")}
    assert {line.split()[1] for line in log if line.startswith("release")} == seeds, "a session was left open"
    assert toprope(place, "audit", "out").returncode == 0
    assert left_of(process.pid) == []


@pytest.mark.promise("CO-8")
def test_kill_minus_9_leaves_no_child_and_a_journal_that_says_what_was_in_flight(
    place: Path, held: Callable[..., subprocess.Popen[str]]
) -> None:
    process = held(*COMMAND)
    until(process, lambda events: count(events, "finished") == 2 and count(events, "dispatched") == 5)
    process.kill()
    process.wait()
    assert left_of(process.pid) == []
    coverage = json.loads(toprope(place, "summary", "out", "--json").stdout)["coverage"]
    assert (coverage["measured"], coverage["unknown"], coverage["omitted"]) == (2, 3, 4)
    assert toprope(place, "audit", "out").returncode == 0


def left_of(session: int) -> list[str]:
    """Processes of a session that are still there."""
    left = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            left.append(stat.parent.name)
    return left


# -- serve -------------------------------------------------------------------------------------------------------------


def test_serve_tells_where_its_servers_are_and_its_captures_are_read_while_it_runs(
    place: Path, held: Callable[..., subprocess.Popen[str]]
) -> None:
    import urllib.request

    (place / "serve.yaml").write_text("servers:\n  policy: {role: model, engine: {kind: scripted}}\n")
    process = held("serve", "serve.yaml", "--out", "served", "--json")
    assert process.stdout is not None
    address = json.loads(process.stdout.readline())
    assert (address["name"], address["role"]) == ("policy", "model")
    assert json.loads(process.stdout.readline()) == {"ready": True}
    assert toprope(place, "capture", "ls", "served").returncode == 0

    url = f"{address['url']}/ng-rollout/task-7/training-token-capture/v1/chat/completions"
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": "hello"}]}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        assert json.loads(reply.read())["choices"][0]["message"]["content"] == "echo: hello"

    listed = [json.loads(line) for line in toprope(place, "capture", "ls", "served", "--json").stdout.splitlines()]
    assert [(info["rollout_id"], info["state"], info["entries"]) for info in listed] == [("task-7", "open", 1)]
    shown = toprope(place, "capture", "show", "served", "task-7", "--json").stdout.splitlines()
    (entry,) = [json.loads(line) for line in shown]
    assert len(entry["prompt_token_ids"]) > 0
    assert len(entry["generation_token_ids"]) == len(entry["generation_log_probs"]) > 0
    assert entry["finish_reason"] == "stop"
    assert entry["model_call_id"].startswith("call-")
    unknown = toprope(place, "capture", "show", "served", "task-8")
    assert_one_paragraph(unknown, "no capture has the key 'task-8'")

    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(address["url"].rpartition(":")[2])), timeout=5)


def test_a_port_that_is_taken_ends_the_start_with_the_servers_name(place: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = toprope(place, "serve", "ledger.yaml", "--out", "out", "--set", f"servers.books.port={port}")
    assert_one_paragraph(result, "servers.books" if "servers.books" in result.stderr else "books", f"{port}")
    assert not (place / "out").exists()


def test_a_server_on_another_address_needs_a_key(place: Path) -> None:
    result = toprope(place, "serve", "ledger.yaml", "--set", "servers.books.host=0.0.0.0")
    assert_one_paragraph(result, "servers.books.host", "api_key")
