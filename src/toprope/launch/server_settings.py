"""The settings of servers and of the sandboxes that they name, as typed values.

The descriptions are the reference: docs/reference/configuration.md is generated from them. Left to others: the run and
the file as a whole (`settings`), checks between settings (`config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

Seconds: TypeAlias = Annotated[float, Meta(ge=0)]
PositiveSeconds: TypeAlias = Annotated[float, Meta(gt=0)]
Count: TypeAlias = Annotated[int, Meta(ge=1)]


class _Server(msgspec.Struct, frozen=True, kw_only=True):
    url: Annotated[
        str | None,
        Meta(description="Where the server runs, if it is not started here: any NeMo Gym protocol server."),
    ] = None
    place: Annotated[
        Literal["inline", "process"],
        Meta(description="Where it runs: `inline` shares this process. `process` is not there yet and refused."),
    ] = "inline"
    host: Annotated[str, Meta(description="The address to bind; anything but loopback needs `api_key`.")] = "127.0.0.1"
    port: Annotated[
        int | None,
        Meta(description="The port to bind, 0 for any free one. A server with a port is bound in every command."),
    ] = None
    api_key: Annotated[str | None, Meta(description="The key that callers must send as a bearer token.")] = None


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`limits` of a sandbox provider: the most that any sandbox of it may use, over all its processes."""

    wall_s: Annotated[PositiveSeconds, Meta(description="Seconds that one run may take.")] = 3600.0
    cpu_s: Annotated[PositiveSeconds, Meta(description="CPU seconds of one run.")] = 3600.0
    memory_bytes: Annotated[Count, Meta(description="Memory, temporary files in memory included.")] = 4 * 2**30
    processes: Annotated[Count, Meta(description="Processes and threads at once.")] = 512
    output_bytes: Annotated[Count, Meta(description="What a run may print before it is killed.")] = 64 * 2**20
    file_bytes: Annotated[Count, Meta(description="The largest single file.")] = 2**30


class SandboxConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox provider, under `sandboxes`. Its name is what grants call it by (`provider_config_ref`)."""

    kind: Annotated[
        Literal["bubblewrap", "docker", "directory"],
        Meta(
            description="`bubblewrap`: namespaces of this kernel. `docker`: containers of an engine on this host. "
            "`directory`: no isolation, a work directory for code that is trusted."
        ),
    ]
    limits: Annotated[SandboxLimits, Meta(description="The most that any of its sandboxes may use.")] = SandboxLimits()
    require_limits: Annotated[
        bool | list[Literal["files", "network", "cpu", "memory", "processes", "output", "wall_time"]] | None,
        Meta(
            description="What must be held back here, or nothing starts: `true` for all. Absent: `true`, for "
            "`directory` nothing."
        ),
    ] = None
    network: Annotated[
        Literal["none", "model"],
        Meta(description="What is reachable from inside: nothing, or the one URL of the agent's model server."),
    ] = "model"
    lease_s: Annotated[
        PositiveSeconds | None,
        Meta(description="Seconds that a sandbox lives at most; absent: as long as its session may."),
    ] = None
    reap_every_s: Annotated[PositiveSeconds, Meta(description="How often sandboxes of dead owners are looked for.")] = (
        30.0
    )
    leases: Annotated[
        str | None,
        Meta(
            description="The directory of leases and work directories; absent: one for each user of the host, so that "
            "any run ends what a dead one left. Servers that lend and borrow need the same."
        ),
    ] = None
    env: Annotated[dict[str, str], Meta(description="Environment variables of every run.")] = {}
    read_only: Annotated[
        list[str], Meta(description="Further trees of the host that code inside may read (`bubblewrap`).")
    ] = []
    hidden: Annotated[
        list[str], Meta(description="Trees that code inside finds empty, below those it may read (`bubblewrap`).")
    ] = []
    image: Annotated[str | None, Meta(description="The image of a sandbox whose maker names none (`docker`).")] = None
    engine: Annotated[
        str | None, Meta(description="URL of the container engine (`docker`); absent: what the environment says.")
    ] = None
    control_groups: Annotated[
        bool, Meta(description="Use control groups where they may be used (`bubblewrap`, `directory`).")
    ] = True


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`limits`: what a model server bounds. The defaults are those of every other server."""

    max_body_bytes: Annotated[
        Count, Meta(description="Bytes of a request body, decompressed; a longer one gets 413 and is not dispatched.")
    ] = 256 * 2**20
    drain_s: Annotated[
        Seconds,
        Meta(description="Seconds that captured calls get to end when the server stops or their client has left."),
    ] = 120.0
    calls: Annotated[Count | None, Meta(description="Model calls of one rollout at most; the next one is refused.")] = (
        None
    )
    tokens: Annotated[
        Count | None, Meta(description="Generated tokens of one rollout, after which a call is refused.")
    ] = None
    seconds: Annotated[
        PositiveSeconds | None,
        Meta(description="Seconds after the first model call of a rollout, after which a call is refused."),
    ] = None


class RendererConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`token_in_renderer`: a renderer of the package `renderers` (extra `renderers`)."""

    name: Annotated[str, Meta(description="Its name there: `qwen3`, `llama-3`, ...")]
    tokenizer: Annotated[
        str,
        Meta(description="The model directory, or its `tokenizer.json`; relative to the configuration's directory."),
    ]
    options: Annotated[
        dict[str, Any], Meta(description="The renderer's own settings, as `{enable_thinking: false}`.")
    ] = {}


class ModelConfig(_Server, frozen=True, kw_only=True):
    """`role: model`: a model server in front of one engine."""

    engine: Annotated[
        dict[str, Any],
        Meta(
            description="`kind` (an entry point of `toprope.engines`, or `module:Class`) and the keyword arguments "
            "of that engine: `{kind: openai, base_url: ..., model: ...}`. Required unless `url` is given."
        ),
    ] = {}
    use: Annotated[
        str | None, Meta(description="A subclass of `toprope.ModelServer` as `module:Class`; absent: ours.")
    ] = None
    identity: Annotated[
        list[Literal["header", "api_key", "session_path"]],
        Meta(
            description="Where to look for the rollout when the path names none: `X-Session-ID`, the API key, "
            "`/sessions/<key>/v1/...`."
        ),
    ] = []
    capture: Annotated[bool, Meta(description="Capture also calls whose identity came from `identity`.")] = False
    return_token_ids: Annotated[
        bool,
        Meta(
            description="Give every caller ids and logprobs in the reply, as agents want that return tokens of their "
            "own. A client asks for one reply's with `X-Toprope-Include: token_ids`."
        ),
    ] = False
    limits: Annotated[LimitsConfig, Meta(description="Bounds of the server, and what one rollout may spend.")] = (
        LimitsConfig()
    )
    keep_alive_s: Annotated[
        PositiveSeconds, Meta(description="Seconds of silence after which a stream says that it is still there.")
    ] = 15.0
    admin_key: Annotated[
        str | None,
        Meta(
            description="The key of the trainer's routes `/admin/weights` and `/admin/abort`, sent as "
            "`x-toprope-admin-key`; absent: nobody may use them."
        ),
    ] = None
    token_in: Annotated[
        Literal["off", "auto", "required"],
        Meta(
            description="Build a captured turn from the recorded ids of the one before, where the engine takes prompts "
            "of ids. `auto`: what cannot be built so is rendered by the engine, and counted. `required`: it is refused."
        ),
    ] = "auto"
    token_in_renderer: Annotated[
        RendererConfig | None,
        Meta(description="Who renders what is new in such a turn; absent: the engine itself."),
    ] = None
    workers: Annotated[Count, Meta(description="Worker processes. Only 1 is there yet.")] = 1


class StdioProgram(msgspec.Struct, frozen=True, kw_only=True):
    """`mcp_stdio`: a program that a grant may have the agent start, exactly as it stands here."""

    command: Annotated[str, Meta(min_length=1, description="The program.")]
    args: Annotated[list[str], Meta(description="Its arguments.")] = []
    env: Annotated[dict[str, str], Meta(description="Variables set beside PATH, HOME, USER and the like.")] = {}
    cwd: Annotated[str | None, Meta(description="The directory that it starts in; absent: the agent's.")] = None


class McpServer(msgspec.Struct, frozen=True, kw_only=True):
    """`mcp_servers`: an MCP server that the agent is given beside the environment's own tools."""

    url: Annotated[str | None, Meta(description="Where it serves streamable HTTP.")] = None
    headers: Annotated[dict[str, str], Meta(description="Headers of each request to `url`.")] = {}
    command: Annotated[
        str | None, Meta(description="Or the program to start for each session; the agent's `mcp_stdio` must list it.")
    ] = None
    args: Annotated[list[str], Meta(description="Its arguments.")] = []
    env: Annotated[dict[str, str], Meta(description="Its variables.")] = {}
    cwd: Annotated[str | None, Meta(description="Its directory.")] = None
    required: Annotated[
        bool, Meta(description="`false`: where it cannot be had the agent works without it, and the row says so.")
    ] = True

    def __post_init__(self) -> None:
        if (self.url is None) == (self.command is None):
            raise ValueError("an MCP server has either a `url` or a `command`")
        if self.command is None and (self.args or self.env or self.cwd is not None):
            raise ValueError("`args`, `env` and `cwd` are of a `command`, and this MCP server has a `url`")
        if self.url is None and self.headers:
            raise ValueError("`headers` are of a `url`, and this MCP server has a `command`")


class ResourcesConfig(_Server, frozen=True, kw_only=True):
    """`role: resources`: the environment proper, with its tools, state and verifier."""

    use: Annotated[
        str | None,
        Meta(
            description="An entry point of `toprope.environments`, or `module:Class`. Required unless `url` is given."
        ),
    ] = None
    config: Annotated[dict[str, Any], Meta(description="The environment's own settings, its keyword arguments.")] = {}
    session_ttl_s: Annotated[PositiveSeconds, Meta(description="Seconds after which an unused session expires.")] = 900
    mcp: Annotated[
        bool | None,
        Meta(
            description="Serve the tools over MCP too, at `/mcp` (needs the extra `mcp`); absent: if an environment of "
            "this file grants them so."
        ),
    ] = None
    sandbox: Annotated[
        str | None, Meta(description="The provider under `sandboxes` that makes a sandbox for each session.")
    ] = None
    judge: Annotated[
        str | None,
        Meta(description="The model server that scores, for an environment that asks one (`judge`)."),
    ] = None
    protocol: Annotated[
        Literal["typed", "flat"],
        Meta(
            description="How a server elsewhere is driven. `flat`: NeMo Gym's older environments, seeded with the flat "
            "task and known by a cookie."
        ),
    ] = "typed"
    workers: Annotated[Count, Meta(description="Worker processes. Only 1 is there yet.")] = 1


class AgentConfig(_Server, frozen=True, kw_only=True):
    """`role: agent`: the harness that drives a model."""

    use: Annotated[
        str | None,
        Meta(description="An entry point of `toprope.agents`, or `module:Class`. Required unless `url` is given."),
    ] = None
    config: Annotated[dict[str, Any], Meta(description="The agent's own settings, its keyword arguments.")] = {}
    model: Annotated[
        str | None, Meta(description="The model server that it calls. Required unless `url` is given.")
    ] = None
    token_id_capture: Annotated[bool, Meta(description="Capture the tokens of this agent's rollouts.")] = False
    sandbox: Annotated[
        str | None,
        Meta(
            description="The provider under `sandboxes` that makes a sandbox for a session which the environment lends "
            "none."
        ),
    ] = None
    max_steps: Annotated[Count | None, Meta(description="Model calls in one activation, at most.")] = None
    allow_sessionless: Annotated[bool, Meta(description="Serve calls that belong to no session.")] = False
    mcp_stdio: Annotated[
        list[str | StdioProgram],
        Meta(
            description="The only programs that a grant may have this agent start, as MCP servers over stdio: command "
            "lines, or `{command, args, env, cwd}`."
        ),
    ] = []
    close_reply: Annotated[
        Literal["required", "optional"],
        Meta(description="`optional`: verify also when the close of its session stays without an answer."),
    ] = "required"


class EnvironmentConfig(_Server, frozen=True, kw_only=True):
    """`role: environment`: runs episodes, one `POST /run` each."""

    use: Annotated[str, Meta(description="An entry point of `toprope.protocols`, or `module:Class`.")] = (
        "single_agent_turn"
    )
    config: Annotated[
        dict[str, Any],
        Meta(
            description="The protocol's own settings; of `interactive`: `user_model` (a model server that plays the "
            "user), `max_turns`, `stop`, `user_timeout_s`, `user_sampling`."
        ),
    ] = {}
    resources: Annotated[str | None, Meta(description="The resources server. Required unless `url` is given.")] = None
    agent: Annotated[str | None, Meta(description="The agent server. Required unless `url` is given.")] = None
    tools: Annotated[
        list[Literal["direct_http", "mcp"]],
        Meta(
            description="How the agent is given the environment's tools: as HTTP routes, over MCP (needs the extra "
            "`mcp`), or both; none by default."
        ),
    ] = []
    mcp_servers: Annotated[
        dict[str, McpServer], Meta(description="Further MCP servers that the agent is given, by the name of the grant.")
    ] = {}
    gradable_on_timeout: Annotated[
        bool | None,
        Meta(description="Verify the partial output of an agent that ran out of time; absent: as its class says."),
    ] = None
    max_concurrent_episodes: Annotated[Count | None, Meta(description="Episodes at once; none: no limit here.")] = None
    queue_timeout_s: Annotated[PositiveSeconds, Meta(description="How long an episode may wait for admission.")] = 600
    episode_timeout_s: Annotated[PositiveSeconds, Meta(description="Bound of an episode, without clean-up.")] = 3600
    agent_timeout_s: Annotated[
        PositiveSeconds | None, Meta(description="Bound of the activation; none: what the episode leaves.")
    ] = None
    verify_timeout_s: Annotated[PositiveSeconds, Meta(description="Bound of verify.")] = 300
    cleanup_timeout_s: Annotated[PositiveSeconds, Meta(description="Bound of closing the sessions.")] = 30


ServerConfig: TypeAlias = ModelConfig | ResourcesConfig | AgentConfig | EnvironmentConfig
ROLES: Mapping[str, type[ServerConfig]] = {
    "model": ModelConfig,
    "resources": ResourcesConfig,
    "agent": AgentConfig,
    "environment": EnvironmentConfig,
}
