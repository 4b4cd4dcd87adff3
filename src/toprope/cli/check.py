"""`toprope check`: validate a configuration and its servers without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from toprope.launch.config import Configuration
    from toprope.launch.serving import CheckReport


def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration, one YAML file.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; may be repeated.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    environment: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Put the environment of this resources server through the conformance suite instead."
        ),
    ] = None,
) -> None:
    """Validate a configuration and ask its servers: names, tasks, engines, grants. Nothing runs, nothing is written.

    With --environment: every promise that an environment must keep, one line each; exit status 1 if one is not kept.

    \b
    toprope check sums.yaml
    toprope check sums.yaml --environment sums
    """
    import os

    import msgspec

    from toprope.cli.interrupts import Interrupts, run_async
    from toprope.cli.tables import columns
    from toprope.launch.config import load_configuration
    from toprope.launch.construct import importable
    from toprope.launch.serving import check as ask

    configuration = load_configuration(config, set_ or [], os.environ)
    importable(config.parent, Path.cwd())
    if environment is not None:
        _conformance(configuration, environment, as_json=json)
        return

    async def command(_: Interrupts) -> CheckReport:
        return await ask(configuration)

    report = run_async(command)
    if json:
        typer.echo(msgspec.json.encode(report).decode())
        return
    rows = [(found.name, found.role, found.where, "; ".join(found.facts)) for found in report.servers]
    typer.echo(columns(["server", "role", "where", "what it said"], rows), nl=False)
    if report.tasks is not None:
        shares = ", ".join(f"{count} in {name}" for name, count in (report.environments or {}).items())
        typer.echo(f"a run would have {report.tasks} tasks and {report.rollouts} rollouts: {shares}")
    typer.echo(f"{config}: nothing stands in the way of a run")


def _conformance(configuration: Configuration, name: str, *, as_json: bool) -> None:
    import msgspec

    from toprope.cli.interrupts import Interrupts, run_async
    from toprope.launch.environments import Outcome, check_environment

    async def command(_: Interrupts) -> tuple[Outcome, ...]:
        return await check_environment(configuration, name)

    outcomes = run_async(command)
    failed = [outcome for outcome in outcomes if outcome.problem is not None]
    for outcome in outcomes:
        line = f"{'kept  ' if outcome.problem is None else 'BROKEN'} {outcome.check.replace('_', ' ')}"
        text = line if outcome.problem is None else f"{line}: {outcome.problem}"
        typer.echo(msgspec.json.encode(outcome).decode() if as_json else text)
    if not as_json:
        typer.echo(f"{name}: {'conforms' if not failed else f'breaks {len(failed)} of {len(outcomes)} promises'}")
    if failed:
        raise typer.Exit(1)
