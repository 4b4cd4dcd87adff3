"""JSON bodies: strict, quick on the common road, exact on the rare one.

msgspec reads and writes; what it cannot carry (lone surrogates) goes through `toprope.canonical.json`. A NaN would be
written as null by msgspec, so it is looked for wherever a null stands in what was written.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec

from toprope.canonical.json import NotJson, dumps, loads, surely_finite

T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder()


def encode(value: Any) -> bytes:
    """Compact JSON of plain values and msgspec structs. Raises `NotJson` naming the path of a NaN or infinity."""
    try:
        data = _encoder.encode(value)
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError, RecursionError):
        return dumps(msgspec.to_builtins(value))
    if b"null" in data and not surely_finite(value):
        _refuse_non_finite(value)
    return data


def decode_any(data: bytes) -> Any:
    """Plain values. Integers keep all digits. Raises `NotJson`."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return loads(data)


def decode_as(data: bytes, wanted: type[T]) -> T:
    """`data` as a `wanted`, strictly typed.

    Raises `NotJson` for what is no JSON, and `msgspec.ValidationError` naming the field and what is accepted
    otherwise; a `ValueError` from a struct's own check comes as the latter too.
    """
    try:
        decoder: msgspec.json.Decoder[T] = _typed_decoder(cast(Any, wanted))
        return decoder.decode(data)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, RecursionError):
        return msgspec.convert(loads(data), wanted)


@lru_cache(maxsize=256)
def _typed_decoder(wanted: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(wanted)


def _refuse_non_finite(value: Any) -> None:
    stack: list[tuple[Any, str]] = [(value, "$")]
    while stack:
        item, where = stack.pop()
        if isinstance(item, float):
            if not math.isfinite(item):
                raise NotJson(f"{where} is {item}, which JSON cannot carry")
        elif isinstance(item, dict):
            stack.extend((inner, f"{where}.{key}") for key, inner in item.items() if not _plain(inner))
        elif isinstance(item, list | tuple | set | frozenset):
            if set(map(type, item)) - _PLAIN_TYPES and not _finite_floats(item):
                stack.extend((inner, f"{where}[{index}]") for index, inner in enumerate(item))
        elif isinstance(item, msgspec.Struct):
            stack.extend((getattr(item, name), f"{where}.{name}") for name in item.__struct_fields__)


_PLAIN_TYPES = {int, str, bool, type(None), bytes}


def _plain(value: Any) -> bool:
    return type(value) in _PLAIN_TYPES


def _finite_floats(items: Any) -> bool:
    """Whether `items` are all floats with a finite sum: logprob lists, settled by one pass in C."""
    return set(map(type, items)) == {float} and math.isfinite(sum(items))
