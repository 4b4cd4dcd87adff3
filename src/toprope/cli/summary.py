"""`toprope summary`: the metrics of runs, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def summary(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Directories of runs.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object a run and line instead of tables.")] = False,
) -> None:
    """Print the metrics of one run, or of several side by side, made from their files.

    \b
    toprope summary runs/a runs/b
    """
    import msgspec

    from toprope.cli.tables import columns, run_table
    from toprope.collector.summary import summarise
    from toprope.launch.evidence import existing_directory

    found = [(path, summarise(existing_directory(path))) for path in directories]
    if json:
        for path, each in found:
            typer.echo(msgspec.json.encode({"directory": str(path), **msgspec.to_builtins(each)}).decode())
        return
    if len(found) == 1:
        typer.echo(run_table(found[0][1]), nl=False)
        typer.echo(found[0][1].message)
        return
    rows = []
    for path, each in found:
        reward = each.metrics.measures.get("reward")
        c = each.coverage
        rows.append(
            [
                path.name,
                c.expected,
                c.measured,
                c.masked,
                c.failed,
                c.omitted + c.unknown,
                f"{c.share:.3f}",
                None if reward is None else f"{reward.tasks.mean:.3f}",
                each.tokens.generated_delivered,
            ]
        )
    head = ["run", "expected", "measured", "masked", "failed", "open", "coverage", "reward", "tokens"]
    typer.echo(columns(head, rows), nl=False)
