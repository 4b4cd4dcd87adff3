"""The program `toprope`: its commands, one module each, and what happens to an error on its way out.

Importing this loads no server and no engine: each command loads what it needs when it runs.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from toprope.cli import audit, capture, check, demo, new, run, serve, show, summary, sweep
from toprope.cli.reporting import reporting
from toprope.cli.usage import call

app = typer.Typer(
    name="toprope",
    help="Run LLM agents in environments and bring back rollouts that are safe to train on.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from toprope import __version__

        typer.echo(f"toprope {__version__}")
        raise typer.Exit


@app.callback()
def _everywhere(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks. Accepted anywhere on the line.")] = False,
) -> None:
    """Run LLM agents in environments and bring back rollouts that are safe to train on."""


for module in (demo, run, serve, check, show, audit, summary, sweep):
    name = module.__name__.rpartition(".")[2]
    app.command(name)(getattr(module, name))
app.add_typer(new.app, name="new")
app.add_typer(capture.app, name="capture")


def main() -> None:
    """Run the program on the command line's arguments and exit with its status."""
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    with reporting(debug=debug):
        sys.exit(call(app, [argument for argument in arguments if argument != "--debug"]))
