"""The verbs of custody, with NeMo Gym's names and signatures, and what is true when each returns.

What we add is optional and keyword-only (`intent`, `reason`); optional verbs have protocols of their own, so that a
sink and a source with exactly NeMo Gym's signatures serve a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from toprope.tokens.entry import TokenEntry
from toprope.tokens.snapshot import Receipt, TokenCaptureSnapshot


@dataclass(frozen=True, slots=True)
class Intent:
    """What is written down of a call before it goes upstream."""

    stream: bool = False
    request_digest: str = ""
    retry_count: int = 0
    writer_epoch: str = ""


@dataclass(frozen=True, slots=True)
class PutAck:
    """What `put` of our own stores returns: the key's version after the write."""

    version: int


class TokenSink(Protocol):
    """Where the recorder writes."""

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Once it returns the intent survives a power cut. Twice, or after the call's put: no-op."""

    async def put(self, entry: TokenEntry) -> object:
        """Once it returns the entry survives a power cut and is visible to every process. Same bytes again: no-op."""

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Once it returns the loss is durable; the rollout will be masked."""

    async def close(self) -> None:
        """Once it returns nothing is pending and no handle is open."""


class TokenSource(Protocol):
    """Where delivery reads."""

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Once it returns the set of entries is fixed; later writes are refused. Repeated: same id and entries."""

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """True once the payload is gone and a tombstone is durable; False, and nothing changed, for a stale pair."""

    async def close(self) -> None:
        """Once it returns no handle is open."""


@runtime_checkable
class AbortingSink(Protocol):
    """Optional: a call that ended without anything sampled that an agent could keep."""

    async def abort_call(self, rollout_id: str, model_call_id: str, *, reason: str) -> None:
        """Once it returns the intent is closed and does not count as lost."""


@runtime_checkable
class SupersedingSource(Protocol):
    """Optional: make a used key new."""

    async def supersede(self, rollout_id: str) -> str | None:
        """Once it returns what stood there is kept as `<key>~<n>`, whose name is returned; None if nothing stood."""


@runtime_checkable
class CaptureReader(Protocol):
    """Optional: reads without freezing, for lineage and retries."""

    async def open_entries(self, rollout_id: str, since: int = 0) -> tuple[TokenEntry, ...]:
        """The acknowledged entries after the first `since`, in order of acknowledgement, with whole prompts."""


@runtime_checkable
class ReceiptSource(Protocol):
    """Optional: the receipts that a tombstone keeps."""

    async def receipts(self, rollout_id: str) -> tuple[Receipt, ...] | None:
        """The receipts of a retired rollout in call order; None if it is not retired."""
