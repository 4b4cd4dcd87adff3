"""`toprope run`: collect rollouts with a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration, one YAML file.")],
    tasks: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSONL file that replaces the configured tasks.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Take only the first tasks.")] = None,
    repeats: Annotated[int | None, typer.Option(metavar="N", min=1, help="Rollouts a task.")] = None,
    concurrency: Annotated[int | None, typer.Option(metavar="N", min=1, help="Episodes at once.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The run directory, new or empty. Absent: runs/<date>-<name>-<short id>."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; may be repeated.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One event a line as JSON, on standard output.")] = False,
) -> None:
    """Collect rollouts: every task of the configuration, each `repeats` times, into a run directory.

    \b
    toprope run sums.yaml --limit 8 --set run.repeats=4
    """
    from toprope.cli.collecting import collect, configured

    changes = {
        "limit": limit,
        "repeats": repeats,
        "concurrency": concurrency,
        "out": None if out is None else str(out),
    }
    raise typer.Exit(collect(configured(config, set_ or [], changes), tasks=tasks, as_json=json))
