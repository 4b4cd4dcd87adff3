"""PF-1 and PF-2 beside a peer: NeMo Gym's own model server with token capture and ours, in turns.

`python -m bench.peer_nemo_gym PYTHON [CONCURRENCY]`, where PYTHON is an interpreter of an environment with `nemo-gym`
(0.7.0 was read; it wants Python 3.13.14). Its server is started as its command line starts it, unpatched, with one
worker; request, upstream, client and rounds are those of `bench.model_call`. Each call is a rollout of its own. That
NeMo Gym recorded the ids of every call is looked at before a figure is printed. Not a part of `make bench`: the peer's
install has 1.4 GB.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from bench.figures import Figure
from bench.model_call import PATHS, Runner, process, request_body

ROUNDS = 8
_START_S = 60.0


def configuration(upstream: str, folder: str, port: int) -> dict[str, object]:
    """What NeMo Gym's own launcher hands to one model server: capture on, ids asked for."""
    server = {
        "entrypoint": "app.py",
        "host": "127.0.0.1",
        "port": port,
        "base_url": upstream,
        "api_key": "k",
        "model": "m",
        "return_token_id_information": True,
        "request_prompt_and_generation_token_ids": True,
        "uses_reasoning_parser": True,
    }
    return {
        "head_server": {"host": "127.0.0.1", "port": 11000},
        "dry_run": False,
        "policy_model": {"responses_api_models": {"vllm_model": server}},
        "token_id_capture": {"enabled": True, "all_agents": True, "dir": str(Path(folder, "tokens"))},
    }


@contextlib.contextmanager
def nemo_gym(python: str, upstream: str, folder: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """NeMo Gym's model server; answers when the block begins, gone when it ends. Its output is in `folder`."""
    found = subprocess.run(
        [python, "-c", "import responses_api_models.vllm_model as m; print(next(iter(m.__path__)))"],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        sys.exit(f"{python} has no NeMo Gym: {found.stderr.strip().splitlines()[-1]}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "NEMO_GYM_CONFIG_PATH": "policy_model",
        "NEMO_GYM_CONFIG_DICT": json.dumps(configuration(upstream, folder, port)),
    }
    with Path(folder, "log").open("wb") as log:
        child = subprocess.Popen([python, "app.py"], env=environment, stdout=log, stderr=log, cwd=found.stdout.strip())
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    try:
        while True:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=1):
                    break
            except OSError:
                if child.poll() is not None or time.monotonic() > until:
                    sys.exit(f"NeMo Gym's server does not answer:\n{Path(folder, 'log').read_text()[-2000:]}")
                time.sleep(0.1)
        yield child, url
    finally:
        child.kill()
        child.wait()


def require_records(folder: str, calls: int) -> None:
    """Exit unless each of so many calls has its record, with as many ids as the upstream sent."""
    files = list(Path(folder, "tokens").glob("*.tokens.jsonl"))
    shapes = {
        tuple(len(record[name]) for name in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"))
        for file in files
        for record in map(json.loads, file.read_bytes().splitlines())
    }
    if len(files) != calls or shapes != {(4000, 300, 300)}:
        sys.exit(f"NeMo Gym recorded {len(files)} of {calls} calls, with {shapes} ids: nothing is compared")


def measure(python: str, upstream: str, concurrency: int) -> None:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        theirs_child, theirs_url = stack.enter_context(nemo_gym(python, upstream, folder))
        own = stack.enter_context(tempfile.TemporaryDirectory())
        ours_child, ours_url = stack.enter_context(process("bench.model_call", "captured", upstream, own))
        theirs = Runner(theirs_child.pid, theirs_url, PATHS["captured"], request_body())
        ours = Runner(ours_child.pid, ours_url, PATHS["captured"], request_body())
        for runner in (theirs, ours):
            runner.warm()
        for _ in range(ROUNDS):
            for runner in (theirs, ours):
                runner.round(concurrency)
        require_records(folder, theirs.calls)
    what = f"{concurrency} captured model calls at a time"
    is_peer = "NeMo Gym, captured, best of the same rounds"
    Figure("PF-1", f"CPU of a call, {what}", ours.cpu_ms, "ms", theirs.cpu_ms, is_peer).emit()
    Figure("PF-2", what, ours.rate, "calls/s", theirs.rate, is_peer).emit()


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m bench.peer_nemo_gym PYTHON [CONCURRENCY]; PYTHON has nemo-gym installed")
    with process("toprope.testing.upstream") as (_, upstream):
        for concurrency in map(int, sys.argv[2:3] or ("1", "32")):
            measure(sys.argv[1], upstream, concurrency)


if __name__ == "__main__":
    main()
