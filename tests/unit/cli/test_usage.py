"""A command line that cannot be read ends in one paragraph and exit status 2, whatever is wrong with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from toprope.cli.app import app
from toprope.cli.usage import call
from toprope.errors.tree import ConfigError


@pytest.mark.promise("UX-2")
@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("run", ["run: Missing argument 'CONFIG'", "accepted: toprope run [OPTIONS] CONFIG", "`toprope run -h`"]),
        ("run a.yaml --repeats x", ["'--repeats'", "valid integer", "toprope run [OPTIONS] CONFIG"]),
        ("run a.yaml --repeats 0", ["'--repeats'", "1"]),
        ("run a.yaml --repeets 2", ["--repeets", "--repeats"]),
        ("run a.yaml b.yaml", ["b.yaml", "toprope run [OPTIONS] CONFIG"]),
        ("run a.yaml --repeats", ["--repeats", "requires an argument"]),
        ("runn", ["'runn'", "accepted: demo, run, serve, check", "`toprope -h`"]),
        ("capture lss", ["capture: ", "'lss'", "accepted: ls, show, sweep, conformance"]),
        ("show", ["'DIR'", "toprope show [OPTIONS] DIR [ROLLOUT]"]),
    ],
)
def test_a_line_that_cannot_be_read_is_one_paragraph(line: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        call(app, line.split())
    assert "\n" not in caught.value.message
    assert [part for part in parts if part not in caught.value.message] == [], caught.value.message


@pytest.mark.parametrize(
    ("line", "status", "lines"),
    [
        (["runn"], 2, 1),
        (["--version"], 0, 0),
        (["run", "nowhere.yaml"], 2, 1),
        (["summary", "nowhere", "--json"], 2, 1),
    ],
)
def test_the_program_says_it_on_standard_error_and_exits_2(line: list[str], status: int, lines: int) -> None:
    result = subprocess.run([sys.executable, "-m", "toprope", *line], capture_output=True, text=True, timeout=60)
    assert result.returncode == status
    assert len(result.stderr.splitlines()) == lines, result.stderr
    assert all(told.startswith("toprope: ") for told in result.stderr.splitlines())


@pytest.mark.parametrize("line", [[], ["capture"]])
def test_no_command_at_all_shows_the_help(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    call(app, line)
    captured = capsys.readouterr()
    assert "Commands:" in captured.out + captured.err
