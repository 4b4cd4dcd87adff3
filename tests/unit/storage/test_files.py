"""Locks between processes, files replaced whole, kinds of file system."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from toprope.storage.atomic import replace_file
from toprope.storage.filesystem import is_network, kind_of
from toprope.storage.lock import FileLock

HOLDER = """
import sys
from pathlib import Path
from toprope.storage.lock import FileLock
with FileLock(Path(sys.argv[1])).held():
    print("held", flush=True)
    sys.stdin.read()
"""

COUNTER = """
import sys
from pathlib import Path
from toprope.storage.lock import FileLock
lock, number = FileLock(Path(sys.argv[1])), Path(sys.argv[2])
for _ in range(300):
    with lock.held():
        number.write_text(str(int(number.read_text()) + 1))
"""


def test_no_increment_is_lost_between_processes(tmp_path: Path) -> None:
    number = tmp_path / "number"
    number.write_text("0")
    counters = [subprocess.Popen([sys.executable, "-c", COUNTER, tmp_path / "l", number]) for _ in range(3)]
    assert [counter.wait(60) for counter in counters] == [0, 0, 0]
    assert number.read_text() == "900"


def test_a_dead_holder_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "l"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    entered = threading.Event()

    def enter() -> None:
        with FileLock(path).held():
            entered.set()

    waiting = threading.Thread(target=enter)
    waiting.start()
    assert not entered.is_set()
    holder.kill()
    holder.communicate()
    waiting.join(30)
    assert entered.is_set()


def test_who_waits_gets_in_before_who_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "l"
    mine, order = FileLock(path), []

    def enter() -> None:
        with FileLock(path).held():
            order.append("who waits")

    waiting = threading.Thread(target=enter)
    with mine.held():
        waiting.start()
        while _is_free(path.with_name("l.turn")):
            threading.Event().wait(0.001)  # until the other stands in the turnstile
    with mine.held():
        order.append("who comes back")
    waiting.join()
    assert order == ["who waits", "who comes back"]


def _is_free(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_a_replaced_file_is_whole_and_has_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "key"
    replace_file(path, b"first", mode=0o600)
    replace_file(path, b"second", mode=0o600)
    assert path.read_bytes() == b"second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["key"]


def test_a_failed_replacement_leaves_the_old_file_and_no_scrap(tmp_path: Path) -> None:
    path = tmp_path / "dir"
    path.mkdir()
    with pytest.raises(OSError):
        replace_file(path, b"data")
    assert path.is_dir()
    assert os.listdir(tmp_path) == ["dir"]


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /mnt/share rw shared:2 - nfs4 server:/x rw
31 30 0:41 / /mnt/share/local rw - tmpfs tmpfs rw
32 22 0:42 / /mnt/with\\040space rw - fuse.sshfs host: rw
33 22 0:43 / /mnt/cover rw - nfs4 a: rw
34 22 0:44 / /mnt/cover rw - xfs /dev/vdb rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/home/x/c.sqlite", "ext4", False),
        ("/mnt/share/run/c.sqlite", "nfs4", True),
        ("/mnt/sharepoint/c.sqlite", "ext4", False),
        ("/mnt/share/local/c.sqlite", "tmpfs", False),
        ("/mnt/with space/c.sqlite", "fuse.sshfs", True),
        ("/mnt/cover/c.sqlite", "xfs", False),
    ],
)
def test_the_mount_table_tells_network_file_systems(path: str, kind: str, network: bool) -> None:
    assert kind_of(Path(path), MOUNTS) == kind
    assert is_network(kind) == network


def test_this_machine_can_be_asked(tmp_path: Path) -> None:
    assert kind_of(tmp_path) is not None
