"""A resources server in a process of its own: its tool `hang` says in a file that it runs, and never ends.

python killable_counter.py <file>
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from toprope.http.serve import serve
from toprope.servers.resources.environment import Environment
from toprope.servers.resources.server import ResourcesServer
from toprope.tools.spec import tool


class Hanging(Environment):
    """Serves one tool."""

    def seed(self, task: dict[str, Any]) -> dict[str, Any]:
        return {}

    @tool
    async def hang(self, state: Any) -> str:
        """Never ends."""
        await asyncio.to_thread(Path(sys.argv[1]).write_text, "running")
        await asyncio.Event().wait()
        return "never"

    def verify(self, state: Any, task: dict[str, Any], response: dict[str, Any]) -> float:
        return 1.0


async def main() -> None:
    server = ResourcesServer(name="counter", environment=Hanging(), signing_key=b"k" * 32, mcp=True)
    bound = await serve(server.app, host="127.0.0.1", port=0)
    print(bound.url, flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
