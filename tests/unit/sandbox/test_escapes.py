"""What hostile code in a bubblewrap sandbox tries, and which mechanism stopped it; the run says them at its end."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.sandbox.conftest import Make, processes_with

from toprope.sandbox.bubblewrap import Bubblewrap
from toprope.sandbox.spec import MIB, Aspect, Completed, OutsideWorkdir

pytestmark = pytest.mark.promise("EP-14")
MECHANISMS: list[str] = []
"""What the running test saw at work."""


@pytest.fixture(autouse=True)
def mechanisms(say: Callable[[str], None]) -> Iterator[None]:
    """Each test's mechanisms, said at the end of the run."""
    MECHANISMS.clear()
    yield
    for line in MECHANISMS:
        say(line)


def stopped(attempt: str, mechanism: str | None) -> None:
    assert mechanism, f"{attempt}: nothing that would stop it"
    MECHANISMS.append(f"escape {attempt}: stopped by {mechanism}")


async def stopped_by(provider: Bubblewrap, attempt: str, aspect: Aspect) -> None:
    stopped(attempt, (await provider.enforces())[aspect].mechanism)


def refused(done: Completed) -> bool:
    return done.exit not in (0, None) and done.killed_by is None


async def test_files_of_the_host_are_not_there(provider: Bubblewrap, make: Make, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    secret.chmod(0o644)
    sandbox = await make()
    for path in ("/etc/shadow", "/proc/1/root/etc/shadow", "/proc/self/cwd/../etc/shadow", str(secret), "/root/.ssh"):
        done = await sandbox.run(["cat", path])
        assert refused(done), f"{path}: {done}"
        assert b"root:" not in done.stdout.data
    done = await sandbox.run(["sh", "-c", f"find / -xdev -name secret 2>/dev/null; ls {tmp_path}"])
    assert b"secret" not in done.stdout.data
    await stopped_by(provider, "host's /etc/shadow and other files", Aspect.FILES)


async def test_nothing_can_be_written_outside_the_work_directory(provider: Bubblewrap, make: Make) -> None:
    sandbox = await make()
    for path in (
        "/x",
        "/usr/x",
        "/etc/x",
        "/run/toprope/inside.py",
        "/usr/bin/env",
        "/proc/sys/kernel/hostname",
        "/dev/x",
    ):
        done = await sandbox.run(["sh", "-c", f"echo hostile > {path}"])
        assert refused(done), f"{path}: {done}"
    assert "x" not in os.listdir("/usr")
    for command in ("mount -t tmpfs x /usr", "unshare -Ur true", "umount /usr", "chroot / true", "ls /sys/fs/cgroup"):
        assert refused(await sandbox.run(["sh", "-c", command])), command
    await stopped_by(provider, "write, mount, unshare, chroot", Aspect.FILES)


async def test_links_swapped_under_the_reader_lead_nowhere(make: Make, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"hunter2")
    sandbox = await make()
    await sandbox.write_file("real/file", b"own")
    await sandbox.run(["ln", "-s", str(outside), "link"])
    program = """
import os
open("began", "w").close()
while True:
    for name in ("real", "link"):
        try:
            os.rename(name, "spot")
            os.rename("spot", name)
        except OSError:
            os.system("rm -rf spot")
            os.makedirs("real", exist_ok=True)
"""
    run = asyncio.ensure_future(sandbox.run(["python3", "-c", program]))
    while True:
        try:
            await sandbox.read_file("began")
            break
        except FileNotFoundError:
            assert not run.done(), run.result()
    seen = set()
    for _ in range(300):
        try:
            seen.add(await sandbox.read_file("spot/file"))
            await sandbox.write_file("spot/file", b"own")
        except (OutsideWorkdir, FileNotFoundError, FileExistsError):
            seen.add(b"refused")
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert seen <= {b"own", b"refused"}
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (outside / "file").read_bytes() == b"hunter2"
    stopped("links swapped while read_file and write_file look", "each component opened below the last, links refused")


async def test_a_fork_bomb_stays_small(provider: Bubblewrap, make: Make, counted: bool, marker: str) -> None:
    sandbox = await make(processes=24)
    bomb = f"""
import os, time  # {marker}
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""
    run = asyncio.ensure_future(sandbox.run(["python3", "-c", bomb]))
    counts = [0]
    while max(counts) < 24 or len(counts) < 30:
        counts.append(len(processes_with(marker)))
        assert not run.done() or run.result().killed_by == Aspect.PROCESSES, run.result()
        await asyncio.sleep(0)
        if run.done():
            break
    run.cancel()
    await asyncio.wait({run})
    most = max(counts)
    assert 1 < most <= 24 + 8
    assert processes_with(marker) == []
    assert (await sandbox.run(["echo", "on"])).stdout.data == b"on\n"
    await stopped_by(provider, f"fork bomb (at most {most} processes)", Aspect.PROCESSES)


async def test_memory_bombs_stay_small(provider: Bubblewrap, make: Make, counted: bool) -> None:
    sandbox = await make(memory_bytes=96 * MIB)
    one = await sandbox.run(["python3", "-c", "x = [bytearray(b'x' * 2**20) for _ in range(400)]; print('held')"])
    several = "import os\nfor _ in range(3): os.fork()\nx = []\nwhile True: x.append(bytearray(b'x' * 2**20))"
    many = await sandbox.run(["python3", "-c", several], timeout_s=20)
    for done in (one, many):
        assert done.exit != 0
        assert b"held" not in done.stdout.data
    files = await sandbox.run(
        ["sh", "-c", "head -c 200000000 /dev/zero > /dev/shm/x || head -c 200000000 /dev/zero > /tmp/x"]
    )
    assert files.exit != 0, files
    assert (await sandbox.run(["echo", "on"])).stdout.data == b"on\n"
    await stopped_by(
        provider, f"memory bomb ({one.killed_by or 'refused'}; {many.killed_by or 'refused'})", Aspect.MEMORY
    )


async def test_endless_computing_ends(provider: Bubblewrap, make: Make, counted: bool) -> None:
    sandbox = await make(cpu_s=1)
    done = await sandbox.run(["sh", "-c", "while :; do :; done & while :; do :; done"])
    assert done.killed_by == Aspect.CPU
    assert done.timed_out
    await stopped_by(provider, "endless loops", Aspect.CPU)


async def test_a_gigabyte_of_output_is_cut(provider: Bubblewrap, make: Make) -> None:
    sandbox = await make(output_bytes=4 * MIB)
    done = await sandbox.run(["head", "-c", "1000000000", "/dev/zero"], output_limit=1000)
    assert done.killed_by == Aspect.OUTPUT
    assert len(done.stdout.data) == 1000
    assert done.stdout.total < 100 * MIB
    await stopped_by(provider, f"1 GB of output (after {done.stdout.total} bytes)", Aspect.OUTPUT)


async def test_one_file_cannot_fill_the_disk(make: Make) -> None:
    sandbox = await make(file_bytes=MIB)
    done = await sandbox.run(["head", "-c", "4000000", "/dev/zero"], output_limit=10)
    assert done.exit == 0, "only files are meant"
    done = await sandbox.run(["sh", "-c", "exec head -c 4000000 /dev/zero > big"])
    assert done.killed_by == "file_size"
    assert len(await sandbox.read_file("big")) == MIB
    stopped("a huge file", "RLIMIT_FSIZE")


async def test_servers_of_the_host_cannot_be_reached(provider: Bubblewrap, make: Make) -> None:
    reached: list[object] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(1)
        writer.close()

    tcp = await asyncio.start_server(answer, "0.0.0.0", 0)
    port = tcp.sockets[0].getsockname()[1]
    abstract = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    abstract.bind(f"\0toprope-{os.urandom(8).hex()}")
    name = abstract.getsockname()
    named = await asyncio.start_unix_server(answer, sock=abstract)
    program = f"""
import socket
for address in ("127.0.0.1", "127.0.0.2", "0.0.0.0", "10.0.0.1", "169.254.169.254"):
    try:
        socket.create_connection((address, {port}), 5)
        print("reached", address)
    except OSError as error:
        print("refused")
line = socket.socket(socket.AF_UNIX)
try:
    line.connect({name!r})
    print("reached")
except OSError:
    print("refused")
"""
    try:
        done = await (await make()).run(["python3", "-c", program])
    finally:
        tcp.close()
        named.close()
    assert done.stdout.text.split() == ["refused"] * 6, done
    assert reached == []
    await stopped_by(provider, "loopback servers, metadata addresses, abstract sockets", Aspect.NETWORK)


async def test_the_parent_cannot_be_killed_or_traced(
    provider: Bubblewrap, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "hunter2")
    program = f"""
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
parent = {os.getpid()}
print("visible", sorted(int(name) for name in os.listdir("/proc") if name.isdigit()))
for pid in (parent, os.getppid(), 1):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
print("ptrace", libc.ptrace(16, parent, 0, 0), ctypes.get_errno())
for name in os.listdir("/proc"):
    if name.isdigit():
        for what in ("environ", "cmdline"):
            try:
                print(open(f"/proc/{{name}}/{{what}}").read())
            except OSError:
                pass
print("still here", os.environ)
"""
    done = await (await make()).run(["python3", "-c", program])
    assert done.exit == 0, done
    text = done.stdout.text
    assert "visible [1, 2]" in text
    assert "ptrace -1 3" in text, "no such process"
    assert "still here" in text
    assert "hunter2" not in text
    assert "SECRET" not in text
    assert "leases" not in text, "paths of the host"
    await stopped_by(provider, "kill, ptrace, /proc and environment of the parent", Aspect.FILES)
    killed_all = await (await make()).run(["sh", "-c", "kill -9 -1; echo on"])
    assert killed_all.exit in (0, 137)


async def test_no_daemon_stays_behind(provider: Bubblewrap, make: Make, counted: bool, marker: str) -> None:
    daemon = f"""
import os, time  # {marker}
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("born", "w").close()
        time.sleep(1000)
    os._exit(0)
while not os.path.exists("born"):
    time.sleep(0.01)
print("left")
"""
    sandbox = await make()
    done = await sandbox.run(["python3", "-c", daemon])
    assert done.stdout.data == b"left\n", done
    assert processes_with(marker) == []
    await stopped_by(provider, "a daemon left behind", Aspect.WALL_TIME)


async def test_an_input_that_nobody_reads_and_a_cut_pipe_end_quietly(make: Make) -> None:
    sandbox = await make()
    done = await sandbox.run(["true"], stdin=b"x" * 4_000_000)
    assert done.exit == 0
    done = await sandbox.run(["sh", "-c", "exec >&- 2>&-; exit 4"])
    assert done.exit == 4
