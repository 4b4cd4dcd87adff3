"""The reference of all commands as Markdown, made from the program itself, so that it cannot fall behind.

`python -m toprope.cli.reference` prints it; docs/reference/cli.md is its output, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

EXIT_STATUSES = """\
| status | meaning |
| --- | --- |
| 0 | coverage reached (or the command did what it says) |
| 1 | it ran, but coverage was not reached, or the audit found a breach |
| 2 | bad configuration or input; nothing ran |
| 130 | interrupted |
"""


def render(app: typer.Typer) -> str:
    """The whole page. Raises `ValueError` naming a command or option that has no help."""
    root: Any = typer.main.get_command(app)
    lines = [
        "# Commands",
        "",
        "Made from the program by `python -m toprope.cli.reference`; do not edit.",
        "",
        "Errors are one paragraph on standard error: what, where, what would be accepted.",
        "",
        "## Exit statuses",
        "",
        EXIT_STATUSES,
        "## `toprope`",
        "",
        *_parameters("toprope", root),
    ]
    for name, command in _commands(root, "toprope"):
        lines += [f"## `{name}`", "", _help(name, command), "", *_parameters(name, command)]
    return "\n".join(lines).rstrip() + "\n"


def _commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        full = f"{prefix} {name}"
        yield full, command
        if hasattr(command, "commands"):
            yield from _commands(command, full)


def _help(name: str, command: Any) -> str:
    text = (command.help or "").strip()
    if not text:
        raise ValueError(f"{name} has no help")
    prose, _, example = text.partition("\b\n")
    lines = [f"    {line.strip()}" for line in example.splitlines() if line.strip()]
    return "\n".join([prose.strip(), "", *lines]).rstrip()


def _parameters(name: str, command: Any) -> list[str]:
    rows = []
    for parameter in command.params:
        if parameter.name == "help":
            continue
        text = getattr(parameter, "help", None)
        is_option = parameter.param_type_name == "option"
        metavar = str(parameter.metavar or parameter.name.upper())
        given = f" {metavar}" if parameter.metavar else ""
        label = ", ".join(parameter.opts) + given if is_option else metavar
        if not text:
            raise ValueError(f"{name} {label} has no help")
        rows.append(f"| `{label}` | {text} |")
    return ["| argument or option | meaning |", "| --- | --- |", *rows, ""] if rows else []


def main() -> None:
    """Print the page."""
    from toprope.cli.app import app

    print(render(app), end="")


if __name__ == "__main__":
    main()
