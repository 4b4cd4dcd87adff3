"""What `run` and `demo` share: settings of the command line over those of the file, a run under a progress display.

Left to others: the run (`launch.run`), the display (`progress`), tables (`tables`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from toprope.cli.interrupts import Interrupts, run_async
from toprope.cli.progress import display
from toprope.collector.collect import Collector
from toprope.collector.summary import Summary
from toprope.launch.config import Configuration, load_configuration
from toprope.launch.construct import importable
from toprope.launch.run import RunJob, require_run
from toprope.launch.world import World
from toprope.results.layout import RunDir


def configured(path: Path, sets: Sequence[str], changes: Mapping[str, Any]) -> Configuration:
    """The configuration at `path`, with `changes` to its run settings (None: as it stands in the file)."""
    configuration = load_configuration(path, sets, os.environ)
    importable(path.parent, Path.cwd())
    run = require_run(configuration)
    given = {key: value for key, value in changes.items() if value is not None}
    return msgspec.structs.replace(configuration, run=msgspec.structs.replace(run, **given))


def log_to(run_dir: RunDir) -> None:
    """From now on what servers log goes into the run's `logs/toprope.log`; the display tells what people must know."""
    run_dir.logs_dir.mkdir(exist_ok=True)
    handler = logging.FileHandler(run_dir.logs_dir / "toprope.log", encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("toprope")
    logger.addHandler(handler)
    logger.propagate = False


def collect(
    configuration: Configuration,
    *,
    tasks: Path | None = None,
    as_json: bool = False,
    explain: Callable[[RunDir], None] | None = None,
) -> int:
    """Run the configuration under a display; the exit status. `explain` prints more of what is on disk then."""
    job = RunJob(configuration, tasks=tasks)
    screen = display(as_json=as_json)

    async def command(interrupts: Interrupts) -> Summary:
        def ready(collector: Collector, world: World) -> None:
            interrupts.on_first = collector.stop
            log_to(collector.run_dir)
            for address in world.bound():
                print(f"{address.name} ({address.role}) listens at {address.url}", file=sys.stderr, flush=True)

        with screen:
            return await job.collect(observers=[screen], ready=ready)

    summary = run_async(command)
    assert job.collector is not None
    if explain is not None:
        explain(job.collector.run_dir)
    screen.finished(summary, job.collector.run_dir.path)
    return summary.exit_status
