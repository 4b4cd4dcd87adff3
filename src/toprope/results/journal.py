"""The journal: what a run did, in order, one JSON object a line, each durable before the run acts on it.

    {"type": "run", ...}          a start of the run: run id, process, version
    {"type": "dispatch", ...}     an attempt got its number; written before its request is sent
    {"type": "session", ...}      a session of an attempt was opened or closed
    {"type": "outcome", ...}      its row is durable: file, offset and SHA-256 of the row's bytes
    {"type": "interrupted", ...}  an attempt was given up because the run was stopped; it does not use up attempts
    {"type": "receipts", ...}     receipts of a capture whose source keeps none, before it is dropped
    {"type": "retired", ...}      a capture is gone, its row being durable
    {"type": "end", ...}          the run ended, and why

Unknown types and fields are kept by their readers, so that later versions can add lines. Left to others: which rows
there are (`ledger`), what all of it adds up to (`account`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from toprope.storage.rows import DurableRows, read_rows
from toprope.tokens.snapshot import Receipt

OutcomeName = Literal["measured", "masked", "failed"]


class _Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    at: str


class RunLine(_Line, frozen=True, tag="run"):
    """A start. `start` counts the starts of this directory from 1."""

    run_id: str
    start: int
    pid: int
    toprope: str


class DispatchLine(_Line, frozen=True, tag="dispatch"):
    """An attempt. `captured` says that its tokens are to be captured and its row rebuilt from them."""

    rollout_id: str
    attempt: int
    task_index: int
    rollout_index: int
    environment: str
    captured: bool = False


class SessionLine(_Line, frozen=True, tag="session"):
    """`event` is opened or closed; `role` is resources or agent."""

    key: str
    role: str
    event: str
    session_id: str
    env_session_id: str | None = None


class OutcomeLine(_Line, frozen=True, tag="outcome"):
    """A durable row: `file` is results or failures. `counts` is False where a failure does not use up attempts."""

    rollout_id: str
    attempt: int
    outcome: OutcomeName
    file: Literal["results", "failures"]
    offset: int
    digest: str
    terminal: bool = False
    counts: bool = True
    kind: str | None = None


class InterruptedLine(_Line, frozen=True, tag="interrupted"):
    """An attempt without outcome, given up by a stop of the run."""

    rollout_id: str
    attempt: int


class ReceiptsLine(_Line, frozen=True, tag="receipts"):
    """Receipts of one capture in call order."""

    key: str
    snapshot_id: str
    version: int
    receipts: list[Receipt]


class RetiredLine(_Line, frozen=True, tag="retired"):
    """A capture was dropped with this pair."""

    key: str
    snapshot_id: str
    version: int


class EndLine(_Line, frozen=True, tag="end"):
    """`reason` is done, budget, interrupted, mask_fraction or failed; `message` says more where there is more."""

    reason: str
    message: str = ""


Line: TypeAlias = (
    RunLine | DispatchLine | SessionLine | OutcomeLine | InterruptedLine | ReceiptsLine | RetiredLine | EndLine
)
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
_KNOWN = frozenset({"run", "dispatch", "session", "outcome", "interrupted", "receipts", "retired", "end"})


class _Type(msgspec.Struct):
    type: str


class Journal:
    """The appending side."""

    def __init__(self, path: Path) -> None:
        self._rows = DurableRows(path)

    async def write(self, line: Line) -> None:
        """On return `line` survives a power cut."""
        await self._rows.append(msgspec.json.encode(line))

    async def close(self) -> None:
        """On return every line is durable and the file is closed."""
        await self._rows.close()


class DamagedLine(msgspec.Struct, frozen=True):
    """A line that cannot be read, by number, with the reason."""

    line_no: int
    reason: str


def read_journal(path: Path) -> Iterator[Line | DamagedLine]:
    """The lines of a journal in order; lines of types that this version does not know are passed over.

    A torn last line is no line (it was never acknowledged); a damaged one before it comes as `DamagedLine`.
    """
    for row in read_rows(path):
        if row.damage == "torn":
            continue
        try:
            yield _decoder.decode(row.data)
        except (msgspec.MsgspecError, ValueError) as error:
            if not _is_foreign(row.data):
                yield DamagedLine(row.line_no, str(error))


def _is_foreign(data: bytes) -> bool:
    try:
        return msgspec.json.decode(data, type=_Type).type not in _KNOWN
    except (msgspec.MsgspecError, ValueError):
        return False
