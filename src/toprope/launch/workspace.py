"""The directory that a command works in, until a run stands in it: made late, and unmade if nothing came of it.

Left to others: what a run writes there (`results`, `capture`).
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from toprope.errors.tree import ConfigError
from toprope.results.layout import RunDir
from toprope.telemetry.calls import ModelCallRecord, read_call_log

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def default_directory(name: str) -> Path:
    """`runs/<date>-<name>-<short id>`, new every time."""
    safe = _UNSAFE.sub("-", name)[:100].strip("-.") or "run"  # file systems take names of 255 bytes
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}-{secrets.token_hex(2)}"


class Workspace:
    """A run directory from before the run begins. Raises `ConfigError` where it cannot be made or holds a run."""

    def __init__(self, path: Path) -> None:
        self.run_dir = RunDir(path)
        self._made_key = False
        try:
            self.run_dir.refuse_used()
            self._made = [parent for parent in (path, *path.parents) if not parent.exists()]
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{path}: the directory cannot be made: {error.strerror}; accepted: a place that can be written."
            ) from error

    @property
    def calls(self) -> Path:
        """One line a model call, for people who ask about times and errors."""
        return calls_of(self.run_dir)

    def signing_key(self) -> bytes:
        """The key of session cookies: random, made once, readable by the owner only."""
        path = self.run_dir.signing_key
        try:
            return path.read_bytes()
        except FileNotFoundError:
            key = secrets.token_bytes(32)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(key)
            self._made_key = True
            return key

    def abandon(self) -> None:
        """Remove what only this object made, if no run, capture or call was written; else leave everything."""
        if self.run_dir.held() or self.run_dir.capture_db.exists() or self.run_dir.capture_files.exists():
            return
        if self.calls.exists() and self.calls.stat().st_size == 0:
            self.calls.unlink()
        if self._made_key and not self.calls.exists():
            self.run_dir.signing_key.unlink(missing_ok=True)
        for directory in (self.run_dir.logs_dir, *self._made):
            with suppress(OSError):  # not empty: somebody else's, and it stays; or it never was
                directory.rmdir()


def calls_of(run_dir: RunDir) -> Path:
    """Where the model servers of a run note their calls."""
    return run_dir.logs_dir / "model_calls.jsonl"


def read_calls(run_dir: RunDir) -> Iterator[ModelCallRecord]:
    """The model calls that were noted, in order; none where there is no such file."""
    path = calls_of(run_dir)
    return read_call_log(path) if path.exists() else iter(())
