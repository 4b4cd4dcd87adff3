"""What a configuration names, built and not started: engines, environments, agents, protocols.

Nothing here binds, writes or asks anybody, so that a bad setting is found before anything exists. Left to others: the
servers around these parts and their life (`world`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import isclass, signature
from typing import Any

from toprope.errors.tree import ConfigError
from toprope.http.client import Client
from toprope.launch.config import Configuration
from toprope.launch.construct import GROUPS, build, find
from toprope.launch.server_settings import AgentConfig, EnvironmentConfig, ModelConfig, ResourcesConfig
from toprope.launch.strict import Where, nearest, shown
from toprope.servers.agent.agent import Agent
from toprope.servers.environment.base import EpisodeProtocol
from toprope.servers.model.engines.base import Engine
from toprope.servers.resources.environment import Environment


@dataclass(frozen=True, slots=True)
class Parts:
    """The engines, environments, agents and protocols of the servers that run here, by server name."""

    engines: Mapping[str, Engine]
    environments: Mapping[str, Environment]
    agents: Mapping[str, Agent]
    protocols: Mapping[str, EpisodeProtocol]


def build_parts(configuration: Configuration, client: Client) -> Parts:
    """Build every part. Raises `ConfigError` naming the key of what cannot be built."""
    servers = Where(configuration.file).at("servers")
    engines: dict[str, Engine] = {}
    environments: dict[str, Environment] = {}
    agents: dict[str, Agent] = {}
    protocols: dict[str, EpisodeProtocol] = {}
    for name, config in configuration.servers.items():
        where = servers.at(name)
        if config.url is not None:
            continue
        if isinstance(config, ModelConfig):
            engines[name] = _engine(config.engine, where.at("engine"), client)
        elif isinstance(config, ResourcesConfig):
            offered = _judge(configuration, config, where, client)
            environments[name] = _named(config.use, "resources", config.config, where, Environment, offered)
        elif isinstance(config, AgentConfig):
            offered = {"client": client, "directory": configuration.directory}
            agents[name] = _named(config.use, "agent", config.config, where, Agent, offered)
            if config.sandbox is not None and agents[name].sandbox is None:
                raise ConfigError(
                    f"{where.at('sandbox')}: {shown(config.use)} runs nothing in a sandbox; accepted: no such key."
                )
        elif isinstance(config, EnvironmentConfig):
            protocols[name] = _named(config.use, "environment", config.config, where, EpisodeProtocol)
            _check_models(protocols[name], configuration, where.at("config"))
    return Parts(engines, environments, agents, protocols)


def _judge(configuration: Configuration, config: ResourcesConfig, where: Where, client: Client) -> dict[str, Any]:
    """The peer that an environment's `judge` is, if it is asked for. Raises for an environment that asks none."""
    if config.judge is None:
        return {}
    assert config.use is not None  # `config` requires it of a server that runs here
    if "judge" not in signature(find(config.use, GROUPS["resources"], where.at("use"))).parameters:
        raise ConfigError(f"{where.at('judge')}: {shown(config.use)} asks no model server; accepted: no such key.")
    model = configuration.servers[config.judge]
    return {"judge": client.peer(model.url or f"inline://{config.judge}", "model", api_key=model.api_key)}


def _check_models(protocol: EpisodeProtocol, configuration: Configuration, where: Where) -> None:
    models = configuration.named(ModelConfig)
    for model in protocol.models:
        if model not in models:
            raise ConfigError(f"{where}: {shown(model)} names no model server; {nearest(model, models)}.")


def _engine(settings: Mapping[str, Any], where: Where, client: Client) -> Engine:
    kind = settings.get("kind")
    if "kind" not in settings:
        for key in get_close_matches("kind", [str(key) for key in settings], n=1):
            raise ConfigError(f"{where.at(key)}: there is no key {key!r} here; did you mean 'kind'? It is required.")
    if not isinstance(kind, str):
        raise ConfigError(f"{where.at('kind')}: this key is required; accepted: embedded, openai, or module:Class.")
    given = {name: value for name, value in settings.items() if name != "kind"}
    engine = build(find(kind, GROUPS["engine"], where.at("kind")), given, where, offered={"client": client})
    for verb in ("capabilities", "start", "generate", "close"):
        if not hasattr(engine, verb):
            raise ConfigError(f"{where.at('kind')}: {shown(kind)} is no engine: it has no {verb!r}.")
    found: Engine = engine
    return found


def _named(
    use: str | None,
    role: str,
    config: Mapping[str, Any],
    where: Where,
    base: type[Any],
    offered: Mapping[str, Any] | None = None,
) -> Any:
    assert use is not None  # `config` requires it of a server that runs here
    target = find(use, GROUPS[role], where.at("use"))
    if isclass(target) and not issubclass(target, base):  # before its settings are judged by a stranger's signature
        raise ConfigError(f"{where.at('use')}: {shown(use)} is no {base.__name__}; accepted: a subclass of it.")
    part = build(target, config, where.at("config"), offered=offered)
    if not isinstance(part, base):
        raise ConfigError(f"{where.at('use')}: {shown(use)} is no {base.__name__}; accepted: a subclass of it.")
    return part
