"""The recorder: parents found, losses said, nothing raised after dispatch, foreign sinks served."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from toprope.capture.delivery import SettlingSource
from toprope.capture.memory_store import MemoryStore
from toprope.capture.protocols import (
    AbortingSink,
    CallJournal,
    CaptureLister,
    CaptureReader,
    DiscardingStore,
    EntryConflict,
    Intent,
    ReceiptSource,
    SupersedingSource,
    TokenSink,
)
from toprope.capture.recorder import CallEvidence, Recorder
from toprope.capture.sqlite_store import SqliteStore
from toprope.errors.tree import CaptureClosed, CaptureError, ConfigError
from toprope.tokens.entry import TokenEntry
from toprope.tokens.hashing import ChainHash
from toprope.tokens.lineage import DEFERRED, DEFERRED_ALL_TOLD
from toprope.tokens.sampled import SampledTokens
from toprope.tokens.snapshot import TokenCaptureSnapshot
from toprope.trajectory.build import Masked, Trainable, build
from toprope.trajectory.terminal import TerminalWitnesses


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def evidence(
    call: str,
    items: Sequence[Mapping[str, Any]] = (),
    prompt: Sequence[int] = (1, 2),
    gen: Sequence[int] = (3, 4),
    **told: Any,
) -> CallEvidence:
    tokens = SampledTokens(np.array(prompt, dtype=np.uint32), np.array(gen, dtype=np.uint32), -0.1 * np.ones(len(gen)))
    fields: dict[str, Any] = {"key": "k", "model": "m", "tokens": tokens, "output_items": [assistant(call)], **told}
    return CallEvidence(call_id=call, request_items=list(items) or [user("hi")], **fields)


class Conversation:
    """A growing conversation whose turns may go through any recorder."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = [user("hi")]
        self.prompt = [1, 2, 3]
        self.calls: list[str] = []

    async def turn(self, recorder: Recorder) -> None:
        call = f"c{len(self.calls)}"
        gen = [100 + len(self.calls), 7]
        await recorder.begin("k", call)
        await recorder.record(evidence(call, self.items, self.prompt, gen))
        self.calls.append(call)
        self.items += [assistant(call), user("go on")]
        self.prompt += [*gen, 50]

    def check(self, snapshot: TokenCaptureSnapshot) -> None:
        assert [e.model_call_id for e in snapshot.entries] == self.calls
        assert [e.parent_call_id for e in snapshot.entries] == [None, *self.calls[:-1]]
        for entry in snapshot.entries:
            whole = [*entry.prompt_token_ids.tolist(), *entry.generation_token_ids.tolist()]
            assert entry.chain_hash == ChainHash.of(whole).hexdigest()
            assert entry.cum_len == len(whole)
        assert not snapshot.incomplete


async def test_a_conversation_is_one_chain() -> None:
    store, talk = MemoryStore(), Conversation()
    recorder = Recorder(store, reader=store)
    for _ in range(6):
        await talk.turn(recorder)
    talk.check(await store.freeze("k"))


@pytest.mark.promise("CP-3")
async def test_workers_that_take_turns_find_each_others_calls(tmp_path: Path) -> None:
    stores = [SqliteStore(tmp_path / "c.sqlite") for _ in range(3)]
    recorders = [Recorder(store, reader=store) for store in stores]
    talk = Conversation()
    for n in (0, 0, 1, 0, 2, 2, 1, 0):
        await talk.turn(recorders[n])
    talk.check(await stores[0].freeze("k"))
    for store in stores:
        await store.close()


async def test_a_restarted_or_forgetful_recorder_goes_on_where_the_store_stands(tmp_path: Path) -> None:
    store, talk = SqliteStore(tmp_path / "c.sqlite"), Conversation()
    for n in range(6):
        recorder = Recorder(store, reader=store)
        await talk.turn(recorder)
        if n % 2:
            await talk.turn(recorder)
            recorder._let_go("k")
            await talk.turn(recorder)
    talk.check(await store.freeze("k"))
    await store.close()


async def test_the_index_stays_small_and_an_evicted_rollout_still_finds_its_parent() -> None:
    store = MemoryStore()
    recorder = Recorder(store, reader=store, max_ids=100)
    talk = Conversation()
    await talk.turn(recorder)
    for n in range(40):
        await recorder.begin(f"other{n}", "c0")
        await recorder.record(evidence("c0", key=f"other{n}", prompt=range(20)))
        assert recorder._ids <= 100
    await talk.turn(recorder)
    talk.check(await store.freeze("k"))


async def test_parallel_calls_of_one_rollout_are_recorded_with_their_own_parents(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "c.sqlite")
    recorder = Recorder(store, reader=store)
    await recorder.begin("k", "root")
    await recorder.record(evidence("root"))
    asked = [user("hi"), assistant("root")]

    async def branch(n: int) -> None:
        await recorder.begin("k", f"b{n}")
        await recorder.record(evidence(f"b{n}", [*asked, user(str(n))], [1, 2, 3, 4, 10 + n], [200 + n]))

    await asyncio.gather(*(branch(n) for n in range(20)))
    snapshot = await store.freeze("k")
    assert {e.model_call_id: e.parent_call_id for e in snapshot.entries} == {
        "root": None,
        **{f"b{n}": "root" for n in range(20)},
    }
    assert not snapshot.incomplete
    await store.close()


def with_tokens(prompt: Any, gen: Any, log_probs: Any) -> dict[str, Any]:
    return {"tokens": SampledTokens(prompt, gen, log_probs)}


BAD = [
    (with_tokens([1], [2], [float("nan")]), "bad_logprob"),
    (with_tokens([1], [2], [float("-inf")]), "bad_logprob"),
    (with_tokens([1], [2], [-9999.0]), "bad_logprob"),
    (with_tokens([1], [2], [None]), "bad_logprob"),
    (with_tokens([1], [2, 3], [-0.1]), "length_mismatch"),
    (with_tokens([1], [2], None), "no_token_ids"),
    (with_tokens(None, [2], [-0.1]), "no_token_ids"),
    (with_tokens([], [2], [-0.1]), "no_token_ids"),
    (with_tokens([1], [-2], [-0.1]), "no_token_ids"),
    (with_tokens([1], [2**32], [-0.1]), "no_token_ids"),
    ({"tokens": None}, "no_token_ids"),
    ({"token_fault": "bad_logprob: the third is missing"}, "bad_logprob"),
    ({"token_fault": "the engine said nothing"}, "no_token_ids"),
    ({"usage_output_tokens": 3}, "length_mismatch"),
    ({"usage_input_tokens": 9}, "length_mismatch"),
    ({"sampling": {"temperature": float("nan")}}, "write_failed"),
]


@pytest.mark.promise("MS-7")
@pytest.mark.parametrize(("told", "reason"), BAD)
async def test_bad_evidence_masks_with_the_reason_and_fails_nothing(
    told: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    recorder = Recorder(store, reader=store)
    await recorder.begin("k", "c1")
    with caplog.at_level(logging.WARNING):
        await recorder.record(evidence("c1", **told))
    snapshot = await store.freeze("k")
    assert (snapshot.entries, snapshot.incomplete, snapshot.reasons) == ((), True, (f"{reason}:c1",))
    assert any("c1" in record.getMessage() and reason in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(("told", "reason"), BAD[:1])
async def test_the_strict_option_fails_the_call_after_the_loss_is_durable(told: dict[str, Any], reason: str) -> None:
    store = MemoryStore()
    recorder = Recorder(store, reader=store, on_capture_error="fail")
    await recorder.begin("k", "c1")
    with pytest.raises(CaptureError, match="c1 of k could not be recorded"):
        await recorder.record(evidence("c1", **told))
    assert (await store.freeze("k")).reasons == (f"{reason}:c1",)


@pytest.mark.parametrize("how", ["mask", "fail"])
async def test_a_call_that_contradicts_its_record_fails_where_the_option_is_strict(how: Any) -> None:
    store = MemoryStore()
    recorder = Recorder(store, reader=store, on_capture_error=how)
    await recorder.begin("k", "c1")
    await recorder.record(evidence("c1"))
    if how == "fail":
        with pytest.raises(EntryConflict):
            await recorder.record(evidence("c1", gen=(8, 8)))
    else:
        await recorder.record(evidence("c1", gen=(8, 8)))
    assert (await store.freeze("k")).reasons == ("conflict:c1",)


async def test_a_call_on_a_closed_capture_is_refused_before_it_is_sent() -> None:
    store = MemoryStore()
    recorder = Recorder(store, reader=store)
    snapshot = await store.freeze("k")
    with pytest.raises(CaptureClosed) as refused:
        await recorder.begin("k", "c1")
    assert (refused.value.status, refused.value.headers) == (403, {"x-should-retry": "false"})
    assert (await store.freeze("k")).version == snapshot.version


@pytest.mark.promise("CP-5")
async def test_a_record_that_comes_after_freeze_makes_the_snapshot_undroppable() -> None:
    store = MemoryStore()
    recorder = Recorder(store, reader=store)
    await recorder.begin("k", "c1")
    old = await store.freeze("k")
    await recorder.record(evidence("c1"))
    assert not await store.drop("k", snapshot_id=old.snapshot_id, version=old.version)
    assert (await store.freeze("k")).incomplete


async def test_a_drained_result_after_freeze_is_dropped_without_a_mark() -> None:
    store = MemoryStore()
    recorder = Recorder(store, reader=store)
    await recorder.begin("k", "c1")
    await recorder.abort("k", "c1", "client_gone")
    old = await store.freeze("k")
    await recorder.record(evidence("c1", client_gone=True))
    assert (await store.freeze("k")) == old
    assert not old.incomplete


@pytest.mark.promise("CP-6")
async def test_an_upstream_failure_and_a_clean_retry_leave_the_rollout_whole() -> None:
    store = MemoryStore()
    recorder = Recorder(store, reader=store)
    few_shot = [user("q"), assistant("shown"), user("hi")]
    await recorder.begin("k", "c1")
    await recorder.abort("k", "c1", "upstream:model_unavailable", request_items=few_shot)
    await recorder.begin("k", "c2")
    await recorder.record(evidence("c2", few_shot))
    snapshot = await store.freeze("k")
    assert [(e.parent_decision, e.parent_resolution_reason) for e in snapshot.entries] == [("root", "first_call")]
    assert not snapshot.incomplete


async def test_a_turn_kept_from_an_aborted_first_call_is_not_taken_for_a_root() -> None:
    store = MemoryStore()
    recorder = Recorder(store, reader=store)
    await recorder.begin("k", "c1")
    await recorder.abort("k", "c1", "upstream:transport_dropped", request_items=[user("hi")])
    await recorder.begin("k", "c2")
    await recorder.record(evidence("c2", [user("hi"), assistant("half a turn"), user("go on")]))
    assert [e.parent_decision for e in (await store.freeze("k")).entries] == ["unresolved"]


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("reason", ["client_gone", "upstream:transport_dropped", "writer_died", "lost:no_token_ids"])
async def test_whatever_ended_a_first_call_what_it_said_vouches_for_no_root(reason: str) -> None:
    store = MemoryStore()
    recorder = Recorder(store, reader=store)
    await recorder.begin("k", "c1")
    await recorder.abort("k", "c1", reason, request_items=[user("hi")])
    await recorder.begin("k", "c2")
    await recorder.record(evidence("c2", KEPT))
    assert [e.parent_resolution_reason for e in (await store.freeze("k")).entries] == ["unrecorded_turn"]


@pytest.mark.promise("CP-9")
async def test_what_another_worker_lost_meanwhile_is_seen_by_one_whose_first_call_is_open() -> None:
    store = MemoryStore()
    mine, other = Recorder(store, reader=store), Recorder(store, reader=store)
    await mine.begin("k", "title")
    await other.begin("k", "b1")
    await other.abort("k", "b1", "client_gone", request_items=[user("hi")])
    await mine.begin("k", "c2")
    await mine.record(evidence("c2", KEPT))
    await mine.record(evidence("title", [user("a title?")], prompt=(9,)))
    built = build(await store.freeze("k"), terminal=TerminalWitnesses.naming(explicit="c2"))
    assert isinstance(built, Masked)
    assert "unrecorded_turn" in built.reasons


class Silent(MemoryStore):
    """A store whose `begin_call` and `put` return nothing, as NeMo Gym's signatures have it."""

    async def begin_call(self, rollout_id: str, model_call_id: str, *, intent: Intent | None = None) -> Any:
        await super().begin_call(rollout_id, model_call_id, intent=intent)

    async def put(self, entry: TokenEntry) -> Any:
        await super().put(entry)


class Blind(MemoryStore):
    async def open_entries(self, rollout_id: str, since: int = 0) -> tuple[TokenEntry, ...]:
        raise OSError("unreadable")


KEPT = [user("hi"), assistant("half a turn"), user("go on")]


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("store_class", [MemoryStore, Silent, Blind])
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("later", ["same recorder", "second worker", "restarted", "forgotten", "forgotten once begun"])
async def test_a_turn_kept_from_a_lost_first_call_trains_nowhere(
    store_class: type[MemoryStore], reads: bool, later: str
) -> None:
    store = store_class()
    first = Recorder(store, reader=store if reads else None)
    second = Recorder(store, reader=store if reads else None) if later in ("second worker", "restarted") else first
    if later == "second worker":
        await second.begin("other", "c0")
    await first.begin("k", "c1")
    await first.abort("k", "c1", "upstream:transport_dropped", request_items=[user("hi")])
    if later == "forgotten":
        first._let_go("k")
    await second.begin("k", "c2")
    if later == "forgotten once begun":
        first._let_go("k")
    await second.record(evidence("c2", KEPT))
    built = build(await store.freeze("k"))
    assert isinstance(built, Masked)
    assert built.reasons == ("unresolved_parent", "unrecorded_turn")


async def test_the_retry_of_a_lost_call_does_not_vouch_for_the_turn_that_it_kept() -> None:
    store = MemoryStore()
    recorder = Recorder(store, reader=store)
    for call, items in (("c1", [user("hi")]), ("c2", KEPT)):
        await recorder.begin("k", call)
        await recorder.abort("k", call, "upstream:transport_dropped", request_items=items)
    await recorder.begin("k", "c3")
    await recorder.record(evidence("c3", KEPT))
    assert [e.parent_resolution_reason for e in (await store.freeze("k")).entries] == ["unrecorded_turn"]


@pytest.mark.promise("CP-16")
@pytest.mark.parametrize("aborts", [True, False])
async def test_shown_turns_are_a_beginning_where_no_call_can_have_been_lost_unseen(aborts: bool) -> None:
    """Without abort_call a begun call is recorded or masks its rollout; with it nobody can tell who reads nothing."""
    sink = Foreign()
    if aborts:
        sink.abort_call = sink.mark_incomplete  # type: ignore[attr-defined]
    recorder = Recorder(sink)
    await recorder.begin("k", "c1")
    await recorder.record(evidence("c1", KEPT))
    built = build(TokenCaptureSnapshot("k", tuple(sink.entries), False, "s", 1))
    assert isinstance(built, Masked if aborts else Trainable)
    assert any("shown" in note for note in recorder.notes) == aborts


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize(
    ("end", "first", "incomplete"),
    [
        ("lost", [user("hi")], True),  # what it said may be the turn that the first record begins with
        ("lost", KEPT, False),  # the turn stood in its own request already
        ("never sent", [user("hi")], False),
        ("recorded", [user("hi")], False),
    ],
)
async def test_a_call_that_is_lost_after_a_later_first_one_was_recorded_puts_that_in_doubt(
    end: str, first: list[dict[str, Any]], incomplete: bool, forgets: bool
) -> None:
    store = MemoryStore()
    recorder = Recorder(store, reader=store)
    await recorder.begin("k", "c1")
    await recorder.begin("k", "c2")
    await recorder.record(evidence("c2", KEPT))
    if forgets:
        recorder._let_go("k")
    if end == "recorded":
        await recorder.record(evidence("c1", first, prompt=(9,)))
    else:
        await recorder.abort("k", "c1", "not_sent" if end == "never sent" else "upstream:x", request_items=first)
    snapshot = await store.freeze("k")
    assert snapshot.entries[0].parent_decision == "root"
    assert snapshot.incomplete == incomplete
    assert len(recorder._beginnings) == 0


SHOWN = [user("ex"), assistant("ok")]


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize(
    ("lost", "kept", "incomplete"),
    [
        ([user("q")], [user("q"), assistant("ok"), user("go on")], True),
        ([user("q")], [*SHOWN, user("sub")], False),  # few-shot again, and the lost call was asked elsewhere
        ([user("ex")], [*SHOWN, user("sub")], True),
        ([*SHOWN, user("q")], [*SHOWN, user("sub")], False),
        ([user("q")], [*SHOWN, user("task")], False),  # the very prompt of the root
    ],
)
async def test_a_call_that_is_lost_after_a_later_beginning_was_recorded_puts_that_in_doubt(
    lost: list[dict[str, Any]], kept: list[dict[str, Any]], incomplete: bool, forgets: bool
) -> None:
    """Another root was shown the same words: until the loss is known the beginning is one."""
    store = MemoryStore()
    recorder = Recorder(store, reader=store)
    await recorder.begin("k", "root")
    await recorder.record(evidence("root", [*SHOWN, user("task")], prompt=(7, 8)))
    await recorder.begin("k", "lost")
    await recorder.begin("k", "later")
    await recorder.record(evidence("later", kept, prompt=(7, 8) if kept[-1] == user("task") else (9,)))
    if forgets:
        recorder._let_go("k")
    await recorder.abort("k", "lost", "upstream:transport_dropped", request_items=lost)
    snapshot = await store.freeze("k")
    assert [e.parent_decision for e in snapshot.entries] == ["root", "root"]
    assert snapshot.incomplete == incomplete
    assert len(recorder._beginnings) == 0


@pytest.mark.promise("CP-9")
async def test_a_doubt_that_cannot_be_written_leaves_the_lost_call_open() -> None:
    class Unmarked(MemoryStore):
        async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", *, reason: str | None = None) -> None:
            raise OSError(28, "no space")

    store = Unmarked()
    recorder = Recorder(store, reader=store)
    await recorder.begin("k", "lost")
    await recorder.begin("k", "first")
    await recorder.record(evidence("first", KEPT))
    await recorder.abort("k", "lost", "upstream:x", request_items=[user("hi")])
    snapshot = await store.freeze("k")
    assert snapshot.reasons == ("dangling_intent:lost",)


@pytest.mark.promise("CP-9")
async def test_a_call_that_is_lost_elsewhere_puts_a_later_beginning_in_doubt_before_it_is_recorded() -> None:
    """Another worker's open call is nobody's that this one could watch: no beginning stands beside it."""
    store = MemoryStore()
    mine, other = Recorder(store, reader=store), Recorder(store, reader=store)
    await mine.begin("k", "root")
    await mine.record(evidence("root", [*SHOWN, user("task")]))
    await other.begin("k", "lost")
    await mine.begin("k", "later")
    await mine.record(evidence("later", [user("q"), assistant("ok"), user("go on")], prompt=(9,)))
    await other.abort("k", "lost", "upstream:transport_dropped", request_items=[user("q")])
    assert [e.parent_decision for e in (await store.freeze("k")).entries] == ["root", "unresolved"]


@pytest.mark.promise("CP-9")
async def test_the_examples_of_a_lost_first_call_do_not_vouch_for_what_it_said() -> None:
    store = MemoryStore()
    recorder = Recorder(store, reader=store)
    for call, items in (("c1", [*SHOWN, user("task")]), ("c2", [user("task")])):
        await recorder.begin("k", call)
        await recorder.abort("k", call, "upstream:transport_dropped", request_items=items)
    await recorder.begin("k", "c3")
    await recorder.record(evidence("c3", [user("task"), assistant("ok"), user("go on")]))
    assert [e.parent_resolution_reason for e in (await store.freeze("k")).entries] == ["unrecorded_turn"]


@pytest.mark.promise("CP-16")
@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("end", ["recorded first", "recorded", "lost first", "lost"])
@pytest.mark.parametrize(
    ("order", "stream", "trains"),
    [
        (("main", "title"), True, True),
        (("title", "main"), False, True),
        (("title", "main"), True, False),  # a part of what it says may have left before the other came
    ],
)
async def test_a_beginning_with_shown_turns_beside_a_title_trains_if_it_came_before_any_reply(
    order: tuple[str, ...], stream: bool, trains: bool, end: str, tmp_path: Path
) -> None:
    store = SqliteStore(tmp_path / "c.sqlite")
    recorder = Recorder(store, reader=store)
    await asyncio.gather(*(recorder.begin("k", call, intent=Intent(stream=stream)) for call in order))

    async def title() -> None:
        if "recorded" in end:
            await recorder.record(evidence("title", [user("a title?")], prompt=(9,)))
        else:
            await recorder.abort("k", "title", "client_gone", request_items=[user("a title?")])

    if "first" in end:
        await title()
    await recorder.record(evidence("main", [*SHOWN, user("task")]))
    if "first" not in end:
        await title()
    built = build(await store.freeze("k"), terminal=TerminalWitnesses.naming(explicit="main"))
    if trains or end == "recorded":
        assert isinstance(built, Trainable)
        assert [trace.call_ids for trace in built.traces] == [("main",)]
    else:
        assert isinstance(built, Masked)
    await store.close()


@pytest.mark.promise("CP-9")
async def test_an_open_call_of_an_earlier_attempt_says_nothing_of_the_next_one() -> None:
    """Neither which call is the first of it, nor does its own loss put a root of it in doubt."""
    store = MemoryStore()
    recorder, other = Recorder(store, reader=store), Recorder(store, reader=store)
    await recorder.begin("k", "old", intent=Intent(stream=False))
    assert await store.supersede("k")
    await other.begin("k", "lost", intent=Intent(stream=False))
    await recorder.begin("k", "c1", intent=Intent(stream=False))
    await recorder.record(evidence("c1", KEPT))
    assert [e.parent_decision for e in (await store.freeze("k")).entries] == ["unresolved"]


@pytest.mark.promise("CP-9")
async def test_the_second_call_of_an_attempt_is_not_from_before_the_record_that_another_worker_put_there() -> None:
    """Its number goes on from an earlier attempt's open call, which this worker takes for the first one."""
    store = MemoryStore()
    mine, other = Recorder(store, reader=store), Recorder(store, reader=store)
    await mine.begin("k", "old", intent=Intent(stream=False))
    store.freeze_listeners.clear()  # the key is made new by a third process
    assert await store.supersede("k")
    await other.begin("k", "b", intent=Intent(stream=False))
    await other.record(evidence("b", [user("hi")]))
    await mine.begin("k", "c", intent=Intent(stream=False))
    await mine.record(evidence("c", [user("hi"), assistant("edited"), user("go on")], prompt=(9,)))
    assert [e.parent_decision for e in (await store.freeze("k")).entries] == ["root", "unresolved"]


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("beside", [(), ("open",)])
async def test_a_lost_call_that_begins_again_is_not_from_before_its_own_reply(beside: tuple[str, ...]) -> None:
    store = MemoryStore()
    recorder = Recorder(store, reader=store)
    for call in (*beside, "b"):
        await recorder.begin("k", call, intent=Intent(stream=False))
    await recorder.abort("k", "b", "client_gone", request_items=[user("hi")])
    await recorder.begin("k", "b", intent=Intent(stream=False))
    await recorder.record(evidence("b", KEPT))
    assert [e.parent_decision for e in (await store.freeze("k")).entries] == ["unresolved"]


@pytest.mark.promise("CP-7")
async def test_a_loss_of_an_earlier_attempt_puts_no_root_of_the_next_one_in_doubt(tmp_path: Path) -> None:
    here, elsewhere = SqliteStore(tmp_path / "c.sqlite"), SqliteStore(tmp_path / "c.sqlite")
    recorder = Recorder(here, reader=here)
    for call in ("done", "old"):
        await recorder.begin("k", call)
    await recorder.record(evidence("done"))
    await elsewhere.supersede("k")
    await recorder.begin("k", "title")
    await recorder.begin("k", "c1")
    await recorder.record(evidence("c1", KEPT))
    await recorder.record(evidence("title", [user("a title?")], prompt=(9,)))
    await recorder.abort("k", "old", "upstream:x", request_items=[user("hi")])
    assert not (await here.freeze("k")).incomplete
    assert len(recorder._beginnings) == 0
    for store in (here, elsewhere):
        await store.close()


async def test_calls_that_end_in_any_way_are_not_waited_for() -> None:
    for store in (MemoryStore(), type("Mute", (Silent, Blind), {})()):
        recorder = Recorder(store, reader=store)
        for call in ("c1", "c2", "c3", "c4"):
            await recorder.begin("k", call)
        await recorder.record(evidence("c1"))
        await recorder.record(evidence("c2", tokens=None))
        await recorder.incomplete("k", "c3", "no_token_ids")
        await recorder.abort("k", "c4", "not_sent")
        assert len(recorder._beginnings) == 0


@pytest.mark.promise("CP-9")
async def test_a_first_call_here_is_none_where_another_worker_began_one_before() -> None:
    store = MemoryStore()
    mine, other = Recorder(store, reader=store), Recorder(store, reader=store)
    await other.begin("k", "title", intent=Intent(stream=False))
    await mine.begin("k", "main", intent=Intent(stream=False))
    await mine.record(evidence("main", [*SHOWN, user("task")]))
    assert [e.parent_decision for e in (await store.freeze("k")).entries] == ["unresolved"]


@pytest.mark.promise("CP-9")
async def test_what_follows_a_record_that_nobody_believes_is_no_beginning() -> None:
    """Two copies of the first call differ and are set aside; the second call continues it and must not stand alone."""
    sink, talk = Foreign(), Conversation()
    recorder = Recorder(sink)
    for _ in range(2):
        await talk.turn(recorder)
    copy = replace(sink.entries[0], generation_token_ids=[8, 8], chain_hash=None)
    snapshot = TokenCaptureSnapshot("k", (*sink.entries, copy), False, "s", 1)
    built = build(snapshot, terminal=TerminalWitnesses.naming(explicit="c1"))
    assert isinstance(built, Masked)
    assert "unresolved_parent" in built.reasons


async def test_a_cancelled_caller_still_leaves_a_record(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "c.sqlite")
    recorder = Recorder(store, reader=store)
    await recorder.begin("k", "c1")
    call = asyncio.create_task(recorder.record(evidence("c1")))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await recorder.close()
    assert [e.model_call_id for e in await store.open_entries("k")] == ["c1"]
    await store.close()


class Slow(MemoryStore):
    """Its puts wait until they may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may = asyncio.Event(), asyncio.Event()

    async def put(self, entry: TokenEntry) -> Any:
        self.begun.set()
        await self.may.wait()
        return await super().put(entry)


async def test_a_recorder_closes_only_after_every_put_that_was_begun() -> None:
    store = Slow()
    recorder = Recorder(store, reader=store)
    await recorder.begin("k", "c1")
    call = asyncio.create_task(recorder.record(evidence("c1")))
    await store.begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    closing = asyncio.create_task(recorder.close())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not closing.done()
    store.may.set()
    await closing
    assert [e.model_call_id for e in await store.open_entries("k")] == ["c1"]


async def test_intents_carry_the_writer(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "c.sqlite")
    recorder = Recorder(store, reader=store, writer_epoch="me")
    await recorder.begin("k", "c1", intent=Intent(stream=True, request_digest="d", retry_count=1))
    assert (await store.list_captures())[0].writer_epochs == ("me",)
    await store.close()


class Foreign:
    """A sink with exactly NeMo Gym's signatures."""

    def __init__(self) -> None:
        self.entries: list[TokenEntry] = []
        self.begun: list[tuple[str, str]] = []
        self.marks: list[tuple[str, str]] = []
        self.broken = False

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        self.begun.append((rollout_id, model_call_id))

    async def put(self, entry: TokenEntry) -> None:
        if self.broken:
            raise OSError("their disk is full")
        self.entries.append(entry)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        self.marks.append((rollout_id, model_call_id))

    async def close(self) -> None:
        raise AssertionError("a recorder closes nothing that it was given")


@pytest.mark.promise("CP-16")
async def test_a_sink_with_exactly_their_signatures_is_served() -> None:
    sink = Foreign()
    recorder = Recorder(sink)
    talk = Conversation()
    for _ in range(3):
        await talk.turn(recorder)
    await recorder.abort("k", "c9", "client_gone")
    await recorder.incomplete("k", "", "unobserved_path:POST /v1/x")
    sink.broken = True
    await recorder.record(evidence("c4"))
    await recorder.close()
    assert sink.begun == [("k", call) for call in talk.calls]
    assert [e.parent_decision for e in sink.entries] == ["unresolved"] * 3
    assert [e.parent_resolution_reason for e in sink.entries] == [DEFERRED_ALL_TOLD] * 3  # no abort: none unseen
    assert [len(e.prompt_token_ids) for e in sink.entries] == [3, 6, 9]
    assert sink.marks == [("k", ""), ("k", "c4")]
    assert len(recorder.notes) == 3  # no intent, no abort, no reads: said at start-up


@pytest.mark.promise("CP-16")
async def test_a_sink_without_begin_call_is_served() -> None:
    class Least:
        def __init__(self) -> None:
            self.entries: list[TokenEntry] = []

        async def put(self, entry: TokenEntry) -> None:
            self.entries.append(entry)

        async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None: ...

        async def close(self) -> None: ...

    sink = Least()
    recorder = Recorder(sink)  # type: ignore[arg-type]
    await recorder.begin("k", "c1")
    await recorder.record(evidence("c1"))
    assert [e.model_call_id for e in sink.entries] == ["c1"]


def test_a_sink_that_cannot_say_that_a_call_was_lost_is_refused() -> None:
    class Mute:
        async def put(self, entry: TokenEntry) -> None: ...

    with pytest.raises(ConfigError, match="Mute has no mark_incomplete"):
        Recorder(Mute())  # type: ignore[arg-type]


class TheirSink(Protocol):
    """A protocol of somebody else's with the same names, as NeMo Gym has one."""

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None: ...

    async def put(self, entry: TokenEntry) -> None: ...

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None: ...

    async def close(self) -> None: ...


@pytest.mark.promise("CP-16")
@pytest.mark.parametrize("base", [TokenSink, TheirSink])
def test_a_verb_that_is_only_inherited_from_a_protocol_is_missing(base: Any) -> None:
    class OnlyPuts(base):  # type: ignore[misc]
        async def put(self, entry: TokenEntry) -> None: ...

    class Marks(OnlyPuts):
        async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None: ...

    class Begins(Marks):
        async def begin_call(self, rollout_id: str, model_call_id: str) -> None: ...

    with pytest.raises(ConfigError, match="OnlyPuts has no mark_incomplete of its own"):
        Recorder(OnlyPuts())
    assert any("Marks has no begin_call" in note for note in Recorder(Marks()).notes)
    assert not any("has no begin_call" in note for note in Recorder(Begins()).notes)


@pytest.mark.promise("CP-9")
async def test_a_lost_first_call_is_not_taken_for_recorded_where_begin_call_is_only_inherited() -> None:
    class Inherits(TokenSink):  # what it leaves out it "has"
        def __init__(self) -> None:
            self.entries: list[TokenEntry] = []

        async def put(self, entry: TokenEntry) -> None:
            self.entries.append(entry)

        async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None: ...

    sink = Inherits()  # type: ignore[abstract]
    recorder = Recorder(sink)
    await recorder.begin("k", "c1")
    await recorder.abort("k", "c1", "upstream:transport_dropped", request_items=[user("hi")])
    await recorder.begin("k", "c2")
    await recorder.record(evidence("c2", KEPT))
    built = build(TokenCaptureSnapshot("k", tuple(sink.entries), False, "s", 1))
    assert isinstance(built, Masked)
    assert "unrecorded_turn" in built.reasons


_OPTIONAL = (
    AbortingSink,
    SupersedingSource,
    CaptureReader,
    CallJournal,
    ReceiptSource,
    CaptureLister,
    DiscardingStore,
    SettlingSource,
)


@pytest.mark.parametrize("part", _OPTIONAL, ids=lambda part: part.__name__)
def test_an_optional_verb_is_there_only_where_a_class_has_it_of_its_own(part: Any) -> None:
    verbs = [name for name in vars(part) if callable(getattr(part, name)) and not name.startswith("_")]
    inherits = type("Inherits", (part,), {})
    own = type("Own", (part,), {name: getattr(MemoryStore, name) for name in verbs})
    assert verbs
    assert [isinstance(each, part) for each in (inherits(), own(), MemoryStore(), object())] == [
        False,
        True,
        True,
        False,
    ]
    assert isinstance(inherits(), inherits)


@pytest.mark.promise("CP-7")
@pytest.mark.parametrize("by", ["this process", "another process"])
async def test_a_key_that_was_made_new_begins_anew(by: str, tmp_path: Path) -> None:
    """A recorder that remembers the attempt before would link the new one to calls that are set aside."""
    here, other = SqliteStore(tmp_path / "c.sqlite"), SqliteStore(tmp_path / "c.sqlite")
    recorder = Recorder(here, reader=here)
    forgotten: list[str] = []
    recorder.forget_listeners.append(forgotten.append)
    before = Conversation()
    for _ in range(2):
        await before.turn(recorder)
    await recorder.begin("k", "open")
    assert await (here if by == "this process" else other).supersede("k") == "k~1"
    asked: list[dict[str, Any]] = [user("hi")]
    prompt = [1, 2, 3]
    for at in range(3):  # greedy: the same ids as before, and one turn more
        await recorder.begin("k", f"z{at}")
        await recorder.record(evidence(f"z{at}", asked, prompt, [100 + at, 7]))
        asked = [*asked, assistant(f"z{at}"), user("go on")]
        prompt = [*prompt, 100 + at, 7, 50 + at]
    assert forgotten == ["k"]
    built = build(await other.freeze("k"))
    assert isinstance(built, Trainable)
    assert built.traces[0].call_ids == ("z0", "z1", "z2")
    await here.close()
    await other.close()


async def test_a_failing_intent_fails_the_call_before_it_is_sent() -> None:
    class Broken(MemoryStore):
        async def begin_call(self, rollout_id: str, model_call_id: str, *, intent: Intent | None = None) -> Any:
            raise OSError(28, "no space", "/captures/k.tokens")

    with pytest.raises(CaptureError, match=r"c1 of k.*OSError.*no space.*/captures/k\.tokens"):
        await Recorder(Broken()).begin("k", "c1")


@pytest.mark.promise("CP-9")
@pytest.mark.parametrize("verb", ["put", "abort_call", "mark_incomplete", "open_entries"])
async def test_a_sink_that_cancels_by_itself_costs_its_rollout_and_fails_no_call(verb: str) -> None:
    """A cancellation that nobody asked for is a failure like another; the open intent says it where a mark cannot."""

    async def broken(*_: Any, **__: Any) -> Any:
        raise asyncio.CancelledError

    store = MemoryStore()
    setattr(store, verb, broken)
    if verb == "mark_incomplete":
        store.put = broken  # type: ignore[method-assign]
    recorder = Recorder(store, reader=store)
    await store.begin_call("k", "elsewhere")
    await store.abort_call("k", "elsewhere", reason="x") if verb != "abort_call" else None
    await recorder.begin("k", "c1")
    await recorder.record(evidence("c1"))
    await recorder.begin("k", "c2")
    await recorder.abort("k", "c2", "client_gone")
    await recorder.close()
    snapshot = await store.freeze("k")
    assert snapshot.incomplete == (verb != "open_entries")
    if verb == "open_entries":
        assert [e.parent_resolution_reason for e in snapshot.entries] == [DEFERRED]
        with pytest.raises(CaptureError):
            await recorder.recorded("k")


async def test_an_intent_that_cancels_by_itself_is_a_failed_intent_and_a_leaving_client_is_none() -> None:
    store = MemoryStore()
    asked = asyncio.Event()
    hang = False

    async def broken(*_: Any, **__: Any) -> Any:
        asked.set()
        if hang:
            await asyncio.Event().wait()
        raise asyncio.CancelledError

    store.begin_call = broken  # type: ignore[method-assign]
    recorder = Recorder(store, reader=store)
    with pytest.raises(CaptureError, match="c1 of k"):
        await recorder.begin("k", "c1")
    hang = True
    asked.clear()
    leaving = asyncio.create_task(recorder.begin("k", "c2"))
    await asked.wait()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_a_put_and_a_mark_that_both_fail_leave_the_open_intent_to_say_it() -> None:
    class Broken(MemoryStore):
        async def put(self, entry: TokenEntry) -> Any:
            raise OSError("no space")

        async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", *, reason: str | None = None) -> None:
            raise OSError("no space")

    store = Broken()
    recorder = Recorder(store, reader=store)
    await recorder.begin("k", "c1")
    await recorder.record(evidence("c1"))
    assert (await store.freeze("k")).reasons == ("dangling_intent:c1",)


async def test_a_reader_that_fails_leaves_the_decision_to_the_builder() -> None:
    store = Blind()
    await Recorder(store, reader=store).begin("k", "elsewhere")
    recorder = Recorder(store, reader=store)
    await recorder.begin("k", "c1")
    await recorder.record(evidence("c1"))
    assert [e.parent_resolution_reason for e in (await store.freeze("k")).entries] == [DEFERRED]


async def test_who_listens_is_told_of_a_rollout_that_ended_and_of_none_that_only_made_room() -> None:
    store, ended = MemoryStore(), list[str]()
    recorder = Recorder(store, reader=store, max_ids=1)
    recorder.forget_listeners.append(ended.append)
    for key in ("a", "b"):
        await recorder.begin(key, "c1")
        await recorder.record(evidence("c1", key=key))
    assert (list(recorder._rollouts), ended) == (["b"], [])
    await store.freeze("a")
    assert ended == ["a"]
    elsewhere = Recorder(store, reader=store)  # another process learns of it from its next call
    elsewhere.forget_listeners.append(ended.append)
    with pytest.raises(CaptureClosed):
        await elsewhere.begin("a", "c2")
    assert ended == ["a", "a"]


@pytest.mark.parametrize("how", ["freeze", "supersede", "frozen elsewhere"])
async def test_a_rollout_that_ended_is_not_watched_for_a_call_that_hangs(how: str) -> None:
    store = MemoryStore()
    recorder = Recorder(store, reader=store)
    for call in ("hung", "first", "late"):
        await recorder.begin("k", call)
    await recorder.record(evidence("first", KEPT))
    assert len(recorder._beginnings) == 1
    recorder._let_go("k")  # for memory: it goes on
    assert len(recorder._beginnings) == 1
    if how == "frozen elsewhere":
        store.freeze_listeners.clear()
    await (store.supersede("k") if how == "supersede" else store.freeze("k"))
    if how == "frozen elsewhere":
        with pytest.raises(CaptureClosed):
            await recorder.begin("k", "next")
    assert len(recorder._beginnings) == 0


async def test_freezing_lets_the_index_go() -> None:
    store, talk = MemoryStore(), Conversation()
    recorder = Recorder(store, reader=store)
    await talk.turn(recorder)
    assert "k" in recorder._rollouts
    await store.freeze("k")
    assert "k" not in recorder._rollouts
    await recorder.close()
    assert store.freeze_listeners == []
