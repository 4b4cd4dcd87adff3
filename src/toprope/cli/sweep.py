"""`toprope sweep`: end the sandboxes that dead runs left."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from toprope.launch.sandboxes import Swept


def sweep(
    leases: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]", help="A lease directory (`sandboxes.<name>.leases`). Absent: this user's own on this host."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """End every sandbox whose owner is dead or whose lease is over, and list those that live on.

    Every run does this as it starts and while it goes on; the command is for a host on which nothing runs any more.

    \b
    toprope sweep
    """
    import msgspec

    from toprope.cli.tables import columns
    from toprope.errors.tree import ConfigError
    from toprope.launch.sandboxes import sweep as end_left_behind

    if leases is not None and not leases.is_dir():
        raise ConfigError(f"DIR: {leases} is no directory; accepted: a directory of leases, or none for your own.")
    swept = end_left_behind(leases)
    if json:
        typer.echo(msgspec.json.encode({"leases": str(swept.leases), **_facts(swept)}).decode())
        return
    if swept.living:
        rows = [
            (each.sandbox_id, each.kind, each.provider, each.owner, f"{each.ends_s:.0f} s") for each in swept.living
        ]
        typer.echo(columns(["sandbox", "kind", "provider", "owner", "ends in"], rows), nl=False)
    ended = f"{len(swept.reaped)} ended" + (f": {', '.join(swept.reaped)}" if swept.reaped else "")
    typer.echo(f"{swept.leases}: {ended}; {len(swept.living)} live on")


def _facts(swept: Swept) -> dict[str, object]:
    import msgspec

    return {"reaped": list(swept.reaped), "living": msgspec.to_builtins(swept.living)}
