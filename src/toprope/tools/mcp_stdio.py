"""MCP over the pipes of a program of this host: started here, bounded and checked line by line, gone on return.

A line may have `MAX_LINE_BYTES`; the program's parent (`guard`) counts, so that an endless one never reaches us. Before
the first tool call some lines that are no messages are skipped, since programs print banners. From then on such a line,
and an answer whose id no open request has, ends the connection: it may stand where the answer should, and the call
would wait until the agent's deadline. Left to others: which programs may be started (`access`), what a message is
(`mcp_messages`), what is said over the connection (`mcp`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCError, JSONRPCMessage, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from toprope.protocol.grants import Stdio
from toprope.tools import guard
from toprope.tools.mcp_messages import Trouble, Unasked, Unfit, drop_output_schemas, read_message, shown

log = logging.getLogger("toprope.tools")

MAX_LINE_BYTES = 16 * 2**20
"""Of one message that a program writes."""

MAX_BANNER_LINES = 100
"""Lines that are no messages, at most, before the first tool call; blank ones are not counted among them."""

GOODBYE_S = 2.0
"""Seconds that a program gets to end by itself when its input is closed, and again after each signal."""

_GONE = (ConnectionError, anyio.ClosedResourceError, anyio.BrokenResourceError)


@asynccontextmanager
async def stdio(connection: Stdio, trouble: Trouble) -> AsyncIterator[Any]:
    """The streams of a program, started here; it and all that it started are gone when the block has ended."""
    # Laid over HOME, PATH, USER and the like; nothing else of our environment is passed on.
    environment = {**get_default_environment(), **connection.env}
    found = shutil.which(connection.command, path=environment.get("PATH"))
    if found is None:
        trouble.refusal = f"{connection.command!r} is no program on this host"
        raise RuntimeError(trouble.refusal)
    guarded = [str(Path(guard.__file__)), str(os.getpid()), str(MAX_LINE_BYTES), found, *connection.args]
    with tempfile.TemporaryFile() as said:
        trouble.log = said
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", *guarded),
            env=environment,
            cwd=connection.cwd,
            stdin=PIPE,
            stdout=PIPE,
            stderr=said,
            start_new_session=True,
            limit=MAX_LINE_BYTES + 1,
        )
        try:
            async with _streams(process, trouble) as streams:
                yield streams
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process, GOODBYE_S if not trouble.ended else 0)
            trouble.text = trouble.text or trouble.last_words().removeprefix("; ")


@asynccontextmanager
async def _streams(process: Process, trouble: Trouble) -> AsyncIterator[Any]:
    heard_in, heard = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    say, said_out = anyio.create_memory_object_stream[SessionMessage](0)
    lines = _Lines(trouble)

    async def outwards() -> None:
        async with said_out:
            with suppress(*_GONE):
                async for told in said_out:
                    lines.said(told.message)
                    assert process.stdin is not None
                    process.stdin.write(told.message.model_dump_json(by_alias=True, exclude_unset=True).encode())
                    process.stdin.write(b"\n")
                    await process.stdin.drain()
                return
            heard_in.close()  # it does not read any more: no answer can come

    async def inwards() -> None:
        assert process.stdout is not None
        async with heard_in:
            with suppress(*_GONE):
                async for line in process.stdout:
                    if not line.endswith(b"\n"):
                        return  # cut by its end
                    try:
                        message = lines.heard(line)
                    except Unfit as why:
                        trouble.end(str(why))
                        return
                    if message is not None:
                        await heard_in.send(SessionMessage(message))

    async with anyio.create_task_group() as group:
        group.start_soon(outwards)
        group.start_soon(inwards)
        try:
            yield heard, say
        finally:
            group.cancel_scope.cancel()
            heard.close()
            say.close()


class _Lines:
    """What was asked of a program and not answered yet, and what it may still say that answers nothing."""

    def __init__(self, trouble: Trouble) -> None:
        self._trouble = trouble
        self._open: set[Any] = set()
        self._given_up: set[Any] = set()
        self._unasked = Unasked()
        self._banner = MAX_BANNER_LINES

    def said(self, message: JSONRPCMessage) -> None:
        """Note what we say, before it is said."""
        if isinstance(message, JSONRPCRequest):
            self._open.add(message.id)
            if message.method == "tools/call":
                self._banner = 0
        elif isinstance(message, JSONRPCNotification) and message.method == "notifications/cancelled":
            self._given_up.add((message.params or {}).get("requestId"))

    def heard(self, line: bytes) -> JSONRPCMessage | None:
        """The message; None for what can be skipped. Raises `Unfit` where the connection is over."""
        message = None
        if not line.isspace():
            try:
                message = read_message(line)
            except Unfit as why:
                self._skip(line, why)
        if not isinstance(message, JSONRPCResponse | JSONRPCError):
            self._unasked.add(len(line))
            return message
        number = message.id
        if number not in self._open:
            raise Unfit(f"it answered a request of id {number!r}, and none of that id is open")
        if number in self._given_up:  # an answer may cross a cancellation, and another one come for that
            self._unasked.add(len(line))
        else:
            self._open.discard(number)
            self._unasked.clear()
            drop_output_schemas(message)
        return message

    def _skip(self, line: bytes, why: Unfit) -> None:
        if self._banner == 0:
            raise why
        if self._banner == MAX_BANNER_LINES:
            log.warning("grant %s: its program wrote a line that is no message: %s", self._trouble.grant, shown(line))
        self._banner -= 1


async def _end(process: Process, first_s: float) -> None:
    """Close its input, then signal it and what is below it until it is gone; what it still writes is thrown away.

    `first_s`: seconds that it gets before the first signal.
    """
    assert process.stdin is not None
    process.stdin.close()
    rest = asyncio.gather(_discard(process), process.wait())
    for number in (signal.SIGTERM, signal.SIGKILL, None):
        if (await asyncio.wait({rest}, timeout=first_s if number == signal.SIGTERM else GOODBYE_S))[0]:
            break
        if number is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
    else:
        rest.cancel()
        log.warning("process %d is still there after SIGKILL", process.pid)


async def _discard(process: Process) -> None:
    """Until its output ends: a program that flushes what it has must not wait for a reader."""
    assert process.stdout is not None
    with suppress(*_GONE):
        while await process.stdout.read(65536):
            pass
