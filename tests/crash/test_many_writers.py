"""Several processes at one store: what one was told, another sees; a race is won or seen; nobody starves."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from tests.campaigns import campaign
from tests.crash.scenes import STORES
from tests.crash.writers import told

from toprope.testing.capture_suite import sample_entry
from toprope.tokens.snapshot import TokenCaptureSnapshot


@pytest.mark.promise("CP-3")
@pytest.mark.parametrize("tries", campaign(1000, 10_000))
@pytest.mark.parametrize("store", sorted(STORES))
async def test_what_put_acknowledged_is_seen_by_freeze_and_lineage_elsewhere(
    memory_dir: Path, store: str, tries: int
) -> None:
    mine = STORES[store](memory_dir)
    with told(("visible", store, memory_dir, "w")) as [writer]:
        for n in range(tries):
            key, call = f"k{n // 10}", f"c{n % 10}"
            writer.tell(f"{key} {call}")
            assert writer.hear() == f"{key} {call}"
            assert (await mine.open_entries(key, n % 10)) == (sample_entry(key, call),)
            if n % 10 == 9:
                assert [e.model_call_id for e in (await mine.freeze(key)).entries] == [f"c{i}" for i in range(10)]
        writer.tell("")
    await mine.close()


@pytest.mark.promise("CP-5")
@pytest.mark.parametrize("races", campaign(2000, 10_000))
@pytest.mark.parametrize("store", sorted(STORES))
async def test_a_put_that_races_freeze_in_another_process_is_inside_or_makes_the_pair_stale(
    memory_dir: Path, store: str, races: int
) -> None:
    mine = STORES[store](memory_dir)
    random = Random(races)
    outcomes: Counter[str] = Counter()

    async def freeze(key: str, at_once: bool) -> tuple[str, TokenCaptureSnapshot, bool | None]:
        for _ in range(random.randrange(60)):
            await asyncio.sleep(0)
        snapshot = await mine.freeze(key)
        return key, snapshot, await drop(snapshot) if at_once else None

    async def drop(snapshot: TokenCaptureSnapshot) -> bool:
        pair = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
        return bool(await mine.drop(snapshot.rollout_id, **pair))

    with told(("race", store, memory_dir, "w")) as [writer]:
        for wave in range(races // 50):
            keys = [f"k{wave}-{n}" for n in range(50)]
            writer.tell(" ".join(keys))
            assert writer.hear() == "put"
            writer.tell("go")
            # Every other pair is dropped only when the writer has said its loss, as delivery does after a row's sync.
            found = await asyncio.gather(*(freeze(key, n % 2 == 0) for n, key in enumerate(keys)))
            became = json.loads(writer.hear())
            for key, snapshot, dropped in found:
                inside = [e.model_call_id for e in snapshot.entries] == ["c1", "c2"]
                assert inside or [e.model_call_id for e in snapshot.entries] == ["c1"]
                assert inside == (became[key] == "accepted"), key
                dropped = await drop(snapshot) if dropped is None else dropped
                if became[key] == "late":
                    assert dropped, key  # a whole delivery came before it
                else:
                    assert dropped == (inside or snapshot.incomplete), (key, became[key])
                outcomes[became[key]] += 1
        writer.tell("")
    await mine.close()
    print(f"\n{store}: {races} races: {dict(outcomes)}")
    assert min(outcomes["accepted"], outcomes["marked"]) > races // 50


@pytest.mark.promise("CP-18")
@pytest.mark.parametrize("seconds", campaign(3, 60))
async def test_four_writers_share_one_store_and_none_starves(tmp_path: Path, seconds: int) -> None:
    """Fairness and losses gate everywhere; the wait beyond the device's own in the full size only: CI is not quiet."""
    wanted = [("pace", "sqlite", tmp_path, f"w{n}") for n in range(4)]
    with told(*wanted, ("device", "sqlite", tmp_path, "beside")) as crowd:
        for each in crowd:
            each.tell("go")
        await asyncio.sleep(seconds)
        for each in crowd:
            each.tell("stop")
        *writers, beside = [json.loads(each.hear()) for each in crowd]
    puts = [sum(each["acked"].values()) for each in writers]
    worst = [round(1000 * each["worst_s"]) for each in writers]
    device = round(1000 * beside["worst_s"])
    print(f"\nputs {puts}, longest waits {worst} ms, the device's longest sync {device} ms of {beside['syncs']}")
    assert min(puts) >= sum(puts) / len(puts) / 2 > 0
    store = STORES["sqlite"](tmp_path)
    infos = await store.list_captures()
    assert {info.rollout_id for info in infos} == {key for each in writers for key in each["acked"]}
    for info in infos:
        claimed = next(each["acked"][info.rollout_id] for each in writers if info.rollout_id in each["acked"])
        assert (info.entries, info.incomplete, info.open_intents) == (claimed, False, 0), info
    sampled = [key for each in writers for key in list(each["acked"])[:5]]
    for key in sampled:
        snapshot = await store.freeze(key)
        assert not snapshot.incomplete
    await store.close()
    if seconds >= 60:
        assert max(worst) <= device + 500
