"""What is known of one rollout's files: read once, then only what was added. Reads, never writes.

`refresh` brings it up to what the files say now; damage that it meets becomes a reason and is never an exception. The
log files only grow (an own or foreign appender adds lines) or are replaced whole, so a file that is the same one and
longer is read from where the last reading ended, and anything else is read anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toprope.capture import jsonl_names as names
from toprope.capture.jsonl_files import Files, FileStat
from toprope.capture.jsonl_lines import Damaged, Found, scan, text_lines, unseal
from toprope.capture.jsonl_state import State, decode_state, decode_tombstone
from toprope.capture.protocols import Intent
from toprope.tokens.entry import TokenEntry
from toprope.tokens.lifecycle import Call, Head, Phase, typed_reason
from toprope.tokens.settling import BegunCall, is_doubtful

LOGS = (names.TOKENS, names.INTENTS, names.BEGUN, names.ABORTED, names.INCOMPLETE)
REPLAY = "replay_of:"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record stands in the token file, the SHA-256 of its bytes, and what `tokens.settling` asks of it."""

    offset: int
    size: int
    digest: str
    doubtful: bool = False

    @classmethod
    def of(cls, offset: int, line: bytes, entry: TokenEntry) -> Place:
        doubtful = is_doubtful(entry.parent_decision, entry.parent_resolution_reason)
        return cls(offset, len(line), hashlib.sha256(line).hexdigest(), doubtful)


@dataclass(slots=True)
class Shelf:
    """One key's files. `base` is `<directory>/<stem>`; `fresh`: the endings of files that another writer changed;
    `acknowledged`: how many records stood there when the last call began, whatever stands there now.
    """

    key: str
    base: Path
    files: Files
    state: State | None = None
    state_lost: bool = False
    entries: dict[str, Place] = field(default_factory=dict)
    intents: dict[str, None] = field(default_factory=dict)
    begun: dict[str, Intent] = field(default_factory=dict)
    aborts: dict[str, str] = field(default_factory=dict)
    marks: dict[str, None] = field(default_factory=dict)
    damage: dict[str, None] = field(default_factory=dict)
    acknowledged: int = 0
    replayed: set[str] = field(default_factory=set)
    known: dict[str, None] = field(default_factory=dict)
    open: dict[str, None] = field(default_factory=dict)
    unindexed: int = 0
    ours: bool = False
    marked: bool = False
    torn: set[str] = field(default_factory=set)
    unended: bool = False
    lines: int = 0
    read_to: dict[str, int] = field(default_factory=dict)
    stats: dict[str, FileStat | None] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)

    def path(self, ending: str) -> Path:
        return self.base.with_name(self.base.name + ending)

    # -- what is true -------------------------------------------------------------------------------------------------

    @property
    def stands(self) -> bool:
        """Whether anything happened under the key; a state made for a first write that never came is nothing."""
        state = self.state
        told = state is not None and (state.frozen or state.retired or state.incomplete or state.version > 0)
        return bool(told or self.known or self.incomplete)

    @property
    def incomplete(self) -> bool:
        told = self.state is not None and self.state.incomplete
        return bool(told or self.marked or self.damage or self.lost)

    @property
    def lost(self) -> bool:
        """Whether the state file is unreadable, or missing where one of ours must have been."""
        return self.state_lost or (self.state is None and self.ours)

    def reasons(self) -> tuple[str, ...]:
        """Why the rollout is incomplete, in order, each once."""
        found: dict[str, None] = dict.fromkeys(self.state.reasons if self.state is not None else ())
        if self.lost:
            found["write_failed:the state file is lost, the rollout may have been frozen before"] = None
        found |= self.damage | self.marks
        if self.incomplete and not found:
            found["write_failed"] = None
        return tuple(found)

    def head(self, absent: Phase) -> Head:
        """The head for `tokens.lifecycle.step`; `absent` is the phase where nothing stands."""
        state = self.state or State()
        if state.retired:
            return Head(
                Phase.RETIRED,
                state.version,
                state.snapshot_id,
                state.incomplete,
                state.calls,
                state.entries,
                state.open_intents,
            )
        if not self.stands:
            return Head(phase=absent)
        return Head(
            Phase.FROZEN if state.frozen else Phase.OPEN,
            state.version + self.unindexed,
            state.snapshot_id,
            self.incomplete,
            len(self.known),
            len(self.entries),
            len(self.open),
        )

    def call(self, call_id: str) -> Call:
        put = call_id in self.entries
        return Call(call_id in self.intents, put, None if put else self.aborts.get(call_id))

    def dangling(self) -> tuple[str, ...]:
        """The calls with an open intent.

        A line that nothing else knows and that ends in a recorded call which has no intent of its own is a torn intent
        with that call's glued behind it: the torn one was never acknowledged, so its call never left.
        """
        if not self.open:
            return ()
        unannounced = tuple(call for call in self.entries if call not in self.intents) if not self.begun else ()
        return tuple(line for line in self.open if not _glued(line, unannounced))

    def writers(self) -> set[str]:
        """The epochs of those who began the calls; the empty one for calls of unknown origin."""
        return {self.begun.get(call, Intent()).writer_epoch for call in self.known}

    def begun_calls(self) -> list[BegunCall]:
        """What `tokens.settling` asks of the calls, those that told of their intent in the order of beginning."""
        still_open = set(self.dangling())
        order = [*(call for call in self.begun if call in self.known), *(c for c in self.known if c not in self.begun)]
        return [self._begun_call(call, call in still_open) for call in order]

    def _begun_call(self, call: str, still_open: bool) -> BegunCall:
        intent, place = self.begun.get(call, Intent()), self.entries.get(call)
        return BegunCall(
            call,
            still_open,
            intent.stream,
            intent.request_digest,
            intent.retry_count,
            intent.writer_epoch,
            place is not None and place.doubtful,
        )

    def standing_aborts(self) -> list[str]:
        """The abort reasons that still hold, in order."""
        return [reason for call, reason in self.aborts.items() if call not in self.entries]

    # -- taking in ----------------------------------------------------------------------------------------------------

    def saw_entry(self, call_id: str, place: Place) -> None:
        self.entries[call_id] = place
        self.known[call_id] = None
        self.open.pop(call_id, None)
        if self.state is None or place.offset >= self.state.indexed_size:
            self.unindexed += 1

    def saw_intent(self, call_id: str) -> None:
        self.intents[call_id] = None
        self.known[call_id] = None
        if call_id not in self.entries and call_id not in self.aborts:
            self.open[call_id] = None

    def saw_abort(self, call_id: str, reason: str, *, late: bool = False) -> None:
        self.aborts[call_id] = reason
        self.known[call_id] = None
        self.open.pop(call_id, None)
        if reason.startswith(REPLAY) and not late:
            self.replayed.add(reason.removeprefix(REPLAY))

    def saw_state(self, state: State) -> None:
        self.state, self.state_lost = state, False
        self.unindexed = sum(place.offset >= state.indexed_size for place in self.entries.values())
        for call_id in state.refused:
            self.saw_abort(call_id, "upstream:refused", late=True)
        for call_id, reason in state.aborts.items():
            self.saw_abort(call_id, reason, late=True)

    def stamp(self, *endings: str) -> None:
        """Remember the files with these endings as they are now: what they say is known."""
        for ending in endings:
            self.stats[ending] = stat = self.files.stat(self.path(ending))
            self.read_to[ending] = stat.size if stat is not None else 0

    # -- reading ------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Up to what the files say. Call it inside the rollout's lock, or on an archive."""
        stats = {ending: self.files.stat(self.path(ending)) for ending in (names.STATE, *LOGS)}
        if any(not self._follows(ending, stats[ending]) for ending in LOGS):
            self._forget()
        if stats[names.STATE] != self.stats.get(names.STATE):
            self._read_state(stats[names.STATE])
            self.fresh.add(names.STATE)
        for ending, read in (
            (names.BEGUN, self._read_begun),
            (names.INTENTS, self._read_intents),
            (names.TOKENS, self._read_tokens),
            (names.ABORTED, self._read_aborts),
            (names.INCOMPLETE, self._read_marks),
        ):
            stat = stats[ending]
            if stat is not None and stat != self.stats.get(ending):
                read(self.files.read(self.path(ending), self.read_to.get(ending, 0)))
                self.fresh.add(ending)
            self.stats[ending] = stat
        if self.state is None and not self.known:
            kept = decode_tombstone(self.files.read(self.path(names.RECEIPTS)))
            if kept is not None:
                self.saw_state(kept.state(self.key))
        retired = self.state is not None and self.state.retired
        if not retired and len(self.entries) < self.acknowledged:
            short = (
                f"{self.acknowledged - len(self.entries)} of at least {self.acknowledged} stored records are missing"
            )
            self.damage[f"write_failed:{short}"] = None
        if self.state is not None and not self.state.retired:
            self._check_index(self.state.entry_digests)

    def _follows(self, ending: str, stat: FileStat | None) -> bool:
        """Whether what was read of a log is still the beginning of what it holds now."""
        before = self.stats.get(ending)
        if before is None or stat == before:
            return True
        return stat is not None and stat.inode == before.inode and stat.size > before.size

    def _forget(self) -> None:
        blank = Shelf(self.key, self.base, self.files)
        for name in self.__slots__:
            setattr(self, name, getattr(blank, name))

    def _read_state(self, stat: FileStat | None) -> None:
        data = self.files.read(self.path(names.STATE)) if stat is not None else b""
        state = decode_state(data)
        if self.state is not None and (state is None or not state.capture_id or _other(self.state, state)):
            self._forget()
        self.stats[names.STATE] = stat
        self.state, self.state_lost = None, stat is not None and state is None
        if state is not None:
            self.saw_state(state)

    def _read_tokens(self, data: bytes) -> None:
        found = scan(data, offset=self.read_to.get(names.TOKENS, 0), lines=self.lines)
        for each in found.found:
            self._take(each)
        self.damage |= dict.fromkeys(found.damage)
        self.lines = found.lines
        self.read_to[names.TOKENS] = found.end
        self.unended = found.unended
        self._note_torn(names.TOKENS, found.torn)
        if found.torn or found.unended:
            self.lines -= 1  # what follows continues that line

    def _take(self, found: Found) -> None:
        call_id, rollout = found.line.call_id, found.line.values.get("rollout_id")
        self.ours = self.ours or found.line.sealed
        if rollout not in (self.key, names.set_aside(self.key)[0]):
            self.damage[f"write_failed:{call_id}: its record names another rollout"] = None
            return
        there = self.entries.get(call_id)
        if there is None:
            doubtful = is_doubtful(found.line.decision, found.line.values.get("parent_resolution_reason"))
            self.saw_entry(call_id, Place(found.offset, found.size, found.digest, doubtful))
        elif there.digest != found.digest:
            self.damage[f"conflict:{call_id}"] = None

    def _check_index(self, index: Mapping[str, str]) -> None:
        for call_id, digest in index.items():
            place = self.entries.get(call_id)
            if place is None:
                self.damage[f"write_failed:{call_id}: its stored record is missing"] = None
            elif place.digest != digest:
                self.damage[f"write_failed:{call_id}: its stored record is not the one that was indexed"] = None

    def _read_intents(self, data: bytes) -> None:
        for call_id in text_lines(data):
            if call_id:
                self.saw_intent(call_id)
        self._whole_lines(names.INTENTS, data)

    def _read_begun(self, data: bytes) -> None:
        self.ours = True
        for values in self._sealed(names.BEGUN, data):
            entries = values.get("entries")
            self.acknowledged = max(self.acknowledged, entries if isinstance(entries, int) else 0)
            self.begun[str(values.get("model_call_id"))] = Intent(
                bool(values.get("stream")),
                str(values.get("request_digest", "")),
                int(values.get("retry_count", 0)),
                str(values.get("writer_epoch", "")),
            )

    def _read_aborts(self, data: bytes) -> None:
        self.ours = True
        for values in self._sealed(names.ABORTED, data):
            self.saw_abort(str(values.get("model_call_id")), str(values.get("reason")), late=bool(values.get("late")))

    def _read_marks(self, data: bytes) -> None:
        self.marked = True
        for text in text_lines(data):
            self.marks[typed_reason(text or None)] = None  # NeMo Gym writes the call's id, we the reason
        self._whole_lines(names.INCOMPLETE, data)

    def _sealed(self, ending: str, data: bytes) -> Iterable[Mapping[str, Any]]:
        self._whole_lines(ending, data)
        for line in data.split(b"\n")[:-1]:
            try:
                if line.strip():
                    yield unseal(line)
            except Damaged as error:
                self.damage[f"write_failed:a line of {ending[1:]} is damaged: {error}"] = None

    def _whole_lines(self, ending: str, data: bytes) -> None:
        end = data.rfind(b"\n") + 1
        self.read_to[ending] = self.read_to.get(ending, 0) + end
        self._note_torn(ending, end < len(data))

    def _note_torn(self, ending: str, torn: bool) -> None:
        if torn:
            self.torn.add(ending)
        else:
            self.torn.discard(ending)


def _other(before: State, after: State) -> bool:
    return before.capture_id != after.capture_id


def _glued(line: str, calls: tuple[str, ...]) -> bool:
    return any(line.endswith(call) and line != call for call in calls)
