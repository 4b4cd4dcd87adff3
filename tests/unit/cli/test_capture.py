"""`toprope capture` as a program: listing, sweeping, showing what is retired, testing a transport."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from toprope.capture.sqlite_store import SqliteStore
from toprope.cli.app import app
from toprope.cli.reporting import reporting
from toprope.cli.tables import seconds_of
from toprope.collector.settings import CaptureSettings
from toprope.errors.tree import ConfigError
from toprope.testing.episodes import Run, collect_scripted, sample_calls


def toprope(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended, reporting(debug=False):
        app(args=list(arguments), prog_name="toprope")
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def a_run(directory: Path) -> SqliteStore:
    """One delivered and one masked rollout; the store that wrote them stays open, as a writer's."""

    async def collect() -> SqliteStore:
        store = SqliteStore(directory / "capture.sqlite")

        async def answer(run: Run) -> dict[str, Any]:
            await sample_calls(store, run.key, [([1, 10], [50, 2])])
            if run.task_id == "1":
                await store.mark_incomplete(run.key, "lost")
            return run.result(1.0)

        tasks = [{"responses_create_params": {"input": str(index)}} for index in range(2)]
        capture = CaptureSettings(enabled=True, settle_s=0.0)
        await collect_scripted(directory, answer, tasks, source=store, selected=True, capture=capture)
        return store

    return asyncio.run(collect())


def test_listing_showing_and_sweeping_while_the_store_is_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = a_run(tmp_path)
    try:
        status, out, _ = toprope(capsys, "capture", "ls", str(tmp_path), "--json")
        [line] = [json.loads(line) for line in out.splitlines()]
        assert (status, line["rollout_id"], line["state"], line["why"]) == (0, "run.1-0", "frozen", "masked")
        assert "incomplete" in line["reasons"]
        status, out, _ = toprope(capsys, "capture", "show", str(tmp_path), "run.0-0", "--json")
        [receipt] = [json.loads(line) for line in out.splitlines()]
        assert (status, receipt["state"], receipt["gen_len"]) == (0, "retired", 2)
        assert toprope(capsys, "capture", "sweep", str(tmp_path), "--older-than", "1h", "--json")[1] == (
            '{"retired":0,"tombstones":0,"evidence":0,"undelivered":0}\n'
        )
        status, out, _ = toprope(capsys, "capture", "sweep", str(tmp_path), "--older-than", "0", "--evidence")
        assert (status, out.startswith("swept 1 tombstones and 1 captures")) == (0, True)
        assert "nothing is kept" in toprope(capsys, "capture", "ls", str(tmp_path))[1]
        status, out, _ = toprope(capsys, "audit", str(tmp_path), "--json")
        report = json.loads(out)
        assert (status, report["counts"]["unverifiable"]) == (0, 2)
    finally:
        asyncio.run(store.close())


def test_a_sweep_says_what_it_keeps_because_nobody_has_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = a_run(tmp_path)

    async def freeze_one_more() -> None:
        await sample_calls(store, "minutes-2", [([1, 10], [50, 2])])
        await store.freeze("minutes-2")
        await store.close()

    asyncio.run(freeze_one_more())
    sweep = ("capture", "sweep", str(tmp_path), "--older-than", "0")
    _, out, _ = toprope(capsys, *sweep, "--evidence")
    assert out.splitlines()[1] == "1 captures of that age stay: no row on disk holds them (--undelivered discards them)"
    assert "minutes-2" in toprope(capsys, "capture", "ls", str(tmp_path))[1]
    assert toprope(capsys, *sweep, "--undelivered", "--json")[1] == (
        '{"retired":0,"tombstones":0,"evidence":1,"undelivered":0}\n'
    )
    assert "nothing is kept" in toprope(capsys, "capture", "ls", str(tmp_path))[1]


def test_an_age_is_read_as_people_write_it() -> None:
    assert [seconds_of(text, "--t") for text in ("90", "45s", "30m", "12h", "7d", "0")] == [
        90,
        45,
        1800,
        43200,
        604800,
        0,
    ]
    for bad in ("", "soon", "-1", "7w", "inf", "nan"):
        with pytest.raises(ConfigError, match="--t"):
            seconds_of(bad, "--t")


def test_a_broken_transport_ends_with_status_1_and_names_its_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = "toprope.testing.broken_transports:AcceptsNan"
    kwargs = json.dumps({"path": str(tmp_path / "c.db")})
    status, out, _ = toprope(capsys, "capture", "conformance", "--quick", "--sink", named, "--kwargs", kwargs)
    assert status == 1
    assert [line for line in out.splitlines() if line.startswith("failed")] == [
        "failed   a logprob that is no number is refused: NaN was accepted as a logprob"
    ]


@pytest.mark.promise("UX-2")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sink", "nowhere:Store"], "nowhere"),
        (["--sink", "toprope.capture.sqlite_store:SqliteStore"], "path"),
        (["--sink", "toprope.capture.memory_store:MemoryStore", "--kwargs", "[1]"], "--kwargs"),
    ],
)
def test_a_transport_that_cannot_be_built_is_one_paragraph(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = toprope(capsys, "capture", "conformance", *arguments)
    assert (status, out) == (2, "")
    assert said in err
    assert "Traceback" not in err
