"""A plain directory isolates nothing, and still nothing that a program starts outlives its run."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from toprope.sandbox.owner import identify
from toprope.sandbox.plain import PlainDirectory
from toprope.sandbox.processes import marked
from toprope.sandbox.spec import MIB, Aspect, Limits, SandboxSpec

DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        env = {"PATH": os.environ["PATH"]} if "hide" in sys.argv else os.environ
        os.execve("/bin/sh", ["sh", "-c", "echo $$ > pid; exec sleep 1000"], env)
    os._exit(0)
while not (os.path.exists("pid") and open("pid").read().strip()):
    time.sleep(0.01)
if "kill" in sys.argv:
    os.kill(os.getppid(), 9)
print(open("pid").read())
"""
"""Leaves a daemon of a double fork; `hide`: with an empty environment; `kill`: and kills who watches over it."""


async def run_daemon(provider: PlainDirectory, *how: str) -> tuple[int, str]:
    sandbox = await provider.create(SandboxSpec(limits=Limits(memory_bytes=256 * MIB)))
    try:
        await sandbox.run(["python3", "-c", DAEMON, *how])
        return int((await sandbox.read_file("pid")).decode()), sandbox.sandbox_id
    finally:
        await sandbox.stop()


HOWS = ([], ["hide"], ["kill"], ["hide", "kill"])
# Without control groups nothing holds a daemon that hides and kills its keeper: the threat model says so.
DAEMONS = [(how, True) for how in HOWS] + [(how, False) for how in HOWS[:3]]


@pytest.mark.promise("EP-14")
@pytest.mark.parametrize(
    ("how", "counted"), DAEMONS, ids=[f"{'-'.join(h) or 'plain'}-{'counted' if c else 'watched'}" for h, c in DAEMONS]
)
async def test_a_daemon_ends_with_the_run(
    how: list[str], counted: bool, tmp_path: Path, say: Callable[[str], None]
) -> None:
    provider = PlainDirectory(tmp_path, control_groups=counted)
    report = await provider.enforces()
    if how == ["hide", "kill"] and "cgroup" not in str(report[Aspect.PROCESSES].mechanism):
        pytest.skip("no control group can be made on this machine")
    pid, sandbox_id = await run_daemon(provider, *how)
    found = identify(pid)  # None also for a zombie, which is dead and waits for process 1
    assert found is None, "the daemon lives on"
    assert marked(f"TOPROPE_SANDBOX={sandbox_id}") == []
    by = "who adopts orphans" if "kill" not in how else "the mark" if "hide" not in how else "the control group"
    say(f"daemon of a double fork ({', '.join(how) or 'plain'}): ended by {by}")


async def test_a_run_that_is_cancelled_leaves_no_daemon(tmp_path: Path) -> None:
    sandbox = await PlainDirectory(tmp_path).create(SandboxSpec())
    run = asyncio.ensure_future(sandbox.run(["python3", "-c", DAEMON + "\ntime.sleep(1000)"]))
    while "pid" not in await asyncio.to_thread(os.listdir, sandbox.workdir):
        assert not run.done(), run.result()
    assert marked(f"TOPROPE_SANDBOX={sandbox.sandbox_id}")
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert marked(f"TOPROPE_SANDBOX={sandbox.sandbox_id}") == []
    await sandbox.stop()


async def test_it_gets_the_search_path_of_the_host_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_SECRET", secrets.token_hex(8))
    sandbox = await PlainDirectory(tmp_path).create(SandboxSpec(env={"OWN": "1"}))
    done = await sandbox.run(["env"])
    names = {line.partition("=")[0] for line in done.stdout.text.splitlines()}
    assert names == {"PATH", "HOME", "TMPDIR", "LANG", "TERM", "OWN", "TOPROPE_SANDBOX"}
    await sandbox.stop()
