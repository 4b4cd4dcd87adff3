"""The file of the sqlite store: its tables, how it is opened, and the lock round everything that could hurt it.

    capture  one row a key     what is true of the whole key; the ends of its two lines
      |  line of calls         call  <- prev <- prev        (in order of begin_call: intent, abort, which entry)
      |  line of entries       entry <- prev <- prev        (in order of put: packed bytes and their hash)
      |  reason                why it is incomplete
    fence    one row a rollout which attempts are over

Lines are chained by row id instead of indexed by key, so that what concurrent rollouts write lands on a few shared
pages; an index led by the key would dirty one page a rollout and commit.

Commit, checkpoint, recovery and close of any connection happen under one file lock. SQLite before 3.51.3 can corrupt a
log that two connections write and checkpoint at once; a reader recovers a dead writer's log when it begins to read and
may checkpoint when it closes, so readers take the lock for both.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from toprope.capture.sqlite_log import damage_in
from toprope.errors.tree import CaptureError, ConfigError
from toprope.storage.atomic import sync_directory
from toprope.storage.filesystem import is_network, kind_of
from toprope.storage.lock import FileLock

APPLICATION_ID = 0x74707270
FORM = 1
_CHECKPOINT_PAGES = 4000
"""16 MiB of log between checkpoints: a checkpoint costs two syncs and delays the commit that runs it."""

_SCHEMA = """
CREATE TABLE capture (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL UNIQUE,
    phase TEXT NOT NULL,
    version INTEGER NOT NULL,
    snapshot_id TEXT,
    incomplete INTEGER NOT NULL,
    calls INTEGER NOT NULL,
    entries INTEGER NOT NULL,
    open_intents INTEGER NOT NULL,
    last_call INTEGER,
    last_entry INTEGER,
    created REAL NOT NULL,
    retired REAL,
    abandoned INTEGER NOT NULL DEFAULT 0,
    receipts BLOB
);
CREATE TABLE call (
    id INTEGER PRIMARY KEY,
    capture INTEGER NOT NULL,
    prev INTEGER,
    call_id TEXT NOT NULL,
    intent INTEGER NOT NULL,
    entry INTEGER,
    abort TEXT,
    replayed INTEGER NOT NULL DEFAULT 0,
    stream INTEGER,
    retry INTEGER,
    begun REAL,
    digest TEXT,
    epoch TEXT
);
CREATE UNIQUE INDEX call_name ON call (call_id, capture);
CREATE TABLE entry (
    id INTEGER PRIMARY KEY,
    prev INTEGER,
    ordinal INTEGER NOT NULL,
    call INTEGER NOT NULL,
    parent INTEGER,
    hash BLOB NOT NULL,
    data BLOB NOT NULL
);
CREATE TABLE reason (capture INTEGER NOT NULL, n INTEGER PRIMARY KEY, reason TEXT NOT NULL, UNIQUE (capture, reason));
CREATE TABLE fence (rollout TEXT PRIMARY KEY, seen INTEGER NOT NULL, swept INTEGER NOT NULL) WITHOUT ROWID;
"""


def can_write(directory: Path) -> bool:
    """Whether files may be made in `directory`; False on a read-only mount, whoever asks."""
    return os.access(directory, os.W_OK)


class SqliteFile:
    """One file, on a local disk. Opening happens in the threads that use it, never here."""

    def __init__(self, path: Path) -> None:
        kind = kind_of(path)
        if is_network(kind):
            raise ConfigError(
                f"{path}: the sqlite capture store needs a local disk, and this is {kind}, a network file system. "
                "Put the run directory on a local disk, or choose the jsonl store."
            )
        if path.is_dir():
            raise ConfigError(
                f"{path}: a directory stands where the sqlite capture store keeps its file. Move it away, or name "
                "another run directory; the jsonl store is what keeps captures in a directory."
            )
        self.path = path
        self._lock = FileLock(path.with_name(path.name + ".lock"))

    def exists(self) -> bool:
        return self.path.exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other connection of any process commits, checkpoints, recovers or closes.

        An archive (a directory that cannot be written) needs no lock and could hold none.
        """
        with nullcontext() if self._is_archive() else self._lock.held():
            yield

    @contextmanager
    def locked_to_write(self) -> Iterator[None]:
        """`locked` for a writer, which knows that the directory can be written: this runs for every commit."""
        with self._lock.held():
            yield

    def _is_archive(self) -> bool:
        return self.path.parent.exists() and not can_write(self.path.parent)

    def open_writer(self) -> sqlite3.Connection:
        """A connection that writes, the tables made if need be. Call it inside `locked`."""
        new = not self.exists()
        self._refuse_a_damaged_log()
        connection = self._connect("rwc")
        try:
            empty = not self._has_tables(connection)  # asked first: a file of another program is left as it is
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA fullfsync=ON")
            connection.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
            connection.execute("PRAGMA journal_size_limit=67108864")
            connection.execute("PRAGMA secure_delete=FAST")
            connection.execute("PRAGMA temp_store=MEMORY")
            if empty:
                connection.executescript(
                    f"BEGIN; {_SCHEMA} PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={FORM}; COMMIT;"
                )
            if new:
                sync_directory(self.path.parent)
        except BaseException:
            connection.close()
            raise
        return connection

    def open_reader(self) -> sqlite3.Connection | None:
        """A connection that only reads; None where there is no file or nothing was ever committed. Inside `locked`.

        A directory that cannot be written is an archive: its file is read as it stands, unless a log lies beside it.
        """
        if not self.exists():
            return None
        archive = self._is_archive()
        if archive and self.path.with_name(self.path.name + "-wal").exists():
            raise CaptureError(f"{self.path}: the directory is read-only but the store was not closed; copy it first")
        self._refuse_a_damaged_log()
        connection = self._connect("ro&immutable=1" if archive else "rw")
        try:
            connection.execute("PRAGMA query_only=ON")
            connection.execute("PRAGMA wal_autocheckpoint=0")
            if self._has_tables(connection):
                return connection
        except BaseException:
            connection.close()
            raise
        connection.close()
        return None

    def close(self, connection: sqlite3.Connection) -> None:
        """Close a connection; the last one of all processes empties the log into the file."""
        with self.locked():
            connection.close()

    def let_go(self) -> None:
        """Close the lock's handles, after the last connection."""
        self._lock.close()

    def _refuse_a_damaged_log(self) -> None:
        """Before SQLite opens the file: it would take what stands before the damage for all there ever was."""
        log = self.path.with_name(self.path.name + "-wal")
        damage = damage_in(log) if self.path.exists() else None
        if damage is not None:
            raise CaptureError(
                f"{log}: {damage}: acknowledged captures are lost, and nothing is written to or delivered from this "
                "store. Keep a copy of the directory; whoever moves the log away goes on with what was checkpointed "
                "before it, and must not train on rollouts that were open since."
            )

    def _connect(self, mode: str) -> sqlite3.Connection:
        name = str(self.path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
        return sqlite3.connect(
            f"file:{name}?mode={mode}",
            uri=True,
            timeout=30.0,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )

    def _has_tables(self, connection: sqlite3.Connection) -> bool:
        """Raises `CaptureError` for a file that is not ours, or newer than this program."""
        try:
            form = connection.execute("PRAGMA user_version").fetchone()[0]
            owner = connection.execute("PRAGMA application_id").fetchone()[0]
            empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        except sqlite3.DatabaseError as error:
            raise CaptureError(f"{self.path}: not a capture store, or its first page is damaged ({error})") from error
        if empty:
            return False
        if owner != APPLICATION_ID:
            raise CaptureError(f"{self.path}: an SQLite file of another program, not a capture store")
        if form > FORM:
            raise CaptureError(f"{self.path}: written in form {form} by a newer version; this one reads up to {FORM}")
        return True
