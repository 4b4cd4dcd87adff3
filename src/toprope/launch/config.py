"""One configuration: its settings read, typed and checked against each other.

Left to others: which settings there are (`settings`), reading files (`load`), building what is named (`build`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from toprope.errors.tree import ConfigError
from toprope.http.peer import read_base_url
from toprope.launch.grants import check_agent, check_grants, check_resources
from toprope.launch.load import load_values
from toprope.launch.server_settings import (
    ROLES,
    AgentConfig,
    EnvironmentConfig,
    ModelConfig,
    ResourcesConfig,
    SandboxConfig,
    ServerConfig,
)
from toprope.launch.settings import CaptureConfig, Config, RunConfig, TaskSource
from toprope.launch.strict import Where, nearest, read, refuse_unknown, shown
from toprope.wire.responses import NOT_SAMPLING, REQUEST_PARAMETERS

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LOOPBACK = ("127.0.0.1", "localhost")
BESIDE_URL: Mapping[type[ServerConfig], tuple[str, ...]] = {
    ModelConfig: (),
    ResourcesConfig: ("protocol",),
    AgentConfig: ("model", "token_id_capture", "close_reply"),
    EnvironmentConfig: ("agent", "queue_timeout_s", "episode_timeout_s", "cleanup_timeout_s"),
}
"""What is said of a server elsewhere beside `url` and `api_key`: how it is driven, and what is known of it. Whatever
else a server is given is for one that is started here, and would be ignored."""


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """A checked configuration: every name in it resolves to a server of the right role."""

    file: str
    directory: Path
    servers: dict[str, ServerConfig]
    run: RunConfig | None
    capture: CaptureConfig
    sandboxes: dict[str, SandboxConfig] = {}

    def named(self, role: type[ServerConfig]) -> dict[str, Any]:
        """The servers of one role, in the order of the file."""
        return {name: server for name, server in self.servers.items() if isinstance(server, role)}

    def captured(self, agent: str) -> bool:
        """Whether rollouts of this agent are selected for token capture."""
        config = self.servers[agent]
        chosen = self.capture.all_agents or (isinstance(config, AgentConfig) and config.token_id_capture)
        return self.capture.enabled and chosen


def load_configuration(path: Path, sets: Sequence[str], environ: Mapping[str, str]) -> Configuration:
    """Read, type and check `path`. Raises `ConfigError` naming file, key path, value and the nearest valid name."""
    return read_configuration(load_values(path, sets, environ), file=str(path), directory=path.parent)


def read_configuration(values: Mapping[str, Any], *, file: str, directory: Path) -> Configuration:
    """Type and check values that were read already."""
    where = Where(file)
    top = read(dict(values), Config, where)
    if not top.servers:
        raise ConfigError(f"{where.at('servers')}: no server is named; accepted: names with a role each.")
    for name in top.servers:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{where.at('servers')}: {shown(name)} cannot name a server; accepted: letters, digits, . _ and -."
            )
    servers = {name: _read_server(value, where.at("servers").at(name)) for name, value in top.servers.items()}
    configuration = Configuration(
        file=file,
        directory=directory,
        servers=servers,
        run=top.run,
        capture=top.token_id_capture,
        sandboxes=top.sandboxes,
    )
    for name, provider in top.sandboxes.items():
        _check_sandbox(name, provider, where.at("sandboxes"))
    for name, server in servers.items():
        _check_server(configuration, name, server, where.at("servers").at(name))
    if top.run is not None:
        _check_run(configuration, top.run, where.at("run"))
    return configuration


def _read_server(value: Any, where: Where) -> ServerConfig:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {shown(value)} is not accepted; accepted: a mapping with the key role.")
    role = value.get("role")
    if "role" not in value:
        for key in get_close_matches("role", [str(key) for key in value], n=1):
            raise ConfigError(f"{where.at(key)}: there is no key {key!r} here; did you mean 'role'? It is required.")
    if not isinstance(role, str) or role not in ROLES:
        what = "this key is required" if "role" not in value else f"{shown(role)} is not accepted"
        raise ConfigError(f"{where.at('role')}: {what}; {nearest(str(role or ''), ROLES)}.")
    refuse_unknown(value, (*ROLES[role].__struct_fields__, "role"), where)
    server = read({key: item for key, item in value.items() if key != "role"}, ROLES[role], where)
    assert isinstance(server, ServerConfig)
    if server.url is not None:
        _check_url(server.url, where.at("url"))
        _refuse_beside_url(value, type(server), where)
    return server


def _refuse_beside_url(given: Mapping[str, Any], role: type[ServerConfig], where: Where) -> None:
    accepted = ("api_key", *BESIDE_URL[role])
    for key, value in given.items():
        if key not in ("role", "url", *accepted) and value is not None:
            raise ConfigError(
                f"{where.at(key)}: `url` says that this server runs elsewhere, and {key!r} is a setting of one that is "
                f"started here; accepted: one of them; beside `url`: {', '.join(accepted)}."
            )


def _check_sandbox(name: str, provider: SandboxConfig, where: Where) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: {shown(name)} cannot name a provider; accepted: letters, digits, . _ and -.")
    own = {"read_only": "bubblewrap", "hidden": "bubblewrap", "image": "docker", "engine": "docker"}
    for key, kind in own.items():
        if getattr(provider, key) and provider.kind != kind:
            raise ConfigError(
                f"{where.at(name).at(key)}: only sandboxes of kind {kind} have it, and this one is of kind "
                f"{provider.kind}; accepted: none."
            )
    if provider.kind == "docker" and not provider.control_groups:
        raise ConfigError(
            f"{where.at(name).at('control_groups')}: a container engine makes its own, and this provider is of kind "
            "docker; accepted: none."
        )


def _check_server(configuration: Configuration, name: str, server: ServerConfig, where: Where) -> None:
    if server.place == "process":
        raise ConfigError(
            f"{where.at('place')}: 'process' is not supported yet, every server shares this process; accepted: inline."
        )
    if isinstance(server, ModelConfig | ResourcesConfig) and server.workers > 1:
        raise ConfigError(f"{where.at('workers')}: {server.workers} is not supported yet; accepted: 1.")
    if isinstance(server, ResourcesConfig) and server.protocol == "flat" and server.url is None:
        raise ConfigError(
            f"{where.at('protocol')}: 'flat' is how an older server elsewhere (`url`) is driven, and this one is "
            "started here; accepted: typed."
        )
    if server.url is not None:
        if isinstance(server, AgentConfig) and server.model is not None:
            _reference(configuration, server.model, ModelConfig, where.at("model"))
        if isinstance(server, EnvironmentConfig) and server.agent is not None:
            _reference(configuration, server.agent, AgentConfig, where.at("agent"))
        return
    if server.host not in LOOPBACK and not server.api_key:
        raise ConfigError(
            f"{where.at('host')}: {shown(server.host)} is reachable from other machines and needs `api_key`; "
            f"accepted without one: {' or '.join(LOOPBACK)}."
        )
    required = {
        ModelConfig: ("engine",),
        ResourcesConfig: ("use",),
        AgentConfig: ("use", "model"),
        EnvironmentConfig: ("resources", "agent"),
    }
    for key in required[type(server)]:
        if not getattr(server, key):
            raise ConfigError(f"{where.at(key)}: this key is required unless `url` says where the server runs.")
    sandbox = server.sandbox if isinstance(server, AgentConfig | ResourcesConfig) else None
    if sandbox is not None and sandbox not in configuration.sandboxes:
        raise ConfigError(
            f"{where.at('sandbox')}: {shown(sandbox)} names no provider under `sandboxes`; "
            f"{nearest(sandbox, configuration.sandboxes)}."
        )
    if isinstance(server, ResourcesConfig):
        check_resources(server, where)
        if server.judge is not None:
            _reference(configuration, server.judge, ModelConfig, where.at("judge"))
    if isinstance(server, AgentConfig):
        check_agent(server, where)
        _reference(configuration, server.model, ModelConfig, where.at("model"))
    if isinstance(server, EnvironmentConfig):
        _reference(configuration, server.resources, ResourcesConfig, where.at("resources"))
        _reference(configuration, server.agent, AgentConfig, where.at("agent"))
        check_grants(configuration.servers, server, where)


def _check_url(url: str, where: Where) -> None:
    reason = "is not accepted"
    try:
        if read_base_url(url)[0].scheme != "inline":
            return
    except ValueError as error:
        reason = f"is no URL of a server: {error}"
    raise ConfigError(f"{where}: {shown(url)} {reason}; accepted: http://host:port or https://host, with a path.")


def _check_sampling(sampling: Mapping[str, Any], where: Where) -> None:
    """A misspelt parameter would be sent on and ignored, and every reward of the run would mean something else."""
    for name in sampling:
        if name in NOT_SAMPLING:
            raise ConfigError(
                f"{where.at(name)}: {name!r} is no setting of sampling: every task says itself what is asked, and "
                "replies are whole. Accepted: temperature, top_p, max_output_tokens and the like."
            )
        close = [] if name in REQUEST_PARAMETERS else get_close_matches(name, REQUEST_PARAMETERS, n=1, cutoff=0.8)
        if close:
            raise ConfigError(
                f"{where.at(name)}: {name!r} is no parameter of a Responses request; did you mean {close[0]!r}? "
                "Accepted: its parameters, and names of an engine's own that resemble none of them."
            )


def _check_run(configuration: Configuration, run: RunConfig, where: Where) -> None:
    if run.agent is not None:
        _check_agent_run(configuration, run.agent, run, where)
    if isinstance(run.environment, str):
        _reference(configuration, run.environment, EnvironmentConfig, where.at("environment"))
    elif run.environment is not None:
        for taskset, share in run.environment.items():
            place = where.at("environment").at(taskset)
            name = share if isinstance(share, str) else share.environment
            _reference(configuration, name, EnvironmentConfig, place)
            if not isinstance(share, str):
                _check_sampling(share.sampling, place.at("sampling"))
    for index, source in enumerate(task_sources(run)):
        if source.generate is not None:
            place = where.at("tasks").at(index) if isinstance(run.tasks, list) else where.at("tasks")
            _reference(configuration, source.generate, ResourcesConfig, place.at("generate"))


def _check_agent_run(configuration: Configuration, name: str, run: RunConfig, where: Where) -> None:
    if run.environment:
        raise ConfigError(f"{where.at('agent')}: stands beside `environment`; accepted: one of them.")
    _reference(configuration, name, AgentConfig, where.at("agent"))
    if configuration.servers[name].url is None:
        raise ConfigError(
            f"{where.at('agent')}: {name!r} is started here and has no /run of its own; accepted: an agent elsewhere "
            "(`url`) that has one, or `environment`."
        )


def task_sources(run: RunConfig) -> list[TaskSource]:
    """The task sources in order, a bare path read as a file."""
    tasks = run.tasks if isinstance(run.tasks, list) else [] if run.tasks is None else [run.tasks]
    return [TaskSource(file=task) if isinstance(task, str) else task for task in tasks]


def _reference(configuration: Configuration, name: str | None, role: type[ServerConfig], where: Where) -> None:
    servers = configuration.named(role)
    if name in servers:
        return
    role_name = next(text for text, kind in ROLES.items() if kind is role)
    other = configuration.servers.get(name or "")
    what = f"is a server of another role, not {role_name}" if other is not None else f"names no {role_name} server"
    raise ConfigError(f"{where}: {shown(name)} {what}; {nearest(name or '', servers)}.")
