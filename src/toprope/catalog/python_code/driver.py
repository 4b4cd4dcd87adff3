"""Runs inside the sandbox: calls the function that a model wrote, once for each test, and says what it returned.

    python3 -I -S driver.py < orders

Orders are JSON: `code`, `function`, `calls` (lists of arguments), `cpu_s`, `wall_s`, `memory_bytes`, `result_bytes`.
Each line that is printed is JSON: first `{"ready": true}`, then for each call its `index` and one of `value`, `raised`
and `failed`. Each call is a process of its own that begins with the code, so that none sees what another
left behind. Nothing here knows an expected answer: whatever the code does in here, all that it can win is to say a
value, and whether the value is right is found out elsewhere. Nothing but the standard library; nothing of ours.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_SUBREAPER = 36
_SWEEP_S = 2.0
_GRACE_MS = 50


def main() -> None:
    orders = json.load(sys.stdin)
    said = os.dup(1)
    nowhere = os.open("/dev/null", os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(nowhere, handle)
    try:
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # what a call leaves behind becomes ours, and is ended
    except OSError:
        pass
    _say(said, {"ready": True})
    for index, arguments in enumerate(orders["calls"]):
        _say(said, {"index": index, **_one(orders, arguments, said)})


def _say(said: int, line: dict[str, Any]) -> None:
    text = json.dumps(line).encode() + b"\n"
    while text:
        text = text[os.write(said, text) :]


def _one(orders: dict[str, Any], arguments: list[Any], said: int) -> dict[str, Any]:
    ours, theirs = os.pipe()
    try:
        child = os.fork()
    except OSError:
        os.close(ours)
        os.close(theirs)
        return {"failed": "no process could be started any more"}
    if child == 0:
        os.close(ours)
        os.close(said)
        _call(orders, arguments, theirs)
    os.close(theirs)
    data, why = _hear(ours, orders["wall_s"], orders["result_bytes"])
    os.close(ours)
    status = _end(child)
    if why is not None:
        return {"failed": why}
    try:
        outcome = json.loads(data)
    except (ValueError, RecursionError):
        outcome = None
    if isinstance(outcome, dict) and set(outcome) in ({"value"}, {"raised"}, {"failed"}):
        return outcome
    if status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        return {"failed": "it used too much time or memory"}
    return {"failed": "it ended without returning"}


def _call(orders: dict[str, Any], arguments: list[Any], results: int) -> NoReturn:
    outcome: dict[str, Any]
    text = b""
    try:
        os.setsid()
        seconds = max(1, int(orders["cpu_s"]))
        _limit(resource.RLIMIT_CPU, seconds)
        _limit(resource.RLIMIT_AS, orders["memory_bytes"])
        namespace: dict[str, Any] = {"__name__": "answer", "__builtins__": __builtins__}
        exec(compile(orders["code"], "answer.py", "exec"), namespace)
        function = namespace.get(orders["function"])
        if callable(function):
            outcome = {"value": _plain(function(*arguments), 0)}
        else:
            outcome = {"failed": f"there is no function {orders['function']}"}
        text = json.dumps(outcome).encode()
    except MemoryError:
        text = b'{"failed": "it used too much time or memory"}'
    except BaseException as error:  # SystemExit too: what the code raises is its answer to this call
        text = json.dumps({"raised": type(error).__name__[:100]}).encode()
    while text:
        text = text[os.write(results, text) :]
    os._exit(0)


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _plain(value: Any, depth: int) -> Any:
    """`value` as JSON has it, tuples as lists. Exact types only: a subclass may lie about itself."""
    if depth > 50:
        raise TypeError("nested too deep")
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return [_plain(each, depth + 1) for each in value]
    if kind is dict and all(type(key) is str for key in value):
        return {key: _plain(each, depth + 1) for key, each in value.items()}
    raise TypeError(f"a {kind.__name__} cannot be compared")


def _hear(pipe: int, wall_s: float, most: int) -> tuple[bytes, str | None]:
    ends = time.monotonic() + wall_s
    data = bytearray()
    while True:
        ready = select.select([pipe], [], [], max(0.0, ends - time.monotonic()))[0]
        if not ready:
            return b"", "it used too much time or memory"
        chunk = os.read(pipe, 65536)
        if not chunk:
            return bytes(data), None
        data += chunk
        if len(data) > most:
            return b"", "it returned too much"


def _end(child: int) -> int | None:
    """Kill the call's process and everything that it left behind; its status if it was waited for."""
    status: int | None = None
    for _ in range(_GRACE_MS):  # one that ended by itself has a status of its own, which a kill would hide
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
        time.sleep(0.001)
    ends = time.monotonic() + _SWEEP_S
    while time.monotonic() < ends:
        for pid in _descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while True:
                pid, how = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    time.sleep(0.001)
                    break
                if pid == child:
                    status = how
        except ChildProcessError:
            break
    return status


def _descendants() -> list[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
    mine, family = os.getpid(), []
    for pid in parents:
        above, steps = pid, 0
        while above in parents and above != mine and steps < 1000:
            above, steps = parents[above], steps + 1
        if above == mine and pid != mine:
            family.append(pid)
    return family


if __name__ == "__main__":
    main()
