"""A program with a public client, run as an agent by `toprope run`: tokens come out, and they are proven."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.promise("EP-14"), pytest.mark.promise("MS-8")]

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="the program bwrap is not installed")
CHAT = """
import os, sys
from openai import OpenAI

client = OpenAI()
model = os.environ["OPENAI_MODEL"]
messages = [{"role": "user", "content": sys.stdin.read()}]
first = client.chat.completions.create(model=model, messages=messages)
messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "Are you sure?"}]
second = client.chat.completions.create(model=model, messages=messages)
print(second.choices[0].message.content)
if os.fork() == 0:
    os.setsid()
    import time
    time.sleep(1000)
"""
MESSAGES = """
import os, sys
import anthropic

client = anthropic.Anthropic()
messages = [{"role": "user", "content": sys.stdin.read()}]
for question in ("Are you sure?", None):
    with client.messages.stream(model=os.environ["ANTHROPIC_MODEL"], max_tokens=100, messages=messages) as stream:
        said = stream.get_final_message()
    messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": question}]
print(said.content[0].text)
"""
"""A daemon is left by the first; the second streams, in another dialect."""
ENVIRONMENT = """
from toprope.protocol.episode import Task
from toprope.protocol.ids import TaskId
from toprope.servers.resources.environment import Environment, final_text

class Exact(Environment):
    def verify(self, state, task, response):
        return float(final_text(response) == task["expected"])

    def tasks(self, size, seed):
        for index in range(size):
            params = {"input": "How much is 2 and 2?", "instructions": "Be short."}
            data = {"expected": "four"}
            yield Task(TaskId("exact", str(index)), {"responses_create_params": params, "task_data": data})
"""


def packages(*names: str) -> set[Path]:
    """The files and directories in which these distributions, and what they need, are installed."""
    found: set[Path] = set()
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop()
        try:
            dist = distribution(name)
        except PackageNotFoundError:
            continue  # needed on another platform
        if dist.name in seen:
            continue
        seen.add(dist.name)
        tops = {file.parts[0] for file in dist.files or () if file.parts[0] not in ("..", "__pycache__")}
        found |= {Path(str(dist.locate_file(top))) for top in tops}
        waiting += [re.match(r"[\w.-]+", need)[0] for need in dist.requires or () if "extra ==" not in need]  # type: ignore[index]
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The public clients and what they need, and nothing else of ours, for a sandbox to read."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:  # another file system
            shutil.copy2(source, target)

    place = tmp_path_factory.mktemp("site")
    place.chmod(0o755)  # inside, an ordinary user reads it
    for path in packages("openai", "anthropic"):
        if path.is_dir():
            shutil.copytree(path, place / path.name, copy_function=link, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            link(str(path), str(place / path.name))
    return place


def toprope(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "toprope", *arguments],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "SECRET_OF_THE_HOST": "hunter2"},
    )


@pytest.mark.parametrize(
    ("kind", "program"),
    [
        ("directory", CHAT),
        pytest.param("bubblewrap", CHAT, marks=needs_bwrap),
        pytest.param("bubblewrap", MESSAGES, marks=needs_bwrap),
    ],
    ids=["openai-directory", "openai-bubblewrap", "anthropic-bubblewrap"],
)
def test_a_program_that_knows_nothing_of_us_gives_rollouts_to_train_on(
    kind: str, program: str, site: Path, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(program)
    (tmp_path / "exact.py").write_text(ENVIRONMENT)
    box: dict[str, Any] = {"kind": kind, "env": {"PYTHONPATH": str(site)}, "leases": str(tmp_path / "leases")}
    if kind == "bubblewrap":
        box["read_only"] = [str(site)]
    config = {
        "sandboxes": {"box": box},
        "servers": {
            "policy": {
                "role": "model",
                "api_key": "sk-of-the-server",
                "engine": {"kind": "scripted", "script": [{"text": "I think four"}, {"text": "four"}]},
            },
            "exact": {"role": "resources", "use": "exact:Exact"},
            "solver": {
                "role": "agent",
                "use": "command",
                "model": "policy",
                "sandbox": "box",
                "token_id_capture": True,
                "config": {
                    "argv": [sys.executable if kind == "directory" else "python3", "agent.py"],
                    "stdin": "{prompt}",
                    "copy": {"agent.py": "agent.py"},
                },
            },
            "episode": {"role": "environment", "resources": "exact", "agent": "solver"},
        },
        "run": {"environment": "episode", "tasks": {"generate": "exact", "size": 2}, "max_attempts": 1},
        "token_id_capture": {"enabled": True},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    ran = toprope(tmp_path, "run", "run.yaml", "--out", "out")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [1.0, 1.0]
    for row in rows:
        assert not row["mask_sample"]
        assert row["_ng_token_capture"]["n_calls"] == 2
        assert row["_ng_token_capture"]["terminal"]["method"] == "content", "the answer is the last call's own words"
        said = [item["generation_token_ids"] for item in row["response"]["output"]]
        assert len(said) == 2
        assert all(said)
        (invoked,) = [r for r in row["ng_agent_observations"]["records"] if r["kind"] == "invocation"]
        assert (invoked["exit"], invoked["model_calls"]) == (0, 2)
    audited = toprope(tmp_path, "audit", "out")
    assert audited.returncode == 0, audited.stdout + audited.stderr
    assert "proven 2" in audited.stdout
    assert "sk-of-the-server" not in "".join(
        path.read_text("utf-8", "replace") for path in (tmp_path / "out").glob("*.json*")
    )
    left = [path.name for path in (tmp_path / "leases").glob("*") if not path.name.startswith(".")]
    assert left == [], "a sandbox is left"
    swept = toprope(tmp_path, "sweep", "leases", "--json")
    assert json.loads(swept.stdout)["reaped"] == []
