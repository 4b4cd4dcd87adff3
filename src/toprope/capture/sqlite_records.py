"""Entries of the sqlite store, from rows back to values: hashes checked, left-out prompts put back.

Read by the writer (a repeated put is compared with what stands) and by readers. A record whose hash does not fit, or
whose parent's record is damaged, is left out and named.
"""

from __future__ import annotations

import hashlib
import sqlite3
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from toprope.capture.packing import Packed, unpack
from toprope.capture.prompts import CallIds, PromptArena, RecentCalls
from toprope.errors.tree import CaptureError
from toprope.tokens.entry import BadRecord, TokenEntry

_PLACE = struct.Struct("<QQQQ")
_COLUMNS = "e.id, e.prev, e.ordinal, e.call, e.parent, e.hash, e.data, c.call_id, c.replayed"


class DamagedRecord(CaptureError):
    """A stored record that does not match its hash or cannot be completed; `call_id` names it."""

    def __init__(self, call_id: str, why: str) -> None:
        super().__init__(f"the record of call {call_id!r} is damaged: {why}")
        self.call_id = call_id


@dataclass(frozen=True, slots=True)
class Record:
    """One row of `entry` with its call. `damage` says what is wrong with it; then `packed` is None."""

    id: int
    ordinal: int
    parent: int | None
    call_id: str
    replayed: bool
    packed: Packed | None
    damage: str | None = None

    @property
    def needs_parent(self) -> bool:
        """Whether the prompt lacks the parent's ids, left out by the store or by who put it."""
        return self.packed is not None and (self.packed.skip > 0 or bool(self.packed.meta.get("prompt_is_delta")))


@dataclass(slots=True)
class Line:
    """Entries in order of put, and the call ids of records that could not be read."""

    entries: list[TokenEntry] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def record_hash(prev: int | None, ordinal: int, call: int, parent: int | None, data: bytes) -> bytes:
    """What a row of `entry` is checked against: 128 bits over its bytes and its place in the line."""
    digest = hashlib.blake2b(_PLACE.pack(prev or 0, ordinal, call, parent or 0), digest_size=16)
    digest.update(data)
    return digest.digest()


def read_record(connection: sqlite3.Connection, entry_id: int) -> Record:
    """One record by row id. Raises `DamagedRecord` if there is no such row."""
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM entry e JOIN call c ON c.id = e.call WHERE e.id = ?", (entry_id,)
    ).fetchone()
    if row is None:
        raise DamagedRecord(f"row {entry_id}", "missing")
    return _record(row)


def read_line(connection: sqlite3.Connection, last: int | None, count: int, since: int = 0) -> list[Record]:
    """The records after the first `since` of a line of `count` that ends with row `last`, in order of put."""
    if last is None or count <= since:
        return []
    rows = connection.execute(
        "WITH RECURSIVE line (id, ordinal) AS ("
        " SELECT id, ordinal FROM entry WHERE id = :last UNION ALL"
        " SELECT p.id, p.ordinal FROM line JOIN entry e ON e.id = line.id JOIN entry p ON p.id = e.prev"
        " WHERE p.ordinal > :since LIMIT :count)"
        f" SELECT {_COLUMNS} FROM line JOIN entry e ON e.id = line.id JOIN call c ON c.id = e.call"
        " ORDER BY e.ordinal",
        {"last": last, "since": since, "count": count - since},
    )
    return [_record(row) for row in rows]


def load_ids(
    connection: sqlite3.Connection, capture: int, entry_id: int, recent: RecentCalls[tuple[int, str]]
) -> CallIds:
    """The ids of one call, whole, walking up as far as prompts were left out. Raises `DamagedRecord`."""
    pieces: list[np.ndarray] = []
    generation: np.ndarray | None = None
    at: int | None = entry_id
    first = ""
    while at is not None:
        record = read_record(connection, at)
        first = first or record.call_id
        known = recent.get((capture, record.call_id))
        if known is not None:
            pieces += [known.generation, known.prompt]
            break
        if record.packed is None:
            raise DamagedRecord(first, f"it needs the record of {record.call_id!r}, {record.damage}")
        pieces += [record.packed.generation, record.packed.prompt]
        if not record.needs_parent:
            break
        if record.parent is None or record.parent >= at:  # parents were written before: no walk goes in circles
            raise DamagedRecord(first, "its prompt is a delta and its parent is not recorded")
        at = record.parent
    generation, *rest = pieces
    prompt = np.concatenate(rest[::-1])
    prompt.flags.writeable = False
    return CallIds(prompt, generation)


def line_entries(
    connection: sqlite3.Connection,
    capture: int,
    records: Sequence[Record],
    recent: RecentCalls[tuple[int, str]],
    *,
    whole: bool,
) -> Line:
    """The entries of `records` as they were put, or all with whole prompts; whole prompts share memory."""
    arena, line = PromptArena(), Line()
    names = {record.id: record.call_id for record in records}
    for record in records:
        try:
            line.entries.append(_entry(connection, capture, record, names, arena, recent, whole))
        except (DamagedRecord, BadRecord):
            line.damaged.append(record.call_id)
    return line


def _entry(
    connection: sqlite3.Connection,
    capture: int,
    record: Record,
    names: dict[int, str],
    arena: PromptArena,
    recent: RecentCalls[tuple[int, str]],
    whole: bool,
) -> TokenEntry:
    packed = record.packed
    if packed is None:
        raise DamagedRecord(record.call_id, record.damage or "")
    gone = False if record.replayed and packed.meta.get("client_gone") else None
    put_as_delta = bool(packed.meta.get("prompt_is_delta"))
    if not record.needs_parent:
        prompt = arena.place(record.call_id, None, packed.prompt, packed.generation)
        return packed.entry(prompt, client_gone=gone)
    if record.parent is None:
        if put_as_delta:
            return packed.entry(client_gone=gone)  # its parent was put elsewhere: there is no more of it
        raise DamagedRecord(record.call_id, "its parent's record is missing")
    parent = names.get(record.parent)
    if parent is None or parent not in arena:
        ids = load_ids(connection, capture, record.parent, recent)
        parent = parent or f"row {record.parent}"
        arena.place(parent, None, ids.prompt, ids.generation)
    prompt = arena.place(record.call_id, parent, packed.prompt, packed.generation)
    if put_as_delta and not whole:
        return packed.entry(client_gone=gone)
    entry = packed.entry(prompt, client_gone=gone)
    return replace(entry, prompt_is_delta=False) if put_as_delta else entry


def _record(row: Iterable[object]) -> Record:
    entry_id, prev, ordinal, call, parent, digest, data, call_id, replayed = row
    try:
        if record_hash(prev, ordinal, call, parent, data) != digest:  # type: ignore[arg-type]
            raise ValueError("it does not match its hash")
        packed = unpack(data)  # type: ignore[arg-type]
        if packed.meta.get("model_call_id") != call_id:
            raise ValueError("it stands under another call's id")
    except (ValueError, TypeError, struct.error) as error:
        return Record(entry_id, ordinal, parent, str(call_id), False, None, str(error))  # type: ignore[arg-type]
    return Record(entry_id, ordinal, parent, str(call_id), bool(replayed), packed)  # type: ignore[arg-type]
