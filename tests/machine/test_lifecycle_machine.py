"""Every cell of the life-cycle table, walked at random on every store and compared with a model that shares no code.

The model is written from the table of the specification, not from `tokens.lifecycle`, so that a wrong cell there is
found and not repeated.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.campaigns import SCALE

from toprope.capture.jsonl_store import JsonlStore
from toprope.capture.memory_store import MemoryStore
from toprope.capture.protocols import EntryConflict
from toprope.capture.sqlite_store import SqliteStore
from toprope.errors.tree import CaptureClosed
from toprope.testing.lossy_files import LossyFiles
from toprope.tokens.entry import TokenEntry

pytestmark = pytest.mark.promise("CP-4")

KEYS = st.sampled_from(["r", "r-a1", "other"])
CALLS = st.sampled_from(["c0", "c1", "c2"])
ABORTS = st.sampled_from(["upstream:500", "truncated:limit_reached", "client_gone"])


def entry(key: str, call: str, variant: int = 0) -> TokenEntry:
    return TokenEntry(
        rollout_id=key,
        model_call_id=call,
        model="m",
        created_at=float(variant),
        prompt_token_ids=[1, 2, variant],
        generation_token_ids=[3],
        generation_log_probs=[-0.5],
    )


@dataclass
class Key:
    """What the table says of one key."""

    phase: str = "open"
    version: int = 0
    pair: tuple[str, int] | None = None
    intents: set[str] = field(default_factory=set)
    puts: dict[str, int] = field(default_factory=dict)
    aborts: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    frozen_calls: tuple[str, ...] = ()

    def dangling(self) -> set[str]:
        return {c for c in self.intents if c not in self.puts and c not in self.aborts}

    def reasons(self) -> set[str]:
        return self.lost | {a for a in self.aborts.values() if a.startswith("truncated:")}


class Custody(RuleBasedStateMachine):
    """One sequence of verbs, told to every store and to the model."""

    @initialize()
    def start(self) -> None:
        self.clock = 0.0
        self.dir = Path(tempfile.mkdtemp(prefix="custody-"))
        self.runner = asyncio.Runner()
        self.memory = MemoryStore(clock=lambda: self.clock)
        self.disk = LossyFiles()
        self.sqlite, self.jsonl = self.open()
        self.keys: dict[str, Key] = {}
        self.seen: dict[str, int] = {}
        self.swept: dict[str, int] = {}
        self.snapshot_ids: dict[int, dict[str, str]] = {0: {}, 1: {}, 2: {}}

    def open(self) -> tuple[SqliteStore, JsonlStore]:
        jsonl = JsonlStore(self.dir / "jsonl", files=self.disk, clock=lambda: self.clock)
        return SqliteStore(self.dir / "c.sqlite", clock=lambda: self.clock), jsonl

    async def close(self) -> None:
        await self.sqlite.close()
        await self.jsonl.close()

    @property
    def stores(self) -> tuple[Any, ...]:
        return self.memory, self.sqlite, self.jsonl

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self.close())
            self.runner.close()
            shutil.rmtree(self.dir)

    # -- the model's helpers

    def absent(self, key: str) -> str:
        name, attempt = (key[:-3], 1) if key.endswith("-a1") else (key, 0)
        return "fenced" if attempt < self.seen.get(name, -1) or attempt <= self.swept.get(name, -1) else "absent"

    def phase(self, key: str) -> str:
        return self.keys[key].phase if key in self.keys else self.absent(key)

    def touch(self, key: str) -> Key:
        name, attempt = (key[:-3], 1) if key.endswith("-a1") else (key, 0)
        if key not in self.keys:
            self.keys[key] = Key()
            self.seen[name] = max(self.seen.get(name, -1), attempt)
        return self.keys[key]

    def every(self, verb: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The answers of all stores; an exception stands for itself by its type."""
        answers = []
        for store in self.stores:
            try:
                answers.append(self.runner.run(getattr(store, verb)(*args, **kwargs)))
            except (CaptureClosed, EntryConflict) as error:
                answers.append(type(error))
        return answers

    def refused(self, answers: list[Any], expected: bool) -> bool:
        assert [answer is CaptureClosed for answer in answers] == [expected] * 3, answers
        return expected

    # -- the verbs

    @rule(key=KEYS, call=CALLS)
    def begin(self, key: str, call: str) -> None:
        closed = self.phase(key) not in ("absent", "open")
        answers = self.every("begin_call", key, call)
        if not self.refused(answers, closed):
            state = self.touch(key)
            if call not in state.aborts and call not in state.puts:
                state.intents.add(call)
            known = state.intents | state.puts.keys() | state.aborts.keys()
            assert {(a.calls, a.entries) for a in answers} == {(len(known), len(state.puts))}

    @rule(key=KEYS, call=CALLS, variant=st.integers(0, 1))
    def put(self, key: str, call: str, variant: int) -> None:
        phase = self.phase(key)
        there = self.keys[key].puts.get(call) if key in self.keys else None
        answers = self.every("put", entry(key, call, variant))
        if self.refused(answers, phase in ("retired", "fenced") or (phase == "frozen" and there is None)):
            return
        state = self.touch(key)
        if there is None:
            state.puts[call] = variant
            state.aborts.pop(call, None)
            state.version += 1
        elif there != variant:
            state.lost.add(f"conflict:{call}")
            state.version += 1
            assert answers == [EntryConflict] * 3
            return
        assert {answer.version for answer in answers} == {state.version}

    @rule(key=KEYS, call=CALLS, reason=ABORTS)
    def abort(self, key: str, call: str, reason: str) -> None:
        phase = self.phase(key)
        if self.refused(self.every("abort_call", key, call, reason=reason), phase in ("retired", "fenced")):
            return
        if key in self.keys and (call in self.keys[key].puts or self.keys[key].aborts.get(call) == reason):
            return
        state = self.touch(key)
        state.aborts[call] = reason
        state.version += phase == "frozen"

    @rule(key=KEYS, call=st.sampled_from(["", "c9"]), reason=st.sampled_from([None, "bad_logprob", "a foreign word"]))
    def mark(self, key: str, call: str, reason: str | None) -> None:
        answers = self.every("mark_incomplete", key, call, reason=reason)
        if not self.refused(answers, self.phase(key) in ("retired", "fenced")):
            state = self.touch(key)
            typed = {None: "write_failed", "bad_logprob": "bad_logprob"}.get(reason, f"write_failed:{reason}")
            state.lost.add(f"{typed}:{call}" if call else typed)
            state.version += 1

    @rule(key=KEYS)
    def freeze(self, key: str) -> None:
        phase = self.phase(key)
        snapshots = self.every("freeze", key)
        if self.refused(snapshots, phase in ("retired", "fenced")):
            return
        state = self.touch(key)
        if phase != "frozen":
            state.phase = "frozen"
            state.version += 1
            state.lost |= {f"dangling_intent:{call}" for call in state.dangling()}
            state.frozen_calls = tuple(state.puts)
        for n, snapshot in enumerate(snapshots):
            assert tuple(e.model_call_id for e in snapshot.entries) == state.frozen_calls
            assert all(e == entry(key, e.model_call_id, state.puts[e.model_call_id]) for e in snapshot.entries)
            assert snapshot.incomplete == bool(state.lost)
            assert set(snapshot.reasons) == state.reasons()
            assert snapshot.version == state.version
            same = self.snapshot_ids[n].setdefault(key, snapshot.snapshot_id) if phase == "frozen" else None
            assert same in (None, snapshot.snapshot_id)
            self.snapshot_ids[n][key] = snapshot.snapshot_id

    @rule(key=KEYS, stale=st.sampled_from(["", "version", "id"]))
    def drop(self, key: str, stale: str) -> None:
        phase = self.phase(key)
        state = self.keys.get(key)
        version = (state.version if state else 0) - (stale == "version")
        for n, store in enumerate(self.stores):
            snapshot_id = "0" * 32 if stale == "id" else self.snapshot_ids[n].get(key, "1" * 32)
            done = self.runner.run(store.drop(key, snapshot_id=snapshot_id, version=version))
            assert done == (phase in ("frozen", "retired") and not stale), (phase, stale, store)
        if state is not None and phase == "frozen" and not stale:
            state.phase = "retired"

    @rule(key=KEYS)
    def supersede(self, key: str) -> None:
        before = self.phase(key)
        names = self.every("supersede", key)
        attempt = 1 if key.endswith("-a1") else 0
        if before == "absent":
            assert names == [None] * 3
            return
        self.seen[key.removesuffix("-a1")], self.swept[key.removesuffix("-a1")] = attempt, -1
        if before == "fenced":
            assert names == [None] * 3
            return
        numbers = [int(each.rpartition("~")[2]) for each in self.keys if each.startswith(f"{key}~")]
        name = f"{key}~{1 + max(numbers, default=0)}"
        assert names == [name] * 3
        self.keys[name] = self.keys.pop(key)
        for ids in self.snapshot_ids.values():
            ids.pop(key, None)

    @rule(older_than=st.sampled_from([0.0, 5.0]), wait=st.sampled_from([0.0, 10.0]))
    def sweep(self, older_than: float, wait: float) -> None:
        self.clock += wait
        retired = [key for key, state in self.keys.items() if state.phase == "retired"]
        if older_than > wait and retired:
            return  # the model keeps no ages
        assert self.every("sweep_retired", older_than) == [len(retired)] * 3
        for key in retired:
            if "~" not in key:
                name, attempt = key.removesuffix("-a1"), 1 if key.endswith("-a1") else 0
                self.swept[name] = max(self.swept.get(name, -1), attempt)
            del self.keys[key]
            for ids in self.snapshot_ids.values():
                ids.pop(key, None)

    @rule()
    def reopen(self) -> None:
        self.runner.run(self.close())
        self.disk = self.disk.after_power_cut()  # everything was acknowledged: nothing may be missing
        self.sqlite, self.jsonl = self.open()

    @rule()
    def kill(self) -> None:
        """The process dies between two verbs: nothing is closed, the files are all there is."""
        left = {
            name: (self.dir / name).read_bytes() for name in ("c.sqlite", "c.sqlite-wal") if (self.dir / name).exists()
        }
        self.runner.run(self.close())
        for name, data in left.items():
            (self.dir / name).write_bytes(data)
        self.disk = self.disk.after_power_cut()
        self.sqlite, self.jsonl = self.open()

    # -- what is true after every step

    @invariant()
    def all_stores_list_what_the_model_holds(self) -> None:
        if not hasattr(self, "keys"):
            return
        expected = {
            key: (
                state.phase,
                state.version,
                bool(state.lost),
                "~" in key,
                len(state.puts),
                len(state.dangling()),
            )
            for key, state in self.keys.items()
        }
        for infos in self.every("list_captures", retired=True):
            found = {
                info.rollout_id: (
                    info.state,
                    info.version,
                    info.incomplete,
                    info.abandoned,
                    info.entries,
                    info.open_intents,
                )
                for info in infos
            }
            assert found == expected

    @invariant()
    def payload_and_receipts_never_stand_together(self) -> None:
        if not hasattr(self, "keys"):
            return
        for key, state in self.keys.items():
            receipts = self.every("receipts", key)
            entries = self.every("open_entries", key)
            if state.phase == "retired":
                assert [tuple(r.model_call_id for r in each) for each in receipts] == [tuple(state.puts)] * 3
                assert entries == [()] * 3
            else:
                assert receipts == [None] * 3
                assert [tuple(e.model_call_id for e in each) for each in entries] == [tuple(state.puts)] * 3


TestCustody = Custody.TestCase
TestCustody.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


@pytest.mark.long
class TestCustodyAtLength(Custody.TestCase):  # type: ignore[name-defined,misc]
    """The same walk, longer and from new seeds; a failure prints how to repeat it."""


TestCustodyAtLength.settings = settings(
    max_examples=1000 * SCALE, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
