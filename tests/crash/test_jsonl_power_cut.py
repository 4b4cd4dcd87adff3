"""The jsonl store on a device that forgets what was not synced: the power goes at every step of every verb."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from toprope.capture.epochs import WriterEpochs
from toprope.capture.jsonl_captures import JsonlCaptures
from toprope.capture.jsonl_store import JsonlStore
from toprope.capture.protocols import EntryConflict, Intent
from toprope.errors.tree import CaptureClosed
from toprope.testing.capture_suite import sample_entry
from toprope.testing.lossy_files import LossyFiles, PowerCut

pytestmark = [pytest.mark.promise("CP-1"), pytest.mark.promise("CP-2")]

HERE = Path("/nowhere")  # names only: the disk is in memory
PARENT: Any = {"parent_decision": "resolved", "parent_call_id": "c1"}


def custody(files: LossyFiles) -> JsonlCaptures:
    return JsonlCaptures(HERE, files, 1 << 20, lambda: 100.0, WriterEpochs(HERE))


def prepared() -> LossyFiles:
    """A device on which one key stands in every phase, everything acknowledged."""
    made = custody(files := LossyFiles())
    for key in ("k", "frozen", "gone", "r-a1"):
        made.begin(key, "c1", Intent())
        made.put(sample_entry(key, "c1"))
    made.begin("k", "c2", Intent(stream=True))
    made.abort("k", "c0", "truncated:limit_reached")
    made.freeze("frozen", "s1")
    made.freeze("gone", "s2")
    assert made.drop("gone", "s2", 2)
    return files


def conflict(made: JsonlCaptures) -> None:
    with pytest.raises(EntryConflict):
        made.put(sample_entry("k", "c1", generated=5))


VERBS: dict[str, Callable[[JsonlCaptures], Any]] = {
    "begin of a new key": lambda made: made.begin("new", "c1", Intent()),
    "begin of a new attempt": lambda made: made.begin("k-a1", "c1", Intent()),
    "begin with an intent": lambda made: made.begin("k", "c3", Intent(True, "d", 1)),
    "put": lambda made: made.put(sample_entry("k", "c2")),
    "put of a delta": lambda made: made.put(sample_entry("k", "c3", prompt=[1, 2, 3, 100, 101, 7], **PARENT)),
    "put of a new key": lambda made: made.put(sample_entry("new", "c1")),
    "put of an aborted call": lambda made: made.put(sample_entry("k", "c0")),
    "put of other bytes": conflict,
    "abort": lambda made: made.abort("k", "c2", "upstream:500"),
    "abort of a new key": lambda made: made.abort("new", "c1", "client_gone"),
    "abort after freeze": lambda made: made.abort("frozen", "c5", "truncated:budget"),
    "mark": lambda made: made.mark("k", "bad_logprob:c2"),
    "mark of a new key": lambda made: made.mark("new", "write_failed"),
    "mark after freeze": lambda made: made.mark("frozen", "write_failed:c9"),
    "freeze": lambda made: made.freeze("k", "s3"),
    "freeze of a new key": lambda made: made.freeze("new", "s3"),
    "drop": lambda made: made.drop("frozen", "s1", 2),
    "supersede": lambda made: made.supersede("k"),
    "supersede of a frozen key": lambda made: made.supersede("frozen"),
    "supersede of a tombstone": lambda made: made.supersede("gone"),
    "sweep": lambda made: made.sweep("gone", 100.0),
}


def seen(files: LossyFiles) -> dict[str, Any]:
    """Everything that a new process can read of the custody."""
    made, found, asked = custody(files), {}, set[str]()
    while new := [key for key in made.keys() if key not in asked]:  # noqa: SIM118
        asked.update(new)
        for key in new:
            if (told := made.info(key)) is not None:
                found[key] = (told, made.open_entries(key, 0), made.receipts(key))
    return found


def act(files: LossyFiles, verb: str) -> bool:
    """Whether the verb was acknowledged."""
    try:
        VERBS[verb](custody(files))
    except PowerCut:
        return False
    return True


@pytest.mark.parametrize("verb", VERBS)
def test_a_power_cut_at_any_step_leaves_before_or_after_and_what_was_acknowledged(verb: str) -> None:
    device = prepared()
    before = seen(device.after_power_cut())
    assert before["k"][1] == (sample_entry("k", "c1"),)
    whole = device.after_power_cut()
    assert act(whole, verb)
    after = seen(whole.after_power_cut())  # of what was acknowledged nothing rests on unsynced bytes
    assert after != before
    came = []
    for at, step in enumerate(whole.log):
        for torn in (0.0, 0.5, 1.0) if step.startswith(("append", "write")) else (0.0,):
            cut = LossyFiles(device.after_power_cut().disk, cut_at=at, torn=torn)
            assert not act(cut, verb)
            chances = [cut.after_power_cut(Random(n)) for n in (1, 2)]
            for files in (cut.killed(), cut.after_power_cut(), *chances):
                found = seen(files)
                assert found in (before, after), (at, step)
                came.append(found == after)
                if found == before:  # done again, it is done for good, whoever wrote which bytes first
                    assert act(files, verb), (at, step)
                    assert seen(files.after_power_cut()) == after, (at, step)
    assert False in came


def test_a_fenced_key_that_was_superseded_is_new_after_a_power_cut() -> None:
    device = prepared()
    with pytest.raises(CaptureClosed):
        custody(device).begin("r", "c1", Intent())
    whole = device.after_power_cut()
    custody(whole).supersede("r")
    for at in range(whole.steps):
        cut = LossyFiles(device.after_power_cut().disk, cut_at=at)
        with pytest.raises(PowerCut):
            custody(cut).supersede("r")
        survivor = cut.after_power_cut(Random(at))
        custody(survivor).supersede("r")
        custody(survivor.after_power_cut()).begin("r", "c1", Intent())


def test_a_put_that_another_process_only_saw_is_made_durable_before_it_is_answered() -> None:
    """The first writer dies between its write and its sync; the second finds the bytes and says "there already"."""
    device = prepared()
    whole = device.after_power_cut()
    act(whole, "put")
    last = max(at for at, step in enumerate(whole.log) if step == "sync k.tokens.jsonl")
    cut = LossyFiles(device.after_power_cut().disk, cut_at=last)
    assert not act(cut, "put")
    second = cut.killed()
    assert act(second, "put")
    assert [step for step in second.log if step.startswith("append")] == []
    assert [e.model_call_id for e in seen(second.after_power_cut())["k"][1]] == ["c1", "c2"]


class NoSync(LossyFiles):
    """Acknowledges what no device has."""

    def sync(self, path: Path) -> None:
        """Nothing happens."""


class NoNames(LossyFiles):
    """Syncs contents and never a directory."""

    def sync_directory(self, directory: Path) -> None:
        """Nothing happens."""


@pytest.mark.parametrize("broken", [NoSync, NoNames])
def test_a_layer_without_syncs_is_seen_to_lose_what_was_acknowledged(broken: type[LossyFiles]) -> None:
    files = broken()
    assert act(files, "put of a new key")
    whole = (sample_entry("new", "c1"),)
    assert seen(files.killed())["new"][1] == whole
    after = seen(files.after_power_cut())
    assert "new" not in after or after["new"][1] != whole


def test_histories_with_many_power_cuts_lose_nothing_that_was_acknowledged() -> None:
    """Cuts and kills at random steps, each followed by the next process on what was left."""
    cuts = 0
    for seed in range(60):
        choose = Random(seed)
        files, acknowledged, count = LossyFiles(), list[str](), 0
        while count < 15:
            cut = LossyFiles(files.disk, cut_at=choose.randint(3, 40), torn=choose.random())
            made = custody(cut)
            try:
                for _ in range(6):
                    count += 1
                    made.begin("k", f"c{count:02}", Intent())
                    made.put(sample_entry("k", f"c{count:02}"))
                    acknowledged.append(f"c{count:02}")
            except PowerCut:
                cuts += 1
            files = choose.choice([cut.killed(), cut.after_power_cut(), cut.after_power_cut(choose)])
        snapshot = custody(files).freeze("k", "s")
        found = [e.model_call_id for e in snapshot.entries]
        assert set(acknowledged) <= set(found), seed
        assert found == sorted(found)
        assert all(e == sample_entry("k", e.model_call_id) for e in snapshot.entries)
        assert [r for r in snapshot.reasons if not r.startswith("dangling_intent:c")] == [], seed
        assert acknowledged, seed
    assert cuts > 120  # two in each history, and more


async def test_a_power_cut_reaches_who_waits_for_a_verb() -> None:
    store = JsonlStore(HERE, files=LossyFiles(cut_at=2))
    with pytest.raises(PowerCut):
        await store.put(sample_entry("k", "c1"))
    await store.close()
