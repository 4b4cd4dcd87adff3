"""Loosely typed bodies: read one field at a time, refused with the field's name and what it accepts; written again.

Clients send explicit nulls everywhere, so a null is always the same as an absent field. Left to others: which fields
a format has (`chat`, `responses`, ...), and what they mean (`toprope.dialects`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from toprope.canonical.json import NotJson, dumps, loads
from toprope.errors.tree import BadRequest


def read_object(data: bytes) -> dict[str, Any]:
    """Parse a request body into the one object that is recorded and sent on.

    The fast parser takes the common case; what it refuses (lone surrogates) takes the strict standard one. Raises
    `BadRequest` (400) for what is no JSON object, so also for NaN and for an empty body.
    """
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        try:
            value = loads(data)
        except NotJson as error:
            raise BadRequest(f"the request body is not JSON: {error}", status=400) from error
    if not isinstance(value, dict):
        raise BadRequest(f"the request body is a JSON {_kind(value)}; an object is expected", status=400)
    return value


def write_object(value: Mapping[str, Any]) -> bytes:
    """Compact JSON of values that were read as JSON, so that no NaN needs to be looked for (70 us in a 16 KB body).

    Raises `BadRequest` (400) for nesting that could be read and cannot be written from where this is called.
    """
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError, RecursionError):
        pass
    try:
        return dumps(value)  # lone surrogates
    except NotJson as error:
        raise BadRequest(f"the request cannot be sent on as JSON: {error}", status=400) from error


def refuse(field: str, value: object, accepted: str) -> BadRequest:
    """The error for a field that holds `value` (shown shortened) where `accepted` is expected."""
    try:
        shown = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists in lists in lists
        shown = f"a {_kind(value)} that is too long to show"
    shown = shown if len(shown) <= 80 else shown[:76] + " ..."
    return BadRequest(f"{field}: {shown} is not accepted; expected {accepted}", status=400)


def text_field(body: Mapping[str, Any], name: str) -> str | None:
    """A string or None."""
    value = body.get(name)
    if value is None or isinstance(value, str):
        return value
    raise refuse(name, value, "a string")


def bool_field(body: Mapping[str, Any], name: str) -> bool | None:
    """True, False or None."""
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise refuse(name, value, "true or false")


def int_field(body: Mapping[str, Any], name: str) -> int | None:
    """An integer (a float without a fraction is one) or None; a bool is refused."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise refuse(name, value, "an integer")
    return value


def number_field(body: Mapping[str, Any], name: str) -> float | None:
    """A number as float, or None; a bool is refused, and an integer that no float can be."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse(name, value, "a number")
    try:
        return float(value)
    except OverflowError:
        raise refuse(name, value, "a number below 1.8e308") from None


def list_field(body: Mapping[str, Any], name: str) -> list[Any]:
    """A list; null and absent are the empty list."""
    value = body.get(name)
    if value is None:
        return []
    if isinstance(value, list):
        return value
    raise refuse(name, value, "a list")


def objects_field(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects; null and absent are the empty list."""
    values = list_field(body, name)
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise refuse(f"{name}[{index}]", value, "an object")
    return values


def stop_field(body: Mapping[str, Any], name: str = "stop") -> tuple[str, ...]:
    """Stop strings: null, one string or a list of them."""
    value = body.get(name)
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return tuple(value)
    raise refuse(name, value, "a string or a list of strings")


def choice_field(body: Mapping[str, Any], name: str) -> str | Mapping[str, Any] | None:
    """A tool choice: null, a word or an object."""
    value = body.get(name)
    if value is None or isinstance(value, str | dict):
        return value
    raise refuse(name, value, "a string or an object")


def _kind(value: object) -> str:
    names = {list: "list", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)
