"""What happens between two lines of ours: a reaper, an owner and a maker at one sandbox, each forced to come late."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.unit.sandbox.docker_engine import running_engine

from toprope.sandbox import cgroups, docker, handles, plain, processes, workdir
from toprope.sandbox.bubblewrap import Bubblewrap
from toprope.sandbox.bubblewrap import reap as reap_bubblewrap
from toprope.sandbox.desk import SandboxDesk
from toprope.sandbox.docker import Docker
from toprope.sandbox.leases import LeaseDirectory, LeaseHome
from toprope.sandbox.owner import identify, this_process
from toprope.sandbox.plain import PlainDirectory
from toprope.sandbox.spec import SandboxBusy, SandboxLost, SandboxSpec

pytestmark = pytest.mark.promise("EP-14")

LONG = SandboxSpec(lease_s=300)


def left_in(leases: Path) -> list[str]:
    return [name for name in os.listdir(leases) if not name.startswith(".lock")]


def a_home(leases: Path) -> LeaseHome:
    return LeaseDirectory(leases).open("directory", "directory", LONG, lambda sandbox_id: {})[0]


def make_owner_dead(leases: Path, sandbox_id: str) -> None:
    lease = leases / sandbox_id / "lease.json"
    lease.write_bytes(lease.read_bytes().replace(b'"started":', b'"started":9'))


# -- reaping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PlainDirectory, Bubblewrap])
async def test_reaping_for_ever_opens_nothing_for_ever(kind: type[PlainDirectory | Bubblewrap], tmp_path: Path) -> None:
    provider = kind(tmp_path)
    reap = plain.reap if kind is PlainDirectory else reap_bubblewrap
    await provider.reap()  # threads, and what they hold
    before = os.listdir("/proc/self/fd")
    for _ in range(20):
        await provider.reap()
        reap(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_what_comes_into_a_tree_while_it_is_removed_is_removed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another reaper marks a sandbox as ended; the writing of a file that had begun comes to its end."""
    home = a_home(tmp_path)
    (home.work / "deep").mkdir()
    rmdir = os.rmdir
    late: list[str] = []

    def rmdir_late(path: Any, *, dir_fd: int | None = None) -> None:
        if str(path) == str(home.path) and late.count("top") < 3:
            late.append("top")
            (home.path / "ended").touch()
        if dir_fd is not None and late.count("below") < 3:
            late.append("below")
            os.close(os.open(f"{path}/late", os.O_CREAT | os.O_WRONLY, dir_fd=dir_fd))
        rmdir(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", rmdir_late)
    LeaseDirectory(tmp_path).release(home, lambda lease: None)
    assert (late.count("top"), late.count("below")) == (3, 3)
    assert left_in(tmp_path) == []


def test_a_tree_that_somebody_fills_for_ever_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = a_home(tmp_path)
    rmdir = os.rmdir

    def filled(path: Any, *, dir_fd: int | None = None) -> None:
        if str(path) == str(home.path):
            (home.path / "again").touch()
        rmdir(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", filled)
    with pytest.raises(OSError, match=os.strerror(errno.ENOTEMPTY)):
        workdir.remove_tree(home.path)


def test_nobody_marks_a_sandbox_as_ended_whose_lease_somebody_has_removed(tmp_path: Path) -> None:
    home = a_home(tmp_path)
    (home.path / "lease.json").unlink()
    home.forbid()
    assert not (home.path / "ended").exists(), "it would stand in the way of who removes the rest"
    assert home.end_reason() == "stop"


def test_an_owner_and_two_reapers_release_one_sandbox_at_once(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def release(home: LeaseHome) -> None:
        try:
            LeaseDirectory(tmp_path).release(home, lambda lease: None)
        except BaseException as error:
            failures.append(error)

    for _ in range(50):
        home = a_home(tmp_path)
        threads = [threading.Thread(target=release, args=(home,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert left_in(tmp_path) == []


def test_who_ends_a_sandbox_forbids_runs_before_it_gives_anything_back(tmp_path: Path) -> None:
    home = a_home(tmp_path)
    seen: list[str | None] = []
    LeaseDirectory(tmp_path).release(home, lambda lease: seen.append(home.end_reason()))
    assert seen == ["stop"], "a run that began now would have no group, and outlive the sandbox"


async def test_a_container_that_another_one_is_removing_is_waited_for(tmp_path: Path) -> None:
    """The engine answers a second removal with a conflict."""
    async with running_engine(tmp_path / "engine") as engine:
        sandbox = await Docker(tmp_path / "leases", engine=engine.url, image="image:1").create(LONG)
        (name,) = engine.containers
        engine.leaving.add(name)
        engine.calls.clear()
        stopping = asyncio.ensure_future(sandbox.stop())
        while not any(call.startswith(f"GET {name}/json") for call in engine.calls):
            assert not stopping.done(), stopping.result()
            await asyncio.sleep(0)
        assert not stopping.done()
        del engine.containers[name]
        await stopping
    assert left_in(tmp_path / "leases") == []


async def test_a_container_is_removed_at_the_engine_that_made_it(tmp_path: Path) -> None:
    leases = tmp_path / "leases"
    async with running_engine(tmp_path / "one") as one, running_engine(tmp_path / "two") as two:
        reapers: list[Callable[[], Any]] = [
            Docker(leases, engine=one.url).reap,
            lambda: asyncio.to_thread(docker.reap, leases),
        ]
        for reap in reapers:
            sandbox = await Docker(leases, engine=two.url, image="image:1").create(LONG)
            make_owner_dead(leases, sandbox.sandbox_id)
            assert await reap() == (sandbox.sandbox_id,)
            assert two.containers == {}
        assert one.calls == [], "it would say that there is no such container"


# -- making ----------------------------------------------------------------------------------------------------------


@contextmanager
def reaping_at(moment: str, leases: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Inside, somebody reaps at `moment` of the making of a sandbox: its lease is over as soon as it is written."""
    opened, write = LeaseDirectory.open, Path.write_text
    reaped: list[str] = []

    def after_open(self: LeaseDirectory, *given: Any, **named: Any) -> Any:
        made = opened(self, *given, **named)
        reaped.extend(plain.reap(leases) if moment == "the lease is written" else ())
        return made

    def around_write(self: Path, text: str, *given: Any, **named: Any) -> int:
        if self.name != "pids.max" or "toprope-try" in str(self):
            return write(self, text, *given, **named)
        if moment == "the group is made":
            reaped.extend(plain.reap(leases))
        with self.open("w") as file:
            if moment == "a file of the group is open":
                reaped.extend(plain.reap(leases))
            return file.write(text)

    with monkeypatch.context() as patched:
        patched.setattr(LeaseDirectory, "open", after_open)
        patched.setattr(Path, "write_text", around_write)
        yield reaped


@pytest.mark.parametrize("moment", ["the lease is written", "the group is made", "a file of the group is open"])
async def test_a_sandbox_that_is_reaped_at_any_moment_of_its_making_is_lost(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = PlainDirectory(tmp_path)
    if "group" in moment and isinstance(await asyncio.to_thread(provider._groups), str):
        pytest.skip("no control groups here")
    with reaping_at(moment, tmp_path, monkeypatch) as reaped, pytest.raises(SandboxLost, match="while it was made"):
        await provider.create(SandboxSpec(lease_s=1e-6))
    assert len(reaped) == 1
    assert left_in(tmp_path) == []


def test_what_is_made_after_a_reapers_look_is_not_left_behind(tmp_path: Path) -> None:
    """A reaper gave back what it found, and removes the lease last: what the maker makes between is the maker's."""
    home = a_home(tmp_path)
    with pytest.raises(SandboxLost), home.making():
        home.forbid()
    with pytest.raises(SandboxLost), home.making():
        raise OSError(errno.ENODEV, "its group is just going")


def test_what_breaks_the_making_of_a_sandbox_that_nobody_reaped_is_said_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"), a_home(tmp_path).making():
        raise OSError(errno.ENOSPC, "full")


async def test_a_container_that_is_reaped_while_it_is_made_is_lost_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = tmp_path / "leases"
    async with running_engine(tmp_path / "engine") as engine:
        provider = Docker(leases, engine=engine.url, image="image:1")
        settings = Docker._settings

        def late(self: Docker, *given: Any) -> dict[str, Any]:
            assert len(docker.reap(leases)) == 1
            return settings(self, *given)

        monkeypatch.setattr(Docker, "_settings", late)
        with pytest.raises(SandboxLost):
            await provider.create(SandboxSpec(lease_s=1e-6))
        assert any(call.startswith("POST") and call.endswith("/start") for call in engine.calls)
        assert engine.containers == {}
    assert left_in(leases) == []


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_that_goes_while_it_is_used_is_gone(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tree of plain files, whose every use the kernel would refuse as that of a group which is just going."""
    trees = [tmp_path / (name if version == 1 else "one") for name in ("memory", "pids", "cpu")]
    group = cgroups.Group(cgroups.Place(version, *trees), "toprope-x")
    for path in group.paths:
        path.mkdir(parents=True)
    run = group.run()
    (run.groups[0] / "cgroup.kill").touch()

    def going(*given: Any, **named: Any) -> Any:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(Path, "write_text", going)
    run.kill()
    with pytest.raises(FileNotFoundError):
        group.make(LONG.limits)
    monkeypatch.setattr(Path, "mkdir", going)
    with pytest.raises(FileNotFoundError):
        group.run()


# -- files and runs of a sandbox that goes ---------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["read", "write"])
@pytest.mark.parametrize(
    "kind",
    [
        PlainDirectory,
        pytest.param(
            Bubblewrap,
            marks=pytest.mark.skipif(shutil.which("bwrap") is None, reason="the program bwrap is not installed"),
        ),
    ],
)
async def test_a_file_of_a_sandbox_that_is_removed_meanwhile_is_lost_and_not_absent(
    kind: type[PlainDirectory | Bubblewrap], use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier would take an absent file for an agent that wrote no answer."""
    sandbox = await kind(tmp_path).create(LONG)
    await sandbox.write_file("answer", b"42")
    real = getattr(workdir, use)

    def late(root: Path, *given: Any, **named: Any) -> Any:
        workdir.remove_tree(root.parent)
        return real(root, *given, **named)

    monkeypatch.setattr(workdir, use, late)
    with pytest.raises(SandboxLost):
        await (sandbox.read_file("answer") if use == "read" else sandbox.write_file("answer", b"43"))
    await sandbox.stop()


@pytest.mark.parametrize("kind", ["directory", "docker"])
async def test_a_run_that_cannot_start_in_a_sandbox_that_is_removed_meanwhile_is_lost(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = tmp_path / "leases"
    async with running_engine(tmp_path / "engine") as engine:
        provider = PlainDirectory(leases) if kind == "directory" else Docker(leases, engine=engine.url, image="image:1")
        sandbox = await provider.create(LONG)

        def late(*given: Any, **named: Any) -> Any:
            workdir.remove_tree(leases / sandbox.sandbox_id)
            raise FileNotFoundError

        monkeypatch.setattr(handles, "execute", late)
        monkeypatch.setattr(os, "mkfifo", late)
        with pytest.raises(SandboxLost):
            await sandbox.run(["true"])
        await sandbox.stop()


async def test_a_file_of_a_container_that_somebody_removed_is_lost_and_not_absent(tmp_path: Path) -> None:
    async with running_engine(tmp_path / "engine") as engine:
        sandbox = await Docker(tmp_path / "leases", engine=engine.url, image="image:1").create(LONG)
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("answer")
        engine.containers.clear()
        with pytest.raises(SandboxLost):
            await sandbox.read_file("answer")
        with pytest.raises(SandboxLost):
            await sandbox.write_file("answer", b"42")
        await sandbox.stop()


class Vanished:
    """The group of a sandbox whose owner removed it, as the run of a borrower finds it."""

    def run(self) -> Vanished:
        return self

    def cpu_s(self) -> float:
        raise FileNotFoundError

    joins: tuple[Path, ...] = ()
    oom_kills = refused_forks = lambda self: 0
    kill = remove = lambda self: None


async def test_a_run_whose_group_is_removed_under_it_is_stopped(tmp_path: Path) -> None:
    sandbox = await PlainDirectory(tmp_path, control_groups=False).create(LONG)
    sandbox._group = Vanished()  # type: ignore[assignment]
    done = await sandbox.run(["sleep", "1000"], timeout_s=60)
    assert (done.exit, done.killed_by) == (None, "stop"), "and not at the end of its time"
    await sandbox.stop()


def test_who_is_killed_hard_is_stopped_before_its_children_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that starts its child while we look would leave it behind."""
    outermost = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    children_of = processes.children_of
    stopped: list[bool] = []

    def look(pid: int) -> list[int]:
        end = time.monotonic() + 30
        while not (told := os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)) and time.monotonic() < end:
            time.sleep(0.001)
        stopped.append(told is not None and told.si_status == signal.SIGSTOP)
        return children_of(pid)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(processes, "children_of", look)
            processes.kill_sandbox(outermost.pid, hard=True)
        assert stopped == [True]
    finally:
        outermost.kill()
        assert outermost.wait(30) == -signal.SIGKILL


# -- owners ----------------------------------------------------------------------------------------------------------


@contextmanager
def no_handle_left() -> Iterator[None]:
    """Inside, this process cannot open anything."""
    lowest = os.dup(0)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_living_owner_lives_also_for_who_has_no_handle_left_to_look(tmp_path: Path) -> None:
    home, me = a_home(tmp_path), this_process()
    with no_handle_left():
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            os.open("/proc/self/stat", os.O_RDONLY)
        alive, here, reason = me.alive(), me.here(), home.end_reason()
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            identify(me.pid)
    assert alive
    assert not here, "nobody is killed by an id of which nothing is known"
    assert reason is None


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESRCH])
def test_only_a_process_that_is_not_there_is_dead(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    me, read = this_process(), Path.read_text

    def absent(self: Path, *given: Any, **named: Any) -> str:
        if self.name == "stat":
            raise OSError(number, os.strerror(number))
        return read(self, *given, **named)

    monkeypatch.setattr(Path, "read_text", absent)
    assert not me.alive()
    assert identify(me.pid) is None


async def test_an_owner_without_a_handle_left_is_told_that_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, read = SandboxDesk(PlainDirectory(tmp_path, control_groups=False)), Path.read_text

    def full(self: Path, *given: Any, **named: Any) -> str:
        if self.name == "stat":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return read(self, *given, **named)

    monkeypatch.setattr(Path, "read_text", full)
    with pytest.raises(SandboxBusy, match=os.strerror(errno.EMFILE)):
        await desk.make(SandboxSpec(), lease_s=300)
