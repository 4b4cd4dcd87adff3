"""The servers of a configuration without a run: kept up for others (`serve`), or looked at once (`check`)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toprope.collector.plan import make_plan
from toprope.http.client import Client
from toprope.launch.config import Configuration
from toprope.launch.parts import Parts, build_parts
from toprope.launch.run import check_capture, require_run, route, shares
from toprope.launch.server_settings import AgentConfig, EnvironmentConfig, ModelConfig, ResourcesConfig
from toprope.launch.settings import TransportConfig
from toprope.launch.tasks import gather_tasks
from toprope.launch.workspace import Workspace
from toprope.launch.world import ServerAddress, World, role_of


@dataclass(frozen=True, slots=True)
class Finding:
    """What `check` knows of one server."""

    name: str
    role: str
    where: str
    facts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Every server of a configuration, and what a run would have (None without `run.tasks`).

    `environments`: rollouts by environment server.
    """

    servers: tuple[Finding, ...]
    tasks: int | None
    rollouts: int | None
    environments: Mapping[str, int] | None


async def serve_until(
    configuration: Configuration, out: Path, up: Callable[[Sequence[ServerAddress]], Awaitable[None]]
) -> None:
    """Start every server on a socket, tell `up` where they are, and stop them when it returns or is cancelled.

    Captures go to `out`. Raises `ConfigError` and `EngineUnavailable` with nothing left behind.
    """
    client = _client(configuration)
    parts = build_parts(configuration, client)
    check_capture(configuration, parts)
    workspace = await asyncio.to_thread(Workspace, out)
    world = World(configuration, parts, client, workspace=workspace, capture=True, bind=True)
    try:
        await world.start()
    except BaseException:
        await asyncio.to_thread(workspace.abandon)
        raise
    try:
        await up([world.addresses[name] for name in configuration.servers])
    finally:
        await world.stop()


async def check(configuration: Configuration) -> CheckReport:
    """Build, start and ask everything, run nothing, leave nothing. Raises `ConfigError` for what would not run."""
    client = _client(configuration)
    parts = build_parts(configuration, client)
    planned = await asyncio.to_thread(_planned, configuration, parts)
    world = World(configuration, parts, client, workspace=None, capture=False)
    await world.start(ask=True)
    try:
        check_capture(configuration, parts)
        return CheckReport(tuple(_finding(world, parts, name) for name in configuration.servers), *planned)
    finally:
        await world.stop()


def _planned(
    configuration: Configuration, parts: Parts
) -> tuple[int, int, Mapping[str, int]] | tuple[None, None, None]:
    """Tasks, rollouts, and rollouts by environment, as the planner of a run makes them. Raises what it raises."""
    if configuration.run is None or configuration.run.tasks is None:
        return None, None, None
    run = require_run(configuration)
    to = shares(run)
    routes = {key: route(configuration, parts, key, share) for key, share in to.items()}
    tasks = gather_tasks(configuration, run, parts, file=None)
    plan = make_plan(tasks, routes, run_id="check", repeats=run.repeats)
    counts = Counter(to[task.route].environment for task in plan.tasks)
    return len(plan.tasks), plan.expected, {name: count * run.repeats for name, count in counts.items()}


def _client(configuration: Configuration) -> Client:
    transport = configuration.run.transport if configuration.run is not None else TransportConfig()
    return Client(transport_budget_s=transport.budget_s, transport_attempts=transport.attempts)


def _finding(world: World, parts: Parts, name: str) -> Finding:
    config = world.configuration.servers[name]
    facts: list[str] = []
    if isinstance(config, ModelConfig) and name in parts.engines:
        engine = parts.engines[name]
        ids = "returns token ids" if engine.capabilities.returns_ids else "returns no token ids"
        facts += [f"{type(engine).__name__} answers", ids, f"{engine.capabilities.logprobs_mode} logprobs"]
    elif isinstance(config, ResourcesConfig) and name in parts.environments:
        tools = ", ".join(parts.environments[name].tools)
        facts += [type(parts.environments[name]).__name__, f"tools: {tools}" if tools else "no tools"]
    elif isinstance(config, AgentConfig):
        captured = world.configuration.captured(name)
        facts += [f"model: {config.model}"] if config.model else []
        facts.append("tokens are captured" if captured else "not captured")
    elif isinstance(config, EnvironmentConfig):
        grants = ", ".join(config.tools)
        facts += [f"{config.agent} in {config.resources}", f"grants: {grants}" if grants else "no grants"]
    if config.url is not None:
        facts.append("answers")
    return Finding(name, role_of(config), world.addresses[name].url, tuple(facts))
