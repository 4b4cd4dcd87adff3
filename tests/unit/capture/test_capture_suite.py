"""The shipped conformance suite: both stores pass it, and transports that break one promise each are caught."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from toprope.capture.memory_store import MemoryStore
from toprope.capture.sqlite_store import SqliteStore
from toprope.testing.capture_suite import CHECKS, Connect, Scale, Transport, run_suite
from toprope.tokens.entry import TokenEntry
from toprope.tokens.snapshot import TokenCaptureSnapshot

SMALL = Scale(races=10, chain=30, entries=40, writers=8, big=2_000)


class _Shared(MemoryStore):
    """A memory store that several clients use; only its owner closes it."""


def sqlite(directory: Path) -> Connect:
    async def connect() -> Transport:
        store = SqliteStore(directory / "c.sqlite")
        return Transport(store, store)

    return connect


def memory(store: MemoryStore) -> Connect:
    async def connect() -> Transport:
        return Transport(store, store)

    return connect


@pytest.mark.promise("CP-13")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", ["sqlite", "memory"])
async def test_every_store_that_ships_keeps(
    kind: str, check: Callable[[Connect, Scale], Awaitable[None]], tmp_path: Path
) -> None:
    await check(sqlite(tmp_path) if kind == "sqlite" else memory(MemoryStore()), SMALL)


class NoTombstone(MemoryStore):
    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        done = await super().drop(rollout_id, snapshot_id=snapshot_id, version=version)
        if done:
            self._captures.pop(rollout_id)
        return done


class StaleDrop(MemoryStore):
    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        now = await self.freeze(rollout_id)
        return await super().drop(rollout_id, snapshot_id=now.snapshot_id, version=now.version)


class LostIntent(MemoryStore):
    async def begin_call(self, rollout_id: str, model_call_id: str, *, intent: Any = None) -> Any:
        return None


class PutAgain(MemoryStore):
    async def put(self, entry: TokenEntry) -> Any:
        ack = await super().put(entry)
        with self._guard:
            self._captures[entry.rollout_id].head = _moved(self._captures[entry.rollout_id].head)
        return ack


class AcceptsNan(MemoryStore):
    async def put(self, entry: TokenEntry) -> Any:
        if entry.generation_log_probs.flags.writeable:  # the smuggled one
            return None
        return await super().put(entry)


class Invisible(MemoryStore):
    """What it holds only its own client sees."""


class ShortFloats(MemoryStore):
    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        snapshot = await super().freeze(rollout_id)
        for entry in snapshot.entries:
            short = entry.generation_log_probs.astype("f4").astype("f8")
            object.__setattr__(entry, "generation_log_probs", short)
        return snapshot


def _moved(head: Any) -> Any:
    from dataclasses import replace

    return replace(head, version=head.version + 1)


@pytest.mark.promise("CP-13")
@pytest.mark.parametrize(
    ("broken", "caught_by"),
    [
        (NoTombstone, "a_dropped_rollout_stays_gone"),
        (StaleDrop, "a_mark_after_freeze_makes_the_old_pair_useless"),
        (LostIntent, "an_open_intent_masks_and_a_put_satisfies_it"),
        (PutAgain, "the_same_put_twice_is_one_entry"),
        (AcceptsNan, "a_logprob_that_is_no_number_is_refused"),
        (ShortFloats, "floats_and_texts_come_back_bit_for_bit"),
    ],
)
async def test_a_broken_transport_is_caught(broken: type[MemoryStore], caught_by: str) -> None:
    outcomes = {each.check: each.result for each in await run_suite(memory(broken()), SMALL)}
    assert outcomes[caught_by] == "failed"


@pytest.mark.promise("CP-13")
async def test_a_transport_whose_clients_do_not_see_each_other_is_caught() -> None:
    async def connect() -> Transport:
        store = Invisible()
        return Transport(store, store)

    outcomes = {each.check: each.result for each in await run_suite(connect, SMALL)}
    assert outcomes["put_is_visible_to_another_client_at_once"] == "failed"
    assert outcomes["put_survives_the_client"] == "failed"


async def test_checks_of_optional_verbs_are_skipped_not_failed() -> None:
    class Plain:
        """Exactly the verbs of NeMo Gym's sink and source."""

        def __init__(self) -> None:
            self._store = MemoryStore()

        async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
            await self._store.begin_call(rollout_id, model_call_id)

        async def put(self, entry: TokenEntry) -> None:
            await self._store.put(entry)

        async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
            await self._store.mark_incomplete(rollout_id, model_call_id)

        async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
            return await self._store.freeze(rollout_id)

        async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
            return await self._store.drop(rollout_id, snapshot_id=snapshot_id, version=version)

        async def close(self) -> None:
            await self._store.close()

    plain = Plain()

    async def connect() -> Transport:
        return Transport(plain, plain)

    results = [each.result for each in await run_suite(connect, SMALL)]
    assert set(results) == {"passed", "skipped"}
    assert results.count("skipped") == 4
