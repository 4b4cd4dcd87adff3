"""What an MCP server says, held against what MCP allows before the SDK believes it; and what goes wrong below MCP.

The SDK drops what it cannot read, and a call whose answer was dropped waits for ever. So both transports read each
message here first. A server may also talk without answering: `Unasked` bounds that. Left to others: how bytes come
(`mcp_stdio`, `mcp_http`), what an answer means (`mcp`).
"""

from __future__ import annotations

import logging
import os
from typing import Any

from mcp.types import JSONRPCError, JSONRPCMessage, JSONRPCResponse, jsonrpc_message_adapter
from pydantic import ValidationError

from toprope.canonical import json
from toprope.errors.body import shorten
from toprope.errors.kinds import Delivery

MAX_UNASKED = 10_000
"""Messages that answer no open request, at most, of a program between two answers and of a stream over HTTP: a server
may log, report progress and ask."""

MAX_UNASKED_BYTES = 64 * 2**20
"""The same in bytes."""

_KINDS = ("method", "result", "error")

if logging.getLogger("mcp.client").level == logging.NOTSET:
    # It logs a traceback of every line that it cannot read: 3.5 MB/s of them were seen. Whoever sets a level has it.
    logging.getLogger("mcp.client").setLevel(logging.CRITICAL)


class Unfit(ValueError):
    """What came is no message of MCP, or no answer to what was asked; its text says what came, in a line."""


def read_message(raw: bytes) -> JSONRPCMessage:
    """The message; it is of one kind, and of version 2.0. Raises `Unfit`, also for a batch: MCP has none."""
    try:
        value = json.loads(raw)
        if not isinstance(value, dict) or sum(kind in value for kind in _KINDS) != 1:
            raise Unfit(f"what came is no message of MCP: {shown(raw)}")
        return jsonrpc_message_adapter.validate_json(raw, by_name=False)
    except json.NotJson as error:
        raise Unfit(f"what came is no JSON: {shown(raw)}") from error
    except ValidationError as error:  # a wrong version, an id that is none, a result that is no object
        raise Unfit(f"what came is no message of MCP: {shown(raw)}") from error


def is_answer(message: JSONRPCMessage) -> bool:
    """Whether it is a result or an error."""
    return isinstance(message, JSONRPCResponse | JSONRPCError)


def check_answer(asked: Any, message: JSONRPCMessage, raw: bytes) -> None:
    """Return only if it answers the request of id `asked`: the SDK does not ask. Raises `Unfit`, showing `raw`."""
    if not isinstance(message, JSONRPCResponse | JSONRPCError) or message.id != asked:
        raise Unfit(f"what came back answers no request of id {asked!r}: {shown(raw)}")


def drop_output_schemas(message: JSONRPCMessage) -> bool:
    """Take the output schemas out of a listing; whether there was one.

    The SDK checks each result of a tool against its output schema, in our event loop. A regular expression of the
    server's, references that fan out, or choices within choices (26 KB of `anyOf`: a minute for a result of 2.5 KB)
    would hold up all episodes of the process. The model reads the text of a result, and needs no such check.
    """
    tools = message.result.get("tools") if isinstance(message, JSONRPCResponse) else None
    listed = tools if isinstance(tools, list) else []
    having = [entry for entry in listed if isinstance(entry, dict) and "outputSchema" in entry]
    for entry in having:
        del entry["outputSchema"]
    return bool(having)


def passed_on(message: JSONRPCMessage, raw: bytes) -> bytes:
    """What the SDK gets of a message that came as `raw`: that, or what is left without output schemas."""
    if not drop_output_schemas(message):
        return raw
    return message.model_dump_json(by_alias=True, exclude_unset=True).encode()


def shown(raw: bytes) -> str:
    """The beginning of it, for one line of a message or a log."""
    return repr(shorten(raw[:400].decode("utf-8", "replace").strip(), 200))


class Unasked:
    """How much a server said that answers nothing."""

    def __init__(self) -> None:
        self._messages = 0
        self._bytes = 0

    def add(self, size: int) -> None:
        """One more, of `size` bytes. Raises `Unfit` beyond the bounds."""
        self._messages += 1
        self._bytes += size
        if self._messages > MAX_UNASKED or self._bytes > MAX_UNASKED_BYTES:
            raise Unfit(
                f"it sent more than {MAX_UNASKED} messages or {MAX_UNASKED_BYTES} bytes that answer no open request"
            )

    def clear(self) -> None:
        self._messages = self._bytes = 0


class Trouble:
    """What went wrong below MCP, which the SDK sees and does not tell. `refusal`: why no further try can help;
    `ended`: why the connection is over, for this call and all later ones."""

    def __init__(self, grant: str) -> None:
        self.grant = grant
        self.text = ""
        self.status: int | None = None
        self.delivery: Delivery | None = None
        self.refusal: str | None = None
        self.ended = ""
        self.log: Any = None

    def clear(self) -> None:
        """Forget what an earlier call met."""
        self.text, self.status, self.delivery = self.ended, None, None

    def end(self, why: str) -> None:
        """From now on every call fails, and says `why`."""
        self.ended = self.text = why
        self.delivery = Delivery.DELIVERED

    def last_words(self) -> str:
        """The end of what a program wrote to its standard error, for a message."""
        if self.log is None or self.log.closed:
            return ""
        size = os.fstat(self.log.fileno()).st_size
        # By position: the program writes through the same open file, and would go on where a seek leaves it.
        said = os.pread(self.log.fileno(), 400, max(0, size - 400)).decode("utf-8", "replace").strip()
        return f"; it wrote: {said}" if said else ""
