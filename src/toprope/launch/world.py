"""A running system: every server of a configuration, built around its parts, started, reachable, and stopped again.

The composition root: who gets which collaborator stands here and nowhere else. Servers start in the order model,
resources, agent, environment, so that each finds the ones it calls, and stop in reverse. Left to others: parts
(`parts`), settings (`config`), what is run on it (`run`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from toprope.capture.recorder import Recorder
from toprope.errors.tree import ConfigError, TopropeError
from toprope.http.app import Limits, ServerApp
from toprope.http.client import Client, Peer, Role
from toprope.launch.config import Configuration
from toprope.launch.construct import find
from toprope.launch.elsewhere import ask_elsewhere
from toprope.launch.grants import further_grant, stdio_programs
from toprope.launch.parts import Parts
from toprope.launch.sandboxes import Desks
from toprope.launch.server_settings import (
    ROLES,
    AgentConfig,
    EnvironmentConfig,
    ModelConfig,
    RendererConfig,
    ResourcesConfig,
    ServerConfig,
)
from toprope.launch.stores import Custody, open_custody
from toprope.launch.strict import Where, shown
from toprope.launch.workspace import Workspace
from toprope.servers.agent.server import AgentServer
from toprope.servers.environment.base import EnvironmentServer
from toprope.servers.environment.participant import SessionReport
from toprope.servers.model.budgets import RolloutLimits
from toprope.servers.model.engines.base import ContinuesTurns
from toprope.servers.model.server import ModelServer
from toprope.servers.model.token_in.library import LibraryRenderer
from toprope.servers.resources.server import ResourcesServer
from toprope.telemetry.calls import CallLog

if TYPE_CHECKING:
    from toprope.http.serve import BoundServer

log = logging.getLogger(__name__)

OnSession = Callable[[SessionReport], Awaitable[None] | None]


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A server that is up: where it is reached, in this process (`inline://`) or over HTTP."""

    name: str
    role: str
    url: str


def role_of(config: ServerConfig) -> Role:
    """The role that a server's settings are of."""
    return cast(Role, next(role for role, kind in ROLES.items() if isinstance(config, kind)))


class World:
    """The servers of one configuration. `capture`: give every model server a recorder. `bind`: listen on a socket.

    `workspace` None works in memory only (nothing is written, nothing captured). `on_session` hears of each session,
    `on_session_closed` of each answered close.
    """

    def __init__(
        self,
        configuration: Configuration,
        parts: Parts,
        client: Client,
        *,
        workspace: Workspace | None,
        capture: bool,
        bind: bool = False,
        on_session: OnSession | None = None,
        on_session_closed: OnSession | None = None,
    ) -> None:
        self.configuration = configuration
        self.parts = parts
        self.client = client
        self.custody: Custody | None = None
        self.addresses: dict[str, ServerAddress] = {}
        self._bind_all = bind
        self._on_session = on_session
        self._on_session_closed = on_session_closed
        self._apps: list[ServerApp] = []
        self._bound: list[BoundServer] = []
        self._recorders: list[Recorder] = []
        self.desks = Desks(configuration)
        self._key = workspace.signing_key() if workspace is not None else secrets.token_bytes(32)
        self._calls = CallLog(workspace.calls) if workspace is not None else None
        if workspace is not None and capture:
            where = Where(configuration.file).at("token_id_capture")
            self.custody = open_custody(configuration.capture, workspace.run_dir, where)

    async def start(self, *, ask: bool = False) -> None:
        """On return every server of ours can be called, engines included. Raises what the first that cannot start
        raises. `ask`: first ask the servers elsewhere; raises `ConfigError` for one that does not answer.
        """
        try:
            if ask:
                await ask_elsewhere(self.configuration, self.client)
            if self.custody is not None:
                await self.custody.settle_dead_writers()
            await self.desks.open()
            for role in ROLES.values():
                await self._start_role(role)
        except BaseException:
            await self.stop()
            raise

    async def stop(self, *, drain_s: float | None = None) -> None:
        """On return nothing of this world runs and every handle is closed. Each step is tried, whatever others did.

        `drain_s`: seconds that captured calls get in all servers together; None: what the limits of each say.
        """
        ends = None if drain_s is None else time.monotonic() + drain_s

        def left() -> float | None:
            return None if ends is None else max(0.0, ends - time.monotonic())

        for server in reversed(self._bound):
            await _quietly(server.close(drain_s=left()), server.app.name)
        for app in reversed(self._apps):
            await _quietly(app.stop(drain_s=left()), app.name)
        await _quietly(self.desks.close(), "the sandbox providers")
        for recorder in self._recorders:
            await _quietly(recorder.close(), "a recorder")
        if self.custody is not None:
            await _quietly(self.custody.close(), "the capture store")
        if self._calls is not None:
            self._calls.close()
        await _quietly(self.client.close(), "the client")

    def bound(self) -> list[ServerAddress]:
        """The servers of this process that others can reach over HTTP, in the order of the file."""
        ours = [name for name, config in self.configuration.servers.items() if config.url is None]
        return [self.addresses[name] for name in ours if self.addresses[name].url.startswith("http")]

    def peer(self, name: str) -> Peer:
        """The server `name` as this process reaches it: inline where it runs here, else at its URL."""
        config = self.configuration.servers[name]
        return self.client.peer(config.url or f"inline://{name}", role_of(config), api_key=config.api_key)

    def reached_by(self, caller: str, name: str) -> Peer:
        """The server `name` as the server `caller` reaches it: over HTTP if the caller runs elsewhere."""
        if self.configuration.servers[caller].url is None:
            return self.peer(name)
        config = self.configuration.servers[name]
        return self.client.peer(self.addresses[name].url, role_of(config), api_key=config.api_key)

    async def _start_role(self, role: type[ServerConfig]) -> None:
        apps: dict[str, ServerApp] = {}
        for name, config in self.configuration.named(role).items():
            if config.url is None:
                apps[name] = self._build(name, config)
                self.client.register(f"inline://{name}", apps[name])
            else:
                self.addresses[name] = ServerAddress(name, role_of(config), config.url)
        self._apps += apps.values()
        await _all(app.start() for app in apps.values())
        for name, app in apps.items():
            config = self.configuration.servers[name]
            url = await self._bind(app, config) if self._must_bind(config) else f"inline://{name}"
            self.addresses[name] = ServerAddress(name, role_of(config), url)

    async def _bind(self, app: ServerApp, config: ServerConfig) -> str:
        from toprope.http.serve import serve  # uvicorn takes 0.1 s to import, and most runs bind nothing

        bound = await serve(app, host=config.host, port=config.port or 0)
        self._bound.append(bound)
        return bound.url

    def _must_bind(self, config: ServerConfig) -> bool:
        """Whether something outside this process may have to reach the server."""
        if self._bind_all or config.port is not None:
            return True
        if isinstance(config, ModelConfig) and self._called_by_programs(config):
            return True
        elsewhere = [other for other in self.configuration.servers.values() if other.url is not None]
        callers: dict[type, tuple[type[ServerConfig], ...]] = {
            ModelConfig: (AgentConfig, ResourcesConfig, EnvironmentConfig),
            ResourcesConfig: (AgentConfig, EnvironmentConfig),
            AgentConfig: (EnvironmentConfig,),
        }
        return any(isinstance(other, callers.get(type(config), ())) for other in elsewhere)

    def _called_by_programs(self, config: ModelConfig) -> bool:
        """Whether an agent here starts programs that call this model server."""
        agents = self.configuration.named(AgentConfig)
        return any(
            agent.needs_http_model and self.configuration.servers[agents[name].model] is config
            for name, agent in self.parts.agents.items()
        )

    def _build(self, name: str, config: ServerConfig) -> ServerApp:
        where = Where(self.configuration.file).at("servers").at(name)
        try:
            if isinstance(config, ModelConfig):
                return self._model(name, config, where)
            if isinstance(config, ResourcesConfig):
                return self._resources(name, config)
            if isinstance(config, AgentConfig):
                return self._agent(name, config)
            return self._environment(name, config)
        except (ConfigError, ValueError) as error:
            if str(error).startswith(str(where)):
                raise
            raise ConfigError(f"{where}: {error}") from error

    def _model(self, name: str, config: ModelConfig, where: Where) -> ServerApp:
        target = ModelServer
        if config.use is not None:
            found = find(config.use, "toprope.models", where.at("use"))
            if not isinstance(found, type) or not issubclass(found, ModelServer):
                raise ConfigError(f"{where.at('use')}: {shown(config.use)} is no ModelServer; accepted: a subclass.")
            target = found
        recorder = None
        if self.custody is not None:
            recorder = Recorder(
                self.custody.sink,
                reader=self.custody.reader,
                on_capture_error=self.configuration.capture.on_capture_error,
            )
            self._recorders.append(recorder)
        return target(
            name=name,
            engine=self.parts.engines[name],
            recorder=recorder,
            identity=config.identity,
            capture_unprefixed=config.capture,
            return_token_ids=config.return_token_ids,
            call_log=self._calls,
            limits=Limits(max_body_bytes=config.limits.max_body_bytes, drain_s=config.limits.drain_s),
            budget=RolloutLimits(config.limits.calls, config.limits.tokens, config.limits.seconds),
            api_key=config.api_key,
            admin_key=config.admin_key,
            keep_alive_s=config.keep_alive_s,
            token_in=config.token_in,
            token_in_renderer=self._renderer(config.token_in_renderer, where.at("token_in_renderer")),
        ).app

    def _renderer(self, config: RendererConfig | None, where: Where) -> ContinuesTurns | None:
        if config is None:
            return None
        try:
            return LibraryRenderer(
                config.name, tokenizer=self.configuration.directory / config.tokenizer, options=config.options
            )
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}") from error

    def _resources(self, name: str, config: ResourcesConfig) -> ServerApp:
        return ResourcesServer(
            name=name,
            environment=self.parts.environments[name],
            signing_key=self._key,
            session_ttl_s=config.session_ttl_s,
            mcp=self._offers_mcp(name, config),
            sandboxes=None if config.sandbox is None else self.desks[config.sandbox],
            api_key=config.api_key,
        ).app

    def _offers_mcp(self, name: str, config: ResourcesConfig) -> bool:
        if config.mcp is not None:
            return config.mcp
        environments = self.configuration.named(EnvironmentConfig).values()
        return any("mcp" in environment.tools and environment.resources == name for environment in environments)

    def _agent(self, name: str, config: AgentConfig) -> ServerApp:
        assert config.model is not None
        return AgentServer(
            name=name,
            agent=self.parts.agents[name],
            model=self.peer(config.model),
            model_over_http=self._over_http(config.model),
            model_key=self.configuration.servers[config.model].api_key,
            sandboxes=self.desks,
            own_sandbox=None if config.sandbox is None else self.desks[config.sandbox],
            client=self.client,
            signing_key=self._key,
            allow_sessionless=config.allow_sessionless,
            max_steps=config.max_steps,
            mcp_stdio=stdio_programs(config),
            api_key=config.api_key,
        ).app

    def _over_http(self, model: str) -> Peer | None:
        """The model server as programs reach it, if it listens."""
        url = self.addresses[model].url
        return self.client.peer(url, "model") if url.startswith("http") else None

    def _environment(self, name: str, config: EnvironmentConfig) -> ServerApp:
        assert config.resources is not None
        assert config.agent is not None
        agent = self.configuration.servers[config.agent]
        resources = self.configuration.servers[config.resources]
        environment = self.parts.environments.get(config.resources)
        gradable = config.gradable_on_timeout
        if gradable is None:
            gradable = environment is not None and environment.gradable_on_timeout
        bound = None if environment is None else environment.verify_bound_s
        if bound is not None and config.verify_timeout_s <= bound:
            raise ConfigError(
                f"verify_timeout_s: {config.verify_timeout_s:g} given, and verify of {config.resources} "
                f"may take {bound:g} s before it ends a hostile answer; accepted: more than that"
            )
        return EnvironmentServer(
            name=name,
            protocol=self.parts.protocols[name],
            resources=self.peer(config.resources),
            agent=self.peer(config.agent),
            capture=self.configuration.captured(config.agent),
            tools=config.tools,
            tools_peer=self.reached_by(config.agent, config.resources),
            further_grants=[further_grant(name, server) for name, server in config.mcp_servers.items()],
            models={model: self.peer(model) for model in self.parts.protocols[name].models},
            resources_protocol=resources.protocol if isinstance(resources, ResourcesConfig) else "typed",
            gradable_on_timeout=gradable,
            close_reply=agent.close_reply if isinstance(agent, AgentConfig) else "required",
            max_concurrent_episodes=config.max_concurrent_episodes,
            queue_timeout_s=config.queue_timeout_s,
            episode_timeout_s=config.episode_timeout_s,
            agent_timeout_s=config.agent_timeout_s,
            verify_timeout_s=config.verify_timeout_s,
            cleanup_timeout_s=config.cleanup_timeout_s,
            on_session=self._on_session,
            on_session_closed=self._on_session_closed,
            api_key=config.api_key,
        ).app


async def _all(starts: Iterator[Awaitable[None]]) -> None:
    """Await all to their end, so that each one that started can be stopped; then raise the first error."""
    results = await asyncio.gather(*starts, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def _quietly(step: Awaitable[None], what: str) -> None:
    try:
        await step
    except (TopropeError, OSError, RuntimeError) as error:  # one that cannot stop must not keep the others running
        log.warning("%s did not stop cleanly: %s", what, error)
