"""MCP over the pipes of a program of this host, bounded and checked: what the SDK's own transport takes on trust.

A line may have `MAX_LINE_BYTES`; the program's parent (`guard`) counts, so that an endless one never reaches us. An
answer whose id no open request has ends the connection: the call that waits would wait until the agent's deadline.
Left to others: which programs may be started (`access`), what is said over the connection (`mcp`).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from mcp.client.stdio import StdioServerParameters, get_default_environment, stdio_client
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from toprope.errors.kinds import Delivery
from toprope.protocol.grants import Stdio
from toprope.tools import guard

MAX_LINE_BYTES = 16 * 2**20
"""Of one message that a program writes."""


class Trouble:
    """What went wrong below MCP, which the SDK sees and does not tell. `refusal`: why no further try can help;
    `ended`: why the connection is over, for this call and all later ones."""

    def __init__(self) -> None:
        self.text = ""
        self.status: int | None = None
        self.delivery: Delivery | None = None
        self.refusal: str | None = None
        self.ended = ""
        self.log: Any = None

    def clear(self) -> None:
        """Forget what an earlier call met."""
        self.text, self.status, self.delivery = self.ended, None, None

    def last_words(self) -> str:
        """The end of what a program wrote to its standard error, for a message."""
        if self.log is None or self.log.closed:
            return ""
        size = os.fstat(self.log.fileno()).st_size
        # By position: the program writes through the same open file, and would go on where a seek leaves it.
        said = os.pread(self.log.fileno(), 400, max(0, size - 400)).decode("utf-8", "replace").strip()
        return f"; it wrote: {said}" if said else ""


@asynccontextmanager
async def stdio(connection: Stdio, trouble: Trouble) -> AsyncIterator[Any]:
    """The streams of a program, started here; it and all that it started are gone when the block has ended."""
    environment = {**get_default_environment(), **connection.env}
    found = shutil.which(connection.command, path=environment.get("PATH"))
    if found is None:
        trouble.refusal = f"{connection.command!r} is no program on this host"
        raise RuntimeError(trouble.refusal)
    guarded = [str(Path(guard.__file__)), str(os.getpid()), str(MAX_LINE_BYTES), found, *connection.args]
    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-I", "-S", *guarded],
        env=connection.env,  # laid over HOME, PATH, USER and the like; nothing else of our environment is passed on
        cwd=connection.cwd,
    )
    with tempfile.TemporaryFile() as said:
        trouble.log = said
        async with stdio_client(parameters, errlog=said) as streams:  # type: ignore[arg-type]  # only its number is used
            try:
                async with _checked(*streams, trouble) as checked:
                    yield checked
            finally:
                trouble.text = trouble.text or trouble.last_words().removeprefix("; ")


@asynccontextmanager
async def _checked(below: Any, above: Any, trouble: Trouble) -> AsyncIterator[Any]:
    """The two streams, with each answer held against the requests that are open."""
    heard_in, heard = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    say, said_out = anyio.create_memory_object_stream[SessionMessage](0)
    waiting: set[Any] = set()
    given_up: set[Any] = set()

    async def outwards() -> None:
        async with said_out:
            async for told in said_out:
                message = told.message
                if isinstance(message, JSONRPCRequest):
                    waiting.add(message.id)
                elif isinstance(message, JSONRPCNotification) and message.method == "notifications/cancelled":
                    given_up.add((message.params or {}).get("requestId"))
                await above.send(told)

    async def inwards() -> None:
        async with heard_in:
            async for told in below:
                message = None if isinstance(told, Exception) else told.message
                if isinstance(message, JSONRPCResponse | JSONRPCError):
                    if message.id not in waiting:
                        trouble.ended = f"it answered a request of id {message.id!r}, and none of that id is open"
                        trouble.text, trouble.delivery = trouble.ended, Delivery.DELIVERED
                        return
                    if message.id not in given_up:
                        waiting.discard(message.id)
                await heard_in.send(told)

    async with anyio.create_task_group() as group:
        group.start_soon(_until_closed, outwards)
        group.start_soon(_until_closed, inwards)
        try:
            yield heard, say
        finally:
            group.cancel_scope.cancel()
            heard.close()
            say.close()


async def _until_closed(pump: Any) -> None:
    try:
        await pump()
    except (anyio.ClosedResourceError, anyio.BrokenResourceError):
        pass  # one end is gone: the other hears it by the end of its stream
