"""Nothing outlives its lease: not its deadline, not its owner's death, not a borrower who goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import select
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.sandbox.conftest import processes_with

from toprope.errors.tree import ConfigError
from toprope.sandbox import cgroups
from toprope.sandbox.bubblewrap import Bubblewrap, reap
from toprope.sandbox.desk import SandboxDesk
from toprope.sandbox.leases import LeaseDirectory
from toprope.sandbox.owner import identify, this_process
from toprope.sandbox.plain import PlainDirectory
from toprope.sandbox.plain import reap as reap_plain
from toprope.sandbox.provider import reaping
from toprope.sandbox.spec import Limits, SandboxBusy, SandboxLost, SandboxSpec, SandboxUnavailable
from toprope.sandbox.workdir import remove_tree
from toprope.storage.atomic import replace_file

pytestmark = pytest.mark.promise("EP-14")

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="the program bwrap is not installed")


async def start_owner(leases: Path, marker: str) -> tuple[asyncio.subprocess.Process, Any]:
    script = Path(__file__).with_name("owner_process.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(leases), marker, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    return process, json.loads(await process.stdout.readline())


def gone(pids: list[int]) -> bool:
    """Wait for the end of each, as the kernel tells it; False after 120 s."""
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended = select.select([handle], [], [], 120)[0]
        os.close(handle)
        if not ended:
            return False
    return True


def left_in(leases: Path) -> list[str]:
    return [name for name in os.listdir(leases) if not name.startswith(".lock")]


def groups_of(sandbox_id: str) -> list[str]:
    return [name for _, below, _ in os.walk("/sys/fs/cgroup") for name in below if name == f"toprope-{sandbox_id}"]


@needs_bwrap
async def test_kill_9_of_the_owner_ends_its_processes_at_once_and_the_next_reap_takes_the_rest(
    tmp_path: Path, marker: str
) -> None:
    owner, told = await start_owner(tmp_path, marker)
    inside = [pid for pid in processes_with(marker) if pid != owner.pid]
    assert len(inside) >= 1
    assert reap(tmp_path) == (), "a living owner's sandbox stays"
    owner.kill()
    await owner.wait()
    assert await asyncio.to_thread(gone, inside), "processes of the sandbox outlive their owner"
    assert await asyncio.to_thread(reap, tmp_path) == (told["id"],)
    assert processes_with(marker) == []
    assert not (tmp_path / told["id"]).exists()
    assert groups_of(told["id"]) == []
    assert await asyncio.to_thread(reap, tmp_path) == ()


@needs_bwrap
async def test_a_borrowers_run_ends_when_the_owner_is_killed(tmp_path: Path, marker: str) -> None:
    owner, told = await start_owner(tmp_path, marker)
    borrowed = await Bubblewrap(tmp_path).attach({"sandbox_id": told["sandbox_id"], "token": told["token"]})
    run = asyncio.ensure_future(borrowed.run(["sh", "-c", "echo > lent; sleep 1000"]))
    while True:
        try:
            await borrowed.read_file("lent")
            break
        except FileNotFoundError:
            assert not run.done(), run.result()
    owner.kill()
    await owner.wait()
    done = await asyncio.wait_for(run, 120)
    assert done.killed_by == "lease"
    with pytest.raises(SandboxLost):
        await borrowed.run(["true"])
    assert await asyncio.to_thread(reap, tmp_path) == (told["id"],)


@needs_bwrap
async def test_a_stopped_owners_sandbox_is_reaped_by_anybody_at_its_deadline(tmp_path: Path, marker: str) -> None:
    owner, told = await start_owner(tmp_path, marker)
    inside = [pid for pid in processes_with(marker) if pid != owner.pid]
    owner.send_signal(19)  # SIGSTOP: it cannot end its sandbox itself
    lease = tmp_path / told["id"] / "lease.json"
    written = msgspec.json.decode(lease.read_bytes())
    lease.write_bytes(msgspec.json.encode({**written, "deadline": 1.0}))
    try:
        assert await asyncio.to_thread(reap, tmp_path) == (told["id"],)
        assert await asyncio.to_thread(gone, inside)
        assert not (tmp_path / told["id"]).exists()
    finally:
        owner.kill()
        await owner.wait()


@needs_bwrap
async def test_a_run_that_is_cancelled_at_any_moment_leaves_no_process(tmp_path: Path, marker: str) -> None:
    provider = Bubblewrap(tmp_path)
    sandbox = await provider.create(SandboxSpec(lease_s=300))
    for moment in range(12):
        run = asyncio.ensure_future(sandbox.run(["sh", "-c", f"sleep 1000 # {marker}"]))
        for _ in range(moment**2):
            await asyncio.sleep(0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert processes_with(marker) == []
    await sandbox.stop()
    assert groups_of(sandbox.sandbox_id) == []


@needs_bwrap
async def test_what_a_sandbox_leaves_unreadable_is_removed_all_the_same(tmp_path: Path) -> None:
    sandbox = await Bubblewrap(tmp_path).create(SandboxSpec())
    await sandbox.run(["sh", "-c", "mkdir -p a/b/c; touch a/b/c/f; ln -s / a/b/root; chmod 0 a/b/c a/b a"])
    await sandbox.stop()
    assert left_in(tmp_path) == []
    assert "passwd" in os.listdir("/etc")


DEEP = """
import os
for number in range(1200):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
    open("file", "w").close()
    os.symlink("/etc", "link")
    os.mkdir("closed", 0)
print("dug")
"""


@needs_bwrap
async def test_directories_deeper_than_any_path_or_stack_are_removed(tmp_path: Path) -> None:
    sandbox = await Bubblewrap(tmp_path).create(SandboxSpec())
    done = await sandbox.run(["python3", "-c", DEEP])
    assert done.stdout.data == b"dug\n", done
    await sandbox.stop()
    assert left_in(tmp_path) == []
    assert "passwd" in os.listdir("/etc")


REMOVE_AS_NOBODY = """
import os, sys
from pathlib import Path
from toprope.sandbox.workdir import remove_tree
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
root = Path(sys.argv[1], "tree")
root.mkdir()
os.chdir(root)
for number in range(1200):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
    open("file", "w").close()
    os.symlink("/etc", "link")
    os.mkdir("closed", 0o700)
    os.mkdir("closed/inner", 0)
    os.chmod("closed", 0)
here = os.open(".", os.O_RDONLY)
for number in range(1150):
    above = os.open("..", os.O_RDONLY, dir_fd=here)
    os.chmod("d" * 200, 0, dir_fd=above)
    os.close(here)
    here = above
os.chdir("/")
remove_tree(root)
print(os.listdir(sys.argv[1]))
"""


async def test_an_ordinary_user_removes_deep_directories_that_were_closed_to_it(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:  # directories of pytest are root's alone
        os.chmod(place, 0o777)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", REMOVE_AS_NOBODY, place, stdout=-1, stderr=-1
        )
        said, complaint = await process.communicate()
        assert said == b"[]\n", complaint.decode()


async def test_two_removers_of_one_tree_both_come_to_an_end(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for number in range(300):
        (tree / f"a{number}" / "b" / "c").mkdir(parents=True)
        (tree / f"a{number}" / "b" / "file").touch()
    await asyncio.gather(*(asyncio.to_thread(remove_tree, tree) for _ in range(4)))
    assert not tree.exists()


def test_a_remover_that_is_stopped_leaves_the_lease_so_that_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, _ = LeaseDirectory(tmp_path).open("d", "directory", SandboxSpec(lease_s=1e-6), lambda sandbox_id: {})
    for number in range(20):
        (home.work / str(number)).mkdir()
    removed: list[object] = []
    rmdir = os.rmdir

    def dying(path: object, **kwargs: Any) -> None:
        removed.append(path)
        if len(removed) == 12:
            raise KeyboardInterrupt
        rmdir(path, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", dying)
        with pytest.raises(KeyboardInterrupt):
            LeaseDirectory(tmp_path).reap("directory", lambda lease: None)
    assert (home.path / "lease.json").exists()
    assert LeaseDirectory(tmp_path).reap("directory", lambda lease: None) == (home.lease.sandbox_id,)
    assert left_in(tmp_path) == []


@needs_bwrap
async def test_sandboxes_do_not_see_each_other(tmp_path: Path) -> None:
    provider = Bubblewrap(tmp_path)
    one, other = await provider.create(SandboxSpec()), await provider.create(SandboxSpec())
    await one.write_file("mine", b"1")
    done = await other.run(["sh", "-c", f"ls /work; ls {tmp_path}; ls /run/toprope"])
    assert b"mine" not in done.stdout.data
    assert one.sandbox_id.encode() not in done.stdout.data
    await one.stop()
    assert (await other.run(["true"])).exit == 0
    await other.stop()


async def test_two_reapers_at_once_take_each_sandbox_once(tmp_path: Path) -> None:
    provider = PlainDirectory(tmp_path)
    made = [await provider.create(SandboxSpec(lease_s=1e-6)) for _ in range(5)]
    both = await asyncio.gather(provider.reap(), PlainDirectory(tmp_path).reap(), provider.reap())
    taken = [each for reaped in both for each in reaped]
    assert set(taken) <= {each.sandbox_id for each in made}
    assert len(taken) == len(set(taken))
    assert left_in(tmp_path) == []


async def test_a_sandbox_that_is_reaped_while_it_is_made_leaves_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = PlainDirectory(tmp_path)
    make = cgroups.Group.make
    made: list[Path] = []

    def late(group: cgroups.Group, limits: Limits) -> None:
        if "try" not in group.pids.name:  # between the lease and the group somebody reaps
            reap_plain(tmp_path)
        make(group, limits)
        made.extend(group.paths)

    monkeypatch.setattr(cgroups.Group, "make", late)
    if isinstance(await asyncio.to_thread(provider._groups), str):
        pytest.skip("no control groups here")
    with pytest.raises(SandboxLost):
        await provider.create(SandboxSpec(lease_s=1e-6))
    assert made
    assert not any(path.exists() for path in made)
    assert left_in(tmp_path) == []


async def test_a_process_that_lives_long_reaps_as_it_goes(tmp_path: Path) -> None:
    provider = PlainDirectory(tmp_path)
    async with reaping(provider, every_s=0.001):
        sandbox = await provider.create(SandboxSpec(lease_s=300))
        lease = tmp_path / sandbox.sandbox_id / "lease.json"
        written = msgspec.json.decode(lease.read_bytes())
        replace_file(lease, msgspec.json.encode({**written, "deadline": 1.0}))
        while sandbox.sandbox_id in await asyncio.to_thread(left_in, tmp_path):
            pass
    with pytest.raises(SandboxLost):
        await sandbox.run(["true"])


async def test_a_damaged_lease_does_not_keep_the_others_from_being_reaped(tmp_path: Path) -> None:
    provider = PlainDirectory(tmp_path)
    damaged, good = [await provider.create(SandboxSpec(lease_s=300)) for _ in range(2)]
    (tmp_path / damaged.sandbox_id / "lease.json").write_bytes(b'{"sandbox_id": ')
    await asyncio.to_thread((tmp_path / good.sandbox_id / "ended").touch)
    with pytest.raises(SandboxUnavailable, match=f"{damaged.sandbox_id}.*truncated"):
        await provider.reap()
    assert not (tmp_path / good.sandbox_id).exists()
    await damaged.stop()
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("name", [f".{'0' * 16}.new", "0" * 16])
@pytest.mark.parametrize("linked", [False, True])
async def test_what_was_forgotten_and_cannot_be_removed_does_not_keep_the_others_from_being_reaped(
    tmp_path: Path, name: str, linked: bool
) -> None:
    provider = PlainDirectory(tmp_path / "leases")
    sandbox = await provider.create(SandboxSpec(lease_s=300))
    (tmp_path / "leases" / sandbox.sandbox_id / "ended").touch()
    odd = tmp_path / "leases" / name
    (tmp_path / "elsewhere").mkdir()
    odd.symlink_to(tmp_path / "elsewhere") if linked else odd.write_bytes(b"")
    os.utime(odd, (0, 0), follow_symlinks=False)
    assert odd.name < sandbox.sandbox_id, "it comes first"
    with pytest.raises(SandboxUnavailable, match=name):
        reap_plain(tmp_path / "leases")
    assert not (tmp_path / "leases" / sandbox.sandbox_id).exists()
    assert (tmp_path / "elsewhere").is_dir()


def test_an_owner_is_one_process_of_one_boot() -> None:
    me = this_process()
    assert me.alive()
    assert not dataclasses.replace(me, started=me.started + 1).alive(), "the id was used again"
    assert not dataclasses.replace(me, boot="another").alive()
    assert dataclasses.replace(me, namespace=1, pid=10**8).alive(), "of another namespace nothing is concluded"
    assert identify(10**8) is None


def refused(leases: Path) -> None:
    directory = LeaseDirectory(leases)
    uses: list[Callable[[], object]] = [
        lambda: directory.open("directory", "directory", SandboxSpec(), lambda sandbox_id: {}),
        lambda: directory.reap("directory", lambda lease: None),
        directory.leases,
    ]
    for use in uses:
        with pytest.raises(ConfigError, match="0700"):
            use()


@pytest.mark.parametrize("mode", [0o702, 0o720])
def test_a_lease_directory_that_others_can_write_is_refused(mode: int, tmp_path: Path) -> None:
    tmp_path.chmod(mode)
    refused(tmp_path)


def test_a_link_of_somebody_else_in_the_place_of_a_lease_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leads to a directory of ours, which is still not the one that we chose."""
    link = tmp_path / "leases"
    (tmp_path / "ours").mkdir(mode=0o700)
    link.symlink_to(tmp_path / "ours")
    LeaseDirectory(link).reap("directory", lambda lease: None)
    lstat = os.lstat

    def of_another(path: Any, **named: Any) -> os.stat_result:  # only root could give it away
        facts = list(lstat(path, **named))
        if str(path) == str(link):
            facts[stat.ST_UID] += 1
        return os.stat_result(facts)

    monkeypatch.setattr(os, "lstat", of_another)
    refused(link)


async def test_without_the_program_nothing_is_claimed_and_the_reason_is_said(tmp_path: Path) -> None:
    provider = Bubblewrap(tmp_path, bwrap="no-such-bwrap")
    assert all(line.mechanism is None for line in (await provider.enforces()).values())
    with pytest.raises(SandboxUnavailable, match="no-such-bwrap not found") as caught:
        await provider.create(SandboxSpec())
    assert not caught.value.retryable, "it stays missing"


async def test_where_the_trial_alone_failed_another_try_may_help(tmp_path: Path) -> None:
    provider = Bubblewrap(tmp_path, bwrap="false")
    with pytest.raises(SandboxBusy, match="a trial") as caught:
        await provider.create(SandboxSpec())
    assert caught.value.retryable


@pytest.mark.parametrize(("number", "retryable"), [(errno.ENOSPC, True), (errno.EMFILE, True), (errno.EACCES, None)])
async def test_a_machine_without_room_for_one_more_is_asked_again_later(
    tmp_path: Path, number: int, retryable: bool | None
) -> None:
    class Full(PlainDirectory):
        async def create(self, spec: SandboxSpec) -> Any:
            raise OSError(number, os.strerror(number))

    with pytest.raises((SandboxBusy, OSError)) as caught:
        await SandboxDesk(Full(tmp_path, name="box")).make(SandboxSpec(), lease_s=9)
    assert getattr(caught.value, "retryable", None) is retryable


@pytest.mark.parametrize("limits", [{"memory_bytes": 1}, {"cpu_s": 0}, {"wall_s": float("nan")}, {"processes": -1}])
def test_limits_that_are_none_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        Limits(**limits)
