"""The shipped conformance suite: every store passes it, and transports that break one promise each are caught by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.campaigns import SCALE

from toprope.capture.memory_store import MemoryStore
from toprope.capture.protocols import PutAck
from toprope.capture.sqlite_store import SqliteStore
from toprope.errors.tree import ConfigError
from toprope.testing.broken_transports import BROKEN
from toprope.testing.capture_endpoints import Endpoints
from toprope.testing.capture_suite import CHECKS, NEEDS, Outcome, Scale, Transport, run_suite
from toprope.tokens.entry import TokenEntry
from toprope.tokens.snapshot import TokenCaptureSnapshot

SMALL = Scale(races=10, chain=30, entries=40, writers=8, big=2_000, tears=6)
FULL = replace(Scale.full(), races=Scale.full().races * SCALE)
STORES = {
    "sqlite": "toprope.capture.sqlite_store:SqliteStore",
    "jsonl": "toprope.capture.jsonl_store:JsonlStore",
    "memory": "toprope.capture.memory_store:MemoryStore",
}


def endpoints(kind: str, directory: Path) -> Endpoints:
    kwargs = {"sqlite": {"path": str(directory / "c.sqlite")}, "jsonl": {"directory": str(directory / "c")}}
    return Endpoints(STORES[kind], kwargs=kwargs.get(kind, {}))


@pytest.mark.promise("CP-13")
@pytest.mark.promise("CP-1")
@pytest.mark.parametrize("scale", [pytest.param(SMALL, id="ci"), pytest.param(FULL, id="long", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", STORES)
async def test_every_store_that_ships_passes(kind: str, scale: Scale, memory_dir: Path) -> None:
    outcomes = await run_suite(endpoints(kind, memory_dir), scale)
    assert len(outcomes) == len(CHECKS)
    assert [str(each) for each in outcomes if each.result == "failed"] == []
    skipped = {each.check for each in outcomes if each.result == "skipped"}
    between_processes = {check.__name__ for check in CHECKS if check.__module__.endswith("capture_deaths")}
    assert skipped == (between_processes if kind == "memory" else set())


@pytest.mark.promise("CP-13")
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
async def test_a_broken_transport_is_failed_by_its_own_check_and_by_no_other(
    broken: type[SqliteStore | MemoryStore], memory_dir: Path
) -> None:
    kwargs = {"path": str(memory_dir / "c.sqlite")} if issubclass(broken, SqliteStore) else {}
    named = Endpoints(f"{broken.__module__}:{broken.__name__}", kwargs=kwargs)
    outcomes = await run_suite(named, SMALL)
    assert [each.check for each in outcomes if each.result == "failed"] == [BROKEN[broken]]
    passed = sum(each.result == "passed" for each in outcomes)
    assert passed >= len(CHECKS) // 3, "skipping must not hide what nobody looked at"


class Shared(MemoryStore):
    """Every client is this one object, which none of them closes."""

    async def close(self) -> None: ...


class ShortFloats(Shared):
    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        snapshot = await super().freeze(rollout_id)
        for entry in snapshot.entries:
            short = entry.generation_log_probs.astype("f4").astype("f8")
            object.__setattr__(entry, "generation_log_probs", short)
        return snapshot


async def test_logprobs_that_come_back_shorter_are_caught() -> None:
    store = ShortFloats()

    async def connect() -> Transport:
        return Transport(store, store)

    outcomes = {each.check: each.result for each in await run_suite(connect, SMALL)}
    assert outcomes["floats_and_texts_come_back_bit_for_bit"] == "failed"


class ForgetsBoundaries(Shared):
    """A record format without a field for a parent that nobody found."""

    async def put(self, entry: TokenEntry) -> PutAck:
        return await super().put(replace(entry, parent_decision="resolved" if entry.parent_call_id else "root"))


class ForgetsWhoRead(Shared):
    async def put(self, entry: TokenEntry) -> PutAck:
        return await super().put(replace(entry, client_gone=False, weight_versions=()))


class SweepsTheFence(Shared):
    async def sweep_retired(self, older_than: float) -> int:
        before = {each.rollout_id for each in await self.list_captures(retired=True)}
        count = await super().sweep_retired(older_than)
        for key in before - {each.rollout_id for each in await self.list_captures(retired=True)}:
            await self.supersede(key)
        return count


@pytest.mark.promise("CP-13")
@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (ForgetsBoundaries, "every_field_of_a_record_comes_back"),
        (ForgetsWhoRead, "every_field_of_a_record_comes_back"),
        (SweepsTheFence, "a_swept_rollout_stays_closed"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
async def test_a_transport_that_loses_what_makes_a_row_safe_is_caught(broken: type[MemoryStore], check: str) -> None:
    store = broken()

    async def connect() -> Transport:
        return Transport(store, store)

    outcomes = await run_suite(connect, SMALL)
    assert [each.check for each in outcomes if each.result == "failed"] == [check]


class GymSink:
    """Exactly NeMo Gym's signatures."""

    def __init__(self, path: str) -> None:
        self._store = SqliteStore(path)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        await self._store.begin_call(rollout_id, model_call_id)

    async def put(self, entry: object) -> None:
        await self._store.put(entry)  # type: ignore[arg-type]

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        await self._store.mark_incomplete(rollout_id, model_call_id)

    async def close(self) -> None:
        await self._store.close()


class GymSource:
    """Exactly NeMo Gym's signatures."""

    def __init__(self, path: str) -> None:
        self._store = SqliteStore(path)

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        return await self._store.freeze(rollout_id)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        return await self._store.drop(rollout_id, snapshot_id=snapshot_id, version=version)

    async def close(self) -> None:
        await self._store.close()


@pytest.mark.promise("CP-16")
async def test_a_sink_and_a_source_with_exactly_nemo_gyms_signatures_pass(memory_dir: Path) -> None:
    named = Endpoints(f"{__name__}:GymSink", f"{__name__}:GymSource", {"path": str(memory_dir / "c.sqlite")})
    outcomes = await run_suite(named, SMALL)
    assert [str(each) for each in outcomes if each.result == "failed"] == []
    skipped = {each.check for each in outcomes if each.result == "skipped"}
    assert skipped == {
        "an_aborted_intent_does_not_mask",
        "the_journal_tells_every_begun_call_in_order",
        "superseding_sets_aside_and_mixes_nothing",
        "a_mark_keeps_its_reason",
        "a_reply_that_was_cut_short_is_told",
        "a_reply_that_was_fetched_again_was_read",
        "settle_waits_for_what_is_in_flight",
        "receipts_outlive_the_payload",
        "a_swept_rollout_stays_closed",
        "reading_leaves_no_trace",
        "a_lost_call_is_named",
        "what_is_set_aside_keeps_its_marks",
        "begin_and_put_say_what_the_key_holds",
        "entries_are_read_in_the_order_of_their_arrival",
        "a_dropped_payload_is_not_read_again",
        "every_capture_is_listed",
        "what_is_read_while_open_is_what_was_put",
        "a_sweep_takes_nothing_but_tombstones",
        "an_earlier_attempt_stays_out",
        "a_discard_takes_what_it_was_told_and_no_live_one",
        "calls_of_dead_writers_are_settled_and_of_live_ones_not",
    }


@pytest.mark.promise("CP-13")
def test_every_promise_that_one_process_can_break_has_a_transport_that_breaks_it() -> None:
    """What no broken transport is failed by may be a check that cannot fail. Those without one of their own here are
    checks of sizes and of plain round trips, most of them broken in the tests above."""
    assert set(BROKEN.values()) <= {check.__name__ for check in CHECKS}
    alone = {check.__name__ for check in CHECKS} - set(BROKEN.values())
    assert alone == {
        "put_survives_the_client",
        "floats_and_texts_come_back_bit_for_bit",
        "freeze_makes_the_set_final",
        "an_unknown_key_freezes_to_nothing_for_good",
        "an_aborted_intent_does_not_mask",
        "superseding_sets_aside_and_mixes_nothing",
        "a_put_racing_freeze_is_in_or_makes_the_pair_stale",
        "the_order_of_puts_does_not_matter",
        "many_writers_lose_nothing",
        "a_deep_chain_comes_back_whole",
        "a_very_long_call_is_kept",
        "a_swept_rollout_stays_closed",
        "reading_leaves_no_trace",
        "what_another_process_puts_is_visible_at_once",
        "an_intent_survives_the_death_of_its_process",
        "a_tombstone_survives_the_death_of_its_process",
        "several_processes_write_one_rollout",
    }


def test_what_a_check_builds_on_comes_before_it() -> None:
    order = {check: n for n, check in enumerate(CHECKS)}
    assert len(order) == len(CHECKS)
    assert all(order[need] < order[check] for check, needs in NEEDS.items() for need in needs)


async def test_an_argument_that_neither_end_takes_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pathh.*nearest|pathh"):
        await Endpoints(STORES["sqlite"], kwargs={"pathh": "x"})()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        await Endpoints("nowhere:Store")()


def test_an_outcome_reads_as_a_sentence() -> None:
    assert str(Outcome("a_put_stays", "failed", "it went")) == "failed   a put stays: it went"
