"""Content encodings of bodies, with the limit counted on what comes out, so that a small bomb stays small.

gzip and deflate always; zstd where a library for it is installed (Python 3.14's own, or the extra `zstd`).
"""

from __future__ import annotations

import importlib
import zlib
from typing import Any, Protocol

from toprope.errors.tree import BadRequest, TooLarge

_CHUNK = 1 << 20
_ZSTD_FEED = 256
"""Bytes fed at a time: four of them may expand to 128 KiB, so a bomb gets 8 MiB past the limit at most."""


class _Inflater(Protocol):
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


def too_large(what: str, limit: int) -> TooLarge:
    """The 413 that names the limit."""
    return TooLarge(f"{what} is larger than the limit of {limit} bytes (max_body_bytes); decompressed size counts")


def decode_content(data: bytes, encoding: str, *, limit: int, what: str) -> bytes:
    """`data` with its Content-Encoding undone, at most `limit` bytes.

    Raises `TooLarge` naming the limit, `BadRequest` (415) for an unknown encoding and (400) for damaged data.
    """
    for name in reversed([part.strip().lower() for part in encoding.split(",")]):
        if name in ("", "identity"):
            continue
        if name in ("gzip", "x-gzip"):
            data = _inflate(data, 31, limit, what)
        elif name == "deflate":
            # RFC 9110 means zlib's wrapper; some senders leave it out.
            data = _inflate(data, 15 if data[:1] in (b"\x78", b"\x58", b"\x38", b"\x18") else -15, limit, what)
        elif name == "zstd" and (library := _zstd()) is not None:
            data = _unzstd(library, data, limit, what)
        else:
            accepted = "gzip, deflate, zstd, identity"
            if _zstd() is None:
                accepted = "gzip, deflate, identity, and zstd where toprope is installed with the extra: toprope[zstd]"
            raise BadRequest(f"{what} has content-encoding {name!r}; accepted are {accepted}", status=415)
    return data


def _inflate(data: bytes, wbits: int, limit: int, what: str) -> bytes:
    out: list[bytes] = []
    size = 0
    try:
        while data:
            stream = zlib.decompressobj(wbits)
            while not stream.eof:
                piece = stream.decompress(data, _CHUNK)
                data = stream.unconsumed_tail
                size += len(piece)
                if size > limit:
                    raise too_large(what, limit)
                out.append(piece)
                if not piece and not data and not stream.eof:
                    raise BadRequest(f"{what} ends inside its compressed data", status=400)
            data = stream.unused_data if wbits == 31 else b""  # gzip files may follow each other
    except zlib.error as error:
        raise BadRequest(f"{what} does not decompress: {error}", status=400) from None
    return b"".join(out)


def _zstd() -> Any | None:
    for name in ("compression.zstd", "zstandard"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def _unzstd(library: Any, data: bytes, limit: int, what: str) -> bytes:
    """Frame by frame: a reader over the whole would take data that were cut short for whole ones."""
    out: list[bytes] = []
    size = at = 0
    try:
        while at < len(data):
            stream = _zstd_frame(library)
            while not stream.eof:
                if at >= len(data):
                    raise BadRequest(f"{what} ends inside its compressed data", status=400)
                piece = stream.decompress(data[at : at + _ZSTD_FEED])
                at += min(_ZSTD_FEED, len(data) - at)
                size += len(piece)
                if size > limit:
                    raise too_large(what, limit)
                out.append(piece)
            at -= len(stream.unused_data)  # frames may follow each other
    except (BadRequest, TooLarge):
        raise
    except Exception as error:  # each library has its own error class: all of them mean damaged data
        raise BadRequest(f"{what} does not decompress: {error}", status=400) from None
    return b"".join(out)


def _zstd_frame(library: Any) -> Any:
    decompressor = library.ZstdDecompressor()
    return decompressor if hasattr(decompressor, "eof") else decompressor.decompressobj()
