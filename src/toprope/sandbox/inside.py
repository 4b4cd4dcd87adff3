"""What runs first inside a sandbox: sets limits, opens the way to the one model URL, starts the program.

Runs as a script, by the interpreter of the sandbox, with nothing but the standard library:

    python3 -I -S inside.py HANDLE STATUS    the orders are JSON in the file of handle HANDLE
    python3 -I -S inside.py VARIABLE         the orders are JSON in this environment variable

Orders: `argv`, `env`, `cwd`, `limits` (resource name -> value), `forward` (`port` to listen on, `socket` to pass on
to) or null; `keep`: adopt every orphan of the program and end them all when it ends, since no pid namespace does it.
STATUS is a socket whose other end the starter holds: when it closes, at any time, everything ends here; one byte from
us says that the sandbox stands and the rest is the program's doing.

This stays while the program runs, as the first process of the pid namespace where there is one: it waits for orphans,
and when the program ends it ends, and the kernel kills what is left. The forwarder carries bytes and decides nothing:
what may pass is decided outside, at the other end of the socket.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys

_SUBREAPER = 36
_PATIENCE_S = 5.0

TYPE_CHECKING = False  # as in `typing`, which takes longer to import than everything here
if TYPE_CHECKING:
    import socket
    from typing import Any, NoReturn

NOT_STARTED = "toprope inside"
"""How the one line begins that is written when the program was not even tried; the status is 125."""


def main(arguments: list[str]) -> NoReturn:
    status: int | None = None
    if len(arguments) == 2:
        orders, status = _read_orders(int(arguments[0])), int(arguments[1])
        _owner_lives(status)
    else:
        orders = json.loads(os.environ.pop(arguments[0]))
        orders["env"] = dict(os.environ, **orders["env"])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    keep = bool(orders.get("keep"))
    if keep:
        _adopt()
    try:
        listener = _listen(orders["forward"])
    except OSError as error:
        sys.stderr.write(f"{NOT_STARTED}: port {orders['forward']['port']} inside: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(125)
    program = os.fork()
    if program == 0:
        if listener is not None:
            listener.close()
        if status is not None:
            os.set_inheritable(status, False)
            os.write(status, b"1")
        _become(orders)
    _let_go_of_output()
    if status is not None:
        import threading

        threading.Thread(target=_end_with_the_starter, args=(status, keep), daemon=True).start()
    if listener is not None:
        import threading

        threading.Thread(target=_serve, args=(listener, orders["forward"]["socket"]), daemon=True).start()
    while True:
        try:
            pid, how = os.wait()
        except ChildProcessError:  # the one who ends everything waited for the last: it ends this too
            signal.pause()
            continue
        if pid == program:
            if keep:
                _end_family()
            os._exit(128 + os.WTERMSIG(how) if os.WIFSIGNALED(how) else os.WEXITSTATUS(how))


def _become(orders: dict[str, Any]) -> NoReturn:
    for name, value in orders["limits"].items():
        hard = resource.getrlimit(getattr(resource, name))[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(getattr(resource, name), (value, value))
    # Python ignores these; a program expects them as a shell leaves them.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    argv = orders["argv"]
    try:
        os.chdir(orders["cwd"])
        os.execvpe(argv[0], argv, orders["env"])
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(126 if isinstance(error, PermissionError) else 127)


def _let_go_of_output() -> None:
    nowhere = os.open("/dev/null", os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(nowhere, handle)


def _listen(forward: dict[str, Any] | None) -> socket.socket | None:
    if forward is None:
        return None
    import socket

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", forward["port"]))
    listener.listen(64)
    return listener


def _serve(listener: socket.socket, path: str) -> NoReturn:
    import threading

    while True:
        client, _ = listener.accept()
        threading.Thread(target=_carry, args=(client, path), daemon=True).start()


def _read_orders(handle: int) -> dict[str, Any]:
    os.lseek(handle, 0, os.SEEK_SET)
    with os.fdopen(handle, "rb") as file:
        orders: dict[str, Any] = json.load(file)
    return orders


def _adopt() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _end_family() -> None:
    """Kill every descendant, those that are made meanwhile included: each is stopped before any is killed. Wait for
    each, so that no zombie is left to whoever is process 1 of this host."""
    import time

    end = time.monotonic() + _PATIENCE_S
    while (family := _family()) and time.monotonic() < end:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in family:
                try:
                    os.kill(pid, number)
                except OSError:
                    pass  # it ended meanwhile
        _wait_for_the_dead()
    while _wait_for_the_dead() and time.monotonic() < end:
        time.sleep(0.001)


def _wait_for_the_dead() -> bool:
    """Whether there are children still."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _family() -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _end_with_the_starter(status: int, keep: bool) -> NoReturn:
    poll = select.poll()
    poll.register(status, select.POLLIN | select.POLLHUP)
    poll.poll()
    if keep:
        _end_family()
    os._exit(128 + signal.SIGKILL)


def _owner_lives(status: int) -> None:
    poll = select.poll()
    poll.register(status, select.POLLIN | select.POLLHUP)
    if poll.poll(0):  # nothing is ever sent to us here: it was closed
        os._exit(1)


def _carry(client: socket.socket, path: str) -> None:
    import socket
    import threading

    model = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        model.connect(path)
    except OSError:
        client.close()
        return
    back = threading.Thread(target=_pump, args=(model, client), daemon=True)
    back.start()
    _pump(client, model)
    back.join()
    client.close()
    model.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    import socket

    try:
        while True:
            data = source.recv(65536)
            if not data:
                break
            sink.sendall(data)
    except OSError:
        pass
    for end, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
        try:
            end.shutdown(how)
        except OSError:
            pass


if __name__ == "__main__":
    main(sys.argv[1:])
