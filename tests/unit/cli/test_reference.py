"""Every command, option and setting is documented, and the pages are what the program says of itself (UX-4)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
import typer

from toprope.cli.app import app
from toprope.cli.reference import render
from toprope.launch import reference as configuration

DOCS = Path(__file__).parents[3] / "docs/reference"


@pytest.mark.promise("UX-4")
def test_the_page_of_commands_is_what_the_program_says() -> None:
    assert (DOCS / "cli.md").read_text() == render(app), "run: python -m toprope.cli.reference > docs/reference/cli.md"


@pytest.mark.promise("UX-4")
def test_the_page_of_settings_is_what_the_settings_say() -> None:
    assert (DOCS / "configuration.md").read_text() == configuration.render(), (
        "run: python -m toprope.launch.reference > docs/reference/configuration.md"
    )


@pytest.mark.promise("UX-4")
def test_an_option_a_command_and_a_setting_without_a_description_are_refused() -> None:
    silent = typer.Typer()

    @silent.callback()
    def everywhere() -> None:
        """All."""

    @silent.command("speak")
    def speak(loud: bool = False) -> None:
        """Say it."""

    with pytest.raises(ValueError, match="toprope speak --loud has no help"):
        render(silent)

    mute = typer.Typer()

    @mute.callback()
    def also_everywhere() -> None:
        """All."""

    @mute.command("hush")
    def hush() -> None: ...

    with pytest.raises(ValueError, match="toprope hush has no help"):
        render(mute)

    class Settings(msgspec.Struct):
        told: Annotated[int, msgspec.Meta(description="a number")] = 1
        untold: int = 2

    with pytest.raises(ValueError, match=r"Settings\.untold has no description"):
        configuration.table("x", Settings)


def commands(group: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*prefix, name))
        else:
            yield (*prefix, name), command


@pytest.mark.promise("UX-4")
@pytest.mark.parametrize(
    ("path", "command"), [pytest.param(p, c, id=" ".join(p)) for p, c in commands(typer.main.get_command(app))]
)
def test_the_help_of_every_command_has_an_example_that_parses(path: tuple[str, ...], command: Any) -> None:
    examples = [line.strip() for line in command.help.partition("\b\n")[2].splitlines() if line.strip()]
    assert examples
    for example in examples:
        program, *words = shlex.split(example)
        assert program == "toprope"
        assert tuple(words[: len(path)]) == path
        command.make_context(example, words[len(path) :])  # raises for what the command does not take
