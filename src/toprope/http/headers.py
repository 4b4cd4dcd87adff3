"""Header fields as they stand on the wire: lower-case names, bytes, repeats kept, looked up without case.

Values beyond ASCII are UTF-8, as the HTTP client underneath writes them; what is no UTF-8 is read as latin-1.

Left to others: what a header means.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar, overload

T = TypeVar("T")
RawHeaders = list[tuple[bytes, bytes]]

_BAD_NAME = re.compile(rb"[^!#$%&'*+\-.^_`|~0-9A-Za-z]")
_BAD_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


def whole_number(text: str) -> int | None:
    """The number that a header or a query gives in up to 18 ASCII digits; None for everything else."""
    return int(text) if len(text) <= 18 and text.isascii() and text.isdigit() else None


class Headers(Mapping[str, str]):
    """A read-only view of raw header pairs. `get` ignores case and gives the first value of a repeated name."""

    __slots__ = ("raw",)

    def __init__(self, raw: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self.raw: tuple[tuple[bytes, bytes], ...] = tuple(raw)

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Headers:
        """Headers from a plain mapping. Raises `ValueError` for a name or value that HTTP cannot carry."""
        if isinstance(fields, Headers):
            return fields
        return cls([raw_field(name, value) for name, value in fields.items()]) if fields else EMPTY

    def __getitem__(self, name: str) -> str:
        wanted = name.lower().encode("utf-8")
        for key, value in self.raw:
            if key == wanted:
                return _text(value)
        raise KeyError(name)

    @overload
    def get(self, name: str, /) -> str | None: ...

    @overload
    def get(self, name: str, /, default: str | T) -> str | T: ...

    def get(self, name: str, /, default: str | T | None = None) -> str | T | None:
        """As of any mapping; most questions are for headers that are not there, which here costs no exception."""
        wanted = name.lower().encode("utf-8")
        for key, value in self.raw:
            if key == wanted:
                return _text(value)
        return default

    def get_all(self, name: str) -> list[str]:
        """Every value sent under `name`, in order."""
        wanted = name.lower().encode("utf-8")
        return [_text(value) for key, value in self.raw if key == wanted]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and any(key == name.lower().encode("utf-8") for key, _ in self.raw)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(key.decode("latin-1") for key, _ in self.raw))

    def __len__(self) -> int:
        return len({key for key, _ in self.raw})

    def __bool__(self) -> bool:
        return bool(self.raw)

    def __hash__(self) -> int:
        return hash(frozenset(key for key, _ in self.raw))

    def __repr__(self) -> str:
        return f"Headers({', '.join(self)})"  # names only: values may be secrets


def _text(value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("latin-1")


EMPTY = Headers()


def raw_field(name: str, value: str) -> tuple[bytes, bytes]:
    """One pair for the wire. Raises `ValueError` for line breaks, control characters and lone surrogates."""
    try:
        key, data = name.lower().encode("ascii"), value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"header {name!r}: names are ASCII and values UTF-8") from None
    if not key or _BAD_NAME.search(key) or _BAD_VALUE.search(data):
        raise ValueError(f"header {name!r}: a name is a token, a value has no line breaks or control characters")
    return key, data
