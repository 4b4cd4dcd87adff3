"""What every transport must keep, as far as one process can see it: plain async functions, one promise each.

Every check opens the clients it needs, closes them, and uses keys of its own, so that one store serves all checks in
any order. It returns when the promise holds and raises `Nonconforming` when it does not.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import numpy as np

from toprope.capture.protocols import (
    AbortingSink,
    CallJournal,
    CaptureLister,
    CaptureReader,
    Intent,
    SupersedingSource,
    own_verb,
)
from toprope.testing.capture_kit import (
    Connect,
    Scale,
    Skipped,
    client,
    demand,
    frozen_ids,
    new_key,
    refused,
    sample_entry,
    takes,
)
from toprope.tokens.entry import WeightSpan


async def put_is_visible_to_another_client_at_once(connect: Connect, scale: Scale) -> None:
    async with client(connect) as writer, client(connect) as other:
        for _ in range(3):
            entry = sample_entry(new_key(), "c1")
            await writer.sink.put(entry)
            snapshot = await other.source.freeze(entry.rollout_id)
            demand(snapshot.entries == (entry,), "an acknowledged entry is missing for, or changed by, another client")


async def put_survives_the_client(connect: Connect, scale: Scale) -> None:
    entry = sample_entry(new_key(), "c1")
    async with client(connect) as writer:
        await writer.sink.put(entry)
    async with client(connect) as later:
        demand((await later.source.freeze(entry.rollout_id)).entries == (entry,), "an entry went with its client")


async def the_same_put_twice_is_one_entry(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one:
        entry = sample_entry(new_key(), "c1")
        await one.sink.put(entry)
        await one.sink.put(entry)
        snapshot = await one.source.freeze(entry.rollout_id)
        demand(len(snapshot.entries) == 1 and not snapshot.incomplete, "a repeated put is not a no-op")
        await one.sink.put(entry)
        again = await one.source.freeze(entry.rollout_id)
        demand(again.version == snapshot.version, "a repeated put after freeze changed something")


async def other_bytes_under_a_call_id_mask_the_rollout(connect: Connect, scale: Scale) -> None:
    text: tuple[dict[str, Any], ...] = ({"type": "message", "role": "assistant", "content": "another"},)
    others: dict[str, dict[str, Any]] = {
        "ids": {"generated": 3},
        "prompt": {"prompt": (1, 2, 4)},
        "decision": {"parent_decision": "unresolved", "parent_resolution_reason": "unrecorded_turn"},
        "finish": {"finish_reason": "length"},
        "items": {},
        "logprobs": {},
    }
    async with client(connect) as one:
        for what, told in others.items():
            key = new_key()
            entry, other = sample_entry(key, "c1"), sample_entry(key, "c1", **told)
            if what == "items":
                other = replace(other, output_items=text)
            if what == "logprobs":
                other = replace(other, generation_log_probs=entry.generation_log_probs - 0.5)
            await one.sink.put(entry)
            await refused(one.sink.put(other), f"another record (its {what} differ) was accepted under a call id")
            snapshot = await one.source.freeze(key)
            demand(snapshot.entries == (entry,), f"a conflicting put (its {what} differ) changed the entry")
            demand(snapshot.incomplete, f"a conflicting put (its {what} differ) left the rollout looking whole")


async def a_logprob_that_is_no_number_is_refused(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one:
        entry = sample_entry(new_key(), "c1")
        smuggled = np.array([-0.1, math.nan])
        object.__setattr__(entry, "generation_log_probs", smuggled)
        await refused(one.sink.put(entry), "NaN was accepted as a logprob")


async def floats_and_texts_come_back_bit_for_bit(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one:
        entry = sample_entry(new_key(), "c1", generated=6, extra={"foreign": [1.5, "\u2028", 2**70, None]})
        values = np.array([-0.0, -5e-324, -0.1, -1.1754943508222875e-38, -123456.789, float(np.float32(-0.3))])
        values.flags.writeable = False
        object.__setattr__(entry, "generation_log_probs", values)
        entry = replace(entry, created_at=1_764_500_000.1234567)
        await one.sink.put(entry)
        back = (await one.source.freeze(entry.rollout_id)).entries[0]
        demand(back.generation_log_probs.tobytes() == values.tobytes(), "logprobs changed")
        demand(back.created_at == entry.created_at, f"the time {entry.created_at!r} became {back.created_at!r}")
        demand(dict(back.extra) == dict(entry.extra), "unknown fields changed")
        demand(back.output_items == entry.output_items, "items changed")


async def every_field_of_a_record_comes_back(connect: Connect, scale: Scale) -> None:
    """What decides whether a call may be trained on stands in its fields: its place, its hash, who read it, images."""
    told: dict[str, dict[str, Any]] = {
        "c1": {"logprobs_mode": "processed", "finish_reason": "stop", "response_id": "resp-1", "dialect": "chat"},
        "c2": {"parent_decision": "resolved", "parent_call_id": "c1", "parent_resolution_reason": "longest_prefix"},
        "c3": {"parent_decision": "unresolved", "parent_resolution_reason": "unrecorded_turn", "cum_len": 8},
        "c4": {"client_gone": True, "media": True, "grammar_forced": [True, False], "routed_experts": [[1], [2]]},
        "c5": {"chain_hash": "5a" * 32, "item_digests": ("message:0:1", "reasoning:2:"), "request_digest": "d1"},
        "c6": {
            "sampling": {"temperature": 0.7},
            "weight_versions": tuple(WeightSpan(n, n + 1, f"w{n}") for n in range(3)),
        },
    }
    async with client(connect) as one:
        key = new_key()
        prompts = {"c2": (1, 2, 3, 100, 101, 7), "c3": (9, 8, 7, 6, 5, 4)}
        put = {
            name: sample_entry(
                key, name, prompt=prompts.get(name, (1, 2, 3)), generated=3 if name == "c6" else 2, **told[name]
            )
            for name in told
        }
        for entry in put.values():
            await one.sink.put(entry)
        back = {entry.model_call_id: entry for entry in (await one.source.freeze(key)).entries}
        demand(back.keys() == put.keys(), f"{sorted(put)} were put, {sorted(back)} came back")
        for name, fields_told in told.items():
            expected = put[name]
            lost = [field for field in fields_told if not _field_equal(back[name], expected, field)]
            demand(not lost, f"a record came back with another {', '.join(lost)}")


def _field_equal(left: Any, right: Any, name: str) -> bool:
    return bool(np.array_equal(getattr(left, name), getattr(right, name)))


async def a_swept_rollout_stays_closed(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one, client(connect) as old_worker:
        if not isinstance(one.source, CaptureLister):
            raise Skipped("the source has no sweep_retired")
        key = new_key()
        entry = sample_entry(key, "c1")
        await one.sink.put(entry)
        await one.source.sweep_retired(0.0)
        snapshot = await one.source.freeze(key)
        demand(snapshot.entries == (entry,), "a sweep took a capture that was not delivered")
        await one.source.drop(key, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        demand(await one.source.sweep_retired(3600.0) == 0, "a sweep took a tombstone that was not old enough")
        demand(await one.source.sweep_retired(0.0) >= 1, "a sweep left an old tombstone")
        shown = [each.rollout_id for each in await one.source.list_captures(retired=True)]
        demand(key not in shown, "a swept tombstone is listed")
        await refused(old_worker.sink.put(entry), "an old worker brought a swept rollout back")


async def freeze_makes_the_set_final(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one, client(connect) as late:
        key = new_key()
        await one.sink.put(sample_entry(key, "c1"))
        first = await one.source.freeze(key)
        await refused(late.sink.put(sample_entry(key, "c2")), "an entry got into a frozen rollout")
        again = await late.source.freeze(key)
        demand(again.snapshot_id == first.snapshot_id, "freezing again gave another snapshot id")
        demand([e.model_call_id for e in again.entries] == ["c1"], "freezing again gave other entries")


async def an_unknown_key_freezes_to_nothing_for_good(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one, client(connect) as late:
        key = new_key()
        snapshot = await one.source.freeze(key)
        demand(snapshot.entries == (), "an unknown key has entries")
        await refused(late.sink.put(sample_entry(key, "c1")), "the empty snapshot was not kept")


async def a_mark_after_freeze_makes_the_old_pair_useless(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one:
        key = new_key()
        await one.sink.put(sample_entry(key, "c1"))
        old = await one.source.freeze(key)
        await one.sink.mark_incomplete(key, "c2")
        stale = await one.source.drop(key, snapshot_id=old.snapshot_id, version=old.version)
        demand(stale is False, "a stale drop erased what came after")
        now = await one.source.freeze(key)
        demand(now.incomplete and len(now.entries) == 1, "a mark after freeze is not seen")
        demand(
            await one.source.drop(key, snapshot_id=now.snapshot_id, version=now.version) is True, "the new pair fails"
        )


async def a_dropped_rollout_stays_gone(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one, client(connect) as old_worker:
        key = new_key()
        entry = sample_entry(key, "c1")
        await one.sink.put(entry)
        snapshot = await one.source.freeze(key)
        for what in ("drop with the right pair fails", "drop is not idempotent"):
            done = await one.source.drop(key, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
            demand(done is True, what)
        await refused(old_worker.sink.put(entry), "an old worker put its entry into a retired rollout")
        await refused(old_worker.sink.put(sample_entry(key, "c2")), "an old worker brought a retired rollout back")
        await refused(one.source.freeze(key), "a retired rollout was frozen as if it were new")


async def an_open_intent_masks_and_a_put_satisfies_it(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one:
        begin = own_verb(one.sink, "begin_call")
        if begin is None:
            raise Skipped("the sink has no begin_call")
        whole, lost = new_key(), new_key()
        await begin(whole, "c1")
        await one.sink.put(sample_entry(whole, "c1"))
        await begin(whole, "c1")
        demand(not (await one.source.freeze(whole)).incomplete, "a satisfied intent masks")
        await begin(lost, "c1")
        await one.sink.put(sample_entry(lost, "c2"))
        demand((await one.source.freeze(lost)).incomplete, "an intent without a put was forgotten")


async def an_aborted_intent_does_not_mask(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one:
        if not isinstance(one.sink, AbortingSink):
            raise Skipped("the sink has no abort_call")
        key = new_key()
        await one.sink.begin_call(key, "c1")
        await one.sink.abort_call(key, "c1", reason="upstream:500")
        await one.sink.abort_call(key, "c2", reason="client_gone")
        await one.sink.put(sample_entry(key, "c2"))
        snapshot = await one.source.freeze(key)
        demand(not snapshot.incomplete, "an aborted call counts as lost")
        demand([e.model_call_id for e in snapshot.entries] == ["c2"], "a put after an abort is not accepted")


async def the_journal_tells_every_begun_call_in_order(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one, client(connect) as other:
        journals = [each.source for each in (one, other) if isinstance(each.source, CallJournal)]
        begins: list[Any] = [own_verb(each.sink, "begin_call") for each in (one, other)]
        if len(journals) < 2 or not all(takes(begin, "intent") for begin in begins):
            raise Skipped("the source has no begun_calls, or the sink takes no intent")
        key, names = new_key(), ("c3", "c1", "c4", "c2")
        demand(await journals[0].begun_calls(key) == (), "an unknown key has begun calls")
        told = {
            name: Intent(stream=n % 2 == 1, request_digest=f"d{n // 2}", retry_count=n, writer_epoch=f"{key}-{n % 2}")
            for n, name in enumerate(names)
        }
        for n, name in enumerate(names):
            await begins[n % 2](key, name, intent=told[name])
            for journal in journals:
                found = [call.call_id for call in await journal.begun_calls(key)]
                demand(
                    found == list(names[: n + 1]), f"{', '.join(names[: n + 1])} were begun, the journal has {found}"
                )
        await one.sink.put(sample_entry(key, "c1"))
        ended: dict[str, tuple[bool, str | None]] = {name: (name == "c1", None) for name in names}
        if isinstance(other.sink, AbortingSink):
            await other.sink.abort_call(key, "c4", reason="client_gone")
            ended["c4"] = (False, "client_gone")
            await other.sink.abort_call(key, "c2", reason="client_gone")
            await one.sink.put(sample_entry(key, "c2"))  # drained: its reply came after all
            ended["c2"] = (True, None)
        await begins[0](key, "c1", intent=told["c3"])
        await other.sink.put(sample_entry(key, "never-begun"))
        await begins[0](key, "never-begun", intent=told["c3"])
        for journal in journals:
            calls = await journal.begun_calls(key)
            demand({c.call_id: (c.recorded, c.abort) for c in calls} == ended, "the journal is wrong about ended calls")
            demand({c.call_id: c.intent for c in calls} == told, "an intent came back changed")
            demand(all(call.live for call in calls if call.open), "the journal says that a live writer is dead")


async def a_put_racing_freeze_is_in_or_makes_the_pair_stale(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one, client(connect) as other:
        for _ in range(scale.races):
            key = new_key()
            await one.sink.put(sample_entry(key, "c1"))

            async def race(key: str = key) -> bool:
                try:
                    await other.sink.put(sample_entry(key, "c2"))
                except Exception:  # refused: then its caller says that the call is lost
                    await other.sink.mark_incomplete(key, "c2")
                    return False
                return True

            snapshot, accepted = await asyncio.gather(one.source.freeze(key), race())
            inside = any(e.model_call_id == "c2" for e in snapshot.entries)
            dropped = await one.source.drop(key, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
            demand(inside == accepted, "an accepted put is not in the snapshot that it raced")
            demand(not dropped or inside or snapshot.incomplete, "a lost call was dropped unseen")


async def many_writers_lose_nothing(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one, client(connect) as other:
        key, calls = new_key(), max(16, scale.entries // scale.writers)

        done = [0] * scale.writers
        when_the_first_ended: list[int] = []
        warm = asyncio.Barrier(scale.writers)

        async def write(n: int) -> None:
            sink = (one, other)[n % 2].sink
            await sink.put(sample_entry(key, f"w{n}.0", prompt=(1, n, 0)))
            await warm.wait()  # what a first write opens is not what is compared
            for i in range(1, calls):
                await sink.put(sample_entry(key, f"w{n}.{i}", prompt=(1, n, i)))
                done[n] += 1
                await asyncio.sleep(0)  # a transport that never waits must not keep the others from their turn
            if not when_the_first_ended:
                when_the_first_ended.extend(done)

        await asyncio.gather(*(write(n) for n in range(scale.writers)))
        demand(min(when_the_first_ended) > 0, "a writer got nothing in while another wrote everything")
        snapshot = await other.source.freeze(key)
        found = {e.model_call_id: tuple(e.prompt_token_ids.tolist()) for e in snapshot.entries}
        wanted = {f"w{n}.{i}": (1, n, i) for n in range(scale.writers) for i in range(calls)}
        demand(
            found == wanted and len(snapshot.entries) == len(wanted), "entries of concurrent writers are lost or mixed"
        )


async def a_deep_chain_comes_back_whole(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one, client(connect) as other:
        key, history, parent = new_key(), np.arange(1, 4, dtype=np.uint32), None
        prompts = []
        for n in range(scale.chain):
            told: dict[str, Any] = {"parent_decision": "resolved", "parent_call_id": parent} if parent else {}
            entry = sample_entry(key, f"c{n:05}", prompt=history, **told)
            await one.sink.put(entry)
            prompts.append(history)
            history = np.concatenate([history, entry.generation_token_ids, np.array([n], dtype=np.uint32)])
            parent = entry.model_call_id
        if isinstance(other.source, CaptureReader):
            tail = await other.source.open_entries(key, scale.chain - 2)
            demand(
                [e.prompt_token_ids.tolist() for e in tail] == [p.tolist() for p in prompts[-2:]],
                "open_entries does not give whole prompts from the middle of a chain",
            )
        entries = {e.model_call_id: e for e in (await other.source.freeze(key)).entries}
        demand(len(entries) == scale.chain, "a long chain is not complete")
        for n, prompt in enumerate(prompts):
            entry = entries[f"c{n:05}"]
            stored = entry.prompt_token_ids
            expected = prompt if not entry.prompt_is_delta else prompt[len(prompt) - len(stored) :]
            demand(np.array_equal(stored, expected), f"the prompt of call {n} of a chain changed")


async def a_very_long_call_is_kept(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one:
        prompt = np.arange(scale.big, dtype=np.uint32) % 150_000
        entry = sample_entry(new_key(), "c1", prompt=prompt, generated=1000)
        await one.sink.put(entry)
        demand((await one.source.freeze(entry.rollout_id)).entries == (entry,), "a long call changed")


async def superseding_sets_aside_and_mixes_nothing(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one:
        if not isinstance(one.source, SupersedingSource):
            raise Skipped("the source has no supersede")
        key = new_key()
        demand(await one.source.supersede(key) is None, "an unknown key was set aside")
        await one.sink.put(sample_entry(key, "old"))
        name = await one.source.supersede(key)
        await one.sink.put(sample_entry(key, "new"))
        demand(await frozen_ids(one, key) == ["new"], "entries of a superseded attempt are mixed in")
        demand(name is not None and await frozen_ids(one, name) == ["old"], "superseded evidence is gone")


async def reading_leaves_no_trace(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one:
        if not isinstance(one.source, CaptureReader):
            raise Skipped("the source has no open_entries")
        key = new_key()
        demand(await one.source.open_entries(key) == (), "an unknown key has entries")
        await one.sink.put(replace(sample_entry(key, "c1")))
        demand(len(await one.source.open_entries(key)) == 1, "a key that was only looked at cannot be written")


async def the_order_of_puts_does_not_matter(connect: Connect, scale: Scale) -> None:
    async with client(connect) as one:
        parent: dict[str, Any] = {"parent_decision": "resolved", "parent_call_id": "c1"}
        pair: list[tuple[Any, dict[str, Any]]] = [((1, 2, 3), {}), ((1, 2, 3, 100, 101, 7), parent)]
        found = []
        for order in ((0, 1), (1, 0)):
            key = new_key()
            for n in order:
                prompt, told = pair[n]
                await one.sink.put(sample_entry(key, f"c{n + 1}", prompt=prompt, **told))
            entries = {entry.model_call_id: entry for entry in (await one.source.freeze(key)).entries}
            found.append([replace(entries[call], rollout_id="") for call in sorted(entries)])
        demand(len(found[0]) == 2 and found[0] == found[1], "a child that was put before its parent came back changed")
