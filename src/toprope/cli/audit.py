"""`toprope audit`: prove a run against its capture record and its journal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from toprope.collector.audit import AuditReport


def audit(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a run.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Prove a run: every trained token was sampled by a recorded call exactly once, and nothing is unaccounted for.

    Exit status 1 on any breach. Rows with token ids of an agent's own that no recorded call bears out are no breach:
    they are counted as not proven, and the run is not called proven.

    \b
    toprope audit runs/20260101-120000-demo-1a2b
    """
    from toprope.cli.interrupts import Interrupts, run_async
    from toprope.collector.audit import audit as prove
    from toprope.launch.evidence import capture_store, existing_directory

    run_dir = existing_directory(directory)

    async def command(_: Interrupts) -> AuditReport:
        async with capture_store(run_dir) as store:
            return await prove(run_dir, store)

    report = run_async(command)
    if json:
        _print_json(report)
    else:
        for breach in report.breaches:
            typer.echo(f"breach: {breach}")
        for note in report.notes:
            typer.echo(f"note: {note}")
        typer.echo(", ".join(f"{name} {count}" for name, count in report.counts.items()))
        typer.echo(f"audit: {_verdict(report)}")
    raise typer.Exit(0 if report.ok else 1)


def _verdict(report: AuditReport) -> str:
    if not report.ok:
        return f"{len(report.breaches)} breach{'es' * (len(report.breaches) > 1)}"
    counts, told = report.counts, ["no breach found"]
    if counts["not_proven"]:
        why = "rows with token ids of the agent's own, which no recorded call bears out"
        told.append(f"proven {counts['proven']}, not proven {counts['not_proven']} ({why})")
    if counts["unverifiable"]:
        told.append(f"unverifiable: {counts['unverifiable']} (captured rows whose receipts are gone)")
    return "; ".join(told) if len(told) > 1 else "proven"


def _print_json(report: object) -> None:
    import msgspec

    value = msgspec.to_builtins(report)
    typer.echo(msgspec.json.encode({"ok": not value["breaches"], **value}).decode())
