"""Errors that authors raise, made plain: what leaves here can be compared, written and sent without their code.

An author may raise an error of ours with anything in it (`ToolError(5)`, a kind of its own, a status that is none), or
a subclass whose attributes are code. Left to others: containing that code while it is read (`tools.workers.contained`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from toprope.errors.body import said_by
from toprope.errors.kinds import Delivery, Kind, Stage, known_kind
from toprope.errors.tree import ToolError, TopropeError

_PLAIN: dict[str, tuple[type, ...]] = {
    "message": (str,),
    "kind": (str, Kind),
    "status": (int,),
    "retryable": (bool,),
    "stage": (type(None), str, Stage),
    "delivery": (type(None), Delivery),
    "upstream_status": (type(None), int),
}


def plain_error(error: TopropeError, server: str) -> TopropeError:
    """`error` itself where all that it says is plain, else an error that says the same as far as it can be said.

    An author's own kind carries the name of its `server`. Runs the author's code where there is some: contain it.
    """
    said: dict[str, Any] = {
        name: value for name, kinds in _PLAIN.items() if type(value := getattr(error, name, None)) in kinds
    }
    if not 400 <= said.get("status", 0) < 600:
        said.pop("status", None)
    headers = error.headers
    if len(said) == len(_PLAIN) and type(headers) is dict and not headers:
        error.kind = known_kind(said["kind"], server)
        return error
    made = ToolError("") if isinstance(error, ToolError) else TopropeError("")
    for name, value in said.items():
        setattr(made, name, value)
    made.message = said.get("message") or text_of(error.message)
    made.kind = known_kind(said.get("kind") or text_of(error.kind), server)
    made.headers = {text_of(name): text_of(value) for name, value in headers.items()}
    made.args, made.__cause__ = (made.message,), error
    return made


@contextmanager
def plain_errors(server: str) -> Iterator[None]:
    """What is raised inside that is an error of ours comes out as `plain_error`. Runs the author's code: contain it."""
    try:
        yield
    except TopropeError as error:
        raise plain_error(error, server)  # noqa: B904  # it is that error, or has it as its cause


def text_of(value: Any) -> str:
    """`value` as an exact `str`: a text without what its class overrides, an error with its type, else `str(value)`."""
    if isinstance(value, str):
        return str.__str__(value)
    return said_by(value) if isinstance(value, BaseException) else str.__str__(str(value))
