"""Stock vLLM as a process, for each model of the leg. `make test-vllm` sets TOPROPE_VLLM; without it nothing is run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

HOME = Path(os.environ["TOPROPE_VLLM"]) if "TOPROPE_VLLM" in os.environ else None
if HOME is None:
    collect_ignore_glob = ["test_*.py"]

TEMPLATE = Path(__file__).parent / "chat_template.jinja"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",  # two threads on a busy machine of two cores are five times slower
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# fmt: off
FLAGS = [
    "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16", "--enforce-eager",
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-request-id-headers", "--enable-scale-out",
]
# fmt: on
START_S = 300.0


@dataclass(frozen=True)
class Vllm:
    """A running server: its base URL with `/v1`, the served model's name and its directory."""

    url: str
    model: str
    directory: Path
    process: subprocess.Popen[bytes]


@contextmanager
def vllm(model: str) -> Iterator[Vllm]:
    """On entry `/health` answers 200; on exit the process is gone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    directory = HOME / "models" / model
    command = [str(HOME / "venv/bin/python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory)]
    command += ["--served-model-name", model, "--host", "127.0.0.1", "--port", str(port), *FLAGS]
    command += ["--chat-template", str(TEMPLATE)]
    log = HOME / f"{model}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env={**os.environ, **ENVIRONMENT}, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait(f"http://127.0.0.1:{port}/health", process, log)
        yield Vllm(f"http://127.0.0.1:{port}/v1", model, directory, process)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM ended with status {process.returncode}; its words are in {log}")
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)  # another program's start: there is nothing to wait on but its port
    raise RuntimeError(f"vLLM did not answer {url} within {START_S:g} s; its words are in {log}")


@pytest.fixture
def start_vllm():
    """`with start_vllm(model) as server`."""
    return vllm


@pytest.fixture(scope="session", params=["random", "smollm2"])
def served(request: pytest.FixtureRequest) -> Iterator[Vllm]:
    with vllm(request.param) as server:
        yield server


@pytest.fixture(scope="session")
def results() -> Iterator[list[dict[str, object]]]:
    """What the page is made of: `{check, model, figure}` for each check that held."""
    rows: list[dict[str, object]] = []
    yield rows
    (HOME / "results.json").write_text(json.dumps(rows, indent=1))
