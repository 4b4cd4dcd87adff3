"""A process that opens one stdio grant, prints what the server says of itself, and waits to be killed."""

from __future__ import annotations

import asyncio
import sys

from toprope.http.client import Client
from toprope.protocol.grants import McpGrant, Stdio
from toprope.tools.access import ToolAccess


async def main() -> None:
    program = Stdio(sys.executable, sys.argv[1:])
    async with Client() as client:
        access = await ToolAccess.open([McpGrant("counter", program)], client, stdio=[program])
        for name in ("variables", "leave_a_daemon"):
            result = await access.call(name, "{}", offered=frozenset({name}))
            print(result.text.split()[0], flush=True)
        await asyncio.Event().wait()


asyncio.run(main())
