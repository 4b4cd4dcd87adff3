"""The examples as their users run them: programs, files and sockets; nothing of ours is imported by the agents."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from toprope.capture.sqlite_store import SqliteStore
from toprope.http.client import Client
from toprope.launch.config import load_configuration
from toprope.launch.parts import build_parts
from toprope.testing.capture_kit import sample_entry

EXAMPLES = Path(__file__).parents[2] / "examples"
FOREIGN = EXAMPLES / "foreign_agent"
ANSWER = "There are 4320 minutes in 3 days."
RUN_HERE = {
    "ledger/till.py",
    "ledger/till.yaml",
    "ledger/tasks.jsonl",
    "foreign_agent/agent_chat.py",
    "foreign_agent/agent_responses.py",
    "foreign_agent/serve.yaml",
    "foreign_agent/take_tokens.py",
}


def python(place: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, with nothing else of ours in the environment."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=place,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


class Served:
    """`toprope serve` that is up: where the policy listens."""

    def __init__(self, place: Path, url: str) -> None:
        self.place = place
        self.url = url

    def agent(self, program: str, key: str) -> subprocess.CompletedProcess[str]:
        """Run an agent with nothing changed but the base URL."""
        base = f"{self.url}/ng-rollout/{key}/training-token-capture/v1"
        return python(self.place, str(FOREIGN / program), OPENAI_BASE_URL=base, OPENAI_API_KEY="unused")

    def take(self, *rewards: str) -> subprocess.CompletedProcess[str]:
        return python(self.place, str(FOREIGN / "take_tokens.py"), "served", "rows.jsonl", *rewards)

    def rows(self) -> list[dict[str, Any]]:
        path = self.place / "rows.jsonl"
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def kept(self) -> list[dict[str, Any]]:
        listed = python(self.place, "-m", "toprope", "capture", "ls", "served", "--json")
        assert listed.returncode == 0, listed.stderr
        return [json.loads(line) for line in listed.stdout.splitlines()]


@contextmanager
def serving(place: Path, config: Path) -> Iterator[Served]:
    server = subprocess.Popen(
        [sys.executable, "-m", "toprope", "serve", str(config), "--out", "served", "--json"],
        cwd=place,
        env={**os.environ, "POLICY_PORT": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        first = server.stdout.readline()
        assert first, server.stderr.read() if server.stderr else ""
        address = json.loads(first)
        assert (address["name"], address["role"]) == ("policy", "model")
        assert json.loads(server.stdout.readline()) == {"ready": True}
        yield Served(place, address["url"])
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)


def test_every_file_of_the_examples_is_run_by_a_test() -> None:
    """Here, on a page of docs/ that shows the file and follows it, or as a program of others (`tests/programs`)."""
    pages = [path.read_text(encoding="utf-8") for path in (EXAMPLES.parent / "docs").glob("*/*.md")]
    shown = {name for page in pages for name in re.findall(r"^```\w+ example=(\S+)$", page, re.MULTILINE)}
    files = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*") if path.is_file()}
    recipes = {path: yaml.safe_load(path.read_text()) for path in (EXAMPLES / "programs").glob("*.yaml")}
    programs = {f"programs/{path.name}" for path in recipes}
    programs |= {
        f"programs/{name}" for recipe in recipes.values() for name in recipe["config"].get("copy", {}).values()
    }
    unrun = {
        name
        for name in files - RUN_HERE - shown - programs
        if "__pycache__" not in name and not name.endswith("README.md")
    }
    assert unrun == set()
    assert (RUN_HERE | shown | programs) - files == set()


@pytest.mark.parametrize("program", ["agent_chat.py", "agent_responses.py"])
def test_the_agents_know_nothing_of_toprope(program: str) -> None:
    tree = ast.parse((FOREIGN / program).read_text())
    named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    named |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert named == {"json", "sys", "openai"}


@pytest.mark.promise("UX-4")
@pytest.mark.promise("MS-8")
def test_an_agent_of_two_dialects_gives_the_same_trainable_row_and_its_evidence_is_retired(tmp_path: Path) -> None:
    with serving(tmp_path, FOREIGN / "serve.yaml") as served:
        for program, key in (("agent_chat.py", "m-1"), ("agent_responses.py", "m-2")):
            said = served.agent(program, key)
            assert (said.returncode, said.stdout.strip()) == (0, ANSWER), said.stderr
        assert {each["rollout_id"]: each["entries"] for each in served.kept()} == {"m-1": 2, "m-2": 2}

        taken = served.take("m-1=1.0", "m-2=0.5")
        assert taken.returncode == 0, taken.stderr
        assert "m-1: 2 calls, 132 tokens, 24 to train" in taken.stdout
        one, two = served.rows()
        assert [(row["_ng_rollout_id"], row["reward"]) for row in (one, two)] == [("m-1", 1.0), ("m-2", 0.5)]
        first, second = one["response"]["_ng_traces"][0], two["response"]["_ng_traces"][0]
        for name in ("token_ids", "loss_mask", "logprobs"):
            assert first[name] == second[name]
        assert len(first["token_ids"]) == len(first["loss_mask"]) == 132
        assert len(first["logprobs"]) == sum(first["loss_mask"]) == 24
        assert all(value < 0 for value in first["logprobs"])
        assert served.kept() == []

        late = served.agent("agent_chat.py", "m-1")
        assert late.returncode != 0
        assert "403" in late.stderr
        again = served.take("m-1=1.0", "nobody=1.0")
        assert "m-1: already delivered" in again.stderr
        assert "no capture: 'nobody'" in again.stderr
        assert len(served.rows()) == 2


TWO_CONVERSATIONS = """
import asyncio, json, sys, toprope
from openai import OpenAI

base, key = sys.argv[1:]
client = OpenAI(base_url=base, api_key="unused")
def ask(text):
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
title, answer = ask("a title for it"), ask("the question")
message = {"type": "message", "role": "assistant",
           "content": [{"type": "output_text", "text": answer.choices[0].message.content}]}

async def main():
    out = {}
    async with toprope.open_store("served") as store:
        (call,) = [e.model_call_id for e in await store.open_entries(key) if e.response_id == answer.id]
        for name, told in {
            "nothing": {"response": {"output": []}},
            "its reply's id": {"response": {"id": answer.id}},
            "its call": {"response": {"output": []}, "_ng_terminal_model_call_id": call},
            "its words": {"response": {"output": [message]}},
        }.items():
            built = await toprope.finalize_rollout_token_capture({"_ng_rollout_id": key, **told}, store)
            items = (built["rebuilt_response"] or {}).get("output") or []
            out[name] = [built["metrics"]["mask_reasons"], [i["content"][0]["text"] for i in items]]
        built = await toprope.finalize_rollout_token_capture(
            {"_ng_rollout_id": key, "response": {"output": []}}, store, deliver="all_chains")
        out["all"] = [built["metrics"]["mask_reasons"], [t["role"] for t in built["rebuilt_response"]["_ng_traces"]]]
    print(json.dumps(out))
asyncio.run(main())
"""


def test_two_conversations_mask_until_the_row_says_which_one_counts(tmp_path: Path) -> None:
    """What the how-to page advises, as it says it."""
    config = tmp_path / "echo.yaml"
    config.write_text("servers: {policy: {role: model, engine: {kind: scripted}}}")
    with serving(tmp_path, config) as served:
        base = f"{served.url}/ng-rollout/two/training-token-capture/v1"
        done = python(tmp_path, "-c", TWO_CONVERSATIONS, base, "two")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    reasons, delivered = found["nothing"]
    assert "several_chains" in reasons
    assert delivered == []
    assert found["its reply's id"] == found["its call"] == found["its words"] == [[], ["echo: the question"]]
    assert found["all"][0] == []
    assert len(found["all"][1]) == 2


def test_the_other_engines_of_the_serve_file_are_built_as_written(tmp_path: Path) -> None:
    text = (FOREIGN / "serve.yaml").read_text()
    kinds = []
    for number, line in enumerate(re.findall(r"^ +# (engine: .*)$", text, re.MULTILINE)):
        values = yaml.safe_load(text.replace("${POLICY_PORT:8010}", "0"))
        values["servers"]["policy"].update(yaml.safe_load(line))
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump(values))
        (engine,) = build_parts(load_configuration(path, (), {}), Client()).engines.values()
        assert engine.capabilities.returns_ids
        kinds.append(type(engine).__name__)
    assert kinds == ["EmbeddedEngine", "OpenAIEngine"]


@pytest.mark.promise("UX-4")
def test_the_till_runs_from_any_directory_and_its_run_is_proven(tmp_path: Path) -> None:
    done = python(tmp_path, "-m", "toprope", "run", str(EXAMPLES / "ledger/till.yaml"), "--out", "out")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_bytes().splitlines()]
    assert sorted(row["reward"] for row in rows) == [0.0, 0.0, 1.0, 1.0]
    assert python(tmp_path, "-m", "toprope", "audit", "out").returncode == 0


def test_serve_tells_people_the_base_url_of_a_captured_rollout(tmp_path: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "toprope", "serve", str(FOREIGN / "serve.yaml"), "--out", "served"],
        cwd=tmp_path,
        env={**os.environ, "POLICY_PORT": "0"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        said = ""
        while "Ctrl-C stops the servers" not in said:
            line = server.stdout.readline()
            assert line, said
            said += line
        assert re.search(r"http://127\.0\.0\.1:\d+/ng-rollout/<key>/training-token-capture/v1$", said, re.MULTILINE)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=60)


@pytest.mark.promise("UX-2")
def test_a_directory_without_captures_is_named(tmp_path: Path) -> None:
    for name, said in (("nowhere", "there is no such directory"), (".", "nothing was captured here")):
        done = python(tmp_path, str(FOREIGN / "take_tokens.py"), name, "rows.jsonl", "k=1")
        assert done.returncode == 1
        assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.promise("UX-2")
async def test_a_mistyped_key_is_named_and_stays_open(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "capture.sqlite")
    await store.put(sample_entry("minutes-1", "c1"))
    program = str(FOREIGN / "take_tokens.py")
    assert "no capture: 'minutes-11'" in python(tmp_path, program, ".", "rows.jsonl", "minutes-11=1.0").stderr
    usage = "Take finished rollouts out of a capture store"
    assert python(tmp_path, program, ".", "rows.jsonl").stderr.startswith(usage)
    for argument in ("minutes-1", "minutes-1=", "minutes-1=good", "minutes-1=nan", "=1.0"):
        done = python(tmp_path, program, ".", "rows.jsonl", argument)
        assert done.returncode == 1
        assert done.stderr.startswith(f"{argument!r} is not KEY=REWARD")
        assert usage in done.stderr
    assert [each.state for each in await store.list_captures()] == ["open"]
    await store.put(sample_entry("minutes-11", "c1"))
    await store.close()


@pytest.mark.promise("CP-10")
@pytest.mark.parametrize(
    ("left", "kept"),
    [
        (b"", []),
        (b'{"_ng_rollout_id":"m-3","rew', []),
        (b'{"_ng_rollout_id":"m-2"}\n' + b'{"_ng_rollout_id":"m-3","rew' + b"w" * 70_000, ["m-2"]),
        (b'{"_ng_rollout_id":"m-2"}', ["m-2"]),
        (b'{"_ng_rollout_id":"m-2"}\n', ["m-2"]),
    ],
    ids=["empty", "torn first", "long torn", "whole without its end", "whole"],
)
async def test_what_a_crash_left_of_a_row_takes_no_other_row_along(
    tmp_path: Path, left: bytes, kept: list[str]
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(left)
    store = SqliteStore(tmp_path / "capture.sqlite")
    await store.put(sample_entry("m-3", "c1"))
    done = python(tmp_path, str(FOREIGN / "take_tokens.py"), ".", "rows.jsonl", "m-3=1.0")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_bytes().splitlines()]
    assert [row["_ng_rollout_id"] for row in rows] == [*kept, "m-3"]
    assert [each.state for each in await store.list_captures(retired=True)] == ["retired"]
    await store.close()
