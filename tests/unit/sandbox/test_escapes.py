"""What hostile code in a bubblewrap sandbox tries, and what was seen to stop it; the run says it at its end.

Said is what the test observed: the error that the code got, the limit that killed it, the namespace that it was in. The
mechanism that the provider declares stands beside it only where something that only this mechanism writes was read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.sandbox.conftest import Make, processes_with

from toprope.sandbox.bubblewrap import Bubblewrap
from toprope.sandbox.bwrap_handles import BubblewrapSandbox
from toprope.sandbox.spec import MIB, Aspect, Completed, OutsideWorkdir

pytestmark = pytest.mark.promise("EP-14")
SEEN: list[str] = []
"""What the running test saw at work."""


@pytest.fixture(autouse=True)
def observations(say: Callable[[str], None]) -> Iterator[None]:
    """Each test's observations, said at the end of the run."""
    SEEN.clear()
    yield
    for line in SEEN:
        say(line)


def saw(attempt: str, *facts: str, declared: str | None = None) -> None:
    assert facts
    assert all(facts), f"{attempt}: nothing was seen to stop it"
    SEEN.append(f"escape {attempt}: {', '.join(facts)}" + (f" [{declared}]" if declared else ""))


async def declared(provider: Bubblewrap, aspect: Aspect) -> str:
    mechanism = (await provider.enforces())[aspect].mechanism
    assert mechanism, f"{aspect}: the provider claims nothing"
    return mechanism


async def own_namespace(sandbox: BubblewrapSandbox, kind: str) -> str:
    inside = (await sandbox.run(["readlink", f"/proc/self/ns/{kind}"])).stdout.text.strip()
    assert inside.startswith(f"{kind}:[")
    assert inside != os.readlink(f"/proc/self/ns/{kind}")
    return f"{kind} namespace of its own"


def last_word(done: Completed) -> str:
    """What the system told the program: the end of its complaint."""
    return (done.stderr.text.strip().splitlines() or [""])[-1].rpartition(": ")[2]


def how(done: Completed) -> str:
    """How a run was stopped, as its owner saw it."""
    end = f"killed_by={done.killed_by}" if done.killed_by else f"exit={done.exit}"
    return end + (f", refused by its counter: {' '.join(done.hit)}" if done.hit else "")


def refused(done: Completed) -> bool:
    return done.exit not in (0, None) and done.killed_by is None


async def test_files_of_the_host_are_not_there(provider: Bubblewrap, make: Make, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    secret.chmod(0o644)
    sandbox = await make()
    words: set[str] = set()
    for path in ("/etc/shadow", "/proc/1/root/etc/shadow", "/proc/self/cwd/../etc/shadow", str(secret), "/root/.ssh"):
        done = await sandbox.run(["cat", path])
        assert refused(done), f"{path}: {done}"
        assert b"root:" not in done.stdout.data
        words.add(last_word(done))
    done = await sandbox.run(["sh", "-c", f"find / -xdev -name secret 2>/dev/null; ls {tmp_path}"])
    assert b"secret" not in done.stdout.data
    await declared(provider, Aspect.FILES)
    saw("host's /etc/shadow and other files", *sorted(words), await own_namespace(sandbox, "mnt"))


WAYS_OUT = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
NEW_USER, NEW_MOUNTS = 0x10000000, 0x20000
def tell(name, status):
    print(name, errno.errorcode[ctypes.get_errno()] if status else "done")
tell("mount", libc.mount(b"x", b"/usr", b"tmpfs", 0, None))
tell("umount", libc.umount2(b"/usr", 2))
tell("unshare", libc.unshare(NEW_USER | NEW_MOUNTS))
tell("chroot", libc.chroot(b"/"))
tell("cgroup", libc.access(b"/sys/fs/cgroup", 0))
"""


async def test_nothing_can_be_written_outside_the_work_directory(provider: Bubblewrap, make: Make) -> None:
    sandbox = await make()
    words: set[str] = set()
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
        words.add(last_word(done))
    assert "x" not in os.listdir("/usr")
    done = await sandbox.run(["python3", "-c", WAYS_OUT])
    found = dict(line.split() for line in done.stdout.text.splitlines())
    assert set(found) == {"mount", "umount", "unshare", "chroot", "cgroup"}, done
    assert "done" not in found.values(), found
    words.update(f"{name}: {word}" for name, word in found.items())
    await declared(provider, Aspect.FILES)
    saw("write, mount, unshare, chroot", *sorted(words))


async def test_links_swapped_under_the_reader_lead_nowhere(make: Make, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"hunter2")
    sandbox = await make()
    await sandbox.write_file("real/file", b"own")
    await sandbox.run(["ln", "-s", str(outside), "link"])
    with pytest.raises(OutsideWorkdir):
        await sandbox.read_file("link/file")
    with pytest.raises(OutsideWorkdir):
        await sandbox.write_file("link/file", b"hostile")
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
    seen: Counter[bytes] = Counter()
    for _ in range(300):
        try:
            seen[await sandbox.read_file("spot/file")] += 1
            await sandbox.write_file("spot/file", b"own")
        except (OutsideWorkdir, FileNotFoundError, FileExistsError):
            seen[b"refused"] += 1
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert set(seen) <= {b"own", b"refused"}
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (outside / "file").read_bytes() == b"hunter2"
    refusals = f"{seen[b'refused']} of 300 looks at a swapped one refused"
    saw("links under read_file and write_file", "OutsideWorkdir through a link that stands", refusals)


async def test_a_fork_bomb_stays_small(provider: Bubblewrap, make: Make, counted: bool, marker: str) -> None:
    sandbox = await make(processes=24, memory_bytes=1024 * MIB)
    bomb = f"""
import os, time  # {marker}
while not os.path.exists("end"):
    try:
        os.fork()
    except OSError as error:
        open("refused", "w").write(os.strerror(error.errno))
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
    word = ""
    while not word and not run.done():
        with contextlib.suppress(FileNotFoundError):
            word = (await sandbox.read_file("refused")).decode()
    await sandbox.write_file("end", b"")
    done = await run
    most = max(counts)
    assert 1 < most <= 24 + 8
    assert processes_with(marker) == []
    assert (await sandbox.run(["echo", "on"])).stdout.data == b"on\n"
    mechanism = await declared(provider, Aspect.PROCESSES)
    assert word or done.killed_by == Aspect.PROCESSES, done
    facts = [f"at most {most} processes", *([f"fork: {word}"] if word else []), how(done)]
    saw("fork bomb", *facts, declared=mechanism if Aspect.PROCESSES in done.hit else None)


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
    mechanism = await declared(provider, Aspect.MEMORY)
    for attempt, done in (("memory bomb of one process", one), ("memory bomb of several processes", many)):
        word = [last_word(done)] if done.killed_by is None and done.stderr.data else []
        saw(attempt, how(done), *word, declared=mechanism if Aspect.MEMORY in done.hit else None)
    saw("files in memory", how(files), *([last_word(files)] if files.stderr.data else []))


async def test_endless_computing_ends(provider: Bubblewrap, make: Make, counted: bool) -> None:
    sandbox = await make(cpu_s=1)
    done = await sandbox.run(["sh", "-c", "while :; do :; done & while :; do :; done"])
    assert done.killed_by == Aspect.CPU
    assert done.timed_out
    await declared(provider, Aspect.CPU)
    saw("endless loops", how(done), f"after {done.wall_s:.1f} s")


async def test_a_gigabyte_of_output_is_cut(provider: Bubblewrap, make: Make) -> None:
    sandbox = await make(output_bytes=4 * MIB)
    done = await sandbox.run(["head", "-c", "1000000000", "/dev/zero"], output_limit=1000)
    assert done.killed_by == Aspect.OUTPUT
    assert len(done.stdout.data) == 1000
    assert done.stdout.total < 100 * MIB
    mechanism = await declared(provider, Aspect.OUTPUT)  # only the count of the reader gives this `killed_by`
    saw("1 GB of output", how(done), f"after {done.stdout.total} bytes", declared=mechanism)


async def test_one_file_cannot_fill_the_disk(make: Make) -> None:
    sandbox = await make(file_bytes=MIB)
    done = await sandbox.run(["head", "-c", "4000000", "/dev/zero"], output_limit=10)
    assert done.exit == 0, "only files are meant"
    done = await sandbox.run(["sh", "-c", "exec head -c 4000000 /dev/zero > big"])
    assert done.killed_by == "file_size"
    assert len(await sandbox.read_file("big")) == MIB
    saw("a huge file", how(done), "the file has its limit's size", declared="SIGXFSZ, which RLIMIT_FSIZE sends")


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
import errno, socket
for address in ("127.0.0.1", "127.0.0.2", "0.0.0.0", "10.0.0.1", "169.254.169.254"):
    try:
        socket.create_connection((address, {port}), 5)
        print("reached", address)
    except OSError as error:
        print(errno.errorcode[error.errno])
line = socket.socket(socket.AF_UNIX)
try:
    line.connect({name!r})
    print("reached")
except OSError as error:
    print(errno.errorcode[error.errno])
"""
    sandbox = await make()
    try:
        done = await sandbox.run(["python3", "-c", program])
    finally:
        tcp.close()
        named.close()
    words = done.stdout.text.split()
    assert len(words) == 6, done
    assert set(words) <= {"ECONNREFUSED", "ENETUNREACH", "EHOSTUNREACH"}, done
    assert reached == []
    await declared(provider, Aspect.NETWORK)
    facts = [*sorted(set(words)), await own_namespace(sandbox, "net")]
    saw("loopback servers, metadata addresses, abstract sockets", *facts)


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
    sandbox = await make()
    facts = ["processes 1 and 2 are all it sees", "ptrace: ESRCH", await own_namespace(sandbox, "pid")]
    saw("kill, ptrace, /proc and environment of the parent", *facts)
    killed_all = await sandbox.run(["sh", "-c", "kill -9 -1; echo on"])
    assert killed_all.exit in (0, 137)
    saw("a signal to everybody", how(killed_all), "we are still here")


async def test_no_terminal_of_the_host_can_be_typed_into(make: Make) -> None:
    program = """
import fcntl, os, termios
print("session", os.getsid(0))
for path in ("/dev/tty", "/dev/console"):
    try:
        fcntl.ioctl(os.open(path, os.O_RDWR), termios.TIOCSTI, b"x")
        print("typed")
    except OSError as error:
        print("refused", error.errno)
"""
    done = await (await make()).run(["python3", "-c", program])
    first, *others = done.stdout.text.splitlines()
    assert first != "session 0", "a session of the host's, which may have a terminal"
    assert len(others) == 2
    assert not any(line.startswith("typed") for line in others)
    facts = [f"{first} of its own namespace", os.strerror(int(others[0].split()[1]))]
    saw("typing into a terminal of the host", *facts)


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
    await declared(provider, Aspect.WALL_TIME)
    saw("a daemon left behind", "gone when its run returned", await own_namespace(sandbox, "pid"))


async def test_an_input_that_nobody_reads_and_a_cut_pipe_end_quietly(make: Make) -> None:
    sandbox = await make()
    done = await sandbox.run(["true"], stdin=b"x" * 4_000_000)
    assert done.exit == 0
    done = await sandbox.run(["sh", "-c", "exec >&- 2>&-; exit 4"])
    assert done.exit == 4
