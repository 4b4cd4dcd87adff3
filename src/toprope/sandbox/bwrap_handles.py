"""Handles of a bubblewrap sandbox: each run is a sandbox of its own making over the same work directory.

So nothing but files is left of a run. Left to others: what a handle does (`handles`), who makes sandboxes and says what
they hold back (`bubblewrap`), the command line (`bwrap_command`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from toprope.sandbox import bwrap_command as commands
from toprope.sandbox import cgroups
from toprope.sandbox.execute import Start
from toprope.sandbox.gate import inside_url
from toprope.sandbox.handles import OwnedHandle, ProcessHandle, memory_file, orders_file
from toprope.sandbox.leases import LeaseHome
from toprope.sandbox.spec import WORKDIR

_ENV = {"HOME": WORKDIR, "LANG": "C.UTF-8", "TMPDIR": "/tmp", "USER": "sandbox", "LOGNAME": "sandbox", "TERM": "dumb"}


@dataclass(frozen=True, slots=True)
class Host:
    """What a handle needs to know of this host: its programs, where control groups go (or why nowhere), and which user
    sandboxes are (None: the one who runs us)."""

    programs: commands.Programs
    groups: cgroups.Place | str
    user: int | None


class BorrowedBubblewrap(ProcessHandle):
    """A handle that can run and let go."""

    gate_inside = commands.RUN

    def __init__(self, host: Host, home: LeaseHome) -> None:
        super().__init__(home, host.groups, owner=host.user)
        self._host = host

    @property
    def workdir(self) -> str:
        """See `BorrowedSandbox`."""
        return WORKDIR

    def inside_url(self, model_url: str) -> str:
        """See `BorrowedSandbox.inside_url`."""
        return inside_url(model_url)

    def environment(self) -> Mapping[str, str]:
        """See `ProcessHandle.environment`."""
        return {**_ENV, "PATH": commands.search_path()}

    def _start(
        self, stack: contextlib.AsyncExitStack, group: cgroups.Run | None, orders: dict[str, Any], status: int
    ) -> Start:
        config = orders_file(stack, orders)
        program, tree = commands.interpreter()
        extra = tuple(dict.fromkeys((*([tree] if tree else []), *self._spec.read_only)))
        trees = commands.Trees(self._home.work, self._home.inside, extra)
        stage = None
        if self._host.user is not None:
            place, words, trees = commands.staged(trees)
            stage = (place, words)
        size = min(self._spec.limits.memory_bytes // 4, self._spec.limits.file_bytes)
        arguments = commands.bwrap_arguments(trees, temporary_bytes=size, hidden=self._spec.hidden)
        # Through a file in memory, so that neither the host's list of processes nor the inside shows paths of ours.
        told = memory_file(stack, b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in arguments))
        own = [program, "-I", "-S", f"{commands.RUN}/inside.py", str(config), str(status)]
        joins = group.joins if group is not None else ()
        argv = commands.start_command(
            self._host.programs, joins, stage, self._host.user, ["--args", str(told), "--", *own]
        )
        return Start(argv, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, "/", (config, status, told))


class BubblewrapSandbox(OwnedHandle, BorrowedBubblewrap):
    """The owner's handle."""

    def __init__(self, host: Host, home: LeaseHome, token: str, release: Callable[[LeaseHome], None]) -> None:
        BorrowedBubblewrap.__init__(self, host, home)
        self.own(token, release)
