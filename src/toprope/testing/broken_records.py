"""Transports that do not give back what was put: ids, texts, replies without tokens, and what is told while open.

Like those of `broken_transports`, which also lists these: one of our stores with one fault. Never use them for
anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from toprope.capture.memory_store import MemoryStore
from toprope.capture.protocols import CaptureInfo, JournalledCall
from toprope.capture.sqlite_store import SqliteStore
from toprope.tokens.entry import TokenEntry
from toprope.tokens.snapshot import TokenCaptureSnapshot


class _Changing(MemoryStore):
    """Gives every record back through `changed`."""

    def changed(self, entry: TokenEntry) -> TokenEntry:
        raise AssertionError("each broken transport has its own")

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        snapshot = await super().freeze(rollout_id)
        return replace(snapshot, entries=tuple(self.changed(entry) for entry in snapshot.entries))


class CutsGeneratedIds(_Changing):
    """Keeps generated ids in 16 bits, as if no vocabulary were larger."""

    def changed(self, entry: TokenEntry) -> TokenEntry:
        return replace(entry, generation_token_ids=entry.generation_token_ids.astype("u2").astype("u4"))


class CutsPromptIds(_Changing):
    """Keeps the ids of prompts in 16 bits."""

    def changed(self, entry: TokenEntry) -> TokenEntry:
        return replace(entry, prompt_token_ids=entry.prompt_token_ids.astype("u2").astype("u4"))


class SaturatesGeneratedIds(_Changing):
    """Keeps generated ids as signed integers of 32 bits; larger ones become the largest."""

    def changed(self, entry: TokenEntry) -> TokenEntry:
        return replace(entry, generation_token_ids=np.minimum(entry.generation_token_ids, 2**31 - 1))


class SaturatesPromptIds(_Changing):
    """Keeps the ids of prompts as signed integers of 32 bits; larger ones become the largest."""

    def changed(self, entry: TokenEntry) -> TokenEntry:
        return replace(entry, prompt_token_ids=np.minimum(entry.prompt_token_ids, 2**31 - 1))


class KnowsTheBasicPlaneOnly(_Changing):
    """Writes a question mark for every character beyond U+FFFF."""

    def changed(self, entry: TokenEntry) -> TokenEntry:
        return replace(entry, output_items=_with_texts(entry.output_items, _in_the_basic_plane))


class DropsNul(_Changing):
    """Leaves out the character that ends a text in C."""

    def changed(self, entry: TokenEntry) -> TokenEntry:
        return replace(entry, output_items=_with_texts(entry.output_items, lambda text: text.replace("\x00", "")))


class CutsLongTexts(_Changing):
    """Keeps 60,000 characters of what a reply says."""

    def changed(self, entry: TokenEntry) -> TokenEntry:
        return replace(entry, output_items=_with_texts(entry.output_items, lambda text: text[:60_000]))


class CutsCallIds(_Changing):
    """Keeps 64 characters of a call id."""

    def changed(self, entry: TokenEntry) -> TokenEntry:
        return replace(entry, model_call_id=entry.model_call_id[:64])


class KeepsOneWeightSpan(_Changing):
    """A reply that was sampled under several versions of the weights has the first alone."""

    def changed(self, entry: TokenEntry) -> TokenEntry:
        return replace(entry, weight_versions=entry.weight_versions[:1])


class DropsEmptyReplies(MemoryStore):
    """Does not give back a call that sampled nothing."""

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        snapshot = await super().freeze(rollout_id)
        return replace(snapshot, entries=tuple(e for e in snapshot.entries if len(e.generation_token_ids)))


class ReadsDeltas(MemoryStore):
    """`open_entries` gives the prompts as they may be stored: what they add to their parent's."""

    async def open_entries(self, rollout_id: str, since: int = 0) -> tuple[TokenEntry, ...]:
        entries = await super().open_entries(rollout_id)
        lengths = {e.model_call_id: len(e.prompt_token_ids) + len(e.generation_token_ids) for e in entries}
        return tuple(
            replace(e, prompt_token_ids=e.prompt_token_ids[lengths[e.parent_call_id] :], prompt_is_delta=True)
            if e.parent_call_id in lengths
            else e
            for e in entries[since:]
        )


class HidesWhatNobodyRead(MemoryStore):
    """`open_entries` leaves out the replies whose client was gone: its retry is sampled again."""

    async def open_entries(self, rollout_id: str, since: int = 0) -> tuple[TokenEntry, ...]:
        return tuple(entry for entry in (await super().open_entries(rollout_id)) if not entry.client_gone)[since:]


class KeepsAbortsAfterPuts(MemoryStore):
    """The journal says of a call whose reply came after all that it was aborted, too."""

    def __init__(self) -> None:
        super().__init__()
        self._aborts: dict[tuple[str, str], str] = {}

    async def abort_call(self, rollout_id: str, model_call_id: str, *, reason: str) -> None:
        await super().abort_call(rollout_id, model_call_id, reason=reason)
        self._aborts.setdefault((rollout_id, model_call_id), reason)

    async def begun_calls(self, rollout_id: str) -> tuple[JournalledCall, ...]:
        calls = await super().begun_calls(rollout_id)
        return tuple(replace(call, abort=self._aborts.get((rollout_id, call.call_id), call.abort)) for call in calls)


class CallsEveryAbortTruncated(MemoryStore):
    """Says of every call that was aborted that a server had ended the trajectory there."""

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        snapshot = await super().freeze(rollout_id)
        told = dict((await self._listed(rollout_id)).aborts)
        more = (each if each.startswith("truncated:") else f"truncated:{each}" for each in told)
        return replace(snapshot, reasons=tuple(dict.fromkeys((*snapshot.reasons, *more))))

    async def _listed(self, rollout_id: str) -> CaptureInfo:
        return next(info for info in await self.list_captures() if info.rollout_id == rollout_id)


class ListsTheLastWrite(MemoryStore):
    """The age of a capture counts from its last write: what is busy is never old."""

    def __init__(self) -> None:
        super().__init__()
        self._written: dict[str, float] = {}

    async def put(self, entry: TokenEntry) -> Any:
        ack = await super().put(entry)
        self._written[entry.rollout_id] = self._clock()
        return ack

    async def list_captures(self, *, retired: bool = False) -> tuple[CaptureInfo, ...]:
        found, now = await super().list_captures(retired=retired), self._clock()
        return tuple(replace(info, age_s=now - self._written.get(info.rollout_id, now - info.age_s)) for info in found)


class ListsNoAge(MemoryStore):
    """Every capture is as old as the list: none is ever old enough to be collected."""

    async def list_captures(self, *, retired: bool = False) -> tuple[CaptureInfo, ...]:
        return tuple(replace(info, age_s=0.0) for info in await super().list_captures(retired=retired))


class ListsTheLivingAsDead(MemoryStore):
    """The list says of every writer that it is gone."""

    async def list_captures(self, *, retired: bool = False) -> tuple[CaptureInfo, ...]:
        found = await super().list_captures(retired=retired)
        return tuple(replace(info, writer="dead" if info.writer is not None else None) for info in found)


class ListsNoWriters(MemoryStore):
    """The list does not say whose the open calls are."""

    async def list_captures(self, *, retired: bool = False) -> tuple[CaptureInfo, ...]:
        return tuple(replace(info, writer_epochs=()) for info in await super().list_captures(retired=retired))


def _in_the_basic_plane(text: str) -> str:
    return "".join(each if ord(each) < 0x10000 else "?" for each in text)


def _with_texts(items: tuple[dict[str, Any], ...], change: Callable[[str], str]) -> tuple[dict[str, Any], ...]:
    def changed(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, dict):
            return {name: changed(each) for name, each in value.items()}
        return [changed(each) for each in value] if isinstance(value, list) else value

    return tuple(changed(item) for item in items)


BROKEN_RECORDS: dict[type[SqliteStore | MemoryStore], str] = {
    CutsGeneratedIds: "ids_of_every_size_come_back",
    CutsPromptIds: "ids_of_every_size_come_back",
    SaturatesGeneratedIds: "ids_of_every_size_come_back",
    SaturatesPromptIds: "ids_of_every_size_come_back",
    KnowsTheBasicPlaneOnly: "texts_of_every_kind_come_back",
    DropsNul: "texts_of_every_kind_come_back",
    CutsLongTexts: "texts_of_every_kind_come_back",
    CutsCallIds: "keys_that_look_alike_do_not_meet",
    KeepsOneWeightSpan: "every_field_of_a_record_comes_back",
    DropsEmptyReplies: "a_call_that_sampled_nothing_is_kept",
    ReadsDeltas: "what_is_read_while_open_is_what_was_put",
    HidesWhatNobodyRead: "what_is_read_while_open_is_what_was_put",
    KeepsAbortsAfterPuts: "the_journal_tells_every_begun_call_in_order",
    CallsEveryAbortTruncated: "a_reply_that_was_cut_short_is_told",
    ListsTheLastWrite: "every_capture_is_listed",
    ListsNoAge: "every_capture_is_listed",
    ListsTheLivingAsDead: "every_capture_is_listed",
    ListsNoWriters: "every_capture_is_listed",
}
"""Each broken transport with the one check that fails it."""
