"""Which kind of file system a path is on, so that a store that needs a local disk can refuse a network share.

Locks and shared memory of SQLite's write-ahead log work between processes of one kernel only; on a network file system
they appear to work and lose data. The kernel's mount table names the kind.
"""

from __future__ import annotations

import re
from pathlib import Path

NETWORK_KINDS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "davfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4"}
    | {"ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "vboxsf", "wekafs"}
    | {"fuse.cephfs", "fuse.davfs2", "fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs", "fuse.mount-s3"}
    | {"fuse.rclone", "fuse.s3fs", "fuse.sshfs"}
)
_ESCAPE = re.compile(r"\\([0-7]{3})")


def kind_of(path: Path, mount_table: str | None = None) -> str | None:
    """The file system kind (`ext4`, `nfs4`, ...) that holds `path`, which need not exist; None where nobody can tell.

    `mount_table` is text in the form of Linux's `/proc/self/mountinfo`, which is read when it is not given.
    """
    if mount_table is None:
        try:
            mount_table = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
        except OSError:
            return None
    real = path.resolve()
    best: tuple[int, str] | None = None
    for line in mount_table.splitlines():
        left, dash, right = line.partition(" - ")
        fields = left.split(" ")
        if not dash or len(fields) < 5:
            continue
        point = Path(_ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        if (point == real or point in real.parents) and (best is None or len(point.parts) >= best[0]):
            best = (len(point.parts), right.split(" ", 1)[0])  # a later line covers an earlier one
    return best[1] if best else None


def is_network(kind: str | None) -> bool:
    """Whether `kind` is a file system whose locks and mappings are not those of one kernel."""
    return kind is not None and kind in NETWORK_KINDS
