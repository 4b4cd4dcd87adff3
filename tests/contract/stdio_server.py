"""An MCP server over stdio, written with the SDK as its users do: a counter, and ways to misbehave.

python stdio_server.py [stubborn]     stubborn: ignores the end of its input and SIGTERM
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("stdio-counter")
state = {"n": 0}


@server.tool()
def count(n: int) -> int:
    """Add n to this process's number."""
    state["n"] += n
    return state["n"]


@server.tool()
def variables() -> str:
    """The names of the environment's variables, and this process's id."""
    return " ".join([str(os.getpid()), *sorted(os.environ)])


@server.tool()
def leave_a_daemon() -> int:
    """Start a process that has a session of its own, ignores SIGTERM and is nobody's child; returns its id."""
    inner = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    outer = (
        "import subprocess, sys; "
        f"print(subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True, "
        "stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"
    )
    made = subprocess.run([sys.executable, "-c", outer], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return int(made.stdout)


@server.tool(name="not.callable")
def odd() -> str:
    """A name that no model can say."""
    return "odd"


@server.tool()
def die() -> str:
    """End without a word."""
    os._exit(3)


if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
server.run(transport="stdio")
while "stubborn" in sys.argv:
    time.sleep(600)
