"""The command line that makes a bubblewrap sandbox, as plain values.

    sh            joins the control groups of the run
    unshare, sh   only for root: a mount namespace of its own, in which the sandbox's directories are bound to a place
                  that an ordinary user may enter
    setpriv       only for root: becomes an ordinary user of the host, for good
    bwrap         new user, pid, network, ipc, uts and cgroup namespaces; a root file system with nothing but what is
                  listed here; no capabilities, no further user namespaces
    inside.py     the first process of the pid namespace: sets limits, forwards to the model, starts the program

All but the last are the same process, one after the other; bubblewrap starts the last and waits for it. So the process
that we started is the one whose death ends everything, and bubblewrap asks the kernel to kill both when we die.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toprope.sandbox.spec import WORKDIR

RUN = "/run/toprope"
"""Where `inside.py` and the model's socket are, as code in the sandbox sees it."""

USER = 1000

JOIN = 'while [ "$1" != -- ]; do echo 0 >"$1" || exit 125; shift; done; shift; exec "$@"'
_STAGE = """set -e
place=$1; shift
mount -t tmpfs -o mode=0755,size=64k toprope "$place"
while [ "$1" != -- ]; do mkdir "$place/$2"; mount --bind "$1" "$place/$2"; shift 2; done
shift; exec "$@"
"""
_PLACES = ("/mnt", "/media", "/srv", "/opt", "/run", "/var/tmp")
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ssl/certs", "localtime", "mime.types")
_ROOTS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


@dataclass(frozen=True, slots=True)
class Programs:
    """Where the programs are on this host. `unshare` and `setpriv` are needed by root only."""

    bwrap: str
    unshare: str | None
    setpriv: str | None


@dataclass(frozen=True, slots=True)
class Trees:
    """Host directories: the work directory, what we give to the inside, and what may be read at its own path."""

    work: Path
    inside: Path
    read_only: tuple[str, ...]


def interpreter() -> tuple[str, str | None]:
    """The Python of the sandbox, which is ours, and its tree where that is not below /usr."""
    prefix = os.path.realpath(sys.base_prefix)
    binary = Path(prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    program = str(binary) if binary.exists() else os.path.realpath(sys.executable)
    return program, None if prefix == "/usr" or prefix.startswith("/usr/") else prefix


def search_path() -> str:
    """PATH inside: our own interpreter first, so that `python3` is the version that runs us."""
    _, tree = interpreter()
    return ":".join([*([f"{tree}/bin"] if tree else []), "/usr/local/bin", "/usr/bin", "/bin"])


def bwrap_arguments(trees: Trees, *, temporary_bytes: int, hidden: Sequence[str] = ()) -> list[str]:
    """Everything that bubblewrap is told, without the program. Sources in `trees` are as bubblewrap can reach them."""
    visible = ["/usr", *(f"/{name}" for name in _ROOTS), *(tree.rpartition("\0")[2] for tree in trees.read_only)]
    arguments = ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net"]
    arguments += ["--unshare-cgroup-try", "--disable-userns", "--die-with-parent", "--as-pid-1"]
    arguments += ["--new-session"]
    arguments += ["--cap-drop", "ALL", "--uid", str(USER), "--gid", str(USER), "--hostname", "sandbox"]
    arguments += ["--ro-bind", "/usr", "/usr"]
    for name in _ROOTS:
        path = f"/{name}"
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, path]
    for name in _ETC:
        arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    for point in ("/tmp", "/dev/shm"):
        arguments += ["--perms", "1777", "--size", str(temporary_bytes), "--tmpfs", point]
    for tree in trees.read_only:
        source, _, target = tree.rpartition("\0")
        arguments += ["--ro-bind", source or target, target]
    for tree in hidden:
        place = os.path.realpath(tree)
        if os.path.isdir(place) and any(f"{place}/".startswith(f"{each}/") for each in visible):
            arguments += ["--size", "4096", "--tmpfs", place, "--remount-ro", place]
    for name in ("passwd", "group", "hosts", "nsswitch.conf"):
        arguments += ["--ro-bind", str(trees.inside / name), f"/etc/{name}"]
    arguments += ["--ro-bind", str(trees.inside), RUN, "--bind", str(trees.work), WORKDIR, "--chdir", WORKDIR]
    # /sys/fs/cgroup is not there at all: nothing inside can leave its group.
    return [*arguments, "--remount-ro", "/dev", "--remount-ro", "/"]


def staged(trees: Trees) -> tuple[str, list[str], Trees]:
    """For root: the place, the arguments of the staging script, and the trees as they are reached below the place."""
    sources = [*map(str, (trees.work, trees.inside)), *trees.read_only]
    place = next(
        (p for p in _PLACES if os.path.isdir(p) and not any(f"{s}/".startswith(f"{p}/") for s in sources)), None
    )
    if place is None:
        raise OSError("no directory for mounts is free of the sandbox's own trees")
    arguments, reached = [], []
    for number, source in enumerate(sources):
        name = str(number)
        arguments += [source, name]
        reached.append(f"{place}/{name}")
    read_only = tuple(f"{at}\0{tree}" for at, tree in zip(reached[2:], trees.read_only, strict=True))
    return place, arguments, Trees(Path(reached[0]), Path(reached[1]), read_only)


def start_command(
    programs: Programs,
    joins: Sequence[Path],
    stage: tuple[str, list[str]] | None,
    host_user: int | None,
    bwrap: Sequence[str],
) -> list[str]:
    """The whole chain. `bwrap` is what follows its name; `stage` and `host_user` are given by root only."""
    command = ["/bin/sh", "-c", JOIN, "sandbox", *map(str, joins), "--"]
    if stage is not None:
        command += [programs.unshare or "unshare", "--mount", "--propagation", "private", "--"]
        command += ["/bin/sh", "-c", _STAGE, "sandbox", stage[0], *stage[1], "--"]
    if host_user is not None:
        command += [programs.setpriv or "setpriv", f"--reuid={host_user}", f"--regid={host_user}", "--clear-groups"]
        command += ["--no-new-privs", "--"]
    return [*command, programs.bwrap, *bwrap]
