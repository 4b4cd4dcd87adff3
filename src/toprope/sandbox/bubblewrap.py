"""Sandboxes by bubblewrap: unprivileged namespaces, one set for each run; control groups where they may be used.

Nothing of a run is left when it ends but the files of the work directory, since its processes have a pid namespace of
their own, which ends with it. What each run uses is counted by control groups (`cgroups`), or watched (`processes`).
As root, the sandbox is made by an ordinary user of the host, so that even a way out would not lead to root.

Left to others: what can be done with a sandbox (`bwrap_handles`), how long it lives (`leases`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toprope.errors.tree import ConfigError
from toprope.sandbox import bwrap_command as commands
from toprope.sandbox import cgroups, inside
from toprope.sandbox.bwrap_handles import BorrowedBubblewrap, BubblewrapSandbox, Host
from toprope.sandbox.execute import WATCH_S
from toprope.sandbox.gate import check_url
from toprope.sandbox.handles import free_groups, group_name
from toprope.sandbox.leases import Lease, LeaseDirectory, LeaseHome, read_descriptor
from toprope.sandbox.spec import (
    WORKDIR,
    Aspect,
    Enforcement,
    Report,
    SandboxBusy,
    SandboxLost,
    SandboxSpec,
    SandboxUnavailable,
)

_FILES = {
    "passwd": f"sandbox:x:{commands.USER}:{commands.USER}:sandbox:{WORKDIR}:/bin/sh\n"
    "nobody:x:65534:65534::/:/bin/false\n",
    "group": f"sandbox:x:{commands.USER}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
PROBE_S = 20.0
"""Seconds that a trial sandbox may take; far more than one needs, since the machine may be busy."""


class Bubblewrap:
    """The provider. One for a process and a lease directory; starts nothing by itself.

    `host_user`: the user of the host that sandboxes are when the owner is root. `control_groups`: False leaves them
    alone also where they could be used. `bwrap`: the program.
    """

    kind = "bubblewrap"

    def __init__(
        self,
        lease_dir: Path,
        *,
        name: str = "bubblewrap",
        host_user: int = 65534,
        control_groups: bool = True,
        bwrap: str = "bwrap",
    ) -> None:
        self.name = name
        if host_user < 1:
            raise ConfigError(f"sandbox host_user: {host_user} is not an ordinary user; give an id above 0")
        self._leases = LeaseDirectory(lease_dir)
        self._user = host_user if os.geteuid() == 0 else None
        self._want_groups = control_groups
        self._bwrap = bwrap
        self._settled: asyncio.Task[tuple[Host | None, Report]] | None = None

    async def enforces(self) -> Report:
        """See `SandboxProvider.enforces`."""
        return (await self._settle())[1]

    async def create(self, spec: SandboxSpec) -> BubblewrapSandbox:
        """See `SandboxProvider.create`."""
        host = await self._host()
        if spec.model_url is not None:
            check_url(spec.model_url)
        return await asyncio.to_thread(self._make, spec, host)

    async def attach(self, descriptor: Mapping[str, Any]) -> BorrowedBubblewrap:
        """See `SandboxProvider.attach`."""
        sandbox_id, token = read_descriptor(descriptor)
        host = await self._host()
        return BorrowedBubblewrap(
            host, await asyncio.to_thread(self._leases.borrow, sandbox_id, token, self.name, self.kind)
        )

    async def reap(self) -> tuple[str, ...]:
        """See `SandboxProvider.reap`."""
        return await asyncio.to_thread(self._leases.reap, self.kind, _free)

    def _make(self, spec: SandboxSpec, host: Host) -> BubblewrapSandbox:
        for tree in spec.read_only:
            if not os.path.isdir(tree):
                raise ConfigError(f"sandbox read_only: {tree} is no directory of this host")
        self._leases.reap_if_due(self.kind, _free)
        parents = host.groups.parents if isinstance(host.groups, cgroups.Place) else ()
        home, token = self._leases.open(
            self.name,
            self.kind,
            spec,
            lambda sandbox_id: {"cgroups": [str(path / group_name(sandbox_id)) for path in parents]},
        )
        try:
            with home.making():
                texts = {"inside.py": Path(inside.__file__).read_text("utf-8"), **_FILES}
                for name, text in texts.items():
                    (home.inside / name).write_text(text)
                    (home.inside / name).chmod(0o644)
                home.inside.chmod(0o755)
                if host.user is not None:
                    os.chown(home.work, host.user, host.user)
                if isinstance(host.groups, cgroups.Place):
                    cgroups.Group(host.groups, group_name(home.lease.sandbox_id)).make(spec.limits)
        except BaseException:
            self._release(home)
            raise
        return BubblewrapSandbox(host, home, token, self._release)

    def _release(self, home: LeaseHome) -> None:
        self._leases.release(home, _free)

    async def _host(self) -> Host:
        host, report = await self._settle()
        if host is None:
            # A missing program stays missing; a trial that failed is tried again, and may have met a busy machine.
            missing = isinstance(_programs(self._bwrap, root=self._user is not None), str)
            raise (SandboxUnavailable if missing else SandboxBusy)(f"bubblewrap: {report[Aspect.FILES].note}")
        return host

    async def _settle(self) -> tuple[Host | None, Report]:
        settled = self._settled
        # What failed is tried again by the next call: the machine may only have been busy.
        if settled is None or (settled.done() and (settled.cancelled() or settled.result()[0] is None)):
            settled = self._settled = asyncio.get_running_loop().create_task(self._probe())
        return await asyncio.shield(settled)

    async def _probe(self) -> tuple[Host | None, Report]:
        groups: cgroups.Place | str = "switched off by the configuration"
        if self._want_groups:
            groups = await asyncio.to_thread(find_groups)
        programs = _programs(self._bwrap, root=self._user is not None)
        if isinstance(programs, str):
            return None, _report(groups, programs, self._user)
        host = Host(programs, groups, self._user)
        failure: str | None = None
        try:
            trial = await asyncio.to_thread(self._make, SandboxSpec(lease_s=2 * PROBE_S), host)
            try:
                done = await trial.run(["/bin/sh", "-c", "exit 7"], timeout_s=PROBE_S)
            finally:
                await trial.stop()
            if done.exit != 7:
                failure = f"a trial run gave {done.exit} ({done.killed_by}): {done.stderr.text.strip()[-300:]}"
        except (SandboxUnavailable, SandboxLost, OSError) as error:
            failure = f"a trial sandbox failed: {error}"
        return (host if failure is None else None), _report(groups, failure, self._user)


def _programs(bwrap: str, *, root: bool) -> commands.Programs | str:
    needed = [bwrap, *(["unshare", "setpriv", "mount"] if root else [])]
    found = {name: shutil.which(name) for name in needed}
    if missing := [name for name in needed if found[name] is None]:
        return f"program {' and '.join(missing)} not found; on Debian: apt-get install bubblewrap util-linux mount"
    return commands.Programs(str(found[bwrap]), found.get("unshare"), found.get("setpriv"))


def reap(lease_dir: Path) -> tuple[str, ...]:
    """End every bubblewrap sandbox below `lease_dir` whose owner is dead or whose lease is over; their ids. Blocks."""
    return LeaseDirectory(lease_dir).reap(Bubblewrap.kind, _free)


def _free(lease: Lease) -> None:
    free_groups(lease.resources, lease.sandbox_id)


def find_groups() -> cgroups.Place | str:
    """Where control groups can be made here, or why none can. Blocks."""
    try:
        return cgroups.find(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    except OSError as error:
        return f"control groups cannot be read: {error}"


def _report(place: cgroups.Place | str, failure: str | None, host_user: int | None) -> Report:
    """What is held and by what. Without a sandbox that starts, nothing is."""
    if failure is not None:
        return {aspect: Enforcement(aspect, None, failure) for aspect in Aspect}
    user = f", host user {host_user}" if host_user is not None else ""
    watched = f"watched every {int(WATCH_S * 1000)} ms"
    held = {
        Aspect.FILES: f"mount and user namespace of bubblewrap{user}",
        Aspect.NETWORK: "network namespace of bubblewrap; one URL through a unix socket, judged outside",
        Aspect.OUTPUT: "counted by the owner while it reads",
        Aspect.WALL_TIME: "the owner's clock; the end of a pid namespace kills all in it",
    }
    if isinstance(place, cgroups.Place):
        version = f"cgroup v{place.version}"
        cpu = "cpuacct" if place.version == 1 else "cpu.stat"
        held[Aspect.CPU] = f"{version} {cpu}, {watched}; RLIMIT_CPU for each process"
        held[Aspect.MEMORY] = f"{version} memory"
        held[Aspect.PROCESSES] = f"{version} pids; RLIMIT_NPROC"
        note = ""
    else:
        held[Aspect.CPU] = f"RLIMIT_CPU for each process; the sum {watched}"
        held[Aspect.MEMORY] = f"RLIMIT_DATA for each process; the sum {watched}"
        held[Aspect.PROCESSES] = f"RLIMIT_NPROC in the sandbox's own user namespace; the sum {watched}"
        note = f"no control groups: {place}"
    noted = (Aspect.CPU, Aspect.MEMORY, Aspect.PROCESSES)
    return {aspect: Enforcement(aspect, held[aspect], note if aspect in noted else "") for aspect in Aspect}
