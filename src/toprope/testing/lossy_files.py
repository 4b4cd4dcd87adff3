"""A file layer that forgets what was not synced: power cuts for whoever writes files, at every step, without a disk.

It keeps two states of everything: what processes see, and what a device surely holds. Content becomes sure with a sync
of the file, names with a sync of their directory. `PowerCut` is raised at a chosen step and from then on, as the
process is dead; `after_power_cut` is what a new process finds.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from toprope.capture.jsonl_files import FileStat


class PowerCut(BaseException):
    """The process is gone. No code of the process may handle it."""


@dataclass(slots=True)
class _Node:
    """One file: `seen` by processes, `sure` on the device; `stamp` moves with every change."""

    number: int
    seen: bytes = b""
    sure: bytes = b""
    stamp: int = 0


@dataclass(frozen=True, slots=True)
class _NameChange:
    """A file got the name `new`, lost the name `old`, or both at once: a rename happens whole or not at all."""

    node: _Node
    old: Path | None = None
    new: Path | None = None

    def apply(self, names: dict[Path, _Node]) -> None:
        if self.old is not None and names.get(self.old) is self.node:
            del names[self.old]
        if self.new is not None:
            names[self.new] = self.node


@dataclass(slots=True)
class Disk:
    """The device. `seen` and `sure` are names to files; `pending` leads from `sure` to `seen`, in order."""

    seen: dict[Path, _Node] = field(default_factory=dict)
    sure: dict[Path, _Node] = field(default_factory=dict)
    pending: list[_NameChange] = field(default_factory=list)
    clock: int = 0
    locks: dict[Path, threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))


class LossyFiles:
    """A process's view of a `Disk`, for `JsonlStore(files=...)`.

    `cut_at` is the step at which the power goes (steps count from 0; None: never): a write before anything, half or all
    of its bytes are there (`torn`: 0.0, 0.5, 1.0), any other step before it takes effect. `steps` counts what was done,
    `log` names it.
    """

    def __init__(self, disk: Disk | None = None, *, cut_at: int | None = None, torn: float = 0.5) -> None:
        self.disk = disk or Disk()
        self.log: list[str] = []
        self._cut_at = cut_at
        self._torn = torn
        self._dead = False

    @property
    def steps(self) -> int:
        return len(self.log)

    def killed(self) -> LossyFiles:
        """What the next process finds when only the process died: everything that was seen."""
        return LossyFiles(self.disk)

    def after_power_cut(self, choose: Random | None = None) -> LossyFiles:
        """What a new process finds after a power cut: what was sure, and of the rest what `choose` keeps.

        Without `choose` everything unsure is gone. With it each unsynced name change and each unsynced end of a file is
        kept, lost or cut, independently, as file systems may; a rename is one change. One directory is assumed.
        """
        left = dict(self.disk.sure)
        for change in self.disk.pending:
            if choose is not None and choose.random() < 0.5:
                change.apply(left)
        disk = Disk(clock=self.disk.clock)
        for path, node in left.items():
            content = _survivor(node, choose)
            disk.seen[path] = disk.sure[path] = _Node(node.number, content, content, node.stamp + 1)
        return LossyFiles(disk)

    # -- `Files` ------------------------------------------------------------------------------------------------------

    def stat(self, path: Path) -> FileStat | None:
        node = self.disk.seen.get(path)
        return FileStat(node.number, len(node.seen), node.stamp) if node is not None else None

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        node = self.disk.seen.get(path)
        if node is None:
            return b""
        return node.seen[start:] if size is None else node.seen[start : start + size]

    def names(self, directory: Path) -> list[str]:
        return [path.name for path in self.disk.seen if path.parent == directory]

    def append(self, path: Path, data: bytes) -> None:
        node = self.disk.seen.get(path)
        if node is None:
            self._step(f"create {path.name}")
            node = self._create(path)
        with self._step_over_bytes(f"append {path.name}", data) as part:
            self._change(node, node.seen + part)
        self.sync(path)

    def write(self, path: Path, data: bytes) -> None:
        self._step(f"create {path.name}")
        node = self._create(path)
        with self._step_over_bytes(f"write {path.name}", data) as part:
            self._change(node, part)
        self.sync(path)

    def sync(self, path: Path) -> None:
        self._step(f"sync {path.name}")
        node = self.disk.seen[path]
        node.sure = node.seen

    def truncate(self, path: Path, size: int) -> None:
        self._step(f"truncate {path.name}")
        node = self.disk.seen[path]
        self._change(node, node.seen[:size])
        self.sync(path)

    def rename(self, old: Path, new: Path) -> None:
        self._step(f"rename {old.name} {new.name}")
        self._rename(_NameChange(self.disk.seen[old], old, new))

    def remove(self, path: Path) -> None:
        if path in self.disk.seen:
            self._step(f"remove {path.name}")
            self._rename(_NameChange(self.disk.seen[path], old=path))

    def sync_directory(self, directory: Path) -> None:
        self._step("sync directory")
        for change in self.disk.pending:
            change.apply(self.disk.sure)
        self.disk.pending.clear()

    def make_directory(self, directory: Path) -> None:
        """Directories are there."""

    def writable(self, directory: Path) -> bool:
        return True

    @contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        with self.disk.locks[path]:
            yield

    # -- steps --------------------------------------------------------------------------------------------------------

    def _create(self, path: Path) -> _Node:
        self.disk.clock += 1
        node = _Node(self.disk.clock)
        self._rename(_NameChange(node, new=path))
        return node

    def _rename(self, change: _NameChange) -> None:
        change.apply(self.disk.seen)
        self.disk.pending.append(change)

    def _change(self, node: _Node, content: bytes) -> None:
        self.disk.clock += 1
        node.seen, node.stamp = content, self.disk.clock

    def _step(self, what: str) -> None:
        if self._dead or self.steps == self._cut_at:
            self._dead = True
            raise PowerCut(what)
        self.log.append(what)

    @contextmanager
    def _step_over_bytes(self, what: str, data: bytes) -> Iterator[bytes]:
        try:
            self._step(what)
        except PowerCut:
            if self.steps == self._cut_at:
                self._cut_at = None  # the part that got out got out once
                yield data[: int(len(data) * self._torn)]
            raise
        yield data


def _survivor(node: _Node, choose: Random | None) -> bytes:
    """What is left of a file's content: the sure bytes, and of an unsynced end what was written by chance."""
    if choose is None or node.seen == node.sure:
        return node.sure
    if not node.seen.startswith(node.sure):
        return choose.choice([node.sure, node.seen])
    added = node.seen[len(node.sure) :]
    kept = added[: choose.randint(0, len(added))]
    if choose.random() < 0.2:
        kept = kept + bytes(len(added) - len(kept))  # the length was written, the bytes were not
    return node.sure + kept
