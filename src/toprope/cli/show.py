"""`toprope show`: a run as a table, or one rollout as a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from toprope.cli.rollouts import RolloutLine
    from toprope.results.layout import RunDir


def show(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a run.")],
    rollout: Annotated[
        str | None,
        typer.Argument(
            metavar="ROLLOUT", help="A rollout id, or its end (`3-1`: task 3, repeat 1); with `-a<n>` that attempt."
        ),
    ] = None,
    env_session: Annotated[
        str | None,
        typer.Option(
            "--env-session",
            metavar="ID",
            help="Only the rollouts that used this session of an environment's provider, whatever became of them.",
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object a rollout, or the rollout's whole row.")
    ] = False,
) -> None:
    """Show a run as a table, or one rollout as a conversation with its calls, tokens, tools and timings.

    \b
    toprope show runs/20260101-120000-demo-1a2b 3-1
    """
    import msgspec

    from toprope.cli.rollouts import read_rollouts
    from toprope.launch.evidence import existing_directory

    run_dir = existing_directory(directory)
    run_dir.require_run()
    lines = read_rollouts(run_dir)
    if env_session is not None:
        lines = _that_used(lines, env_session, directory)
    if rollout is not None:
        _show_one(run_dir, _choose(lines, rollout, directory), as_json=json)
    elif json:
        for line in lines:
            typer.echo(msgspec.json.encode(line).decode())
    else:
        _show_all(lines)


def _that_used(lines: list[RolloutLine], env_session: str, directory: Path) -> list[RolloutLine]:
    from toprope.errors.tree import ConfigError

    found = [line for line in lines if env_session in line.env_sessions]
    if not found:
        known = sum(bool(line.env_sessions) for line in lines)
        raise ConfigError(
            f"{directory}: no rollout is known to have used the environment session {env_session!r}; {known} of "
            f"{len(lines)} attempts name one at all (`toprope show {directory} --json` lists them as env_sessions)."
        )
    return found


def _show_all(lines: list[RolloutLine]) -> None:
    from toprope.cli.tables import columns, shortened

    rows = [
        [
            line.rollout_id,
            line.attempt,
            f"{line.taskset} {line.task_id}".strip(),
            line.outcome,
            None if line.reward is None else f"{line.reward:g}",
            line.calls,
            line.tokens,
            None if line.seconds is None else f"{line.seconds:.2f} s",
            None if line.why is None else shortened(line.why, 140),
        ]
        for line in lines
    ]
    head = ["rollout", "attempt", "task", "outcome", "reward", "calls", "tokens", "took", "why"]
    typer.echo(columns(head, rows), nl=False)


def _choose(lines: list[RolloutLine], asked: str, directory: Path) -> RolloutLine:
    """The attempt that `asked` names: the latest one, unless it says which."""
    from toprope.correlation.ids import parse_capture_key
    from toprope.errors.tree import ConfigError

    try:
        key = parse_capture_key(asked)
    except ValueError as error:
        raise ConfigError(f"{directory}: {error}.") from error
    whole = [line for line in lines if line.rollout_id == key.rollout_id]
    ends = [line for line in lines if line.rollout_id.endswith(f".{key.rollout_id}")]
    found = whole or ends
    names = sorted({line.rollout_id for line in found})
    if not found:
        raise ConfigError(f"{directory}: no rollout has the id {asked!r}; `toprope show {directory}` lists them.")
    if len(names) > 1:
        raise ConfigError(
            f"{directory}: {asked!r} is the end of {len(names)} ids: {', '.join(names[:5])}; give one whole."
        )
    if key.attempt:
        found = [line for line in found if line.attempt == key.attempt]
        if not found:
            raise ConfigError(f"{directory}: rollout {names[0]} has no attempt {key.attempt}.")
    return max(found, key=lambda line: line.attempt)


def _show_one(run_dir: RunDir, line: RolloutLine, *, as_json: bool) -> None:
    from toprope.canonical.json import dumps
    from toprope.cli.conversation import render
    from toprope.correlation.ids import capture_key
    from toprope.launch.workspace import read_calls

    row = _row(run_dir, line)
    if as_json:
        typer.echo(dumps(row).decode())
        return
    key = capture_key(line.rollout_id, line.attempt)
    calls = [call for call in read_calls(run_dir) if call.rollout_id == key]
    typer.echo(render(row, _task_input(run_dir, line), calls), nl=False)
    if line.seconds is not None:
        typer.echo(f"\nthe rollout took {line.seconds:.2f} s")


def _row(run_dir: RunDir, line: RolloutLine) -> dict[str, Any]:
    from toprope.canonical.json import loads
    from toprope.errors.tree import ConfigError
    from toprope.results.read import Damage, read_failure_heads, read_result_heads
    from toprope.results.rows import restore

    for heads in (read_result_heads(run_dir.results), read_failure_heads(run_dir.failures)):
        for head in heads:
            if isinstance(head, Damage):
                continue
            if (head.value.rollout_id, head.value.attempt) == (line.rollout_id, line.attempt):
                return restore(loads(head.data))
    raise ConfigError(
        f"{run_dir.path}: attempt {line.attempt} of {line.rollout_id} was dispatched and left no row: "
        "it runs still, or the run was stopped."
    )


def _task_input(run_dir: RunDir, line: RolloutLine) -> dict[str, Any]:
    from toprope.results.read import Damage, read_values

    for task in read_values(run_dir.tasks):
        if not isinstance(task, Damage) and task.get("_ng_task_index") == line.task_index:
            found = task.get("task_input")
            return found if isinstance(found, dict) else {}
    return {}
