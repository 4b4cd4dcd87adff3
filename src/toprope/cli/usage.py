"""A command line that cannot be read: one paragraph that says what, where, and what would be accepted."""

from __future__ import annotations

from typing import Any

import typer

from toprope.errors.tree import ConfigError

USAGE_ERROR: Any = typer.BadParameter.__base__
"""What typer raises for every such line; some versions take it from click, some keep a copy without a public name."""


def call(app: typer.Typer, arguments: list[str]) -> int:
    """Run the command that `arguments` name; its exit status. Raises `ConfigError` where they name none."""
    try:
        status = app(args=arguments, prog_name="toprope", standalone_mode=False)
    except USAGE_ERROR as error:
        if "\n" in error.format_message():  # no arguments at all: the message is the whole help
            error.show()
            return int(error.exit_code)
        raise ConfigError(paragraph(error)) from error
    return status if isinstance(status, int) else 0


def paragraph(error: Any) -> str:
    """The error on one line: the command, what is wrong with which argument, and how the command is written."""
    what = " ".join(error.format_message().split()).rstrip(".")
    context = error.ctx
    if context is None:
        return f"{what}; `toprope -h` says what is accepted."
    name = context.command_path.partition(" ")[2]
    commands = getattr(context.command, "commands", None)
    if commands:
        accepted = f"accepted: {', '.join(commands)}"
    else:
        accepted = f"accepted: {' '.join([context.command_path, '[OPTIONS]', *_arguments(context.command)])}"
    place = f"{name}: " if name else ""
    return f"{place}{what}; {accepted} (`{context.command_path} -h` says more)."


def _arguments(command: Any) -> list[str]:
    """The arguments as the reference writes them, those in brackets that may be left out."""
    named = [(str(each.metavar), each.required) for each in command.params if each.param_type_name == "argument"]
    return [metavar if required else f"[{metavar}]" for metavar, required in named]
