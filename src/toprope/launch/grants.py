"""What a configuration says of grants: the checks of `tools`, `mcp`, `mcp_servers` and `mcp_stdio`, and what they mean.

Left to others: making a session's grants (`servers.environment`), opening them (`toprope.tools`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from importlib.util import find_spec

from toprope.errors.tree import ConfigError
from toprope.launch.server_settings import AgentConfig, EnvironmentConfig, McpServer, ResourcesConfig, ServerConfig
from toprope.launch.strict import Where, shown
from toprope.protocol.grants import GRANT_NAME, McpGrant, Stdio, StreamableHttp

_URL = re.compile(r"https?://[^\s/]+(/\S*)?")


def check_grants(servers: Mapping[str, ServerConfig], environment: EnvironmentConfig, where: Where) -> None:
    """Return if the environment's grants can be made and used. Raises `ConfigError` naming the key."""
    resources, agent = servers[environment.resources or ""], servers[environment.agent or ""]
    if len(set(environment.tools)) < len(environment.tools):
        raise ConfigError(f"{where.at('tools')}: {environment.tools} names one twice; accepted: each at most once.")
    if "mcp" in environment.tools:
        if isinstance(resources, ResourcesConfig) and resources.url is None and resources.mcp is False:
            raise ConfigError(
                f"{where.at('tools')}: 'mcp' is asked of {environment.resources!r}, which says `mcp: false`; accepted: "
                "direct_http, or a server that does not say so."
            )
        if resources.url is None or agent.url is None:
            _require_sdk(where.at("tools"))
    for name, server in environment.mcp_servers.items():
        _check_further(name, server, agent, where.at("mcp_servers").at(name))


def check_resources(resources: ResourcesConfig, where: Where) -> None:
    """Return if the server can serve what it says."""
    if resources.mcp:
        _require_sdk(where.at("mcp"))


def check_agent(agent: AgentConfig, where: Where) -> None:
    """Return if every command line of `mcp_stdio` can be read."""
    try:
        if all(program.command for program in stdio_programs(agent)):
            return
        reason = "one is empty"
    except ValueError as error:
        reason = str(error)
    raise ConfigError(
        f"{where.at('mcp_stdio')}: a command line cannot be read: {reason}; accepted: a program and its arguments."
    )


def stdio_programs(agent: AgentConfig) -> tuple[Stdio, ...]:
    """The programs that a grant may have this agent start. Raises `ValueError` for a line with an open quote."""
    found = []
    for given in agent.mcp_stdio:
        if isinstance(given, str):
            command, *args = shlex.split(given) or [""]
            found.append(Stdio(command, args))
        else:
            found.append(Stdio(given.command, given.args, given.env, given.cwd))
    return tuple(found)


def further_grant(name: str, server: McpServer) -> McpGrant:
    """The grant that an entry of `mcp_servers` stands for."""
    connection: StreamableHttp | Stdio
    if server.url is not None:
        connection = StreamableHttp(server.url, server.headers)
    else:
        connection = Stdio(server.command or "", server.args, server.env, server.cwd)
    return McpGrant(name, connection, server.required)


def _check_further(name: str, server: McpServer, agent: ServerConfig, where: Where) -> None:
    if name == "environment" or not GRANT_NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: {shown(name)} cannot name this grant; accepted: letters, digits, . _ and -, and not "
            "'environment', which names the one of the environment's own tools."
        )
    if server.url is not None and not _URL.fullmatch(server.url):
        raise ConfigError(f"{where.at('url')}: {shown(server.url)} is not accepted; accepted: http://host:port/path.")
    if agent.url is not None or not isinstance(agent, AgentConfig):
        return  # whoever runs it says what it can do
    _require_sdk(where)
    connection = further_grant(name, server).connection
    if isinstance(connection, Stdio) and connection not in stdio_programs(agent):
        line = shlex.join([connection.command, *connection.args])
        raise ConfigError(
            f"{where.at('command')}: the agent would have to start {line!r}, which its `mcp_stdio` does not list; "
            "accepted: programs that stand there with the same arguments, environment and directory."
        )


def _require_sdk(where: Where) -> None:
    if find_spec("mcp") is None:
        raise ConfigError(f"{where}: MCP needs the official SDK; `pip install toprope[mcp]` brings it.")
