"""One run of a configuration: parts, tasks, servers, collector, in the order in which a mistake costs least.

Settings, parts and tasks are checked before anything exists; engines are started and asked before the run directory
holds a run; whatever fails before that leaves no directory behind. Left to others: the run itself (`collector`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from toprope import __version__
from toprope.collector.collect import Collector
from toprope.collector.events import Observer
from toprope.collector.plan import Route
from toprope.collector.settings import CaptureSettings, Destination, RunSettings
from toprope.collector.summary import Summary
from toprope.collector.tasks import SourceTask
from toprope.errors.tree import ConfigError
from toprope.http.client import Client
from toprope.launch.config import Configuration
from toprope.launch.parts import Parts, build_parts
from toprope.launch.server_settings import AgentConfig, EnvironmentConfig, ModelConfig
from toprope.launch.settings import EnvironmentShare, RunConfig
from toprope.launch.strict import Where
from toprope.launch.tasks import gather_tasks
from toprope.launch.workspace import Workspace, default_directory
from toprope.launch.world import World
from toprope.servers.environment.participant import SessionReport
from toprope.servers.environment.turns import read_input

_PLACES = frozenset({"url", "place", "host", "port", "api_key", "admin_key", "keep_alive_s", "workers", "limits"})
"""Settings that say where a server runs and how much it takes; they may change between a run and its resumption."""


class RunJob:
    """A run that is ready to start: every setting, part and task was checked. Raises `ConfigError` if one is wrong."""

    def __init__(self, configuration: Configuration, *, tasks: Path | None = None) -> None:
        self.configuration = configuration
        self.run = require_run(configuration)
        self.client = Client(
            transport_budget_s=self.run.transport.budget_s, transport_attempts=self.run.transport.attempts
        )
        self.parts = build_parts(configuration, self.client)
        self.tasks: Sequence[SourceTask] = gather_tasks(configuration, self.run, self.parts, file=tasks)
        self.collector: Collector | None = None
        check_capture(configuration, self.parts)

    async def collect(
        self, *, observers: Sequence[Observer] = (), ready: Callable[[Collector, World], None] | None = None
    ) -> Summary:
        """Run it. On return everything is on disk and nothing runs any more; `ready` gets the
        collector, to stop it, and the world that it runs on.

        Raises `ConfigError` and `EngineUnavailable` with nothing left behind.
        """
        workspace = await asyncio.to_thread(self._workspace)
        try:
            world = World(
                self.configuration,
                self.parts,
                self.client,
                workspace=workspace,
                capture=self.configuration.capture.enabled,
                on_session=self._session_opened,
                on_session_closed=self._session_closed,
            )
            await world.start(ask=True)
            try:
                check_capture(self.configuration, self.parts)  # again: some engines know only once they are up
                self.collector = collector = self._collector(world, workspace, observers)
                if ready is not None:
                    ready(collector, world)
                return await collector.collect(self.tasks)
            finally:
                await world.stop(drain_s=self.run.stop_s)  # the collector is done: nobody reads what these calls say
        finally:
            await asyncio.to_thread(workspace.abandon)

    def _workspace(self) -> Workspace:
        return Workspace(Path(self.run.out).expanduser() if self.run.out else default_directory(self.name))

    @property
    def name(self) -> str:
        """What the run is called: its setting, else the file's name."""
        return self.run.name or Path(self.configuration.file).stem

    def _collector(self, world: World, workspace: Workspace, observers: Sequence[Observer]) -> Collector:
        capture = self.configuration.capture
        return Collector(
            run_dir=workspace.run_dir,
            environments={key: self._destination(world, share) for key, share in shares(self.run).items()},
            source=None if world.custody is None else world.custody.source,
            settings=RunSettings(
                name=self.name,
                repeats=self.run.repeats,
                concurrency=self.run.concurrency,
                max_attempts=self.run.max_attempts,
                min_coverage=self.run.min_coverage,
                budget_s=self.run.budget_s,
                request_timeout_s=_longest_episode(self.configuration),
                scoring={"servers": scoring_settings(self.configuration), **sandbox_settings(self.configuration)},
                servers={
                    name: f"toprope {__version__}" if config.url is None else config.url
                    for name, config in self.configuration.servers.items()
                },
            ),
            capture=CaptureSettings(
                enabled=capture.enabled,
                all_agents=capture.all_agents,
                rebuild_response=capture.rebuild_response,
                max_mask_fraction=capture.max_mask_fraction,
                mask_fraction_min_samples=capture.mask_fraction_min_samples,
                settle_s=capture.settle_s,
                format=capture.format,
                deliver=capture.deliver,
                source_timeout_s=capture.source_timeout_s,
                journal_receipts=not isinstance(capture.store, str),  # the audit cannot ask a transport by name
            ),
            observers=observers,
        )

    def _destination(self, world: World, share: EnvironmentShare) -> Destination:
        known = route(self.configuration, self.parts, share.environment, share)
        config = self.configuration.servers[share.environment]
        return Destination(
            peer=world.peer(share.environment),
            name=share.environment,
            selected=known.selected,
            weight=known.weight,
            sampling=known.sampling,
            read=known.read,
            agent_run=isinstance(config, AgentConfig),
            tells_sessions=config.url is None,
        )

    async def _session_opened(self, report: SessionReport) -> None:
        await self._journal(report, "opened")

    async def _session_closed(self, report: SessionReport) -> None:
        await self._journal(report, "closed")

    async def _journal(self, report: SessionReport, event: str) -> None:
        told = self.collector.session(report, event=event) if self.collector is not None else None
        if told is not None:
            await told


def require_run(configuration: Configuration) -> RunConfig:
    """The `run` section. Raises `ConfigError` if there is none, or neither environment nor agent in it."""
    where = Where(configuration.file).at("run")
    if configuration.run is None:
        raise ConfigError(f"{where}: this key is required to run; accepted: {{environment, tasks, ...}}.")
    if not configuration.run.environment and configuration.run.agent is None:
        names = ", ".join(configuration.named(EnvironmentConfig)) or "none is configured"
        raise ConfigError(f"{where.at('environment')}: this key is required to run; accepted: {names}.")
    return configuration.run


def shares(run: RunConfig) -> dict[str, EnvironmentShare]:
    """Where each task set goes, to an environment server or to an agent; `*` stands for every other one."""
    if run.agent is not None:
        return {"*": EnvironmentShare(environment=run.agent)}
    if isinstance(run.environment, str):
        return {"*": EnvironmentShare(environment=run.environment)}
    return {
        taskset: EnvironmentShare(environment=share) if isinstance(share, str) else share
        for taskset, share in (run.environment or {}).items()
    }


def route(configuration: Configuration, parts: Parts, key: str, share: EnvironmentShare) -> Route:
    """What the planner is told of a share of the run."""
    config = configuration.servers[share.environment]
    if isinstance(config, AgentConfig):
        return Route(key, configuration.captured(share.environment), share.weight, share.sampling, read_input)
    assert isinstance(config, EnvironmentConfig)
    selected = config.agent is not None and configuration.captured(config.agent)
    protocol = parts.protocols.get(share.environment)
    return Route(key, selected, share.weight, share.sampling, None if protocol is None else protocol.read)


def check_capture(configuration: Configuration, parts: Parts) -> None:
    """Raise `ConfigError` if an agent is to be captured on an engine that gives no token ids."""
    for name, agent in configuration.named(AgentConfig).items():
        engine = parts.engines.get(agent.model or "")
        if engine is not None and configuration.captured(name) and not engine.capabilities.returns_ids:
            raise ConfigError(
                f"{Where(configuration.file).at('servers').at(agent.model)}: token capture is on for the agent "
                f"{name!r}, but this engine returns no token ids; accepted: an engine that does (for an endpoint that "
                "can, set return_token_ids: true), or token_id_capture: {enabled: false}."
            )


def scoring_settings(configuration: Configuration) -> dict[str, Mapping[str, Any]]:
    """Every setting of the servers that changes what a reward means; no secrets, no addresses."""
    out: dict[str, Mapping[str, Any]] = {}
    for name, config in configuration.servers.items():
        values = {key: value for key, value in msgspec.to_builtins(config).items() if key not in _PLACES}
        if "engine" in values:
            engine = values["engine"]
            values["engine"] = {key: engine[key] for key in engine if key not in ("api_key", "base_url")}
        if "config" in values:
            values["config"] = _without_secrets(values["config"])
        if isinstance(config, ModelConfig):
            spend = {key: getattr(config.limits, key) for key in ("calls", "tokens", "seconds")}
            values |= {f"limits.{key}": value for key, value in spend.items() if value is not None}
        out[name] = values
    return out


def _without_secrets(value: Any) -> Any:
    """`value` without keys of others' servers; of headers and environment variables only the names are kept."""
    if not isinstance(value, Mapping):
        return value
    kept = {key: _without_secrets(item) for key, item in value.items() if key != "api_key"}
    return {
        key: sorted(map(str, item)) if key in ("env", "headers") and isinstance(item, Mapping) else item
        for key, item in kept.items()
    }


def sandbox_settings(configuration: Configuration) -> dict[str, Any]:
    """What sandboxes allow, which also changes what a reward means: under the key `sandboxes`, if there are any."""
    if not configuration.sandboxes:
        return {}
    places = ("leases", "engine", "reap_every_s", "control_groups", "env")  # env may hold a secret
    return {
        "sandboxes": {
            name: {key: value for key, value in msgspec.to_builtins(config).items() if key not in places}
            for name, config in configuration.sandboxes.items()
        }
    }


def _longest_episode(configuration: Configuration) -> float:
    """A guard above every deadline that an environment server keeps itself, in seconds."""
    bounds: list[float] = [
        config.queue_timeout_s + config.episode_timeout_s + 2 * config.cleanup_timeout_s
        for config in configuration.named(EnvironmentConfig).values() or [EnvironmentConfig()]
    ]
    return 60.0 + max(bounds)
