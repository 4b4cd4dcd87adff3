"""An environment of a configuration under the conformance suite.

The suite is in `toprope.testing`, which sees everything and which nothing here may import; it is loaded by name, as a
plug-in is.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from toprope.errors.tree import ConfigError
from toprope.http.client import Client
from toprope.launch.config import Configuration
from toprope.launch.parts import Parts, build_parts
from toprope.launch.server_settings import ResourcesConfig
from toprope.launch.strict import nearest
from toprope.launch.tasks import gather_tasks
from toprope.launch.world import World
from toprope.servers.resources.environment import Environment


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check of the suite. `problem` None: the promise is kept."""

    check: str
    problem: str | None


async def check_environment(configuration: Configuration, name: str) -> tuple[Outcome, ...]:
    """Every check of the suite over the environment of the resources server `name`, with its settings and sandboxes.

    Tasks are the environment's own, else those of the configuration. Raises `ConfigError` for a name that is no
    resources server of this configuration or runs elsewhere.
    """
    resources = configuration.named(ResourcesConfig)
    if name not in resources:
        raise ConfigError(f"--environment: {name!r} is no resources server here; {nearest(name, resources)}.")
    config = resources[name]
    if config.url is not None:
        raise ConfigError(f"--environment: {name!r} runs elsewhere (`url`); accepted: one that is started here.")
    suite = importlib.import_module("toprope.testing.environment_suite")
    client = Client()
    parts = build_parts(configuration, client)
    tasks = _tasks(configuration, parts, parts.environments[name])
    world = World(configuration, parts, client, workspace=None, capture=False)
    await world.start()
    try:
        desk = None if config.sandbox is None else world.desks[config.sandbox]
        found = await suite.check_environment(parts.environments[name], tasks=tasks, sandboxes=desk)
    finally:
        await world.stop()
    problems = {finding.check: finding.problem for finding in found}
    names = [suite.READ_TASKS, *([] if suite.READ_TASKS in problems else suite.CHECKS)]
    return tuple(Outcome(check, problems.get(check)) for check in names)


def _tasks(configuration: Configuration, parts: Parts, environment: Environment) -> list[object] | None:
    """None where the environment makes its own."""
    if type(environment).tasks is not Environment.tasks:
        return None
    if configuration.run is None or configuration.run.tasks is None:
        raise ConfigError(
            "--environment: this environment makes no tasks of its own, and `run.tasks` names none; accepted: a "
            "configuration with tasks for it."
        )
    return list(gather_tasks(configuration, configuration.run, parts, file=None))
