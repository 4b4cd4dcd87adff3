"""JSON in and out, strictly: no bare NaN, integers of any size, lone surrogates kept as escapes.

msgspec does the common case; what it cannot carry exactly (integers beyond 64 bits, lone surrogates) takes the
standard library's slow road instead of being changed silently.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

_decoder = msgspec.json.Decoder()
_encoder = msgspec.json.Encoder()
_sorted_encoder = msgspec.json.Encoder(order="sorted")
_packer = msgspec.msgpack.Encoder()
_NON_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")  # a MessagePack float whose exponent is all ones


MAX_DIGITS = 4300
"""Digits of an integer that is read. The time that one takes grows with their square, so that Python stops here too."""


class NotJson(ValueError):
    """A text that is no JSON, or a value that JSON cannot carry; the message says where."""


def loads(data: bytes | str) -> Any:
    """Parse strict JSON. Integers keep all digits (at most 4,300); what floats cannot hold, NaN too, is `NotJson`."""
    try:
        return _decoder.decode(data)
    except (ValueError, RecursionError):  # refused: the standard library may take it (lone surrogates), or says why
        pass
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole)
    except NotJson:
        raise
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from error


def key_written_twice(data: bytes) -> str | None:
    """The first key that stands twice in one object of a text that `loads` takes: readers disagree about its value.

    Raises `NotJson` for nesting that only the fast parser follows.
    """
    found: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> None:
        if len(dict(items)) < len(items):
            names = [name for name, _ in items]
            found.append(next(name for index, name in enumerate(names) if name in names[:index]))

    try:
        json.loads(data, object_pairs_hook=pairs, parse_int=_nothing, parse_float=_nothing)
    except RecursionError as error:
        raise NotJson(str(error)) from error
    return found[0] if found else None


def dumps(value: Any) -> bytes:
    """Compact JSON. Raises `NotJson` naming the path of a value that cannot be stored (NaN, infinities, bytes, ...)."""
    return _dumps(value, _encoder, sort=False)


def canonical(value: Any) -> bytes:
    """Compact JSON with sorted keys: equal values give equal bytes. Raises `NotJson` as `dumps` does."""
    return _dumps(value, _sorted_encoder, sort=True)


def _dumps(value: Any, encoder: msgspec.json.Encoder, *, sort: bool) -> bytes:
    try:
        data = encoder.encode(value)
        if b"null" not in data:  # where a NaN would stand: the encoder writes one as null
            return data
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError, RecursionError):
        data = b""  # the standard library may carry it: big integers, lone surrogates
    if not surely_finite(value):
        check_finite(value)
    if data:
        return data
    try:
        text = json.dumps(value, separators=(",", ":"), sort_keys=sort, allow_nan=False, ensure_ascii=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise NotJson(str(error)) from error
    return text.encode("ascii")


def surely_finite(value: Any) -> bool:
    """Whether plain values and msgspec structs hold neither NaN nor infinity; False where only a walk can tell.

    MessagePack writes every float as 0xcb and its IEEE 754 bytes, so that one pass in C and a search do for the walk
    (a tenth of its time). Other bytes may look like such a float, never the reverse.
    """
    try:
        return _NON_FINITE.search(_packer.encode(value)) is None
    except (OverflowError, TypeError, ValueError, RecursionError):  # big integers, lone surrogates, foreign kinds
        return False


def check_finite(value: Any, path: str = "$") -> None:
    """Raise `NotJson` with the path of the first NaN or infinity in `value`."""
    stack = [(value, path)]
    while stack:
        item, where = stack.pop()
        if type(item) is float:
            if item != item or item in (float("inf"), float("-inf")):
                raise NotJson(f"{where} is {item}, which JSON cannot carry")
        elif isinstance(item, dict):
            stack.extend((inner, f"{where}.{key}") for key, inner in item.items())
        elif isinstance(item, list | tuple) and set(map(type, item)) != {int}:
            # (A list of token ids holds no floats, which one pass in C shows.)
            stack.extend((inner, f"{where}[{index}]") for index, inner in enumerate(item))


def _nothing(text: str) -> None:
    """A number that nobody reads."""


def _refuse_constant(name: str) -> Any:
    raise NotJson(f"{name} is not JSON")


def _whole(text: str) -> int:
    digits = len(text) - text.startswith("-")
    if digits > MAX_DIGITS:
        raise NotJson(f"an integer has {digits} digits; {MAX_DIGITS} are read")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise NotJson(f"number {text} is beyond the range of a float")
    return number
