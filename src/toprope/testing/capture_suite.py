"""What any sink and source must keep, as plain async functions: the conformance suite for capture transports.

`connect` opens one more client of the custody under test, as another process would; every check opens the clients it
needs, closes them, and uses keys of its own, so that one store serves all checks in any order. A check returns when
the promise holds and raises `Nonconforming` when it does not. Checks of optional verbs are skipped for transports
without them. What needs processes to die is left to the caller.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from toprope.capture.protocols import (
    AbortingSink,
    CaptureReader,
    ReceiptSource,
    SupersedingSource,
    TokenSink,
    TokenSource,
)
from toprope.tokens.entry import TokenEntry


class Nonconforming(AssertionError):
    """The transport breaks a promise; the message says which and how."""


@dataclass(frozen=True, slots=True)
class Transport:
    """One client's two ends; they may be one object."""

    sink: TokenSink
    source: TokenSource

    async def close(self) -> None:
        await self.sink.close()
        if id(self.source) != id(self.sink):
            await self.source.close()


Connect = Callable[[], Awaitable[Transport]]


@dataclass(frozen=True, slots=True)
class Scale:
    """How hard to try. The defaults take a few seconds on a local disk; the suite's full size is `Scale.full()`."""

    races: int = 50
    chain: int = 200
    entries: int = 500
    writers: int = 16
    big: int = 50_000

    @classmethod
    def full(cls) -> Scale:
        return cls(races=1000, chain=1000, entries=10_000, writers=64, big=500_000)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one check: `passed`, `failed` or `skipped`, and why."""

    check: str
    result: str
    detail: str = ""


async def run_suite(connect: Connect, scale: Scale | None = None) -> tuple[Outcome, ...]:
    """Every check in order, one outcome each. Never raises for what the transport does."""
    outcomes = []
    for check in CHECKS:
        try:
            await check(connect, scale or Scale())
        except _Skip as why:
            outcomes.append(Outcome(check.__name__, "skipped", str(why)))
        except Exception as error:  # a transport may raise anything; the report says what
            outcomes.append(Outcome(check.__name__, "failed", f"{type(error).__name__}: {error}"))
        else:
            outcomes.append(Outcome(check.__name__, "passed"))
    return tuple(outcomes)


# -- helpers ----------------------------------------------------------------------------------------------------------


class _Skip(Exception):
    pass


def sample_entry(key: str, call_id: str, *, prompt: Any = (1, 2, 3), generated: int = 2, **fields: Any) -> TokenEntry:
    """An entry with `generated` ids whose logprobs no f32 can hold."""
    return TokenEntry(
        rollout_id=key,
        model_call_id=call_id,
        model="suite",
        created_at=1.5,
        prompt_token_ids=np.asarray(prompt, dtype=np.uint32),
        generation_token_ids=np.arange(100, 100 + generated, dtype=np.uint32),
        generation_log_probs=-np.arange(1, generated + 1, dtype=np.float64) / 10,
        output_items=({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": call_id}]},),
        token_item_index=0,
        **fields,
    )


def _key() -> str:
    return f"suite.{secrets.token_hex(6)}"


def _demand(truth: bool, what: str) -> None:
    if not truth:
        raise Nonconforming(what)


@asynccontextmanager
async def _client(connect: Connect) -> AsyncIterator[Transport]:
    transport = await connect()
    try:
        yield transport
    finally:
        await transport.close()


async def _refused(action: Awaitable[Any], what: str) -> None:
    try:
        await action
    except Exception:  # which error is the transport's own affair
        return
    raise Nonconforming(what)


async def _ids(transport: Transport, key: str) -> list[str]:
    return [entry.model_call_id for entry in (await transport.source.freeze(key)).entries]


# -- checks -----------------------------------------------------------------------------------------------------------


async def put_is_visible_to_another_client_at_once(connect: Connect, scale: Scale) -> None:
    async with _client(connect) as writer, _client(connect) as other:
        for _ in range(3):
            entry = sample_entry(_key(), "c1")
            await writer.sink.put(entry)
            snapshot = await other.source.freeze(entry.rollout_id)
            _demand(snapshot.entries == (entry,), "an acknowledged entry is missing for, or changed by, another client")


async def put_survives_the_client(connect: Connect, scale: Scale) -> None:
    entry = sample_entry(_key(), "c1")
    async with _client(connect) as writer:
        await writer.sink.put(entry)
    async with _client(connect) as later:
        _demand((await later.source.freeze(entry.rollout_id)).entries == (entry,), "an entry went with its client")


async def the_same_put_twice_is_one_entry(connect: Connect, scale: Scale) -> None:
    async with _client(connect) as one:
        entry = sample_entry(_key(), "c1")
        await one.sink.put(entry)
        await one.sink.put(entry)
        snapshot = await one.source.freeze(entry.rollout_id)
        _demand(len(snapshot.entries) == 1 and not snapshot.incomplete, "a repeated put is not a no-op")
        await one.sink.put(entry)
        again = await one.source.freeze(entry.rollout_id)
        _demand(again.version == snapshot.version, "a repeated put after freeze changed something")


async def other_bytes_under_a_call_id_mask_the_rollout(connect: Connect, scale: Scale) -> None:
    async with _client(connect) as one:
        entry = sample_entry(_key(), "c1")
        await one.sink.put(entry)
        await _refused(
            one.sink.put(sample_entry(entry.rollout_id, "c1", generated=3)), "a conflicting put was accepted"
        )
        snapshot = await one.source.freeze(entry.rollout_id)
        _demand(snapshot.entries == (entry,), "a conflicting put changed the entry")
        _demand(snapshot.incomplete, "a conflicting put left the rollout looking whole")


async def a_logprob_that_is_no_number_is_refused(connect: Connect, scale: Scale) -> None:
    async with _client(connect) as one:
        entry = sample_entry(_key(), "c1")
        smuggled = np.array([-0.1, math.nan])
        object.__setattr__(entry, "generation_log_probs", smuggled)
        await _refused(one.sink.put(entry), "NaN was accepted as a logprob")


async def floats_and_texts_come_back_bit_for_bit(connect: Connect, scale: Scale) -> None:
    async with _client(connect) as one:
        entry = sample_entry(_key(), "c1", generated=6, extra={"foreign": [1.5, "\u2028", 2**70, None]})
        values = np.array([-0.0, -5e-324, -0.1, -1.1754943508222875e-38, -123456.789, float(np.float32(-0.3))])
        values.flags.writeable = False
        object.__setattr__(entry, "generation_log_probs", values)
        await one.sink.put(entry)
        back = (await one.source.freeze(entry.rollout_id)).entries[0]
        _demand(back.generation_log_probs.tobytes() == values.tobytes(), "logprobs changed")
        _demand(dict(back.extra) == dict(entry.extra), "unknown fields changed")
        _demand(back.output_items == entry.output_items, "items changed")


async def freeze_makes_the_set_final(connect: Connect, scale: Scale) -> None:
    async with _client(connect) as one, _client(connect) as late:
        key = _key()
        await one.sink.put(sample_entry(key, "c1"))
        first = await one.source.freeze(key)
        await _refused(late.sink.put(sample_entry(key, "c2")), "an entry got into a frozen rollout")
        again = await late.source.freeze(key)
        _demand(again.snapshot_id == first.snapshot_id, "freezing again gave another snapshot id")
        _demand([e.model_call_id for e in again.entries] == ["c1"], "freezing again gave other entries")


async def an_unknown_key_freezes_to_nothing_for_good(connect: Connect, scale: Scale) -> None:
    async with _client(connect) as one, _client(connect) as late:
        key = _key()
        snapshot = await one.source.freeze(key)
        _demand(snapshot.entries == (), "an unknown key has entries")
        await _refused(late.sink.put(sample_entry(key, "c1")), "the empty snapshot was not kept")


async def a_mark_after_freeze_makes_the_old_pair_useless(connect: Connect, scale: Scale) -> None:
    async with _client(connect) as one:
        key = _key()
        await one.sink.put(sample_entry(key, "c1"))
        old = await one.source.freeze(key)
        await one.sink.mark_incomplete(key, "c2")
        stale = await one.source.drop(key, snapshot_id=old.snapshot_id, version=old.version)
        _demand(stale is False, "a stale drop erased what came after")
        now = await one.source.freeze(key)
        _demand(now.incomplete and len(now.entries) == 1, "a mark after freeze is not seen")
        _demand(
            await one.source.drop(key, snapshot_id=now.snapshot_id, version=now.version) is True, "the new pair fails"
        )


async def a_dropped_rollout_stays_gone(connect: Connect, scale: Scale) -> None:
    async with _client(connect) as one, _client(connect) as old_worker:
        key = _key()
        entry = sample_entry(key, "c1")
        await one.sink.put(entry)
        snapshot = await one.source.freeze(key)
        for what in ("drop with the right pair fails", "drop is not idempotent"):
            done = await one.source.drop(key, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
            _demand(done is True, what)
        await _refused(old_worker.sink.put(entry), "an old worker put its entry into a retired rollout")
        await _refused(old_worker.sink.put(sample_entry(key, "c2")), "an old worker brought a retired rollout back")
        await _refused(one.source.freeze(key), "a retired rollout was frozen as if it were new")


async def an_open_intent_masks_and_a_put_satisfies_it(connect: Connect, scale: Scale) -> None:
    async with _client(connect) as one:
        begin = getattr(one.sink, "begin_call", None)
        if begin is None:
            raise _Skip("the sink has no begin_call")
        whole, lost = _key(), _key()
        await begin(whole, "c1")
        await one.sink.put(sample_entry(whole, "c1"))
        await begin(whole, "c1")
        _demand(not (await one.source.freeze(whole)).incomplete, "a satisfied intent masks")
        await begin(lost, "c1")
        await one.sink.put(sample_entry(lost, "c2"))
        _demand((await one.source.freeze(lost)).incomplete, "an intent without a put was forgotten")


async def an_aborted_intent_does_not_mask(connect: Connect, scale: Scale) -> None:
    async with _client(connect) as one:
        if not isinstance(one.sink, AbortingSink):
            raise _Skip("the sink has no abort_call")
        key = _key()
        await one.sink.begin_call(key, "c1")
        await one.sink.abort_call(key, "c1", reason="upstream:500")
        await one.sink.abort_call(key, "c2", reason="client_gone")
        await one.sink.put(sample_entry(key, "c2"))
        snapshot = await one.source.freeze(key)
        _demand(not snapshot.incomplete, "an aborted call counts as lost")
        _demand([e.model_call_id for e in snapshot.entries] == ["c2"], "a put after an abort is not accepted")


async def a_put_racing_freeze_is_in_or_makes_the_pair_stale(connect: Connect, scale: Scale) -> None:
    async with _client(connect) as one, _client(connect) as other:
        for _ in range(scale.races):
            key = _key()
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
            _demand(inside == accepted, "an accepted put is not in the snapshot that it raced")
            _demand(not dropped or inside or snapshot.incomplete, "a lost call was dropped unseen")


async def many_writers_lose_nothing(connect: Connect, scale: Scale) -> None:
    async with _client(connect) as one, _client(connect) as other:
        key, calls = _key(), max(2, scale.entries // scale.writers)

        async def write(n: int) -> None:
            sink = (one, other)[n % 2].sink
            for i in range(calls):
                await sink.put(sample_entry(key, f"w{n}.{i}", prompt=(1, n, i)))

        await asyncio.gather(*(write(n) for n in range(scale.writers)))
        snapshot = await other.source.freeze(key)
        found = {e.model_call_id: tuple(e.prompt_token_ids.tolist()) for e in snapshot.entries}
        wanted = {f"w{n}.{i}": (1, n, i) for n in range(scale.writers) for i in range(calls)}
        _demand(
            found == wanted and len(snapshot.entries) == len(wanted), "entries of concurrent writers are lost or mixed"
        )


async def a_deep_chain_comes_back_whole(connect: Connect, scale: Scale) -> None:
    async with _client(connect) as one, _client(connect) as other:
        key, history, parent = _key(), np.arange(1, 4, dtype=np.uint32), None
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
            _demand(
                [e.prompt_token_ids.tolist() for e in tail] == [p.tolist() for p in prompts[-2:]],
                "open_entries does not give whole prompts from the middle of a chain",
            )
        entries = {e.model_call_id: e for e in (await other.source.freeze(key)).entries}
        _demand(len(entries) == scale.chain, "a long chain is not complete")
        for n, prompt in enumerate(prompts):
            entry = entries[f"c{n:05}"]
            stored = entry.prompt_token_ids
            expected = prompt if not entry.prompt_is_delta else prompt[len(prompt) - len(stored) :]
            _demand(np.array_equal(stored, expected), f"the prompt of call {n} of a chain changed")


async def a_very_long_call_is_kept(connect: Connect, scale: Scale) -> None:
    async with _client(connect) as one:
        prompt = np.arange(scale.big, dtype=np.uint32) % 150_000
        entry = sample_entry(_key(), "c1", prompt=prompt, generated=1000)
        await one.sink.put(entry)
        _demand((await one.source.freeze(entry.rollout_id)).entries == (entry,), "a long call changed")


async def superseding_sets_aside_and_mixes_nothing(connect: Connect, scale: Scale) -> None:
    async with _client(connect) as one:
        if not isinstance(one.source, SupersedingSource):
            raise _Skip("the source has no supersede")
        key = _key()
        _demand(await one.source.supersede(key) is None, "an unknown key was set aside")
        await one.sink.put(sample_entry(key, "old"))
        name = await one.source.supersede(key)
        await one.sink.put(sample_entry(key, "new"))
        _demand(await _ids(one, key) == ["new"], "entries of a superseded attempt are mixed in")
        _demand(name is not None and await _ids(one, name) == ["old"], "superseded evidence is gone")


async def receipts_outlive_the_payload(connect: Connect, scale: Scale) -> None:
    async with _client(connect) as one, _client(connect) as other:
        if not isinstance(one.source, ReceiptSource) or not isinstance(other.source, ReceiptSource):
            raise _Skip("the source keeps no receipts")
        key = _key()
        await one.sink.put(sample_entry(key, "c1"))
        _demand(await one.source.receipts(key) is None, "there are receipts of a rollout that was not delivered")
        snapshot = await one.source.freeze(key)
        await one.source.drop(key, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        kept = await other.source.receipts(key)
        _demand(
            kept is not None and [(r.model_call_id, r.prompt_len, r.gen_len) for r in kept] == [("c1", 3, 2)],
            "receipts",
        )


async def reading_leaves_no_trace(connect: Connect, scale: Scale) -> None:
    async with _client(connect) as one:
        if not isinstance(one.source, CaptureReader):
            raise _Skip("the source has no open_entries")
        key = _key()
        _demand(await one.source.open_entries(key) == (), "an unknown key has entries")
        await one.sink.put(replace(sample_entry(key, "c1")))
        _demand(len(await one.source.open_entries(key)) == 1, "a key that was only looked at cannot be written")


CHECKS: tuple[Callable[[Connect, Scale], Awaitable[None]], ...] = (
    put_is_visible_to_another_client_at_once,
    put_survives_the_client,
    the_same_put_twice_is_one_entry,
    other_bytes_under_a_call_id_mask_the_rollout,
    a_logprob_that_is_no_number_is_refused,
    floats_and_texts_come_back_bit_for_bit,
    freeze_makes_the_set_final,
    an_unknown_key_freezes_to_nothing_for_good,
    a_mark_after_freeze_makes_the_old_pair_useless,
    a_dropped_rollout_stays_gone,
    an_open_intent_masks_and_a_put_satisfies_it,
    an_aborted_intent_does_not_mask,
    a_put_racing_freeze_is_in_or_makes_the_pair_stale,
    many_writers_lose_nothing,
    a_deep_chain_comes_back_whole,
    a_very_long_call_is_kept,
    superseding_sets_aside_and_mixes_nothing,
    receipts_outlive_the_payload,
    reading_leaves_no_trace,
)
