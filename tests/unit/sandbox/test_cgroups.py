"""Control groups as this host has them, and hosts that have none."""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path
from typing import Any

import pytest

from toprope.sandbox import cgroups
from toprope.sandbox.owner import this_process
from toprope.sandbox.spec import MIB, Limits

MOUNTS = Path("/proc/self/mountinfo").read_text()
OWN = Path("/proc/self/cgroup").read_text()


def started_in(run: cgroups.Run, command: str) -> subprocess.Popen[bytes]:
    script = 'for f in "$@"; do echo 0 >"$f"; done; exec sh -c "$0"'
    return subprocess.Popen(["sh", "-c", script, command, *map(str, run.joins)], stdout=subprocess.PIPE)


@pytest.fixture
def place() -> cgroups.Place:
    found = cgroups.find(MOUNTS, OWN)
    if isinstance(found, str):
        pytest.skip(f"no control groups here: {found}")
    return found


def test_limits_are_held_and_the_group_is_killed_whole(place: cgroups.Place) -> None:
    group = cgroups.Group(place, f"toprope-test-{secrets.token_hex(4)}")
    group.make(Limits(memory_bytes=64 * MIB, processes=4))
    try:
        run = group.run()
        process = started_in(
            run, "head -c 200000000 /dev/zero | tail -c 150000000 | wc -c; echo end; sleep 1000 & sleep 1000"
        )
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"0", "tail keeps what it reads in memory, and is killed"
        assert process.stdout.readline() == b"end\n"
        assert group.oom_kills() >= 1
        assert run.cpu_s() > 0
        run.kill()
        assert process.wait() == -9
        process.stdout.close()
    finally:
        group.remove()
    assert not any(path.exists() for path in group.paths)
    group.remove()


def test_a_group_that_another_reaper_removes_while_it_is_read_is_gone(
    place: cgroups.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of a directory of leases and a borrower reap at once; each is content with what the other did."""
    group = cgroups.Group(place, f"toprope-test-{secrets.token_hex(4)}")
    group.make(Limits())
    run = group.run()
    read = Path.read_text
    raced = []

    def late(path: Path, *given: Any, **named: Any) -> str:
        if path.name not in ("cgroup.procs", "cpuacct.usage", "cpu.stat"):
            return read(path, *given, **named)
        with path.open(*given, **named) as file:
            if path.parent.exists():
                path.parent.rmdir()
                raced.append(path.name)
            return file.read()

    try:
        monkeypatch.setattr(Path, "read_text", late)
        with pytest.raises(FileNotFoundError):
            run.cpu_s()
        if place.version == 2:
            assert len(raced) == 1
            return
        run.remove()
        group.remove()
        assert raced == ["cpuacct.usage", "cgroup.procs", *["cgroup.procs"] * len(group.paths)]
    finally:
        monkeypatch.undo()
        group.remove()
    assert not any(path.exists() for path in group.paths)


def test_a_trial_that_was_killed_is_swept_by_the_next(place: cgroups.Place) -> None:
    me = this_process()
    dead = place.pids / f"toprope-try-{me.namespace}-{me.pid}-{me.started - 1}-00000000"
    other = place.pids / f"toprope-try-1-{me.pid}-{me.started - 1}-00000000"
    try:
        for group in (dead, other):
            group.mkdir()
        assert cgroups.find(MOUNTS, OWN) == place
        assert not dead.exists()
        assert other.exists(), "of another pid namespace nothing is known"
    finally:
        for group in (dead, other):
            cgroups.remove(group)


def test_an_old_empty_group_without_anybody_is_removed_and_one_in_use_is_not(
    place: cgroups.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"toprope-test-{secrets.token_hex(4)}"  # a place of its own: others use theirs meanwhile
    inner = cgroups.Place(place.version, place.memory / name, place.pids / name, place.cpu / name)
    for path in inner.parents:
        path.mkdir()
    if inner.version == 2:
        (inner.pids / "cgroup.subtree_control").write_text("+memory +pids")
    process = None
    try:
        old, used = (cgroups.Group(inner, f"toprope-{secrets.token_hex(8)}") for _ in range(2))
        for group in (old, used):
            group.make(Limits())
        old.run()
        process = started_in(used.run(), "echo began; sleep 1000")
        assert process.stdout is not None
        assert process.stdout.readline() == b"began\n"
        cgroups.sweep_forgotten(inner)
        assert all(path.exists() for path in old.paths), "made just now"
        monkeypatch.setattr(cgroups, "FORGOTTEN_S", -60.0)
        cgroups.sweep_forgotten(inner)
        assert not any(path.exists() for path in old.paths)
        assert used.pids.exists()
    finally:
        for path in inner.parents:
            for each in path.glob("toprope-*"):
                cgroups.remove(each)  # kills the shell and its sleep: alone, the sleep would hold the output open
            cgroups.remove(path)
        if process is not None:
            process.communicate(timeout=30)


def test_version_2_counts_and_kills(tmp_path: Path) -> None:
    """The calls of version 2 that need no controller, on whatever tree of it this host has."""
    trees = [line.split(" ")[4] for line in MOUNTS.splitlines() if " - cgroup2 " in line]
    if not trees or not os.access(trees[0], os.W_OK):
        pytest.skip("no tree of version 2 that can be written")
    root = Path(trees[0]) / f"toprope-test-{secrets.token_hex(4)}"
    try:
        root.mkdir()
    except OSError as error:
        pytest.skip(f"no group can be made in {trees[0]}: {error}")
    try:
        run = cgroups.Group(cgroups.Place(2, root, root, root), ".").run()
        process = started_in(run, "echo began; sleep 1000 & sleep 1000")
        assert process.stdout is not None
        assert process.stdout.readline() == b"began\n"
        assert run.cpu_s() >= 0
        run.kill()
        assert process.wait() == -9
        process.stdout.close()
        run.remove()
        assert not run.groups[0].exists()
    finally:
        cgroups.remove(root)


def test_version_2_is_told_the_limits_and_asked_what_they_stopped(tmp_path: Path) -> None:
    """On a tree of plain files that look like version 2: what is written and read, wherever these tests run."""
    group = cgroups.Group(cgroups.Place(2, tmp_path, tmp_path, tmp_path), "toprope-x")
    own = tmp_path / "toprope-x"
    own.mkdir()
    (own / "memory.swap.max").write_text("max")
    group.make(Limits(memory_bytes=64 * MIB, processes=4))
    assert (own / "memory.max").read_text() == str(64 * MIB)
    assert (own / "memory.swap.max").read_text() == "0", "what does not fit must not go to the disk instead"
    assert (own / "pids.max").read_text() == str(4 + cgroups.OVERHEAD_PROCESSES)
    (own / "memory.events").write_text("low 0\noom 9\noom_kill 3\n")
    (own / "pids.events").write_text("max 5\n")
    assert (group.oom_kills(), group.refused_forks()) == (3, 5)
    run = group.run()
    assert run.joins == (run.groups[0] / "cgroup.procs",)
    assert run.groups[0].parent == own, "counted with the sandbox, and by itself"
    (run.groups[0] / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    assert run.cpu_s() == 2.5
    (run.groups[0] / "cgroup.kill").write_text("")
    run.kill()
    assert (run.groups[0] / "cgroup.kill").read_text() == "1"


def test_a_host_without_usable_groups_says_why(tmp_path: Path) -> None:
    assert cgroups.find("", "0::/\n") == "no control groups are mounted"
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    (tmp_path / "cgroup.controllers").write_text("cpu io")
    mount = f"30 1 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    assert "no memory and pids controller" in str(cgroups.find(mount, "0::/\n"))
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids")
    reason = cgroups.find(mount, "0::/user.slice\n")
    assert "is no control group" in str(reason), "a directory that only looks like one is not believed"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == []


def test_version_1_is_asked_when_version_2_has_no_controllers(tmp_path: Path) -> None:
    lines = []
    for name in ("memory", "pids", "cpuacct"):
        (tmp_path / name / "own").mkdir(parents=True)
        lines.append(f"30 1 0:26 / {tmp_path / name} rw - cgroup cgroup rw,{name}")
    reason = cgroups.find("\n".join(lines), "3:memory:/own\n2:pids:/own\n1:cpuacct:/\n")
    assert isinstance(reason, str)
    assert reason == f"{tmp_path}/memory/own is no control group"
    assert list(tmp_path.rglob("toprope-*")) == []
