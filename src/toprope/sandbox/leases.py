"""Leases: what exists, whose it is and until when, written down before anything is started.

    DIR/.lock                  between those who reap
    DIR/<sandbox id>/lease.json    the lease: owner, deadline, what to release, the digest of the borrower's token
                    /ended         the owner stopped it, or it was reaped: every runner kills its run and starts none
                    /runs/<run>    the process of each run, whoever started it
                    /inside/       what the sandbox needs from us, read-only inside
                    /work/         the work directory

A sandbox lives while its owner lives and its deadline has not come. `reap` ends all others; any process of the same
user may call it, at any time. Left to others: what a kind of sandbox needs to be released (`release`).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from toprope.errors.tree import ConfigError, Forbidden
from toprope.sandbox.owner import ProcessId, identify, this_process
from toprope.sandbox.processes import kill_sandbox
from toprope.sandbox.spec import SandboxLost, SandboxSpec, SandboxUnavailable
from toprope.sandbox.workdir import remove_tree
from toprope.storage.atomic import replace_file
from toprope.storage.lock import FileLock

_ID = re.compile(r"[0-9a-f]{16}")
log = logging.getLogger("toprope.sandbox")

_SOFT_S = 1.0
_REAP_EVERY_S = 10.0
_FORGOTTEN_S = 3600.0
"""Age of a directory without a lease (its maker died in the moment of making it) at which it is removed."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One sandbox's lease. `provider`: the name of who made it; `kind`: of which kind it is, so that any provider of
    that kind can end it. `deadline`: Unix seconds. `resources`: what has to be released, by what it is."""

    sandbox_id: str
    provider: str
    kind: str
    owner: ProcessId
    deadline: float
    token_sha256: str
    spec: SandboxSpec
    resources: dict[str, list[str]]

    def over(self) -> bool:
        """Whether the sandbox must not live any longer."""
        return time.time() >= self.deadline or not self.owner.alive()


class LeaseHome:
    """One sandbox's directory."""

    def __init__(self, path: Path, lease: Lease) -> None:
        self.path = path
        self.lease = lease

    @property
    def work(self) -> Path:
        """The work directory, on the host."""
        return self.path / "work"

    @property
    def inside(self) -> Path:
        """What the sandbox reads from us."""
        return self.path / "inside"

    def end_reason(self) -> str | None:
        """Why no run may go on here: `lease` or `stop`; None while runs may."""
        if not (self.path / "lease.json").exists() or (self.path / "ended").exists():
            return "stop"
        return "lease" if self.lease.over() else None

    @contextmanager
    def making(self) -> Iterator[None]:
        """Around whatever is made for it. Raises `SandboxLost` where somebody reaped it meanwhile, be it that this went
        unnoticed (what was made after the reaper's look would be left behind) or that it broke something."""
        try:
            yield
        except Exception as error:
            if self.end_reason() == "stop":
                raise self._reaped() from error
            raise
        if self.end_reason() == "stop":
            raise self._reaped()

    def _reaped(self) -> SandboxLost:
        return SandboxLost(f"sandbox {self.lease.sandbox_id} was reaped while it was made")

    def register_run(self, pid: int) -> Path | None:
        """Write down the process of a run, so that who ends the sandbox ends it too; None if it has ended already."""
        found = identify(pid)
        if found is None:
            return None
        path = self.path / "runs" / f"{pid}-{found.started}"
        try:
            path.write_bytes(msgspec.json.encode(found))
        except FileNotFoundError:
            raise SandboxLost(f"sandbox {self.lease.sandbox_id} was stopped") from None
        return path

    def forbid(self) -> None:
        """On return no run starts any more, and every runner is about to kill its own."""
        if (self.path / "lease.json").exists():  # without it nothing starts, and somebody is just removing the rest
            with suppress(FileNotFoundError):
                (self.path / "ended").touch()

    def end(self) -> None:
        """On return no run starts any more, and the processes of those that were written down are killed."""
        self.forbid()
        try:
            runs = list((self.path / "runs").iterdir())
        except FileNotFoundError:
            return
        found: list[ProcessId] = []
        for run in runs:
            try:
                found.append(msgspec.json.decode(run.read_bytes(), type=ProcessId))
            except (FileNotFoundError, msgspec.DecodeError):
                continue  # it ended meanwhile, or its runner died while writing: then it died with the runner
        end = time.monotonic() + _SOFT_S
        hard = False
        while found := [process for process in found if process.alive()]:
            hard = hard or time.monotonic() > end
            for process in found:
                if process.here():
                    kill_sandbox(process.pid, hard=hard)
            if time.monotonic() > end + _SOFT_S:
                return  # of a namespace that this process cannot see into; its runner sees `ended`
            time.sleep(0.005)

    def check(self, token: str) -> None:
        """Raises `Forbidden` unless `token` is the borrower's."""
        if not hmac.compare_digest(_digest(token), self.lease.token_sha256):
            raise Forbidden(
                f"sandbox {self.lease.sandbox_id}: the descriptor's token is not the one its owner gave out"
            )


class LeaseDirectory:
    """All leases of one directory. Its methods block (files, a lock between processes). It holds nothing open."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._reaped: float | None = None

    def open(
        self, provider: str, kind: str, spec: SandboxSpec, resources: Callable[[str], dict[str, list[str]]]
    ) -> tuple[LeaseHome, str]:
        """A new lease of this process and the borrower's token. `resources`: by id, what will have to be released."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._require_ours()
        sandbox_id, token = secrets.token_hex(8), secrets.token_urlsafe(24)
        lease = Lease(
            sandbox_id,
            provider,
            kind,
            this_process(),
            time.time() + spec.lease_s,
            _digest(token),
            spec,
            resources(sandbox_id),
        )
        making = self.path / f".{sandbox_id}.new"
        making.mkdir(mode=0o700)
        for name in ("runs", "inside", "work"):
            (making / name).mkdir(mode=0o700)
        replace_file(making / "lease.json", msgspec.json.encode(lease), mode=0o600)
        os.rename(making, self.path / sandbox_id)
        return LeaseHome(self.path / sandbox_id, lease), token

    def find(self, sandbox_id: str) -> LeaseHome:
        """The sandbox of this id. Raises `SandboxLost`."""
        if not _ID.fullmatch(sandbox_id):
            raise Forbidden(f"{sandbox_id!r} is no sandbox id")
        try:
            data = (self.path / sandbox_id / "lease.json").read_bytes()
            home = LeaseHome(self.path / sandbox_id, msgspec.json.decode(data, type=Lease))
        except (FileNotFoundError, NotADirectoryError):
            raise SandboxLost(f"sandbox {sandbox_id}: no such sandbox here; it was stopped or reaped") from None
        except msgspec.DecodeError as error:
            raise SandboxLost(f"sandbox {sandbox_id}: its lease cannot be read: {error}") from None
        if (reason := home.end_reason()) is not None:
            raise SandboxLost(f"sandbox {sandbox_id} is gone ({reason})")
        return home

    def borrow(self, sandbox_id: str, token: str, provider: str, kind: str) -> LeaseHome:
        """The sandbox of a descriptor. Raises `SandboxLost`, and `Forbidden` for a wrong token or another provider."""
        home = self.find(sandbox_id)
        if (home.lease.provider, home.lease.kind) != (provider, kind):
            raise Forbidden(f"sandbox {sandbox_id} was made by {home.lease.provider!r}, not by {provider!r}")
        home.check(token)
        return home

    def leases(self) -> list[Lease]:
        """Every lease that can be read, of any kind, whether or not it is over."""
        found: list[Lease] = []
        if not self.path.is_dir():
            return found
        self._require_ours()
        for path in sorted(self.path.iterdir()):
            if _ID.fullmatch(path.name):
                try:
                    found.append(msgspec.json.decode((path / "lease.json").read_bytes(), type=Lease))
                except (OSError, msgspec.DecodeError):
                    continue  # in the making, or being removed; a damaged one is named by `reap`
        return found

    def _require_ours(self) -> None:
        """Raise `ConfigError` for a directory, or a link in its place, in which somebody else could plant leases."""
        link, facts = os.lstat(self.path), os.stat(self.path)
        if link.st_uid != os.geteuid() or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            raise ConfigError(
                f"sandbox leases: {self.path} belongs to another user or can be written by others; give a directory of "
                "your own (mode 0700)"
            )

    def release(self, home: LeaseHome, free: Callable[[Lease], None]) -> None:
        """On return nothing of the sandbox is left. `free` gives back what its kind holds; again is harmless, also at
        the same time: a reaper may release what its owner is stopping."""
        home.end()
        free(home.lease)
        remove_tree(home.path)

    def reap_if_due(self, kind: str, free: Callable[[Lease], None]) -> None:
        """`reap`, at the first call and then not more often than every 10 s: who makes many sandboxes pays for few."""
        now = time.monotonic()
        if self._reaped is None or now - self._reaped > _REAP_EVERY_S:
            self._reaped = now
            try:
                self.reap(kind, free)
            except Exception as error:  # somebody else's sandbox: making a new one goes on, `reap` itself raises it
                log.warning("sandbox leases in %s: one could not be reaped: %s", self.path, error)

    def reap(self, kind: str, free: Callable[[Lease], None]) -> tuple[str, ...]:
        """End every sandbox of `kind` whose lease is over; their ids. One that fails does not stop the others.

        The first failure is raised when all have been tried; the next call tries again.
        """
        if not self.path.is_dir():
            return ()
        self._require_ours()
        reaped: list[str] = []
        failure: Exception | None = None
        with closing(FileLock(self.path / ".lock")) as lock, lock.held():
            for path in sorted(self.path.iterdir()):
                try:
                    if self._reap_one(path, kind, free):
                        reaped.append(path.name)
                except (OSError, msgspec.DecodeError) as error:
                    failure = failure or SandboxUnavailable(f"sandbox lease {path}: it cannot be ended: {error}")
                except Exception as error:  # kept and raised below; the others are still to be reaped
                    failure = failure or error
        if failure is not None:
            raise failure
        return tuple(reaped)

    def _reap_one(self, path: Path, kind: str, free: Callable[[Lease], None]) -> bool:
        """Whether a sandbox of `kind` was ended at `path`. What was forgotten in the making is removed, of any kind."""
        if not _ID.fullmatch(path.name):
            if path.name.endswith(".new") and time.time() - _age_mark(path) > _FORGOTTEN_S:
                remove_tree(path)
            return False
        try:
            lease = msgspec.json.decode((path / "lease.json").read_bytes(), type=Lease)
            if lease.kind != kind or not (lease.over() or (path / "ended").exists()):
                return False
            self.release(LeaseHome(path, lease), free)
        except FileNotFoundError:
            if time.time() - _age_mark(path) > _FORGOTTEN_S:
                remove_tree(path)
            return False
        return True


def read_descriptor(descriptor: Mapping[str, Any]) -> tuple[str, str]:
    """Sandbox id and token. Raises `Forbidden` for what is no descriptor of ours."""
    sandbox_id, token = descriptor.get("sandbox_id"), descriptor.get("token")
    if not isinstance(sandbox_id, str) or not isinstance(token, str):
        raise Forbidden("sandbox descriptor: expected sandbox_id and token, two strings")
    return sandbox_id, token


def default_directory() -> Path:
    """Where leases are unless the configuration says otherwise: one directory for each user of a host, so that a run
    finds what a dead one left. It survives a restart, after which everything in it is over."""
    return Path(f"/var/tmp/toprope-sandboxes-{os.geteuid()}")


def _age_mark(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return time.time()


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
