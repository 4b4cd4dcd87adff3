"""`toprope capture ls | show | sweep | conformance`: the evidence kept in a capture store, and tests for transports.

All work while writers run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from toprope.tokens.entry import TokenEntry
    from toprope.tokens.snapshot import Receipt

app = typer.Typer(
    help="Look at the evidence kept in a capture store, sweep it, test a transport.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("ls")
def ls(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a run or of `toprope serve`.")],
    retired: Annotated[bool, typer.Option("--retired", help="List what was delivered and retired, too.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line, with `rollout_id`.")] = False,
) -> None:
    """List the captures that are kept: key, state, age, calls, and why.

    Kept as: open, dead writer (nobody will write to it any more), undelivered (frozen, no row on disk), masked, failed,
    abandoned (set aside for a later run), write only (rebuild_response: false), half-dropped (its row is delivered; a
    start or a sweep retires it).

    \b
    toprope capture ls runs/20260101-120000-demo-1a2b
    """
    from toprope.cli.interrupts import Interrupts, run_async
    from toprope.cli.tables import age, columns
    from toprope.collector.kept import Kept, kept_evidence
    from toprope.launch.evidence import capture_store, existing_directory

    run_dir = existing_directory(directory)

    async def command(_: Interrupts) -> tuple[Kept, ...]:
        async with capture_store(run_dir) as store:
            return () if store is None else await kept_evidence(run_dir, store, retired=retired)

    found = run_async(command)
    if json:
        import msgspec

        for each in found:
            value = {**msgspec.to_builtins(each.info), "why": each.why, "reasons": each.reasons}
            typer.echo(msgspec.json.encode(value).decode())
        return
    if not found:
        typer.echo("nothing is kept" + ("" if retired else " (delivered captures are retired: --retired lists them)"))
        return
    rows = [
        [
            each.info.rollout_id,
            each.info.state,
            each.why,
            age(each.info.age_s),
            each.info.calls,
            each.info.entries,
            each.info.open_intents,
            "; ".join(each.reasons) or None,
        ]
        for each in found
    ]
    typer.echo(columns(["key", "state", "kept as", "age", "calls", "entries", "open", "reasons"], rows), nl=False)


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


@app.command("sweep")
def sweep(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a run or of `toprope serve`.")],
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="T", help="An age: seconds, or a number with s, m, h or d.")
    ],
    evidence: Annotated[
        bool, typer.Option("--evidence", help="Discard kept evidence of that age too: masked, failed, abandoned.")
    ] = False,
    undelivered: Annotated[
        bool,
        typer.Option(
            "--undelivered", help="Discard, with evidence, also what could still be delivered, and write-only."
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a line.")] = False,
) -> None:
    """Remove tombstones (receipts of delivered rollouts) that are older than T; with --evidence kept evidence too.

    First retires what was delivered and not dropped. Never touched: captures of live writers, and the high-water mark
    of each rollout, which keeps old workers out. What is recorded and no row on disk holds (undelivered, open, of a
    dead writer, write only) is kept and counted unless --undelivered is given; of a writer that told no epoch age alone
    says then that it is gone. Rows whose receipts or evidence went are `unverifiable` to the audit.

    \b
    toprope capture sweep runs/20260101-120000-demo-1a2b --older-than 30d
    """
    from toprope.cli.interrupts import Interrupts, run_async
    from toprope.cli.tables import seconds_of
    from toprope.collector.kept import kept_evidence, may_go
    from toprope.collector.reconcile import reconcile
    from toprope.launch.evidence import capture_store, existing_directory

    run_dir = existing_directory(directory)
    limit = seconds_of(older_than, "--older-than")

    async def command(_: Interrupts) -> dict[str, int]:
        async with capture_store(run_dir) as store:
            if store is None:
                return {"retired": 0, "tombstones": 0, "evidence": 0, "undelivered": 0}
            retired = await reconcile(run_dir, store)
            kept = await kept_evidence(run_dir, store)
            asked = evidence or undelivered
            gone = await store.discard(may_go(kept, limit, undelivered=undelivered)) if asked else ()
            wanted = set(may_go(kept, limit, undelivered=True)) - set(may_go(kept, limit))
            swept = await store.sweep_retired(limit)
            return {
                "retired": len(retired.retired),
                "tombstones": swept,
                "evidence": len(gone),
                "undelivered": len(wanted - set(gone)),
            }

    done = run_async(command)
    if json:
        import msgspec

        typer.echo(msgspec.json.encode(done).decode())
        return
    typer.echo(
        f"swept {done['tombstones']} tombstones and {done['evidence']} captures kept as evidence; "
        f"{done['retired']} delivered captures were retired first"
    )
    if done["undelivered"]:
        typer.echo(
            f"{done['undelivered']} captures of that age stay: no row on disk holds them (--undelivered discards them)"
        )


@app.command("conformance")
def conformance(
    sink: Annotated[
        str, typer.Option("--sink", metavar="module:Class", help="The sink; also the source if none is named.")
    ],
    source: Annotated[str | None, typer.Option("--source", metavar="module:Class", help="The source.")] = None,
    kwargs: Annotated[
        str, typer.Option("--kwargs", metavar="JSON", help="Keyword arguments; each end gets those that it takes.")
    ] = "{}",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds: seconds instead of minutes.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Check a capture transport of your own: every promise that this program relies on, one line each.

    Other processes build the transport too, and some are killed. Exit status 1 if a check fails.

    \b
    toprope capture conformance --sink my_store:Store --kwargs '{"path": "/tmp/try.db"}'
    """
    from toprope.cli.interrupts import Interrupts, run_async
    from toprope.launch.transports import arguments, check_transport

    given = arguments(kwargs)

    def tell(outcome: Any) -> None:
        import msgspec

        typer.echo(msgspec.json.encode(outcome).decode() if json else str(outcome))

    async def command(_: Interrupts) -> bool:
        return await check_transport(sink, source, given, quick=quick, tell=tell)

    if not run_async(command):
        raise typer.Exit(1)


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
