"""Every verb of every store, killed at each of its steps: what another process then finds is before or after, whole.

The steps are found by a run that is not killed (`nursery`); a second run is killed at each. Nothing runs between the
kill and the reader.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.crash.nursery import Fate, Nursery
from tests.crash.scenes import STORES, VERBS, seen

from toprope.testing.capture_suite import sample_entry

pytestmark = [pytest.mark.promise("CP-1"), pytest.mark.promise("CP-2")]

EVERY = sorted(STORES)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("store", EVERY)
async def test_a_process_killed_at_any_step_leaves_before_or_after(
    ward: Nursery, left_behind: dict[str, Path], memory_dir: Path, store: str, verb: str
) -> None:
    def fresh() -> Path:
        copy = memory_dir / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        return shutil.copytree(left_behind[store], copy)

    before = await seen(store, fresh())
    assert before["k"][6] == (sample_entry("k", "c1"),)
    whole = ward.run("act", directory := fresh(), store=store, verb=verb)
    assert (whole.code, whole.said) == (0, ["acknowledged"]), whole.error
    after = await seen(store, directory)
    assert (before == after) == (verb == "put of the same bytes")
    if store == "sqlite":  # a table of points that misses the commit would prove nothing
        assert {"BEGIN IMMEDIATE", "COMMIT", "after COMMIT", "close", "after close"} <= set(whole.points)
        assert any(each.startswith(("INSERT", "UPDATE", "DELETE")) for each in whole.points) == (before != after)
    last = len(whole.points) - 1 - whole.points[::-1].index("after COMMIT") if store == "sqlite" else None
    for at, label in enumerate(whole.points, 1):
        fate = ward.run("act", directory := fresh(), kill_at=at, store=store, verb=verb)
        assert fate.code == -9, fate
        assert fate.points == whole.points[:at]
        where = f"killed at {at} of {len(whole.points)}: {label}"
        found = await seen(store, directory)
        if (store, verb) == ("jsonl", "sweep_retired") and found not in (before, after):
            assert found == {**before, "gone": (*before["gone"][:7], None)}, where  # a tombstone, its receipts gone
            found = before
        assert found in (before, after), where
        if fate.said:
            assert found == after, where
        if last is not None:
            assert found == (after if at > last else before), where
        if found == before:
            again = ward.run("act", directory, store=store, verb=verb)
            assert again.code == 0, (where, again.error)
            assert await seen(store, directory) == after, where


@pytest.mark.parametrize("store", EVERY)
async def test_the_first_write_of_a_run_killed_at_any_step_leaves_a_store_that_works(
    ward: Nursery, memory_dir: Path, store: str
) -> None:
    whole = ward.run("act", memory_dir / "run", store=store, verb="put of a new key")
    assert whole.code == 0, whole.error
    for at, label in enumerate(whole.points, 1):
        directory = memory_dir / f"at-{at}"
        fate = ward.run("act", directory, kill_at=at, store=store, verb="put of a new key")
        assert (fate.code, len(fate.points)) == (-9, at), fate
        found = await seen(store, directory)
        whole_put = (sample_entry("new", "c1"),)
        assert [key for key in found if found[key][6] not in ((), whole_put)] == [], label
        if fate.said:
            assert found["new"][6] == whole_put, label
        again = ward.run("act", directory, store=store, verb="put of a new key")
        assert again.code == 0, (label, again.error)
        assert (await seen(store, directory))["new"][6] == whole_put


@pytest.mark.parametrize("store", EVERY)
async def test_writers_that_share_a_commit_die_together_and_each_is_absent_or_whole(
    ward: Nursery, left_behind: dict[str, Path], memory_dir: Path, store: str
) -> None:
    def play(at: int | None) -> tuple[Fate, Path]:
        directory = shutil.copytree(left_behind[store], memory_dir / f"at-{at}")
        return ward.run("together", directory, kill_at=at, store=store), directory

    whole, _ = play(None)
    assert whole.code == 0, whole.error
    assert len(whole.said) == 10
    killed = 0
    for at in range(1, len(whole.points) + 1):
        fate, directory = play(at)
        if fate.code == 0:
            continue  # this run needed fewer steps: more of it fell into one commit
        killed += 1
        assert fate.code == -9, fate
        found = await seen(store, directory)
        assert found["k"][6] == (sample_entry("k", "c1"),)
        for n in range(5):
            key = f"t{n}"
            entries = found[key][6] if key in found else None
            if f"put {key}" in fate.said:
                assert entries == (sample_entry(key, "c1"),)
            elif f"begun {key}" in fate.said:
                assert entries in ((), (sample_entry(key, "c1"),))
            if entries == ():
                assert found[key][4] == 1  # an intent that nobody answered
    assert killed >= 8
