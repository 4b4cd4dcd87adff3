"""kill -9 of each process that has a hand in a sandboxed episode: nothing of it runs on, nothing of it is left.

Three processes: a resources server that owns and lends sandboxes, an agent server whose program works in them, the run.
A ledger that the environment keeps says which allocations were released.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.parts import needs
from tests.unit.sandbox.conftest import processes_with

pytestmark = [
    pytest.mark.promise("EP-11"),
    pytest.mark.promise("EP-14"),
    needs("bwrap"),
]

EPISODES = 2
ENVIRONMENT = """
import os
from toprope.protocol.episode import Task
from toprope.protocol.ids import TaskId
from toprope.sandbox.spec import Limits, SandboxSpec
from toprope.servers.resources.environment import Environment

class Ledgered(Environment):
    sandbox = SandboxSpec(limits=Limits(wall_s=900))
    lends_sandbox = True

    def note(self, event, sandbox):
        with open(os.environ["LEDGER"], "a") as file:
            file.write(f"{event} {sandbox.sandbox_id}\\n")

    def seed(self, task, sandbox):
        self.note("seeded", sandbox)
        return sandbox

    def release(self, state):
        self.note("released", state)

    def verify(self, state, task, response):
        return 1.0

    def tasks(self, size, seed):
        for index in range(size):
            params = {"input": "go"}
            yield Task(TaskId("t", str(index)), {"responses_create_params": params, "task_data": {}})
"""
PROGRAM = "(setsid sleep 1000 &) ; setsid sh -c 'sleep 1000; : MARKER' & echo {prompt}; sleep 1000; : MARKER"
BOX = {"kind": "bubblewrap", "reap_every_s": 0.2, "require_limits": ["files", "network"]}
PLAIN = {"kind": "directory", "reap_every_s": 0.2}


def agent(marker: str, **more: Any) -> dict[str, Any]:
    program = ["sh", "-c", PROGRAM.replace("MARKER", marker)]
    return {"role": "agent", "use": "command", "model": "policy", "config": {"argv": program}, **more}


class Stage:
    """The processes of one test, their directory, and what they leave."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.leases = place / "leases"
        self.marker = f"marker-{secrets.token_hex(8)}"
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.box: dict[str, Any] = BOX
        (place / "ledgered.py").write_text(ENVIRONMENT)

    def start(self, name: str, command: str, servers: dict[str, Any], *, sandboxes: bool = True, **more: Any) -> None:
        config = {"servers": servers, **more}
        if sandboxes:
            config["sandboxes"] = {"box": {**self.box, "leases": str(self.leases)}}
        file = self.place / f"{name}.yaml"
        file.write_text(json.dumps(config))
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-m", "toprope", command, str(file), "--out", str(self.place / f"out-{name}"), "--json"],
            cwd=self.place,
            env={**os.environ, "LEDGER": str(self.place / "ledger")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def serve(self, name: str, servers: dict[str, Any], **more: Any) -> dict[str, str]:
        """Start servers; their URLs by name."""
        self.start(name, "serve", servers, **more)
        stream = self.processes[name].stdout
        assert stream is not None
        urls = {}
        for line in stream:
            told = json.loads(line)
            if "ready" in told:
                return urls
            urls[told["name"]] = told["url"]
        raise AssertionError(self.processes[name].communicate()[1])

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def ids(self) -> list[str]:
        return [path.name for path in self.leases.glob("*") if not path.name.startswith(".")]

    def ledger(self, event: str) -> list[str]:
        file = self.place / "ledger"
        lines = file.read_text().splitlines() if file.exists() else []
        return sorted(line.split()[1] for line in lines if line.startswith(event))

    def inside(self) -> list[int]:
        """Processes of the programs, those that they left behind included."""
        return processes_with(self.marker)

    def until(self, held: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 180
        while not held():
            assert time.monotonic() < end, f"{what}; inside {self.inside()}, leases {self.ids()}"
            time.sleep(0.02)

    def until_running(self) -> None:
        def running() -> bool:
            run = self.processes["run"]
            assert run.poll() is None, run.communicate()
            return len(self.ids()) == EPISODES and len(self.inside()) >= 2 * EPISODES

        self.until(running, "the programs do not start")

    def failures(self) -> set[tuple[str, str, bool]]:
        """Kind, stage and `terminal` of the run's failures."""
        rows = [json.loads(line) for line in (self.place / "out-run/failures.jsonl").read_text().splitlines()]
        return {(row["failure_kind"], row["stage"], row["terminal"]) for row in rows}

    def gone(self) -> bool:
        return not self.inside() and not self.ids() and not self.groups()

    def groups(self) -> list[str]:
        names = {f"toprope-{name}" for name in self.ledger("seeded")}
        return [name for _, below, _ in os.walk("/sys/fs/cgroup") for name in below if name in names]

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in self.processes.values():
            process.communicate(timeout=180)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def three_processes(stage: Stage, **episode: Any) -> None:
    owner = {"role": "resources", "use": "ledgered:Ledgered", "sandbox": "box", "session_ttl_s": 1}
    urls = stage.serve("owner", {"room": owner})
    policy = {"role": "model", "engine": {"kind": "scripted"}}
    urls |= stage.serve("borrower", {"policy": policy, "solver": agent(stage.marker)})
    servers = {
        "room": {"role": "resources", "url": urls["room"]},
        "solver": {"role": "agent", "url": urls["solver"]},
        "episode": {"role": "environment", "resources": "room", "agent": "solver", **episode},
    }
    task = {"task_id": {"taskset": "t", "task_id": "0"}}
    task["task_input"] = {"responses_create_params": {"input": "go"}, "task_data": {}}
    (stage.place / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    run = {"environment": "episode", "tasks": "tasks.jsonl", "repeats": EPISODES, "max_attempts": 1}
    stage.start("run", "run", servers, sandboxes=False, run=run)
    stage.until_running()


def test_the_owner_is_killed(stage: Stage) -> None:
    three_processes(stage)
    stage.kill("owner")
    stage.until(stage.gone, "sandboxes of a killed resources server live on")
    assert stage.processes["run"].wait(180) != 0
    assert stage.failures() == {("session_lost", "agent", False)}, "said as what it is, and worth another attempt"


def test_the_borrower_is_killed(stage: Stage) -> None:
    three_processes(stage)
    stage.kill("borrower")
    stage.until(stage.gone, "sandboxes that a killed agent server worked in live on")
    assert stage.processes["run"].wait(180) != 0
    assert stage.ledger("released") == stage.ledger("seeded")
    assert len(stage.ledger("seeded")) == EPISODES


def test_the_run_is_killed(stage: Stage) -> None:
    three_processes(stage, episode_timeout_s=30, verify_timeout_s=1, cleanup_timeout_s=2)  # the programs start in it
    stage.kill("run")
    stage.until(stage.gone, "sandboxes of a killed run outlive its lease and a sweep")
    assert stage.ledger("released") == stage.ledger("seeded")
    assert len(stage.ledger("seeded")) == EPISODES


def one_process(stage: Stage, **episode: Any) -> None:
    servers = {
        "policy": {"role": "model", "engine": {"kind": "scripted"}},
        "room": {"role": "resources", "use": "ledgered:Ledgered", "sandbox": "box"},
        "solver": agent(stage.marker),
        "episode": {"role": "environment", "resources": "room", "agent": "solver", **episode},
    }
    run = {"environment": "episode", "tasks": {"generate": "room", "size": EPISODES}, "max_attempts": 1}
    stage.start("run", "run", servers, run=run)


@pytest.mark.parametrize("box", [BOX, PLAIN], ids=["bubblewrap", "directory"])
def test_a_run_that_is_killed_with_all_its_servers_leaves_no_process_and_the_next_sweep_takes_the_rest(
    stage: Stage, box: dict[str, Any]
) -> None:
    stage.box = box
    one_process(stage)
    stage.until_running()
    stage.kill("run")
    stage.until(lambda: not stage.inside(), "programs of a killed run live on")
    assert len(stage.ids()) == EPISODES, "nobody was there to remove them"
    swept = subprocess.run(
        [sys.executable, "-m", "toprope", "sweep", str(stage.leases), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(swept.stdout)
    assert sorted(told["reaped"]) == stage.ledger("seeded")
    assert told["living"] == []
    assert stage.gone()


@pytest.mark.promise("CO-8")
def test_ctrl_c_ends_programs_and_releases_everything(stage: Stage) -> None:
    one_process(stage)
    stage.until_running()
    stage.processes["run"].send_signal(signal.SIGINT)
    assert stage.processes["run"].wait(180) == 130
    assert stage.gone()
    assert stage.ledger("released") == stage.ledger("seeded")
    assert len(stage.ledger("seeded")) == EPISODES


@pytest.mark.promise("EP-10")
def test_a_deadline_ends_programs_and_their_daemons(stage: Stage) -> None:
    stage.box = PLAIN
    one_process(stage, agent_timeout_s=5)
    assert stage.processes["run"].wait(180) == 1
    assert stage.gone()
    assert stage.ledger("released") == stage.ledger("seeded")
    assert stage.failures() == {("agent_timeout", "agent", False)}
