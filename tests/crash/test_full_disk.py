"""A disk that fills up and empties again: clear errors, one masked rollout, and everything else as it was."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.crash.scenes import LATE, STORES, TURNS
from tests.crash.syscalls import ROOT
from tests.crash.test_delivery_kill import generated, state_of, whole_rows
from tests.parts import not_here

from toprope.capture.delivery import finalize_rollout_token_capture
from toprope.results.layout import RunDir

HOW = ("limit", "full")
TMPFS = 'mount -t tmpfs -o size=4m tmpfs "$0" && exec "$@"'


def fill_up(what: str, how: str, store: str, tmp_path: Path) -> tuple[Path, str]:
    """Play `full_disk`; the directory as it was left, and what was said."""
    place, copy = tmp_path / "small", tmp_path / "copy"
    place.mkdir()
    program = [sys.executable, "-m", "tests.crash.full_disk", what, how, store, str(place), str(copy)]
    if how == "full":
        may = ["unshare", "-rm", "sh", "-c", TMPFS, str(place)]
        if shutil.which("unshare") is None or subprocess.run([*may, "true"], capture_output=True).returncode:
            not_here("mounting a small file system is not permitted here")
        program = [*may, *program]
    told = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, env=told, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return copy, ran.stdout


@pytest.mark.promise("CP-6")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("store", sorted(STORES))
async def test_a_full_disk_masks_the_rollout_it_hit_and_no_other(tmp_path: Path, store: str, how: str) -> None:
    directory, said = fill_up("capture", how, store, tmp_path)
    became = dict(line.split(": ", 1) for line in said.splitlines())
    assert became["record"] == "done"  # the agent's call does not fail for its record
    assert became["put"].startswith("refused: ")
    for verb, what in became.items():
        if what.startswith("refused: "):
            assert any(word in what for word in ("disk", "space", "too large")), (verb, what)
            assert verb == "begin" or str(tmp_path / "small") in what, (verb, what)  # where
    if how == "full" or store == "sqlite":
        assert all(what.startswith("refused: ") for verb, what in became.items() if verb != "record")
    custody = STORES[store](directory)
    row = {"_ng_rollout_id": "victim", "_ng_attempt_index": 0, "response": {"id": "r", "output": []}}
    delivered = await finalize_rollout_token_capture(row, custody, settle_s=0)
    assert delivered is not None
    assert delivered["mask_sample"]
    assert "incomplete" in delivered["metrics"]["mask_reasons"]
    assert any("c1" in reason for reason in delivered["metrics"]["incomplete_reasons"])
    for key in ("neighbour", "later", "shown"):
        snapshot = await custody.freeze(key)
        assert ([e.model_call_id for e in snapshot.entries], snapshot.incomplete) == (["c1"], False), key
    if became["drop"] != "done":
        kept = await custody.freeze("kept")
        assert [e.model_call_id for e in kept.entries] == ["c1"]
        assert await custody.drop("kept", snapshot_id=kept.snapshot_id, version=kept.version)
    assert (await custody.freeze("refused")).entries == ()
    await custody.close()


@pytest.mark.parametrize("store", sorted(STORES))
async def test_a_put_that_does_not_fit_takes_none_of_its_group_along(tmp_path: Path, store: str) -> None:
    directory, said = fill_up("group", "limit", store, tmp_path)
    became = said.split()
    assert became.count("PutAck") == 9
    assert became[5] != "PutAck"
    custody = STORES[store](directory)
    for n in range(10):
        assert len((await custody.freeze(f"k{n}")).entries) == (0 if n == 5 else 1), n
    await custody.close()


@pytest.mark.promise("CP-10")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("store", sorted(STORES))
async def test_a_row_that_the_disk_refuses_ends_the_run_and_its_evidence_stays(
    tmp_path: Path, store: str, how: str
) -> None:
    directory, said = fill_up("ledger", how, store, tmp_path)
    assert said.startswith("the run ended: OSError: ")
    assert str(RunDir(tmp_path / "small").results) in said
    assert RunDir(directory).results.read_bytes().endswith(b"\n")  # nothing half written stays
    [row] = whole_rows(directory)
    assert row["_ng_rollout_id"] == "run.0-0"
    assert generated(row) == [ids for _, ids in TURNS]
    source = STORES[store](directory / "captures")
    assert await state_of(source, f"run.{LATE}-0") == "frozen"
    verdict = {"_ng_rollout_id": f"run.{LATE}-0", "response": {"id": "resp-1", "output": []}}
    delivered = await finalize_rollout_token_capture(verdict, source, settle_s=0)
    assert delivered is not None
    assert not delivered["mask_sample"]
    assert generated({"response": delivered["rebuilt_response"]}) == [ids for _, ids in TURNS]
    await source.close()
