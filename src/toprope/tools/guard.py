"""The parent of one stdio server, a program of its own: nothing that the server started outlives it.

    python -I -S guard.py <pid of who started it> <bytes of a line at most> <command> [args...]

It adopts whatever its descendants leave behind, and kills all of it when the command ends, when it is told to end, or
when whoever started it dies. It passes on what the command writes, and ends it for a line that is too long. Imports
nothing but the standard library's smallest: it starts in 20 ms. Linux only.
"""

import _thread
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_NOT_STARTED = 127
_LAST_WORDS_S = 2.0


def main(owner: int, most: int, command: list[str]) -> int:
    """The status of `command`, or 127 where it cannot be started. On return no descendant lives."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != owner:  # it died before we asked to hear of it
        return _NOT_STARTED
    hears, says = os.pipe()  # neither is inherited
    try:
        child = os.posix_spawnp(
            command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, says, 1)], setsigmask=()
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return _NOT_STARTED
    os.close(says)
    _let_go_of_its_input()
    passing = _thread.allocate_lock()
    passing.acquire()
    _thread.start_new_thread(_pass_on, (hears, most, passing))
    status = _wait_for(child)
    _kill_all_below()
    passing.acquire(timeout=_LAST_WORDS_S)  # what it wrote before it ended
    return status


def _let_go_of_its_input() -> None:
    """The server's input is its own: held here too, nobody would see it close it."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)


def _pass_on(hears: int, most: int, passing: "_thread.LockType") -> None:
    """Copy what is written to our own output, whose reader splits it into lines. A line beyond `most` bytes ends all.

    When nobody writes any more, nobody can read from us either: the reader sees the end of the command's output, also
    where the command goes on without it.
    """
    length = 0
    try:
        while chunk := os.read(hears, 65536):
            first, newline, _ = chunk.partition(b"\n")
            length = len(chunk.rpartition(b"\n")[2]) if newline else length + len(first)
            if length > most:
                os.write(2, b"[ended: it wrote a line of more than %d bytes]\n" % most)
                os.kill(os.getpid(), signal.SIGTERM)
                break
            while chunk:
                chunk = chunk[os.write(1, chunk) :]
    except OSError:
        pass  # whoever read is gone; the command hears it by a closed pipe
    finally:
        os.close(hears)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        passing.release()


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
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
