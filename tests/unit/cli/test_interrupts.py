"""Ctrl-C once stops in order; the same Ctrl-C delivered twice is still one; a second one ends at once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from toprope.cli.interrupts import SAME_S, Interrupts, run_async

TWICE = """
import asyncio, os, signal
from toprope.cli.interrupts import run_async

async def command(interrupts):
    interrupts._clock = iter([0.0, 0.1, 10.0]).__next__
    interrupts.on_first = lambda: print("stopping", flush=True)
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(3):
            await asyncio.sleep(0.01)
    print("not reached", flush=True)

run_async(command)
"""


@pytest.mark.promise("CO-8")
def test_the_second_ctrl_c_ends_at_once_with_130() -> None:
    result = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=60)
    assert result.returncode == 130
    assert result.stdout == "stopping\n"
    assert "interrupted twice" in result.stderr


async def test_one_ctrl_c_that_arrives_twice_is_one() -> None:
    now = [0.0]
    calls: list[str] = []
    task: asyncio.Task[Any] = asyncio.ensure_future(asyncio.Event().wait())
    interrupts = Interrupts(task, clock=lambda: now[0])
    interrupts.on_first = lambda: calls.append("stop")
    interrupts()
    now[0] = SAME_S / 2
    interrupts()
    assert (calls, interrupts.count) == (["stop"], 1)
    task.cancel()


def test_a_signal_before_anything_else_is_said_cancels_the_command() -> None:
    async def command(_: Interrupts) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    with pytest.raises(SystemExit) as ended:
        run_async(command)
    assert ended.value.code == 130


def test_the_result_of_the_command_comes_back() -> None:
    async def command(_: Interrupts) -> int:
        return 7

    assert run_async(command) == 7
