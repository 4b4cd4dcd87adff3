"""The tasks of a run, from files and from environments that make their own.

A generated task belongs to the task set that has its resources server's name, so that `run.environment` can route it.
Left to others: the format of a row (`collector.tasks`), ids of rollouts (`collector.plan`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from toprope.collector.tasks import SourceTask, read_tasks
from toprope.errors.body import said_by
from toprope.errors.tree import ConfigError, TopropeError
from toprope.launch.config import Configuration, task_sources
from toprope.launch.parts import Parts
from toprope.launch.settings import RunConfig, TaskSource
from toprope.launch.strict import Where
from toprope.servers.resources.environment import Environment


def gather_tasks(configuration: Configuration, run: RunConfig, parts: Parts, *, file: Path | None) -> list[SourceTask]:
    """Every task of the run in order; `file`, of the command line, stands for all configured sources.

    Raises `ConfigError` with file, line and reason for the first malformed one, and if there is none at all.
    """
    where = Where(configuration.file).at("run").at("tasks")
    if file is not None:
        found = list(islice(read_tasks(file), run.limit))
    else:
        sources = task_sources(run)
        if not sources:
            raise ConfigError(f"{where}: this key is required; accepted: a JSONL file, a source, or a list of them.")
        found = list(
            islice(
                (
                    task
                    for index, source in enumerate(sources)
                    for task in _read(
                        source, configuration, parts, where.at(index) if isinstance(run.tasks, list) else where
                    )
                ),
                run.limit,
            )
        )
    if not found:
        raise ConfigError(f"{where if file is None else file}: there is no task; accepted: at least one.")
    return found


def _read(source: TaskSource, configuration: Configuration, parts: Parts, where: Where) -> Iterator[SourceTask]:
    if source.file is not None:
        return islice(read_tasks(_resolve(source.file, configuration, where)), source.limit)
    assert source.generate is not None
    environment = parts.environments.get(source.generate)
    if environment is None:
        raise ConfigError(
            f"{where.at('generate')}: {source.generate!r} runs elsewhere and cannot be asked for tasks; "
            "accepted: a resources server of this configuration, or `file`."
        )
    return islice(_generate(environment, source.generate, source, where.at("generate")), source.limit)


def _generate(environment: Environment, name: str, source: TaskSource, where: Where) -> Iterator[SourceTask]:
    try:
        for index, task in enumerate(environment.tasks(source.size, source.seed)):
            if index == source.size:  # one that never ends would be read for ever
                raise ConfigError(f"{where}: {name!r} was asked for {source.size} tasks (size) and gives more")
            place = f"{where}: task {index} of {name!r}"
            yield SourceTask(place, name, task.task_id.task_id, task.task_input)
    except ConfigError:
        raise
    except TopropeError as error:
        raise ConfigError(f"{where}: {name!r}: {error.message}") from error
    except (KeyboardInterrupt, GeneratorExit):  # the user's; and the end of whoever reads
        raise
    except BaseException as error:  # the author's own code, its sys.exit() too: told with its text, nothing ran
        raise ConfigError(f"{where}: {name!r} cannot make tasks: {said_by(error)}") from error


def _resolve(file: str, configuration: Configuration, where: Where) -> Path:
    path = Path(file).expanduser()
    beside = configuration.directory / path
    found = beside if beside.exists() or path.is_absolute() else path
    if not found.exists():
        raise ConfigError(
            f"{where}: {file!r} is neither in {configuration.directory} nor in the current directory; "
            "accepted: a JSONL file, one task a line."
        )
    return found
