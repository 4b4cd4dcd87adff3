"""`toprope serve`: start the servers of a configuration and keep them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from toprope.launch.world import ServerAddress


def serve(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="The configuration, one YAML file; it needs no `run` section.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The directory for captures. Absent: runs/<date>-<name>-<short id>."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; may be repeated.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help='One object a line: {"name", "role", "url"}, then {"ready": true}.')
    ] = False,
) -> None:
    """Start every server of a configuration on a socket and keep them until Ctrl-C.

    \b
    toprope serve sums.yaml --out served --json
    """
    import asyncio
    import os

    from toprope.cli.interrupts import Interrupts, run_async
    from toprope.launch.config import load_configuration
    from toprope.launch.construct import importable
    from toprope.launch.serving import serve_until
    from toprope.launch.workspace import default_directory

    configuration = load_configuration(config, set_ or [], os.environ)
    importable(config.parent, Path.cwd())
    directory = out or default_directory(config.stem)

    async def up(addresses: Sequence[ServerAddress]) -> None:
        _announce(addresses, directory, as_json=json)
        await asyncio.Event().wait()

    async def command(_: Interrupts) -> None:
        await serve_until(configuration, directory, up)

    run_async(command)


def _announce(addresses: Sequence[ServerAddress], directory: Path, *, as_json: bool) -> None:
    import sys

    import msgspec

    from toprope.cli.tables import columns

    if as_json:
        for address in addresses:
            typer.echo(msgspec.json.encode(address).decode())
        typer.echo('{"ready":true}')
    else:
        typer.echo(columns(["server", "role", "url"], [(a.name, a.role, a.url) for a in addresses]), nl=False)
        for address in addresses:
            if address.role == "model":
                base = f"{address.url}/ng-rollout/<key>/training-token-capture/v1"
                typer.echo(f"{address.name}: the base URL of a captured rollout is {base}")
        typer.echo(f"captures go to {directory}; Ctrl-C stops the servers")
    sys.stdout.flush()
