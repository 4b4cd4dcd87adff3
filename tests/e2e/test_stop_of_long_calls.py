"""Ctrl-C while an engine is at work for a long time: the run ends within its own bound, and every intent is closed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """
servers:
  policy: {role: model, engine: {kind: 'slow:Slow', script: [{text: done}]}, limits: {drain_s: 100000}}
  books: {role: resources, use: ledger}
  clerk: {role: agent, use: tool_loop, model: policy, token_id_capture: true}
  episode: {role: environment, resources: books, agent: clerk, tools: [direct_http]}
run: {environment: episode, tasks: {generate: books, size: 3, seed: 5}, concurrency: 1, stop_s: 0.1}
token_id_capture: {enabled: true}
"""

SLOW = '''
import asyncio, pathlib
from toprope.testing.scripted import ScriptedEngine

class Slow(ScriptedEngine):
    """Answers once; every later call goes on for ever."""

    calls = 0

    async def generate(self, request):
        self.calls += 1
        if self.calls > 1:
            print("at work", flush=True)
            await asyncio.Event().wait()
        return await super().generate(request)
'''


@pytest.mark.promise("CO-8")
def test_one_sigint_ends_a_run_whose_engine_never_answers_and_aborts_its_intent(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "slow.yaml").write_text(CONFIG)
    toprope = [sys.executable, "-m", "toprope"]
    process = subprocess.Popen(
        [*toprope, "run", "slow.yaml", "--out", "out"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        while b"at work" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)  # the server's own bound is more than a day
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 130, told
    assert len((tmp_path / "out/results.jsonl").read_bytes().splitlines()) == 1
    listed = subprocess.run(
        [*toprope, "capture", "ls", "out", "--retired", "--json"], cwd=tmp_path, capture_output=True, timeout=60
    )
    captures = [json.loads(line) for line in listed.stdout.splitlines()]
    assert len(captures) == 2
    assert [capture["open_intents"] for capture in captures] == [0, 0]
    audit = subprocess.run([*toprope, "audit", "out"], cwd=tmp_path, capture_output=True, timeout=60)
    assert audit.returncode == 0, audit.stdout
