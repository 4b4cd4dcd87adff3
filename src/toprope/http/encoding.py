"""Content encodings of bodies, with the limit counted on what comes out, so that a small bomb stays small.

gzip and deflate always; zstd where a library for it is installed.
"""

from __future__ import annotations

import importlib
import zlib
from typing import Any, Protocol

from toprope.errors.tree import BadRequest, TooLarge

_CHUNK = 1 << 20


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
            accepted = "gzip, deflate, identity" + (", zstd" if _zstd() is not None else "")
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
    """Both libraries give a reader that stops at a size; one more byte than the limit tells that there was more."""
    import io

    try:
        if hasattr(library, "ZstdFile"):
            reader: Any = library.ZstdFile(io.BytesIO(data))
        else:
            reader = library.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True)
        with reader:
            out: bytes = reader.read(limit + 1)
    except Exception as error:  # each library has its own error class: all of them mean damaged data
        raise BadRequest(f"{what} does not decompress: {error}", status=400) from None
    if len(out) > limit:
        raise too_large(what, limit)
    return out
