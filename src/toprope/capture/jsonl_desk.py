"""Where the files of rollouts are opened, locked, remembered and written. Blocking; one use at a time for a key.

    opened: lock -> what the files say now -> finish what a dead writer began -> make sure of what it left -> the verb

What is written is durable when `append` or `commit` returns: content, then name. Which verb writes what is
`jsonl_captures`' affair.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from toprope.canonical.json import NotJson, canonical, loads
from toprope.capture import jsonl_names as names
from toprope.capture.fence import Fence, fence_key
from toprope.capture.jsonl_files import Files, is_scrap, replace_durably
from toprope.capture.jsonl_lines import text_line
from toprope.capture.jsonl_shelf import Shelf
from toprope.capture.jsonl_state import new_state
from toprope.errors.tree import CaptureClosed, CaptureError
from toprope.tokens.lifecycle import Head, Phase

_KNOWN_KEYS = 1024
"""Rollouts whose index is remembered: more than run at once; about 200 bytes a call each."""

_ANY = (names.STATE, names.TOKENS, names.INTENTS, names.ABORTED, names.BEGUN, names.INCOMPLETE, names.RECEIPTS)
_MOVED = (*names.PAYLOAD, names.RECEIPTS)


class Desk:
    """The files of one directory, which the first write makes."""

    def __init__(self, directory: Path, files: Files, clock: Callable[[], float]) -> None:
        self.directory = directory
        self.files = files
        self.clock = clock
        self._guard = threading.Lock()
        self._shelves: OrderedDict[str, Shelf] = OrderedDict()

    # -- opening ------------------------------------------------------------------------------------------------------

    @contextmanager
    def opened(self, key: str, *, write: bool, make: bool = True) -> Iterator[Shelf]:
        """The key's files, locked and read. Without `make` a key that has none is looked at without leaving any.

        With `write` everything that they say is durable before the verb builds on it, whoever wrote it. Raises
        `CaptureError` for a write in a directory that cannot be written.
        """
        base, number = names.set_aside(key)
        if number is not None and self._exists(self._base(base)):
            with self.opened(base, write=False):
                pass  # finishes a move to this key that a dead writer began
        path = self._base(key)
        if not make and not self._exists(path):
            yield Shelf(key, path, self.files)
            return
        archive = not self.files.writable(self.directory)
        if archive and write:
            raise CaptureError(f"{self.directory}: the capture directory cannot be written")
        if not archive:
            self.files.make_directory(self.directory)
        with nullcontext() if archive else self.files.lock(_beside(path, names.LOCK)):
            shelf = self._shelf(key, path)
            try:
                shelf.refresh()
                if not archive:
                    shelf = self._finish(shelf)
                if write:
                    self._make_sure(shelf)
                yield shelf
            except CaptureClosed:
                raise  # a refusal wrote nothing
            except BaseException:
                with self._guard:
                    self._shelves.pop(key, None)
                raise

    def _base(self, key: str) -> Path:
        """Where the key's files are: under its stem, or under NeMo Gym's name for it where that one wrote them."""
        path = self.directory / names.stem_of(key)
        foreign = names.foreign_stem_of(key)
        if foreign is not None and not self._exists(path) and self._exists(self.directory / foreign):
            present = self.files.names(self.directory)  # says whether the name is the same in capital letters too
            if any(foreign + ending in present for ending in _ANY):
                return self.directory / foreign
        return path

    def _exists(self, path: Path) -> bool:
        return any(self.files.stat(_beside(path, ending)) is not None for ending in _ANY)

    def _shelf(self, key: str, path: Path) -> Shelf:
        with self._guard:
            shelf = self._shelves.get(key)
            if shelf is None or shelf.base != path:
                shelf = self._shelves[key] = Shelf(key, path, self.files)
            self._shelves.move_to_end(key)
            while len(self._shelves) > _KNOWN_KEYS:
                self._shelves.popitem(last=False)
            return shelf

    def _anew(self, key: str) -> Shelf:
        with self._guard:
            self._shelves.pop(key, None)
        shelf = self._shelf(key, self._base(key))
        shelf.refresh()
        return shelf

    def _make_sure(self, shelf: Shelf) -> None:
        """What another writer left, who may have died between a write and its sync, is durable on return."""
        if not shelf.fresh:
            return
        for ending in shelf.fresh - {names.STATE}:
            self.files.sync(shelf.path(ending))
        self.files.sync_directory(self.directory)
        shelf.named |= shelf.fresh
        shelf.fresh.clear()

    def captures(self) -> list[str]:
        """The keys that have files here, in order of their names."""
        keys: dict[str, None] = {}
        for name in sorted(self.files.names(self.directory)):
            for ending in _ANY:
                stem = names.stem_in(name, ending)
                if stem is not None:
                    key = names.key_of(stem)
                    key = self._told_key(stem) if key is None else key
                    if key is not None:
                        keys[key] = None
        return list(keys)

    def _told_key(self, stem: str) -> str | None:
        shelf = Shelf("", self.directory / stem, self.files)
        shelf.refresh()
        return shelf.state.key if shelf.state is not None and shelf.state.key else None

    # -- writing ------------------------------------------------------------------------------------------------------

    def exist(self, shelf: Shelf) -> None:
        """On return the key has a state file, and its rollout's fence knows the attempt."""
        if shelf.state is not None:
            return
        rollout, attempt = fence_key(shelf.key)
        if attempt > 0 and not shelf.stands:
            with self._fence_lock(rollout):
                self._write_fence(rollout, self._fence(rollout).seen_up_to(attempt))
        shelf.state = new_state(shelf.key, self.clock()) if not shelf.lost else None
        head = shelf.head(Phase.OPEN)
        self.commit(shelf, replace(head, phase=Phase.OPEN), fresh=True)

    def append(self, shelf: Shelf, ending: str, line: bytes) -> int:
        """On return the line stands in the log, durably; the value is the offset of its first byte."""
        path = shelf.path(ending)
        start = shelf.read_to.get(ending, 0)
        if ending in shelf.torn:
            self.files.truncate(path, start)
            shelf.torn.discard(ending)
        if ending == names.TOKENS and shelf.unended:
            line, start = b"\n" + line, start + 1
            shelf.unended = False
            shelf.lines += 1
        self.files.append(path, line)
        self._name(shelf, ending)
        shelf.stamp(ending)
        return start

    def rewrite(self, shelf: Shelf, ending: str, data: bytes) -> None:
        """On return the file holds exactly `data`, durably."""
        replace_durably(self.files, shelf.path(ending), data)
        shelf.named.add(ending)
        shelf.torn.discard(ending)
        shelf.stamp(ending)

    def commit(
        self, shelf: Shelf, head: Head, reasons: tuple[str, ...] = (), *, fresh: bool = False, **changes: Any
    ) -> None:
        """On return the state file says `head`, and why the rollout is incomplete if it is, durably."""
        why = tuple(dict.fromkeys((*shelf.reasons(), *reasons)))
        retired = head.phase is Phase.RETIRED
        before = shelf.state or new_state(shelf.key, self.clock())
        index = {} if retired or fresh else {call: place.digest for call, place in shelf.entries.items()}
        state = replace(
            before,
            frozen=head.phase in (Phase.FROZEN, Phase.RETIRED),
            retired=retired,
            incomplete=head.incomplete or bool(why),
            snapshot_id=head.snapshot_id,
            version=0 if fresh else head.version,
            entry_digests=index,
            indexed_size=0 if retired or fresh else shelf.read_to.get(names.TOKENS, 0),
            reasons=why,
            calls=head.calls,
            entries=head.entries,
            open_intents=head.open_intents,
            **changes,
        )
        self.rewrite(shelf, names.STATE, state.encode())
        shelf.saw_state(state)
        if not retired:
            for reason in why:
                if reason not in shelf.marks:
                    self.append(shelf, names.INCOMPLETE, text_line(reason))
                    shelf.marks[reason] = None
                    shelf.marked = True

    def remove(self, shelf: Shelf, endings: tuple[str, ...]) -> None:
        """On return the files are gone, durably."""
        present = [shelf.path(ending) for ending in endings if self.files.stat(shelf.path(ending)) is not None]
        for path in present:
            self.files.remove(path)
        if present:
            self.files.sync_directory(self.directory)

    def _name(self, shelf: Shelf, ending: str) -> None:
        if ending not in shelf.named:
            self.files.sync_directory(self.directory)
            shelf.named.add(ending)

    # -- setting aside and sweeping ----------------------------------------------------------------------------------

    def move(self, shelf: Shelf) -> str:
        """On return what stood under the key is `<key>~<n>`, whose name is returned, and the key is new, durably."""
        stem = names.set_aside(names.stem_of(f"{shelf.key}~1"))[0]
        taken = [0]
        for name in self.files.names(self.directory):
            for ending in _ANY:
                found, number = names.set_aside(names.stem_in(name, ending) or "")
                if found == stem and number is not None:
                    taken.append(number)
        target = f"{shelf.key}~{max(taken) + 1}"
        self.exist(shelf)
        assert shelf.state is not None
        self.commit(shelf, shelf.head(Phase.OPEN), superseding=target)  # from here on it happens, whoever finishes it
        self._finish_move(shelf)
        return target

    def sweep(self, shelf: Shelf) -> None:
        """On return the tombstone is gone and its attempt fenced, durably."""
        self.commit(shelf, shelf.head(Phase.RETIRED), sweeping=True)  # from here on it happens, whoever finishes it
        self._finish_sweep(shelf)

    def _finish(self, shelf: Shelf) -> Shelf:
        """The key's files after what a dead writer began with them is done."""
        if shelf.state is not None and shelf.state.superseding is not None:
            return self._finish_move(shelf)
        if shelf.state is not None and shelf.state.sweeping:
            return self._finish_sweep(shelf)
        return shelf

    def _finish_sweep(self, shelf: Shelf) -> Shelf:
        assert shelf.state is not None
        if not shelf.state.abandoned:
            self.keep_out(shelf.key)
        self.remove(shelf, _MOVED)
        self.remove(shelf, (names.STATE,))
        return self._anew(shelf.key)

    def _finish_move(self, shelf: Shelf) -> Shelf:
        state = shelf.state
        assert state is not None
        assert state.superseding is not None
        target = Shelf(state.superseding, self.directory / names.stem_of(state.superseding), self.files)
        self.lift_fence(shelf.key)
        for ending in _MOVED:
            if self.files.stat(shelf.path(ending)) is not None:
                self.files.rename(shelf.path(ending), target.path(ending))
        self.files.sync_directory(self.directory)
        moved = replace(state, key=state.superseding, superseding=None, abandoned=True)
        self.rewrite(target, names.STATE, moved.encode())
        self.remove(shelf, (names.STATE,))
        return self._anew(shelf.key)

    # -- fences -------------------------------------------------------------------------------------------------------

    def absent(self, key: str) -> Phase:
        """The phase of a key under which nothing stands."""
        rollout, attempt = fence_key(key)
        return Phase.FENCED if self._fence(rollout).keeps_out(attempt) else Phase.ABSENT

    def was_swept(self, key: str) -> bool:
        """Whether the key's attempt, or a later one, was swept."""
        rollout, attempt = fence_key(key)
        return attempt <= self._fence(rollout).swept

    def lift_fence(self, key: str) -> None:
        """On return the key's attempt is the last one that was seen, durably."""
        rollout, attempt = fence_key(key)
        with self._fence_lock(rollout):
            self._write_fence(rollout, Fence(attempt, -1))

    def keep_out(self, key: str) -> None:
        """On return the key's attempt is over for good, durably."""
        rollout, attempt = fence_key(key)
        with self._fence_lock(rollout):
            self._write_fence(rollout, self._fence(rollout).swept_to(attempt))

    def _fence(self, rollout: str) -> Fence:
        data = self.files.read(_beside(self.directory / names.stem_of(rollout), names.FENCE))
        try:
            told = loads(data) if data else {}
            return Fence(int(told.get("seen", -1)), int(told.get("swept", -1)))
        except (NotJson, AttributeError, TypeError, ValueError) as error:
            raise CaptureError(
                f"{self.directory}: the fence of rollout {rollout!r} is damaged ({error}); remove the file "
                f"{names.stem_of(rollout)}{names.FENCE} if no attempt of that rollout is still running"
            ) from error

    def _write_fence(self, rollout: str, fence: Fence) -> None:
        path = _beside(self.directory / names.stem_of(rollout), names.FENCE)
        if self._fence(rollout) != fence:
            replace_durably(self.files, path, canonical({"seen": fence.seen, "swept": fence.swept}) + b"\n")
        else:
            self.files.sync_directory(self.directory)  # who wrote it may have died before the name was durable

    def _fence_lock(self, rollout: str) -> Any:
        return self.files.lock(_beside(self.directory / names.stem_of(rollout), names.FENCE + ".lock"))

    # -- scraps -------------------------------------------------------------------------------------------------------

    def remove_scraps(self, older_than: float) -> None:
        """Files of writers that died before they could name them go when they are older than so many seconds."""
        limit = (self.clock() - max(older_than, 3600.0)) * 1e9
        for name in self.files.names(self.directory):
            stat = self.files.stat(self.directory / name) if is_scrap(name) else None
            if stat is not None and stat.mtime_ns < limit:
                self.files.remove(self.directory / name)


def _beside(base: Path, ending: str) -> Path:
    return base.with_name(base.name + ending)
