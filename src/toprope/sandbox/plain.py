"""A directory of its own for programs that run as they are: for trusted code, and for tests. It isolates nothing.

It keeps every word of the interface (leases, borrowers, bounded output and time, a clean environment, the one model URL
with a key of its own) and says truthfully that it holds back no file and no network: `require_limits` refuses it for
whoever asks for these. What a program starts ends with the run, daemons included:

    inside.py     adopts every orphan of the program, and kills all of them when the program ends or we are gone
    a group       where control groups can be made, lists every process of a run; none can leave it
    the mark      a word in the environment of every run, by which what is left is found when `inside.py` was killed

Left to others: what a handle does (`handles`), leases (`leases`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from toprope.sandbox import cgroups, inside
from toprope.sandbox.bubblewrap import find_groups
from toprope.sandbox.bwrap_command import JOIN
from toprope.sandbox.execute import WATCH_S, Start
from toprope.sandbox.gate import Gate
from toprope.sandbox.handles import OwnedHandle, ProcessHandle, free_groups, group_name, orders_file
from toprope.sandbox.leases import Lease, LeaseDirectory, LeaseHome, read_descriptor
from toprope.sandbox.processes import kill_marked
from toprope.sandbox.spec import Aspect, Completed, Enforcement, Limits, Report, SandboxSpec

_TEMPORARY = ".tmp"
_MARK = "TOPROPE_SANDBOX"


class PlainDirectory:
    """The provider. `control_groups`: False leaves them alone also where they could be used."""

    kind = "directory"

    def __init__(self, lease_dir: Path, *, name: str = "directory", control_groups: bool = True) -> None:
        self.name = name
        self._leases = LeaseDirectory(lease_dir)
        self._want_groups = control_groups
        self._found: cgroups.Place | str | None = None

    async def enforces(self) -> Report:
        """See `SandboxProvider.enforces`: output, time, and what control groups or a watch can bound."""
        place = await asyncio.to_thread(self._groups)
        counted = isinstance(place, cgroups.Place)
        watched = f"watched every {int(WATCH_S * 1000)} ms"
        groups = f"cgroup v{place.version}" if isinstance(place, cgroups.Place) else watched
        held = {
            Aspect.OUTPUT: "counted by the owner while it reads",
            Aspect.WALL_TIME: "the owner's clock; every process that the program left is killed with it",
            Aspect.CPU: f"{groups}; RLIMIT_CPU for each process",
            Aspect.MEMORY: groups if counted else f"RLIMIT_DATA for each process; the sum {watched}",
            Aspect.PROCESSES: groups,
        }
        why = "programs run unconfined on the host"
        return {each: Enforcement(each, held.get(each), "" if each in held else why) for each in Aspect}

    async def create(self, spec: SandboxSpec) -> PlainSandbox:
        """See `SandboxProvider.create`."""
        return await asyncio.to_thread(self._make, spec)

    async def attach(self, descriptor: Mapping[str, Any]) -> BorrowedPlain:
        """See `SandboxProvider.attach`."""
        sandbox_id, token = read_descriptor(descriptor)
        home = await asyncio.to_thread(self._leases.borrow, sandbox_id, token, self.name, self.kind)
        return BorrowedPlain(home, await asyncio.to_thread(self._groups))

    async def reap(self) -> tuple[str, ...]:
        """See `SandboxProvider.reap`."""
        return await asyncio.to_thread(self._leases.reap, self.kind, _free)

    def _make(self, spec: SandboxSpec) -> PlainSandbox:
        self._leases.reap_if_due(self.kind, _free)
        place = self._groups()
        parents = place.parents if isinstance(place, cgroups.Place) else ()
        home, token = self._leases.open(
            self.name,
            self.kind,
            spec,
            lambda sandbox_id: {"cgroups": [str(path / group_name(sandbox_id)) for path in parents]},
        )
        try:
            with home.making():
                (home.work / _TEMPORARY).mkdir(mode=0o700)
                if isinstance(place, cgroups.Place):
                    cgroups.Group(place, group_name(home.lease.sandbox_id)).make(spec.limits)
        except BaseException:
            self._release(home)
            raise
        return PlainSandbox(home, place, token, self._release)

    def _release(self, home: LeaseHome) -> None:
        self._leases.release(home, _free)

    def _groups(self) -> cgroups.Place | str:
        if self._found is None:
            self._found = find_groups() if self._want_groups else "switched off by the configuration"
        return self._found


class BorrowedPlain(ProcessHandle):
    """A handle that can run and let go. `workdir` is a directory of the host: nothing is hidden here."""

    def __init__(self, home: LeaseHome, groups: cgroups.Place | str) -> None:
        super().__init__(home, groups)

    def inside_url(self, model_url: str) -> str:
        """The same URL: nothing stands between, unless the caller makes a gate."""
        return model_url

    def environment(self) -> Mapping[str, str]:
        """The search path of the host, and nothing else of it."""
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": self.workdir,
            "TMPDIR": f"{self.workdir}/{_TEMPORARY}",
            "LANG": "C.UTF-8",
            "TERM": "dumb",
        }

    async def _run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdin: bytes | None,
        limits: Limits,
        keep: int,
        gate: Gate | None,
    ) -> Completed:
        mark = f"{self.sandbox_id}.{secrets.token_hex(4)}"
        try:
            return await super()._run(argv, {**env, _MARK: mark}, stdin, limits, keep, gate)
        finally:
            await asyncio.shield(asyncio.to_thread(kill_marked, f"{_MARK}={mark}"))

    def _start(
        self, stack: contextlib.AsyncExitStack, group: cgroups.Run | None, orders: dict[str, Any], status: int
    ) -> Start:
        config = orders_file(stack, {**orders, "keep": True})
        own = [sys.executable, "-I", "-S", inside.__file__, str(config), str(status)]
        joins = group.joins if group is not None else ()
        argv = ["/bin/sh", "-c", JOIN, "sandbox", *map(str, joins), "--", *own]
        mark = f"{_MARK}={orders['env'][_MARK]}"
        return Start(argv, {"PATH": os.defpath}, "/", (config, status), mark)

    def _resource_limits(self, limits: Limits, *, counted: bool) -> dict[str, int]:
        held = super()._resource_limits(limits, counted=counted)
        del held["RLIMIT_NPROC"]  # it would count every process of this user, and here that is the host's own
        return held


class PlainSandbox(OwnedHandle, BorrowedPlain):
    """The owner's handle."""

    def __init__(
        self, home: LeaseHome, groups: cgroups.Place | str, token: str, release: Callable[[LeaseHome], None]
    ) -> None:
        BorrowedPlain.__init__(self, home, groups)
        self.own(token, release)


def reap(lease_dir: Path) -> tuple[str, ...]:
    """End every plain directory below `lease_dir` whose owner is dead or whose lease is over; their ids. Blocks."""
    return LeaseDirectory(lease_dir).reap(PlainDirectory.kind, _free)


def _free(lease: Lease) -> None:
    free_groups(lease.resources, lease.sandbox_id)
    kill_marked(f"{_MARK}={lease.sandbox_id}.")
