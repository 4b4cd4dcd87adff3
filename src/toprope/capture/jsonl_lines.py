r"""The lines of the jsonl store: one record to a line and back, and what can be read of a damaged file. Pure.

    {"chain_hash":..., ..., "weight_versions":[...],"~blake2b":"<32 hex>"}\n

A token line is a JSON object with sorted keys: NeMo Gym's fields under its names, ours beside them where they are not
at their default. `~blake2b` (it sorts last) is the hash of the object without it, so that no flipped byte passes;
lines without it are somebody else's and taken as they are, but for the digest of their ids. `prompt_skip` ids of the
prompt, the parent's prompt + generation, were left out by the store and not by who put the entry.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import numpy as np

from toprope.canonical.digest import digest_tokens
from toprope.canonical.json import NotJson, dumps, loads
from toprope.tokens.entry import BadRecord, TokenEntry, as_log_probs

FORM = 1
_FORM = "toprope_form"
_SEAL = re.compile(rb',"~blake2b":"([0-9a-f]{32})"\}\Z')
_SEAL_KEY = "~blake2b"
_ALWAYS = frozenset(
    {"schema_version", "rollout_id", "model_call_id", "model", "prompt_token_ids", "generation_token_ids"}
    | {"generation_log_probs", "routed_experts", "output_items", "token_item_index", "created_at", "response_id"}
    | {"parent_call_id", "parent_decision", "parent_resolution_reason", "cum_len", "prompt_is_delta"}
)
_OWN = frozenset({"digest", "prompt_skip", "parent_resolution", "extra", _FORM, _SEAL_KEY})
_DEFAULTS: dict[str, Any] = {
    f.name: f.default_factory() if f.default_factory is not MISSING else f.default
    for f in fields(TokenEntry)
}  # fmt: skip
_RESERVED = _OWN | _DEFAULTS.keys()


class Damaged(ValueError):
    """A line that does not read, or not as what was written; the message says why."""


# -- sealed objects -----------------------------------------------------------------------------------------------


def seal(values: Mapping[str, Any]) -> bytes:
    """One line (without its newline) of these values. Raises `NotJson` for what JSON cannot carry."""
    body = dumps(dict(sorted({**values, _FORM: FORM}.items())))  # what is nested keeps its order
    digest = hashlib.blake2b(body, digest_size=16).hexdigest()
    return body[:-1] + b',"' + _SEAL_KEY.encode() + b'":"' + digest.encode() + b'"}'


def unseal(line: bytes, *, foreign: bool = False) -> dict[str, Any]:
    """The values of a sealed line. Raises `Damaged`. With `foreign` an object that never had a seal passes too."""
    try:
        values = loads(line)
    except NotJson as error:
        raise Damaged(f"it is no JSON ({error})") from error
    if not isinstance(values, dict):
        raise Damaged("it is no object")
    found = _SEAL.search(line)
    if found is not None:
        body = line[: found.start()] + b"}"
        if hashlib.blake2b(body, digest_size=16).hexdigest().encode() != found[1]:
            raise Damaged("it does not match its hash")
        del values[_SEAL_KEY]
        if values.pop(_FORM, None) != FORM:
            raise Damaged("it is of a form that this version does not read")
        return values
    if not foreign or _FORM in values:
        raise Damaged("its hash is missing")
    return values


def text_line(text: str) -> bytes:
    """`text` as one line: itself where it is plain, else as a JSON string."""
    plain = text.isprintable() and text == text.strip() and text and not text.startswith('"')
    return (text.encode("utf-8") if plain else json.dumps(text).encode("ascii")) + b"\n"


def text_lines(data: bytes) -> list[str]:
    """The texts of whole lines; what follows the last newline was never acknowledged and is left out."""
    texts = []
    for line in data.split(b"\n")[:-1]:
        text = line.strip().decode("utf-8", "backslashreplace")
        if text.startswith('"'):
            try:
                value = loads(text)
            except NotJson:
                value = None
            text = value if isinstance(value, str) else text
        texts.append(text)
    return texts


# -- token lines --------------------------------------------------------------------------------------------------


def encode_entry(entry: TokenEntry, *, skip: int = 0, digest: str | None = None) -> bytes:
    """The line of `entry`, without the first `skip` ids of its prompt. `digest` is NeMo Gym's, of the whole sequence.

    Raises `BadRecord`: `bad_logprob` for NaN, `write_failed` for a field that JSON cannot carry.
    """
    values: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        value = getattr(entry, name)
        if name in _ALWAYS or name == "parent_decision" or (value is not default and not _equal(value, default)):
            values[name] = value
    extra = dict(values.pop("extra", {}))
    clashing = {name: extra.pop(name) for name in list(extra) if name in _RESERVED}
    if clashing:
        values["extra"] = clashing
    values |= extra
    values["parent_resolution"] = values.pop("parent_decision")
    values["digest"] = digest
    values["prompt_token_ids"] = entry.prompt_token_ids[skip:].tolist()
    values["generation_token_ids"] = entry.generation_token_ids.tolist()
    values["generation_log_probs"] = as_log_probs(np.array(entry.generation_log_probs)).tolist()
    if skip:
        values["prompt_skip"] = skip
        values["prompt_is_delta"] = True
    if entry.grammar_forced is not None:
        values["grammar_forced"] = entry.grammar_forced.tolist()
    if isinstance(entry.routed_experts, np.ndarray):
        values["routed_experts"] = {"npy": _npy(entry.routed_experts)}
    if entry.weight_versions:
        values["weight_versions"] = [[span.start, span.end, span.version] for span in entry.weight_versions]
    for name in ("output_items", "item_digests", "sampling"):
        if name in values:
            values[name] = dict(values[name]) if name == "sampling" else list(values[name])
    try:
        return seal(values)
    except NotJson as error:
        raise BadRecord("write_failed", f"call {entry.model_call_id}: {error}") from error


@dataclass(frozen=True, slots=True)
class Line:
    """A token line taken apart. `skip` parent ids precede `values["prompt_token_ids"]` for the store's own reasons."""

    values: Mapping[str, Any]
    sealed: bool

    @property
    def call_id(self) -> str:
        return str(self.values["model_call_id"])

    @property
    def parent(self) -> str | None:
        parent = self.values.get("parent_call_id")
        return parent if isinstance(parent, str) else None

    @property
    def decision(self) -> str:
        """`root`, `resolved` or `unresolved`. A line that does not say is resolved if it names a parent, whose ids are
        checked; with neither, what stands in its prompt is nobody's to vouch for."""
        told = self.values.get("parent_resolution")
        if told is None:
            return "resolved" if self.parent is not None else "unresolved"
        return told if told in ("root", "resolved") else "unresolved"

    @property
    def skip(self) -> int:
        return int(self.values.get("prompt_skip") or 0) if self.sealed else 0

    @property
    def is_delta(self) -> bool:
        """Whether the prompt lacks the parent's ids, left out by the store or by who put it."""
        return bool(self.values.get("prompt_is_delta"))

    @property
    def put_as_delta(self) -> bool:
        return self.is_delta and not self.skip

    def entry(self) -> TokenEntry:
        """The entry with the prompt that stands in the line. Raises `BadRecord` as `TokenEntry` does."""
        ours = _OWN if self.sealed else ("digest", "parent_resolution")
        dump = {name: value for name, value in self.values.items() if name not in ours}
        dump["parent_decision"] = self.decision
        experts = dump.get("routed_experts")
        if self.sealed and isinstance(experts, dict) and experts.keys() == {"npy"}:
            dump["routed_experts"] = np.load(io.BytesIO(base64.b64decode(experts["npy"])), allow_pickle=False)
        if not self.sealed:
            dump = {"model": "", "created_at": 0.0, **dump}
        try:
            entry = TokenEntry.from_dump(dump)
        except BadRecord:
            raise
        except (TypeError, ValueError, KeyError) as error:
            raise BadRecord("write_failed", f"call {self.call_id}: its record does not read ({error})") from error
        if self.sealed and "extra" in self.values:
            object.__setattr__(entry, "extra", {**entry.extra, **self.values["extra"]})
        return entry

    def check_digest(self, prompt: np.ndarray, generation: np.ndarray) -> None:
        """Raise `BadRecord` if a foreign line's digest is not that of its whole sequence."""
        told = self.values.get("digest")
        if self.sealed or not isinstance(told, str):
            return
        if digest_tokens(np.concatenate([prompt, generation])) != told:
            raise BadRecord("write_failed", f"call {self.call_id}: its ids do not match their digest")


def decode_line(data: bytes) -> Line:
    """Raises `Damaged` for bytes that are no record."""
    values = unseal(data, foreign=True)
    if not _is_record(values):
        raise Damaged("it is no record of a call")
    return Line(values, _SEAL.search(data) is not None)


# -- whole files --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """One record in a file: where its bytes are, their SHA-256 (NeMo Gym's index has it), and what it says."""

    offset: int
    size: int
    digest: str
    line: Line


@dataclass(slots=True)
class Scan:
    """What stands in (a part of) a token file.

    `damage` names every place that should be a record and is none, but not a torn end, which was never acknowledged.
    `end` is the first byte after what was understood; `torn` says that bytes follow it, `unended` that the last record
    lacks its newline.
    """

    found: list[Found] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    lines: int = 0
    end: int = 0
    torn: bool = False
    unended: bool = False


def scan(data: bytes, *, offset: int = 0, lines: int = 0) -> Scan:
    """The records in `data`, which stands at byte `offset` of its file, after `lines` lines.

    Survives a torn last line, a whole last object without its newline, objects glued together on one line, and a torn
    one with others behind it.
    """
    result = Scan(lines=lines, end=offset)
    at = 0
    while at < len(data):
        newline = data.find(b"\n", at)
        stop = len(data) if newline < 0 else newline
        result.lines += 1
        end = _scan_line(data, at, stop, offset, last=newline < 0, into=result)
        if newline >= 0:
            result.end = offset + newline + 1
        elif end > at:
            result.end, result.unended = offset + end, True
            result.torn = bool(data[end:stop].strip())
        else:
            result.torn = True
        at = stop + 1
    return result


def _scan_line(data: bytes, at: int, stop: int, offset: int, *, last: bool, into: Scan) -> int:
    """Put what one line holds into `into`; the first byte after its last record (`at` if it has none)."""
    line = data[at:stop]
    if not line.strip():
        return at
    try:
        into.found.append(_found(line, offset + at))
        return stop
    except Damaged as error:
        why = str(error)
    end = at
    for start, size in _objects(line):
        try:
            found = _found(line[start : start + size], offset + at + start)
        except Damaged:
            continue
        if data[end : at + start].strip():
            into.damage.append(f"write_failed:line {into.lines} of the token file holds a torn record")
        into.found.append(found)
        end = at + start + size
    if not last and data[end:stop].strip():
        into.damage.append(f"write_failed:line {into.lines} of the token file is damaged: {why}")
    return end


def _found(data: bytes, offset: int) -> Found:
    return Found(offset, len(data), hashlib.sha256(data.strip()).hexdigest(), decode_line(data))


def _objects(line: bytes) -> Iterator[tuple[int, int]]:
    """Where whole objects that look like records stand in a line that is none: (first byte, bytes)."""
    decoder = json.JSONDecoder()
    at = line.find(b'{"')
    while at >= 0:
        text = line[at:].decode("utf-8", "surrogateescape")
        try:
            value, size = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            value, size = None, 0
        length = len(text[:size].encode("utf-8", "surrogateescape"))
        if _is_record(value):
            yield at, length
            at = line.find(b'{"', at + length)
        else:
            at = line.find(b'{"', at + 2)


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("model_call_id"), str) and "rollout_id" in value


def _equal(value: Any, default: Any) -> bool:
    return type(value) is type(default) and not isinstance(value, np.ndarray) and bool(value == default)


def _npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode("ascii")
