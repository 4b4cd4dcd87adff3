"""The parent of one stdio server, a program of its own: nothing that the server started outlives it.

    python -I -S guard.py <pid of who started it> <command> [args...]

It adopts whatever its descendants leave behind, and kills all of it when the command ends, when it is told to end, or
when whoever started it dies. Imports nothing but the standard library's smallest: it starts in 20 ms. Linux only.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_NOT_STARTED = 127


def main(owner: int, command: list[str]) -> int:
    """The status of `command`, or 127 where it cannot be started. On return no descendant lives."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != owner:  # it died before we asked to hear of it
        return _NOT_STARTED
    try:
        child = os.posix_spawnp(command[0], command, os.environ, setsigmask=())
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return _NOT_STARTED
    _let_go_of_the_pipes()
    status = _wait_for(child)
    _kill_all_below()
    return status


def _let_go_of_the_pipes() -> None:
    """The server's pipes are its own: held here too, nobody would see it close them."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(null, stream)


def _wait_for(child: int) -> int:
    while signal.sigwait(_WATCHED) == signal.SIGCHLD:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 0
            if pid == child:
                return os.waitstatus_to_exitcode(status) & 0xFF
            if pid == 0:
                break
    return 128 + signal.SIGTERM


def _kill_all_below() -> None:
    """Whoever dies leaves its children to us, so that rounds of killing our own children end with none."""
    me = os.getpid()
    while True:
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/stat", errors="replace") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
                if parent == me:
                    os.kill(int(name), signal.SIGKILL)
            except (OSError, IndexError, ValueError):
                pass  # it ended meanwhile
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
