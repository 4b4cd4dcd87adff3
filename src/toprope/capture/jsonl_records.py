"""Entries of the jsonl store, from lines back to values: hashes checked, left-out prompts put back.

A record that does not read, or whose parent's does not, is left out and named.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from toprope.capture import jsonl_names as names
from toprope.capture.jsonl_lines import Damaged, Line, decode_line
from toprope.capture.jsonl_shelf import Place, Shelf
from toprope.capture.prompts import CallIds, PromptArena, RecentCalls
from toprope.errors.tree import CaptureError
from toprope.tokens.entry import BadRecord, TokenEntry

Recent = RecentCalls[tuple[str, str]]


class DamagedRecord(CaptureError):
    """A stored record that cannot be read or completed; `call_id` names it."""

    def __init__(self, call_id: str, why: str) -> None:
        super().__init__(f"the record of call {call_id!r} is damaged: {why}")
        self.call_id = call_id
        self.why = why


@dataclass(slots=True)
class Records:
    """Entries in order of put, and a reason for each that could not be read."""

    entries: list[TokenEntry] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def read_records(shelf: Shelf, recent: Recent, *, since: int = 0, whole: bool) -> Records:
    """The entries after the first `since` as they were put, or all with whole prompts; whole prompts share memory."""
    places = list(shelf.entries.items())[since:]
    records, arena = Records(), PromptArena()
    if not places:
        return records
    start = min(place.offset for _, place in places)
    data = shelf.files.read(shelf.path(names.TOKENS), start)
    for call_id, place in places:
        at = place.offset - start
        try:
            line = _line(call_id, data[at : at + place.size])
            entry = _entry(shelf, call_id, line, arena, recent, whole)
            if entry.client_gone and call_id in shelf.replayed:
                entry = replace(entry, client_gone=False)  # its client came back and has the reply
            records.entries.append(entry)
        except DamagedRecord as error:
            records.lost.append(f"write_failed:{call_id}: {error.why}")
        except BadRecord as error:
            records.lost.append(f"{error.reason}:{call_id}: {error}")
    return records


def read_entry(shelf: Shelf, call_id: str, recent: Recent) -> TokenEntry:
    """One recorded entry as it was put. Raises `DamagedRecord` or `BadRecord`."""
    line = _read_line(shelf, call_id, shelf.entries[call_id])
    return _entry(shelf, call_id, line, PromptArena(), recent, whole=False)


def load_ids(shelf: Shelf, call_id: str, recent: Recent) -> CallIds:
    """The ids of one recorded call, whole, walking up as far as prompts were left out. Raises `DamagedRecord`."""
    pieces: list[np.ndarray] = []
    at, first, walked = call_id, call_id, set[str]()
    while True:
        known = recent.get((_capture_id(shelf), at)) if shelf.state is not None else None
        if known is not None:
            pieces += [known.generation, known.prompt]
            break
        place = shelf.entries.get(at)
        if place is None or at in walked:
            raise DamagedRecord(first, f"its prompt follows the record of {at!r}, which is missing")
        walked.add(at)
        line = _read_line(shelf, at, place)
        try:
            entry = line.entry()
        except BadRecord as error:
            raise DamagedRecord(first, f"it needs the record of {at!r}: {error}") from error
        pieces += [entry.generation_token_ids, entry.prompt_token_ids]
        if not line.is_delta:
            break
        if line.parent is None:
            raise DamagedRecord(first, "its prompt is a delta and names no parent")
        at = line.parent
    generation, *rest = pieces
    prompt = np.concatenate(rest[::-1])
    prompt.flags.writeable = False
    return CallIds(prompt, generation)


def keep_ids(shelf: Shelf, entry: TokenEntry, recent: Recent, *, after: str | None) -> None:
    """Remember the ids of an entry with a whole prompt, for the call that continues it."""
    if not entry.prompt_is_delta and _capture_id(shelf):
        name = _capture_id(shelf)
        ids = CallIds(entry.prompt_token_ids, entry.generation_token_ids)
        recent.keep((name, entry.model_call_id), ids, after=(name, after) if after is not None else None)


def parent_ids(shelf: Shelf, entry: TokenEntry, recent: Recent) -> CallIds | None:
    """The ids that `entry` need not repeat: its parent's, if its whole prompt really begins with them."""
    parent = entry.parent_call_id
    if parent is None or entry.prompt_is_delta or entry.parent_decision != "resolved" or parent not in shelf.entries:
        return None
    try:
        ids = load_ids(shelf, parent, recent)
    except DamagedRecord:
        return None  # nothing is built on a damaged record: the prompt is stored whole
    return ids if ids.begins(entry.prompt_token_ids) else None


def _entry(shelf: Shelf, call_id: str, line: Line, arena: PromptArena, recent: Recent, whole: bool) -> TokenEntry:
    entry = line.entry()
    generation = entry.generation_token_ids
    if not line.is_delta:
        prompt = arena.place(call_id, None, entry.prompt_token_ids, generation)
        line.check_digest(prompt, generation)
        return replace(entry, prompt_token_ids=prompt)
    parent = line.parent
    if parent is None or (parent not in arena and parent not in shelf.entries):
        if line.put_as_delta:
            return entry  # its parent was put elsewhere: there is no more of it
        raise DamagedRecord(call_id, "its parent's record is missing")
    if parent not in arena:
        try:
            ids = load_ids(shelf, parent, recent)
        except DamagedRecord:
            if line.put_as_delta and not whole:
                return entry  # as it was put; who completes it will miss the parent
            raise
        arena.place(parent, None, ids.prompt, ids.generation)
    prompt = arena.place(call_id, parent, entry.prompt_token_ids, generation)
    line.check_digest(prompt, generation)
    if line.put_as_delta and not whole:
        return entry
    return replace(entry, prompt_token_ids=prompt, prompt_is_delta=False)


def _read_line(shelf: Shelf, call_id: str, place: Place) -> Line:
    return _line(call_id, shelf.files.read(shelf.path(names.TOKENS), place.offset, place.size))


def _line(call_id: str, data: bytes) -> Line:
    try:
        line = decode_line(data)
    except Damaged as error:
        raise DamagedRecord(call_id, str(error)) from error
    if line.call_id != call_id:
        raise DamagedRecord(call_id, "another call's record stands in its place")
    return line


def _capture_id(shelf: Shelf) -> str:
    return shelf.state.capture_id if shelf.state is not None else ""
