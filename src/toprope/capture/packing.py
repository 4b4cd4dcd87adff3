r"""How one `TokenEntry` stands in bytes. Pure; what a store keeps beside the bytes is the store's affair.

    +------+-------+------+----------+-------+--------+------------+---------+-------------+--------+---------+------+
    | form | flags | zero | prompt n | gen n | skip n | prompt ids | gen ids | logprobs    | forced | experts | meta |
    | u8   | u8    | u16  | u32      | u32   | u32    | n x u32    | n x u32 | n x f32/f64 | n bits | npy     | JSON |
    +------+-------+------+----------+-------+--------+------------+---------+-------------+--------+---------+------+

Little-endian throughout. `skip` ids of the whole prompt, the parent's prompt + generation, were left out here because
the parent's record has them (0: the prompt stands as it was put). Logprobs are f32 where that loses nothing for any
value of the call, else f64: what was put comes back bit for bit. `experts` (u64 size, then NumPy's own format) stands
there when `routed_experts` is an array. `meta` is a JSON array of the other fields in the order of `_META`, cut after
the last that is not at its default.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from toprope.canonical.json import NotJson, dumps, loads
from toprope.tokens.entry import BadRecord, TokenEntry, WeightSpan

FORM = 1
_HEAD = struct.Struct("<BBHIII")
_SIZE = struct.Struct("<Q")
_F32, _FORCED, _EXPERTS = 1, 2, 4

_META = (
    "rollout_id",
    "model_call_id",
    "model",
    "created_at",
    "output_items",
    "token_item_index",
    "parent_decision",
    "parent_call_id",
    "parent_resolution_reason",
    "cum_len",
    "chain_hash",
    "finish_reason",
    "response_id",
    "request_digest",
    "item_digests",
    "sampling",
    "dialect",
    "logprobs_mode",
    "weight_versions",
    "client_gone",
    "media",
    "prompt_is_delta",
    "routed_experts",
    "extra",
    "schema_version",
)
_BY_NAME = {f.name: f.default for f in fields(TokenEntry)} | {"sampling": {}, "extra": {}}
_DEFAULTS: tuple[tuple[str, Any], ...] = tuple((name, _BY_NAME[name]) for name in _META)
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed bytes taken apart: `skip` parent ids precede `prompt` (N,), the ids that stand here."""

    skip: int
    prompt: NDArray[np.uint32]
    generation: NDArray[np.uint32]
    log_probs: NDArray[np.float64]
    grammar_forced: NDArray[np.bool_] | None
    meta: dict[str, Any]

    def entry(self, prompt: NDArray[np.uint32] | None = None, *, client_gone: bool | None = None) -> TokenEntry:
        """The entry as it was put, given its whole prompt where ids were skipped. Raises `BadRecord`."""
        meta = self.meta if client_gone is None else {**self.meta, "client_gone": client_gone}
        return TokenEntry(
            prompt_token_ids=self.prompt if prompt is None else prompt,
            generation_token_ids=self.generation,
            generation_log_probs=self.log_probs,
            grammar_forced=self.grammar_forced,
            **meta,
        )


def pack(entry: TokenEntry, *, skip: int = 0) -> bytes:
    """The bytes of `entry` without the first `skip` ids of its prompt.

    Raises `BadRecord`: `write_failed` for a field that JSON cannot carry, naming it; `bad_logprob` for NaN.
    """
    log_probs = entry.generation_log_probs
    if not np.isfinite(log_probs).all():  # no TokenEntry is made like this; a store is the last place to notice
        raise BadRecord("bad_logprob", f"call {entry.model_call_id}: a logprob is not finite")
    with np.errstate(over="ignore"):  # what overflows is not equal afterwards, and stays f64
        narrow = log_probs.astype("<f4")
    flags = 0
    if np.array_equal(narrow.astype(np.float64).view(np.uint64), np.ascontiguousarray(log_probs).view(np.uint64)):
        flags, log_probs = _F32, narrow
    parts = [
        entry.prompt_token_ids[skip:].astype("<u4", copy=False).tobytes(),
        entry.generation_token_ids.astype("<u4", copy=False).tobytes(),
        log_probs.astype(f"<f{log_probs.dtype.itemsize}", copy=False).tobytes(),
    ]
    if entry.grammar_forced is not None:
        flags |= _FORCED
        parts.append(np.packbits(entry.grammar_forced).tobytes())
    experts = entry.routed_experts
    if isinstance(experts, np.ndarray):
        flags |= _EXPERTS
        file = io.BytesIO()
        np.save(file, experts, allow_pickle=False)
        parts += [_SIZE.pack(file.tell()), file.getvalue()]
        experts = None
    parts.append(_pack_meta(entry, experts))
    prompt_n = len(entry.prompt_token_ids) - skip
    return _HEAD.pack(FORM, flags, 0, prompt_n, len(entry.generation_token_ids), skip) + b"".join(parts)


def unpack(data: bytes) -> Packed:
    """The inverse of `pack`. Raises `BadRecord("write_failed")` for bytes that are none."""
    try:
        return _unpack(memoryview(data))
    except (struct.error, ValueError, KeyError, IndexError, TypeError, NotJson) as error:
        raise BadRecord("write_failed", f"a stored record does not read: {error}") from error


def _pack_meta(entry: TokenEntry, experts: Any) -> bytes:
    values: list[Any] = []
    used = 0
    try:
        for name, default in _DEFAULTS:
            value = experts if name == "routed_experts" else getattr(entry, name)
            values.append(value)
            if value is not default and value != default:
                used = len(values)
                wrap = _WRAPPED.get(name)
                if wrap is not None:
                    values[-1] = wrap(value)
        return _encoder.encode(values[:used])
    except (NotJson, UnicodeEncodeError, TypeError) as error:
        raise BadRecord("write_failed", f"call {entry.model_call_id}: {name}: {error}") from error


def _free_json(value: Any) -> msgspec.Raw:
    """JSON that somebody else composed, refused where JSON cannot carry it.

    The encoder writes NaN as null, so a text without null needs no second look; the rest takes the careful road.
    """
    plain = value if type(value) in (tuple, list) else dict(value)
    try:
        text = _encoder.encode(plain)
        if b"null" not in text:
            return msgspec.Raw(text)
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError, RecursionError):
        pass
    return msgspec.Raw(dumps(list(plain) if type(plain) is tuple else plain))


_WRAPPED: Mapping[str, Callable[[Any], Any]] = {
    "output_items": _free_json,
    "sampling": _free_json,
    "extra": _free_json,
    "routed_experts": lambda value: msgspec.Raw(dumps(value)),
    "created_at": lambda value: msgspec.Raw(dumps(value)),
    "weight_versions": lambda spans: [[span.start, span.end, span.version] for span in spans],
}


def _unpack(view: memoryview) -> Packed:
    form, flags, _, prompt_n, gen_n, skip = _HEAD.unpack_from(view)
    if form != FORM:
        raise ValueError(f"form {form}, this reads form {FORM}")
    at = _HEAD.size
    prompt = np.frombuffer(view, "<u4", prompt_n, at)
    at += 4 * prompt_n
    generation = np.frombuffer(view, "<u4", gen_n, at)
    at += 4 * gen_n
    log_probs = np.frombuffer(view, "<f4" if flags & _F32 else "<f8", gen_n, at)
    at += log_probs.nbytes
    forced = None
    if flags & _FORCED:
        size = (gen_n + 7) // 8
        forced = np.unpackbits(np.frombuffer(view, np.uint8, size, at), count=gen_n).astype(np.bool_)
        at += size
    experts = None
    if flags & _EXPERTS:
        size = _SIZE.unpack_from(view, at)[0]
        at += _SIZE.size
        experts = np.load(io.BytesIO(view[at : at + size]), allow_pickle=False)
        at += size
    meta = _unpack_meta(bytes(view[at:]))
    if experts is not None:
        meta["routed_experts"] = experts
    log_probs = log_probs.astype(np.float64, copy=False)
    log_probs.flags.writeable = False
    return Packed(skip, prompt, generation, log_probs, forced, meta)


def _unpack_meta(data: bytes) -> dict[str, Any]:
    meta = dict(zip(_META, loads(data), strict=False))
    for name in ("output_items", "item_digests"):
        meta[name] = tuple(meta.get(name, ()))
    meta["weight_versions"] = tuple(WeightSpan(*span) for span in meta.get("weight_versions", ()))
    return meta
