"""The directory of a run is made late and unmade if nothing came of it; what others put there stays."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from toprope.errors.tree import ConfigError
from toprope.launch.workspace import Workspace, default_directory
from toprope.telemetry.calls import CallLog


def test_abandoning_removes_every_directory_that_was_made(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "runs/deep/one")
    workspace.signing_key()
    CallLog(workspace.calls).close()
    workspace.abandon()
    assert list(tmp_path.iterdir()) == []


def test_abandoning_leaves_what_was_there_and_what_was_captured(tmp_path: Path) -> None:
    mine = tmp_path / "out"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    workspace = Workspace(mine)
    workspace.signing_key()
    workspace.abandon()
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]

    kept = Workspace(tmp_path / "kept")
    kept.signing_key()
    kept.run_dir.capture_db.write_bytes(b"evidence")
    kept.abandon()
    assert kept.run_dir.capture_db.exists()
    assert kept.run_dir.signing_key.exists()


def test_the_signing_key_is_made_once_and_read_by_its_owner_only(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "out")
    key = workspace.signing_key()
    assert len(key) == 32
    assert Workspace(tmp_path / "out").signing_key() == key
    assert stat.S_IMODE(workspace.run_dir.signing_key.stat().st_mode) == 0o600


@pytest.mark.promise("UX-2")
def test_a_place_that_cannot_be_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="file/out: the directory cannot be made"):
        Workspace(tmp_path / "file" / "out")


def test_a_directory_with_a_name_too_long_for_the_file_system_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the directory cannot be made: File name too long"):
        Workspace(tmp_path / ("x" * 300))


def test_a_long_name_still_names_a_directory() -> None:
    assert len(default_directory("x" * 300).name) < 150


def test_two_default_directories_are_never_one(tmp_path: Path) -> None:
    first, second = default_directory("a b/c"), default_directory("a b/c")
    assert first != second
    assert first.parent == Path("runs")
    assert "-a-b-c-" in first.name
