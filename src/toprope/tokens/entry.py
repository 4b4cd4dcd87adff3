"""`TokenEntry`: the record of one model call, checked at construction.

Pure values. How a record is packed on disk is a store's affair, whose parent it is `lineage`'s, what becomes of a
rollout's records `lifecycle`'s. Imports numpy and nothing heavier, so that an inference worker can import it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION = 1
ABSENT_LOGPROB = -9999.0
"""What vLLM sends where it has no logprob; never a value to store."""

_ROUNDING = 1e-4
"""How far beyond 0 a logprob may be: engines that sum in half precision go that far."""

ParentDecision = Literal["root", "resolved", "unresolved"]


class BadRecord(ValueError):
    """Evidence that must not become a record. `reason` is one of the snapshot's typed incompleteness reasons."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Generated positions [start, end) that were sampled under `version` of the weights."""

    start: int
    end: int
    version: str


@dataclass(frozen=True, slots=True, eq=False)
class TokenEntry:
    """One model call as the policy made it.

    Shapes: `prompt_token_ids` (P,) uint32, the whole prompt, or only what follows the parent's prompt + generation
    when `prompt_is_delta`; `generation_token_ids` (G,) uint32; `generation_log_probs` (G,) float64 in nats, bit-exact
    as the engine gave them; `grammar_forced` (G,) bool or None. `cum_len` is the length of whole prompt + generation,
    `chain_hash` the rolling hash over it (`tokens.hashing`). `output_items` are Responses items without token arrays;
    `token_item_index` is the last one, which carries the arrays in projections, or None when there is none.

    Raises `BadRecord` for: lengths of ids and logprobs that differ, a logprob that is NaN, infinite, positive beyond
    rounding or the engine's placeholder, an id outside [0, 2**32), an empty whole prompt, a `token_item_index` outside
    `output_items`, an item other than that one that carries ids of its own, ids without logprobs or the reverse, a call
    id or key that is no Unicode, a time that is no number, a newer `schema_version`.
    """

    rollout_id: str
    model_call_id: str
    model: str
    created_at: float
    prompt_token_ids: NDArray[np.uint32]
    generation_token_ids: NDArray[np.uint32]
    generation_log_probs: NDArray[np.float64]
    output_items: tuple[dict[str, Any], ...] = ()
    token_item_index: int | None = None
    logprobs_mode: str = "raw"
    grammar_forced: NDArray[np.bool_] | None = None
    routed_experts: Any = None
    response_id: str | None = None
    request_digest: str | None = None
    item_digests: tuple[str, ...] = ()
    parent_decision: ParentDecision = "root"
    parent_call_id: str | None = None
    parent_resolution_reason: str | None = None
    prompt_is_delta: bool = False
    cum_len: int | None = None
    chain_hash: str | None = None
    finish_reason: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    weight_versions: tuple[WeightSpan, ...] = ()
    client_gone: bool = False
    media: bool = False
    dialect: str | None = None
    schema_version: int = SCHEMA_VERSION
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "prompt_token_ids", as_ids(self.prompt_token_ids, "prompt_token_ids"))
        put(self, "generation_token_ids", as_ids(self.generation_token_ids, "generation_token_ids"))
        put(self, "generation_log_probs", as_log_probs(self.generation_log_probs))
        if self.grammar_forced is not None:
            put(self, "grammar_forced", _frozen(np.asarray(self.grammar_forced, dtype=np.bool_)))
        put(self, "output_items", tuple(self.output_items))
        self._check()

    def _check(self) -> None:
        if not 0 < self.schema_version <= SCHEMA_VERSION:
            raise BadRecord("write_failed", f"schema_version {self.schema_version}: this reads up to {SCHEMA_VERSION}")
        generated = len(self.generation_token_ids)
        if generated != len(self.generation_log_probs):
            raise BadRecord(
                "length_mismatch", f"{generated} generated ids but {len(self.generation_log_probs)} logprobs"
            )
        if self.grammar_forced is not None and len(self.grammar_forced) != generated:
            raise BadRecord("length_mismatch", f"{generated} generated ids but {len(self.grammar_forced)} forced flags")
        if not self.prompt_is_delta and len(self.prompt_token_ids) == 0:
            raise BadRecord("no_token_ids", "the prompt has no token ids")
        if self.prompt_is_delta and self.parent_call_id is None:
            raise BadRecord("no_token_ids", "a delta prompt names no parent")
        index = self.token_item_index
        if index is not None and not 0 <= index < len(self.output_items):
            raise BadRecord(
                "length_mismatch", f"token_item_index {index} outside {len(self.output_items)} output items"
            )
        _check_carriers(self.output_items, index)
        if not math.isfinite(self.created_at):
            raise BadRecord("write_failed", f"created_at is {self.created_at}")
        for name, value in (("rollout_id", self.rollout_id), ("model_call_id", self.model_call_id)):
            if not is_text(value):
                raise BadRecord("write_failed", f"{name} is {_shown(value)}, which is no Unicode text")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenEntry):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    __hash__ = None  # type: ignore[assignment]

    def model_dump(self) -> dict[str, Any]:
        """The record as plain JSON values (lists of ints and floats), fields by name; the inverse of `from_dump`."""
        out: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, np.ndarray):
                value = value.tolist()
            elif f.name == "weight_versions":
                value = [[s.start, s.end, s.version] for s in value]
            elif isinstance(value, tuple):
                value = list(value)
            elif isinstance(value, Mapping):
                value = dict(value)
            out[f.name] = value
        extra = out.pop("extra")
        return {**extra, **out}

    @classmethod
    def from_dump(cls, dump: Mapping[str, Any]) -> TokenEntry:
        """Read `model_dump`'s form. Unknown keys are kept in `extra`; raises `BadRecord` as construction does.

        A dump that does not say whose continuation the call is has an `unresolved` parent: nobody vouches for what
        stands in its prompt.
        """
        known = {f.name for f in fields(cls)} - {"extra"}
        values = {k: v for k, v in dump.items() if k in known}
        version = values.get("schema_version", SCHEMA_VERSION)
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise BadRecord("write_failed", f"schema_version {version!r}: this reads up to {SCHEMA_VERSION}")
        missing = {"prompt_token_ids", "generation_token_ids", "generation_log_probs"} - values.keys()
        if missing:
            raise BadRecord("no_token_ids", f"half a bundle: {', '.join(sorted(missing))} missing")
        _check_types(values)
        values["weight_versions"] = tuple(WeightSpan(*span) for span in values.get("weight_versions") or ())
        for name in ("output_items", "item_digests"):
            values[name] = tuple(values.get(name) or ())
        for name in ("sampling", "client_gone", "media", "prompt_is_delta", "logprobs_mode"):
            if values.get(name, "") is None:
                del values[name]
        values["parent_decision"] = values.get("parent_decision") or "unresolved"
        return cls(**values, extra={k: v for k, v in dump.items() if k not in known})


_CARRIED = frozenset({"prompt_token_ids", "generation_token_ids", "generation_log_probs"})


def _check_carriers(items: Sequence[Mapping[str, Any]], index: int | None) -> None:
    """Raise `BadRecord` if ids stand in items in a way that leaves open which generation the call's own is.

    One item alone may carry them, the last, with all three lists. Lists that are all empty are a client's defaults.
    """
    carriers = [at for at, item in enumerate(items) if not _CARRIED.isdisjoint(item) and _carries(item)]
    if len(carriers) > 1:
        raise BadRecord("length_mismatch", f"{len(carriers)} output items carry token ids ({carriers}); one may")
    for at in carriers:
        if index is not None and at != index:
            raise BadRecord("length_mismatch", f"output_items[{at}] carries token ids, token_item_index is {index}")
        missing = sorted(name for name in _CARRIED if items[at].get(name) is None)
        if missing:
            raise BadRecord("no_token_ids", f"half a bundle in output_items[{at}]: {', '.join(missing)} missing")


def _carries(item: Mapping[str, Any]) -> bool:
    return any(item.get(name) is not None and len(item[name]) > 0 for name in _CARRIED)


def is_text(value: str) -> bool:
    """Whether a string is Unicode that can be written: half a surrogate pair cannot."""
    return value.isascii() or not any("\ud800" <= each <= "\udfff" for each in value)


_TYPES: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "rollout_id": (str, "a string"),
    "model_call_id": (str, "a string"),
    "model": (str, "a string"),
    "created_at": ((int, float, np.number), "a number"),
    "output_items": ((list, tuple), "a list of objects"),
    "token_item_index": ((int, np.integer), "an integer"),
    "logprobs_mode": (str, "a string"),
    "response_id": (str, "a string"),
    "request_digest": (str, "a string"),
    "item_digests": ((list, tuple), "a list of strings"),
    "parent_call_id": (str, "a string"),
    "parent_resolution_reason": (str, "a string"),
    "prompt_is_delta": (bool, "true or false"),
    "cum_len": ((int, np.integer), "an integer"),
    "chain_hash": (str, "a string"),
    "finish_reason": (str, "a string"),
    "sampling": (Mapping, "an object"),
    "weight_versions": ((list, tuple), "a list of [start, end, version]"),
    "client_gone": (bool, "true or false"),
    "media": (bool, "true or false"),
    "dialect": (str, "a string"),
}
"""What a dumped field holds where it is not null."""


def _check_types(values: Mapping[str, Any]) -> None:
    """Raise `BadRecord("write_failed")` naming the first field of a dump that is not of its type."""
    for name in ("rollout_id", "model_call_id", "model", "created_at"):
        if values.get(name) is None:
            raise BadRecord("write_failed", f"{name} is missing")
    for name, (kind, accepted) in _TYPES.items():
        value = values.get(name)
        if value is not None and not (isinstance(value, kind) and (kind is bool or type(value) is not bool)):
            raise BadRecord("write_failed", f"{name} is {_shown(value)}, expected {accepted}")
    forced = values.get("grammar_forced")
    if forced is not None and not (
        isinstance(forced, list | tuple | np.ndarray) and {bool, np.bool_}.issuperset(map(type, forced))
    ):
        raise BadRecord("write_failed", f"grammar_forced is {_shown(forced)}, expected a list of true and false")
    decision = values.get("parent_decision") or "unresolved"
    if decision not in ("root", "resolved", "unresolved"):
        raise BadRecord("write_failed", f"parent_decision is {_shown(decision)}, expected root, resolved or unresolved")
    for name, part, accepted in (("output_items", Mapping, "an object"), ("item_digests", str, "a string")):
        for index, value in enumerate(values.get(name) or ()):
            if not isinstance(value, part):
                raise BadRecord("write_failed", f"{name}[{index}] is {_shown(value)}, expected {accepted}")
    for index, span in enumerate(values.get("weight_versions") or ()):
        if not isinstance(span, list | tuple) or [type(each) for each in span] != [int, int, str]:
            raise BadRecord(
                "write_failed", f"weight_versions[{index}] is {_shown(span)}, expected [start, end, version]"
            )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:56] + " ..."


def as_ids(values: Sequence[int] | NDArray[Any], name: str) -> NDArray[np.uint32]:
    """`values` as a read-only (N,) uint32 array. Raises `BadRecord` naming the first value outside [0, 2**32)."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:  # lists of several lengths
        raise BadRecord("no_token_ids", f"{name}: expected a flat list of integers ({error})") from error
    if array.dtype == np.uint32 and array.ndim == 1:
        return _frozen(array)
    if array.ndim == 1 and array.size == 0:
        return _frozen(np.zeros(0, dtype=np.uint32))
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array.min() <= 1 and _odd_kinds(values)):
        raise BadRecord("no_token_ids", f"{name}: expected a flat list of integers")
    bad = (array < 0) | (array >= 2**32)
    if bad.any():
        where = int(np.argmax(bad))
        raise BadRecord("no_token_ids", f"{name}[{where}] is {array[where]}, outside [0, 2**32)")
    return _frozen(array.astype(np.uint32))


def as_log_probs(values: Sequence[float] | NDArray[Any]) -> NDArray[np.float64]:
    """`values` as a read-only (N,) float64 array. Raises `BadRecord` naming the first that is no logprob."""
    if odd := _odd_kinds(values):
        raise BadRecord("bad_logprob", f"generation_log_probs: expected a flat list of numbers, not of {odd}")
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRecord("bad_logprob", f"generation_log_probs: {error}") from error
    if array.ndim != 1:
        raise BadRecord("bad_logprob", "generation_log_probs: expected a flat list of numbers")
    if array.size == 0 or (np.minimum.reduce(array) > ABSENT_LOGPROB and np.maximum.reduce(array) <= _ROUNDING):
        return _frozen(array)  # the common case, and a third of the time; a NaN compares false
    bad = ~np.isfinite(array) | (array == ABSENT_LOGPROB) | (array > _ROUNDING)
    if bad.any():
        where = int(np.argmax(bad))
        what = "non-finite logprob" if not math.isfinite(array[where]) else f"logprob {array[where]}"
        raise BadRecord("bad_logprob", f"{what} at {where}")
    return _frozen(array)


def _odd_kinds(values: Any) -> str:
    """The kinds of values that numpy takes for numbers and no engine does: truth values and texts."""
    if isinstance(values, np.ndarray) and values.dtype != np.object_:
        kinds = {values.dtype.type}
    elif isinstance(values, Iterable):
        kinds = set(map(type, values))
    else:
        return ""
    return ", ".join(sorted(kind.__name__ for kind in kinds if issubclass(kind, str | bytes | bool | np.bool_)))


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    if array.flags.writeable:
        array = array.copy()
        array.flags.writeable = False
    return array


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return type(left) is type(right) and bool(np.array_equal(left, right))
    return bool(left == right)
