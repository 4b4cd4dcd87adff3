"""`toprope new environment`: what it makes runs, conforms and tests itself as it stands; `check --environment`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from toprope.cli.new import check_name, make_environment
from toprope.errors.tree import ConfigError


def toprope(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toprope", *arguments]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120)


@pytest.mark.promise("EP-15")
def test_a_new_environment_runs_conforms_and_passes_its_own_tests(tmp_path: Path) -> None:
    made = toprope(tmp_path, "new", "environment", "my_shelf")
    assert made.returncode == 0, made.stderr
    place = tmp_path / "my_shelf"
    assert str(next(iter(made.stdout.split()))) == "made"
    lines = [line for line in (place / "my_shelf.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 40

    ran = toprope(place, "run", "my_shelf.yaml", "--out", "first")
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in (place / "first/results.jsonl").read_text().splitlines()]
    assert {row["_ng_task_id"]["task_id"]: row["reward"] for row in rows} == {
        "two-apples": 1.0,
        "a-pear-too": 0.5,
        "take-away": 0.0,
        "make-even": 0.5,
    }
    checked = toprope(place, "check", "my_shelf.yaml", "--environment", "my_shelf")
    assert checked.returncode == 0, checked.stdout
    assert checked.stdout.splitlines()[-1] == "my_shelf: conforms"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=place,
        env=clean,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert tested.returncode == 0, tested.stdout
    assert "2 passed" in tested.stdout


@pytest.mark.parametrize("name", ["true", "none", "verdict", "tool_error", "annotated", "environment"])
def test_a_name_that_is_a_word_of_the_new_module_makes_one_that_conforms(tmp_path: Path, name: str) -> None:
    place = make_environment(name, tmp_path)
    checked = toprope(place, "check", f"{name}.yaml", "--environment", name)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.splitlines()[-1] == f"{name}: conforms"


def test_what_is_there_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "shelf").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("shelf", "dangling"):
        with pytest.raises(ConfigError, match="there already"):
            make_environment(name, tmp_path)
    refused = toprope(tmp_path, "new", "environment", "shelf")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert len(refused.stderr.strip().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "shelf"]
    assert list((tmp_path / "shelf").iterdir()) == []


def test_it_can_be_made_elsewhere_and_a_place_that_is_a_file_is_refused(tmp_path: Path) -> None:
    place = make_environment("shelf", tmp_path / "deep/down")
    assert sorted(path.name for path in place.iterdir()) == [
        "README.md",
        "shelf.py",
        "shelf.yaml",
        "tasks.jsonl",
        "test_shelf.py",
    ]
    assert [path.name for path in place.parent.iterdir()] == ["shelf"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        make_environment("shelf", tmp_path / "file")


@pytest.mark.parametrize(
    "name",
    [
        *("", "A", "9x", "a-b", "a__b", "a_", "../x", "x/y", "x.y", "ünï", "a" * 41),  # no module's name
        *("class", "match", "test_x", "policy", "episode"),  # a meaning already
        *("json", "toprope", "yaml"),  # found already
    ],
)
def test_a_name_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="NAME"):
        check_name(name)


@pytest.mark.parametrize("name", ["on", "null", "yes", "e1"])
def test_a_name_that_yaml_reads_as_something_else_is_a_name_in_the_configuration(name: str, tmp_path: Path) -> None:
    text = (make_environment(name, tmp_path) / f"{name}.yaml").read_text()
    servers = yaml.safe_load(text)["servers"]
    assert servers[name]["role"] == "resources"
    assert servers["episode"]["resources"] == name


BROKEN = """
from toprope import Environment

class Broken(Environment):
    def verify(self, state, task, response):
        return float(response["output"][-1]["content"] == "done")
"""
CONFIG = """
servers:
  policy: {role: model, engine: {kind: scripted, script: [done]}}
  broken: {role: resources, use: "broken_one:Broken"}
  far: {role: resources, url: "http://127.0.0.1:9"}
  solver: {role: agent, use: tool_loop, model: policy}
  episode: {role: environment, resources: broken, agent: solver}
run: {environment: episode, tasks: tasks.jsonl}
"""


def test_check_says_which_promise_an_environment_breaks_and_how(tmp_path: Path) -> None:
    (tmp_path / "broken_one.py").write_text(BROKEN)
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "tasks.jsonl").write_text('{"responses_create_params": {"input": "go"}, "n": 1}\n')
    done = toprope(tmp_path, "check", "c.yaml", "--environment", "broken")
    assert done.returncode == 1
    (line,) = (line for line in done.stdout.splitlines() if "does nothing gets a verdict" in line)
    assert line.startswith("BROKEN")
    assert "IndexError" in line
    found = toprope(tmp_path, "check", "c.yaml", "--environment", "broken", "--json")
    outcomes = [json.loads(line) for line in found.stdout.splitlines()]
    assert any(each["problem"] is None for each in outcomes)
    assert any(each["check"] == "an_agent_that_does_nothing_gets_a_verdict" and each["problem"] for each in outcomes)
    for name, said in (("brokn", "did you mean 'broken'"), ("policy", "no resources server"), ("far", "elsewhere")):
        refused = toprope(tmp_path, "check", "c.yaml", "--environment", name)
        assert refused.returncode == 2
        assert said in refused.stderr
