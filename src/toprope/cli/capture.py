"""`toprope capture ls | show`: the evidence kept in a capture store. Both work while writers run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from toprope.tokens.entry import TokenEntry
    from toprope.tokens.snapshot import Receipt

app = typer.Typer(help="Look at the evidence kept in a capture store.", no_args_is_help=True, rich_markup_mode=None)


@app.command("ls")
def ls(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a run or of `toprope serve`.")],
    retired: Annotated[bool, typer.Option("--retired", help="List what was delivered and retired, too.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line, with `rollout_id`.")] = False,
) -> None:
    """List the captures that are kept: key, state, age, calls, and why.

    \b
    toprope capture ls runs/20260101-120000-demo-1a2b
    """
    from toprope.cli.interrupts import Interrupts, run_async
    from toprope.cli.tables import age, columns
    from toprope.launch.evidence import capture_store, existing_directory

    run_dir = existing_directory(directory)

    async def command(_: Interrupts) -> Any:
        async with capture_store(run_dir) as store:
            return () if store is None else await store.list_captures(retired=retired)

    found = run_async(command)
    if json:
        import msgspec

        for info in found:
            typer.echo(msgspec.json.encode(msgspec.to_builtins(info)).decode())
        return
    if not found:
        typer.echo("nothing is kept" + ("" if retired else " (delivered captures are retired: --retired lists them)"))
        return
    rows = [
        [
            info.rollout_id,
            info.state + (" abandoned" if info.abandoned else ""),
            age(info.age_s),
            info.calls,
            info.entries,
            info.open_intents,
            "; ".join([*info.reasons, *(f"{reason} x{count}" for reason, count in info.aborts)]) or None,
        ]
        for info in found
    ]
    typer.echo(columns(["key", "state", "age", "calls", "entries", "open", "reasons"], rows), nl=False)


@app.command("show")
def show(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a run or of `toprope serve`.")],
    key: Annotated[str, typer.Argument(metavar="KEY", help="The capture key: a rollout id, `-a<n>` for attempt n.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line, with all token ids.")] = False,
) -> None:
    """Show the recorded calls of one capture key in order; of a retired one its receipts.

    \b
    toprope capture show runs/20260101-120000-demo-1a2b r0123456789.0-1 --json
    """
    from toprope.cli.interrupts import Interrupts, run_async
    from toprope.errors.tree import ConfigError
    from toprope.launch.evidence import capture_store, existing_directory

    run_dir = existing_directory(directory)

    async def command(_: Interrupts) -> tuple[Any, Any, bool]:
        async with capture_store(run_dir) as store:
            if store is None:
                return (), None, False
            known = any(info.rollout_id == key for info in await store.list_captures(retired=True))
            receipts = await store.receipts(key)
            return (() if receipts is not None else await store.open_entries(key)), receipts, known

    entries, receipts, known = run_async(command)
    if not known and not entries and receipts is None:
        raise ConfigError(
            f"{directory}: no capture has the key {key!r}; `toprope capture ls --retired` lists the keys."
        )
    if json:
        import msgspec

        for entry in entries:
            typer.echo(msgspec.json.encode(entry.model_dump()).decode())
        for receipt in receipts or ():
            value = {"rollout_id": key, "state": "retired", **msgspec.to_builtins(receipt)}
            typer.echo(msgspec.json.encode(value).decode())
        return
    typer.echo(_receipts_table(receipts) if receipts is not None else _entries_table(entries), nl=False)


def _entries_table(entries: tuple[TokenEntry, ...]) -> str:
    from toprope.cli.tables import columns

    rows = [
        [
            entry.model_call_id,
            entry.parent_call_id or entry.parent_decision,
            len(entry.prompt_token_ids),
            len(entry.generation_token_ids),
            f"{float(entry.generation_log_probs.mean()):.3f}" if len(entry.generation_log_probs) else None,
            entry.finish_reason,
            entry.dialect,
        ]
        for entry in entries
    ]
    return columns(["call", "parent", "prompt", "generated", "mean logprob", "finish", "dialect"], rows)


def _receipts_table(receipts: tuple[Receipt, ...]) -> str:
    from toprope.cli.tables import columns

    rows = [
        [receipt.model_call_id, receipt.parent_call_id, receipt.prompt_len, receipt.gen_len, receipt.chain_hash[:16]]
        for receipt in receipts
    ]
    return "retired: the payload was delivered, these receipts are kept\n" + columns(
        ["call", "parent", "prompt", "generated", "chain hash"], rows
    )
