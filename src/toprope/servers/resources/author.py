"""The author's code, run so that it can cost its own call and nothing else: contained, and its results read there too.

What an author returns may be code again: a generator, a number with its own `__float__`, a text with its own `encode`.
So it is iterated, compared and written in a worker, by a reader that gives back plain values: what ends a process, or
never ends, ends or keeps a worker and not the server. Left to others: what is plain about an error
(`servers.authored`), the threads (`tools.workers`), verdicts (`verdict`).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from itertools import islice
from typing import Any

from toprope.errors.body import said_by, shorten
from toprope.errors.kinds import Kind
from toprope.errors.tree import TopropeError
from toprope.http.jsonbody import encode
from toprope.protocol.sessions import is_handle
from toprope.servers.authored import plain_error
from toprope.tools.workers import WorkerThreads, contained

HANDLE_NEEDED = "a printable text of 1 to 512 characters is needed"
_EXCERPT = 100
_NO_CODE = frozenset({str, int, float, bool, type(None)})

Reader = Callable[[Any], Any]
"""Makes plain values of what an author returned. Raises a `TopropeError` that says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class _Came:
    """What came of the author's code: a value, an error of ours made plain, or something to be awaited."""

    value: Any = None
    error: TopropeError | None = None
    later: Awaitable[Any] | None = None


def _as_it_is(found: Any) -> Any:
    return found


async def run_author(
    workers: WorkerThreads,
    server: str,
    what: str,
    kind: Kind,
    function: Callable[..., Any],
    *args: Any,
    given: Callable[[], dict[str, Any]] = dict,
    read: Reader = _as_it_is,
) -> Any:
    """What `read` makes of the result of the author's `function(*args, **given())`.

    Without `read` it is the result itself, not looked at. Raises the author's own `TopropeError`, made plain, and
    everything else as `kind`, retryable, with its type and text; `what` names the call, `server` whose it is.
    """

    def in_a_thread() -> _Came:
        try:
            found = function(*args, **given())
            return _Came(later=found) if inspect.isawaitable(found) else _Came(read(found))
        except TopropeError as error:
            return _Came(error=plain_error(error, server))

    async def on_the_loop(later: Awaitable[Any] | None = None) -> _Came:
        try:
            return _Came(await (function(*args, **given()) if later is None else later))
        except TopropeError as error:
            return _Came(error=plain_error(error, server))

    def reading(found: Any) -> _Came:
        try:
            return _Came(read(found))
        except TopropeError as error:
            return _Came(error=plain_error(error, server))

    try:
        unread = inspect.iscoroutinefunction(function)
        came = await (contained(on_the_loop()) if unread else workers.call(in_a_thread))
        if came.later is not None:
            came, unread = await contained(on_the_loop(came.later)), True
        if unread and came.error is None and read is not _as_it_is:
            came = reading(came.value) if type(came.value) in _NO_CODE else await workers.call(reading, came.value)
    except Exception as error:  # the author's own: told to the caller, who decides whether to try again
        message = f"{server}: {what}: {await workers.call(said_by, error)}"  # its text is the author's code too
        raise TopropeError(message, kind=kind, status=500, retryable=True) from error
    if came.error is not None:
        raise came.error
    return came.value


# -- readers -----------------------------------------------------------------------------------------------------


def names_reader(server: str, tools: Collection[str]) -> Reader:
    """Reads what `session_tools` returned: names out of `tools`, as a frozenset. At most as many are looked at."""

    def wrong(why: str) -> TopropeError:
        return TopropeError(f"{server}: session_tools {why}", kind=Kind.SEED_FAILED, status=500, retryable=False)

    def read(found: Any) -> frozenset[str]:
        try:
            given = iter((found,) if isinstance(found, str) else found)
        except TypeError:
            raise wrong(f"gave {shown(found)}; a list of names of tools is needed") from None
        named = []
        for name in islice(given, len(tools) + 1):
            if not isinstance(name, str):
                raise wrong(f"names {shown(name)}; each name must be a text")
            named.append(str.__str__(name))  # without what a class of the author's overrides
            if named[-1] not in tools:
                raise wrong(f"names {shown(named[-1])}, which is no tool of this environment")
        if len(named) > len(tools):
            raise wrong(f"gives more names than this environment has tools ({len(tools)})")
        return frozenset(named)

    return read


def handle_reader(server: str) -> Reader:
    """Reads what `env_session_id` returned: None, or a handle that people can look for."""

    def read(found: Any) -> str | None:
        if found is None:
            return None
        text = str.__str__(found) if isinstance(found, str) else None
        if not is_handle(text):
            size = "" if text is None else f" of {len(text)} characters"
            raise TopropeError(
                f"{server}: env_session_id gave a {type(found).__name__}{size}; {HANDLE_NEEDED}, or None",
                kind=Kind.SEED_FAILED,
                status=500,
                retryable=False,
            )
        return text

    return read


def json_reader(server: str, what: str, kind: Kind, *, text: bool = False) -> Reader:
    """Reads anything: its JSON as bytes; with `text` a string as it is. Raises `kind` for what JSON cannot carry."""

    def read(found: Any) -> bytes | str:
        if text and isinstance(found, str):
            return str.__str__(found)
        try:
            return encode(found)
        except BaseException as error:  # no kind of JSON, a cycle, NaN, sys.exit() in its code: the author's
            raise TopropeError(
                f"{server}: {what}: it returned a {type(found).__name__} that JSON cannot carry: {said_by(error)}",
                kind=kind,
                status=500,
                retryable=True,
            ) from error

    return read


def shown(value: Any) -> str:
    """`value` for a message: its `repr`, cut; where that fails, its type. Runs the author's `__repr__`."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 1024:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to write the largest in decimal
    try:
        return shorten(repr(value), _EXCERPT)
    except BaseException:  # an author's own `__repr__`, sys.exit() in it too
        return f"a {type(value).__name__}"
