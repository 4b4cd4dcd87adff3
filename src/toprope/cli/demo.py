"""`toprope demo`: the whole system on the embedded model, in two environments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from toprope.results.layout import RunDir


def demo(
    tasks: Annotated[int, typer.Option(metavar="N", min=1, help="Tasks for each of the two environments.")] = 8,
    seed: Annotated[int, typer.Option(metavar="N", help="The seed that the tasks are made from.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The run directory, new or empty. Absent: runs/<date>-demo-<short id>."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One event a line as JSON, on standard output.")] = False,
) -> None:
    """Run a real small model on single-digit addition, plain and with a tool, and show what came back.

    Needs the extras `embedded` and `reasoning-gym`, no network and no GPU; about two minutes on two cores.

    \b
    toprope demo --tasks 4
    """
    from importlib.resources import as_file, files

    from toprope.cli.collecting import collect, configured

    sets = [f"run.tasks.{index}.{key}={value}" for index in (0, 1) for key, value in (("size", tasks), ("seed", seed))]
    with as_file(files("toprope.launch") / "demo.yaml") as path:
        configuration = configured(path, sets, {"out": None if out is None else str(out)})
    raise typer.Exit(collect(configuration, as_json=json, explain=None if json else explain))


def explain(run_dir: RunDir) -> None:
    """Print one line a task: the question, the rewards of its group, tokens, calls, time; then where to look."""
    from toprope.cli.rollouts import read_rollouts
    from toprope.cli.tables import columns
    from toprope.results.read import Damage, read_values

    questions: dict[int, str] = {}
    for task in read_values(run_dir.tasks):
        if not isinstance(task, Damage):
            questions[task["_ng_task_index"]] = str(
                task["task_input"]["responses_create_params"]["input"][-1]["content"]
            )
    groups: dict[int, list[object]] = {}
    lines = read_rollouts(run_dir)
    for index in dict.fromkeys(line.task_index for line in lines):
        group = [line for line in lines if line.task_index == index]
        groups[index] = [
            group[0].taskset,
            questions.get(index),
            " ".join("-" if line.reward is None else f"{line.reward:g}" for line in group),
            sum(line.calls or 0 for line in group),
            sum(line.tokens or 0 for line in group),
            f"{max((line.seconds or 0.0 for line in group), default=0.0):.1f} s",
        ]
    head = ["environment", "task", "rewards", "calls", "tokens", "longest"]
    typer.echo(columns(head, groups.values()), nl=False)
