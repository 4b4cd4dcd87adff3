"""The values of the room: what a sandbox is to be, what it holds back and by what, how a run in it ended.

Left to others: who makes sandboxes (`provider`, and one module for each kind), how long they live (`leases`).
"""

from __future__ import annotations

import errno
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Literal

from toprope.errors.kinds import Kind
from toprope.errors.tree import ConfigError, TopropeError

WORKDIR = "/work"
"""The work directory, as code in the sandbox sees it."""

MIB = 2**20


class Aspect(StrEnum):
    """What a sandbox can hold back."""

    FILES = "files"
    NETWORK = "network"
    CPU = "cpu"
    MEMORY = "memory"
    PROCESSES = "processes"
    OUTPUT = "output"
    WALL_TIME = "wall_time"


@dataclass(frozen=True, slots=True)
class Enforcement:
    """One line of a provider's report. `mechanism` is None where the aspect is not held; `note` then says why."""

    aspect: Aspect
    mechanism: str | None
    note: str = ""


Report = Mapping[Aspect, Enforcement]


class SandboxUnavailable(TopropeError):
    """A sandbox cannot be made here, however often: a program or an image is missing, the kernel refuses."""

    kind = Kind.GRANT_UNAVAILABLE
    status = 503


class SandboxBusy(SandboxUnavailable):
    """A sandbox cannot be made or used now, and may be later: the machine is full, the engine does not answer."""

    retryable = True


NO_ROOM = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.EDQUOT,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOSPC,
    }
)
"""What the system says of a machine that has no room for one more: processes, memory, open files, disk."""


class SandboxLost(TopropeError):
    """The sandbox is gone: stopped, its lease over, its owner dead."""

    kind = Kind.SESSION_LOST
    status = 404
    retryable = True


class OutsideWorkdir(TopropeError):
    """A path that leaves the work directory, or goes through a link, or names what is no regular file."""

    kind = Kind.FORBIDDEN
    status = 403


class FileTooLarge(TopropeError):
    """A file over the limit that the caller gave."""

    kind = Kind.LIMIT_REACHED
    status = 413


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use. Memory and processes are counted over all runs of a sandbox at the same time.

    `wall_s`, `cpu_s`: seconds. `memory_bytes`: all processes together, temporary files in memory included.
    `processes`: processes and threads. `output_bytes`: stdout and stderr together, before the run is killed (how much
    of it is kept is the caller's choice). `file_bytes`: the largest single file.
    """

    wall_s: float = 300.0
    cpu_s: float = 300.0
    memory_bytes: int = 2048 * MIB
    processes: int = 256
    output_bytes: int = 64 * MIB
    file_bytes: int = 1024 * MIB

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(f"sandbox limits.{each.name}: {value!r} is no limit; give a number above 0")
        if self.memory_bytes < 32 * MIB:
            raise ConfigError(
                f"sandbox limits.memory_bytes: {self.memory_bytes} is less than any program needs to start; give "
                f"{32 * MIB} (32 MiB) or more"
            )


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """A sandbox as its owner wants it.

    `lease_s`: it lives no longer than that, whatever becomes of the owner. `model_url`: the one URL that code inside
    can reach; None leaves the choice to each run. `network`: `none` takes also that away. `env`: given to every run.
    `read_only`: further trees of the host that code inside may read, at the same paths (bubblewrap). `hidden`: trees
    below those that it may read, or below /usr, in whose place it finds an empty directory (bubblewrap). `image`: what
    the sandbox is made from (docker).
    """

    limits: Limits = field(default_factory=Limits)
    lease_s: float = 3600.0
    model_url: str | None = None
    network: Literal["none", "model"] = "model"
    env: Mapping[str, str] = field(default_factory=dict)
    read_only: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    image: str | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.lease_s) or self.lease_s <= 0:
            raise ConfigError(f"sandbox lease_s: {self.lease_s!r} is no time; give seconds above 0")
        if self.network not in ("none", "model") or (self.network == "none" and self.model_url is not None):
            raise ConfigError(
                f"sandbox network: {self.network!r} with model_url {self.model_url!r}; accepted: model, "
                "or none and no model_url"
            )
        for name in ("read_only", "hidden"):
            for tree in getattr(self, name):
                if not tree.startswith("/") or tree == "/" or "\0" in tree or ".." in tree.split("/"):
                    raise ConfigError(f"sandbox {name}: {tree!r} is no absolute path of one tree of the host")
        for tree in self.read_only:
            if f"{tree}/".startswith(f"{WORKDIR}/"):
                raise ConfigError(
                    f"sandbox read_only: {tree} would be hidden by the work directory, which is {WORKDIR} inside; "
                    "accepted: a tree that lies elsewhere"
                )
        check_env(self.env)


def check_env(env: Mapping[str, str]) -> None:
    """Raises `ConfigError` for what no environment can carry."""
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise ConfigError(f"sandbox env: {name!r} cannot be set; a name has no '=', and neither has a zero byte")


def check_run(argv: Sequence[str], env: Mapping[str, str] | None) -> None:
    """Raises `ConfigError` for a run that no provider can start."""
    if not argv or any("\0" in word for word in argv):
        raise ConfigError("sandbox run: argv needs a program, and no word of it may hold a zero byte")
    check_env(env or {})


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of one output stream: the first `len(data)` of `total` bytes."""

    data: bytes
    total: int

    @property
    def truncated(self) -> bool:
        """Whether there was more than was kept."""
        return self.total > len(self.data)

    @property
    def text(self) -> str:
        """As text, wrong bytes replaced; what was left out is said at the end."""
        text = self.data.decode("utf-8", "replace")
        return f"{text}\n[{self.total - len(self.data)} more bytes left out]" if self.truncated else text


@dataclass(frozen=True, slots=True)
class Completed:
    """How a run ended.

    `exit`: its status as a shell gives it (128 + n after signal n); None when the sandbox killed it. `killed_by`: the
    limit that ended it (an `Aspect` value, or `file_size`), `lease` or `stop`; None when it ended by itself. `hit`:
    limits that refused something on the way (a fork, an allocation), whether or not that ended it. `wall_s`: seconds.
    """

    exit: int | None
    stdout: Kept
    stderr: Kept
    killed_by: str | None
    hit: tuple[str, ...] = ()
    wall_s: float = 0.0

    @property
    def timed_out(self) -> bool:
        """Whether it ran out of wall or CPU time."""
        return self.killed_by in (Aspect.WALL_TIME, Aspect.CPU)
