"""`<key>.tokens.state.json`: what is true of a rollout as a whole. Pure.

NeMo Gym's fields (`frozen`, `retired`, `incomplete`, `snapshot_id`, `version`, `entry_digests`, `indexed_size`), ours
beside them under `toprope`, and whatever else stood there, untouched. It tells of the token file up to `indexed_size`;
each record behind that moves the version by one more.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toprope.canonical.json import NotJson, canonical, loads
from toprope.capture.jsonl_lines import Damaged, seal, unseal
from toprope.tokens.snapshot import Receipt

_THEIRS = ("frozen", "retired", "incomplete", "snapshot_id", "version")


@dataclass(frozen=True, slots=True)
class State:
    """What the file says.

    `aborts` are those that came after freeze; `superseding` names the key to which everything here is moving,
    `sweeping` says that everything here is going: whoever opens the key next finishes either;
    `capture_id` tells this capture from a later one under the same key; `calls`, `entries` and `open_intents` are what
    a tombstone remembers of what is gone.
    """

    key: str = ""
    frozen: bool = False
    retired: bool = False
    incomplete: bool = False
    snapshot_id: str | None = None
    version: int = 0
    entry_digests: Mapping[str, str] = field(default_factory=dict)
    indexed_size: int = 0
    capture_id: str = ""
    created: float | None = None
    retired_at: float | None = None
    abandoned: bool = False
    superseding: str | None = None
    sweeping: bool = False
    reasons: tuple[str, ...] = ()
    aborts: Mapping[str, str] = field(default_factory=dict)
    calls: int = 0
    entries: int = 0
    open_intents: int = 0
    refused: tuple[str, ...] = ()
    rest: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The whole content of the file."""
        ours = {
            "key": self.key,
            "capture_id": self.capture_id,
            "created": self.created,
            "retired_at": self.retired_at,
            "abandoned": self.abandoned,
            "superseding": self.superseding,
            "sweeping": self.sweeping,
            "reasons": list(self.reasons),
            "aborts": dict(self.aborts),
            "calls": self.calls,
            "entries": self.entries,
            "open_intents": self.open_intents,
        }
        theirs = {
            "frozen": self.frozen,
            "retired": self.retired,
            "incomplete": self.incomplete,
            "snapshot_id": self.snapshot_id or "",
            "version": self.version,
            "entry_digests": dict(self.entry_digests),
            "indexed_size": self.indexed_size,
        }
        return canonical({**self.rest, **theirs, "toprope": ours}) + b"\n"


def new_state(key: str, created: float) -> State:
    """The state of a key under which nothing happened yet."""
    return State(key=key, created=created, capture_id=secrets.token_hex(8))


def decode_state(data: bytes) -> State | None:
    """None for bytes that are no state: empty, torn, or with a field that cannot be."""
    try:
        values = loads(data)
    except NotJson:
        return None
    if not isinstance(values, dict) or not all(name in values for name in _THEIRS):
        return None
    ours = values.pop("toprope", {})
    try:
        return _decode(values, ours)
    except (TypeError, ValueError, AttributeError, KeyError):
        return None


def _decode(values: dict[str, Any], ours: dict[str, Any]) -> State:
    index, size = values.pop("entry_digests", None), values.pop("indexed_size", None)
    refusals = values.get("refusals") or []
    state = State(
        key=str(ours.get("key", "")),
        frozen=_flag(values.pop("frozen")),
        retired=_flag(values.pop("retired")),
        incomplete=_flag(values.pop("incomplete")),
        snapshot_id=str(values.pop("snapshot_id") or "") or None,
        version=_count(values.pop("version")),
        entry_digests=dict(index) if index is not None else {},
        indexed_size=_count(size) if size is not None else 0,
        capture_id=str(ours.get("capture_id", "")),
        created=_moment(ours.get("created")),
        retired_at=_moment(ours.get("retired_at")),
        abandoned=_flag(ours.get("abandoned", False)),
        superseding=ours.get("superseding"),
        sweeping=_flag(ours.get("sweeping", False)),
        reasons=tuple(str(reason) for reason in ours.get("reasons", ())),
        aborts={str(call): str(reason) for call, reason in ours.get("aborts", {}).items()},
        calls=_count(ours.get("calls", 0)),
        entries=_count(ours.get("entries", 0)),
        open_intents=_count(ours.get("open_intents", 0)),
        refused=tuple(str(each["model_call_id"]) for each in refusals),
        rest=values,
    )
    if (state.frozen or state.retired) and state.snapshot_id is None and not state.retired:
        raise ValueError("frozen without a snapshot id")
    return state


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is no flag")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value


def _moment(value: Any) -> float | None:
    return None if value is None else float(value)


@dataclass(frozen=True, slots=True)
class Tombstone:
    """`<key>.tokens.receipts`: the pair that retired a rollout, when (epoch seconds), and a receipt a call."""

    snapshot_id: str
    version: int
    at: float
    receipts: tuple[Receipt, ...]

    def encode(self) -> bytes:
        """The whole content of the file, sealed."""
        told = [
            [
                each.model_call_id,
                each.parent_call_id,
                each.prompt_len,
                each.gen_len,
                each.chain_hash,
                each.logprobs_hash,
            ]
            for each in self.receipts
        ]
        pair = {"snapshot_id": self.snapshot_id, "version": self.version}
        return seal({**pair, "retired_at": self.at, "receipts": told}) + b"\n"

    def state(self, key: str) -> State:
        """The state of the rollout, where its own file is lost and nothing but this is left."""
        count = len(self.receipts)
        return State(
            key=key,
            frozen=True,
            retired=True,
            snapshot_id=self.snapshot_id,
            version=self.version,
            retired_at=self.at,
            created=self.at,
            abandoned="~" in key,
            calls=count,
            entries=count,
        )


def decode_tombstone(data: bytes) -> Tombstone | None:
    """None for bytes that are no receipts."""
    try:
        values = unseal(data.rstrip(b"\n"))
        receipts = tuple(Receipt(*each) for each in values["receipts"])
        return Tombstone(values["snapshot_id"], values["version"], values["retired_at"], receipts)
    except (Damaged, KeyError, TypeError):
        return None
