"""The settings of a run, of token capture, and the configuration file as a whole, as typed values.

The descriptions are the reference: docs/reference/configuration.md is generated from them. Left to others: one server's
settings (`server_settings`), checks between settings (`config`), reading files (`load`), building what is named
(`construct`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from toprope.launch.server_settings import Count, PositiveSeconds, SandboxConfig, Seconds

_SIZE, _SEED = 32, 0


class TaskSource(msgspec.Struct, frozen=True, kw_only=True):
    """One source of tasks: `{generate: <resources server>, size, seed}` or `{file: <path>}`."""

    generate: Annotated[str | None, Meta(description="A resources server whose environment makes its own tasks.")] = (
        None
    )
    size: Annotated[Count, Meta(description="How many tasks to generate.")] = _SIZE
    seed: Annotated[int, Meta(description="The seed of the generator.")] = _SEED
    file: Annotated[
        str | None,
        Meta(description="A JSONL file; relative to the configuration's directory, else to the current one."),
    ] = None
    limit: Annotated[Count | None, Meta(description="Take only the first tasks of this source.")] = None

    def __post_init__(self) -> None:
        if (self.generate is None) == (self.file is None):
            raise ValueError("a task source names either `generate: <resources server>` or `file: <path>`")
        if self.file is not None and (self.size, self.seed) != (_SIZE, _SEED):
            raise ValueError("`size` and `seed` are of `generate`, and this task source is a file (`limit` takes less)")


class EnvironmentShare(msgspec.Struct, frozen=True, kw_only=True):
    """Which environment a taskset goes to, and how."""

    environment: Annotated[str, Meta(description="The environment server.")]
    weight: Annotated[float, Meta(gt=0, description="Share of this taskset in the order of dispatch.")] = 1.0
    sampling: Annotated[
        dict[str, Any],
        Meta(
            description="Fields set in `responses_create_params` of its tasks, such as temperature and seed. Names of "
            "an engine's own pass; one that nearly is a known parameter (`temprature`) is refused."
        ),
    ] = {}


class TransportConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How long a call between servers is tried again."""

    budget_s: Annotated[PositiveSeconds, Meta(description="Seconds from the first failure.")] = 15.0
    attempts: Annotated[Count, Meta(description="Attempts in all.")] = 4


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`run`: what to collect. `toprope serve` needs none."""

    environment: Annotated[
        str | dict[str, str | EnvironmentShare] | None,
        Meta(description="An environment server, or taskset -> environment server or {environment, weight, sampling}."),
    ] = None
    agent: Annotated[
        str | None,
        Meta(
            description="Instead of `environment`: an agent elsewhere (`url`) whose own `/run` runs the episode and "
            "answers with the verify response."
        ),
    ] = None
    tasks: Annotated[
        str | TaskSource | list[str | TaskSource] | None,
        Meta(description="A JSONL file, a source, or a list of them."),
    ] = None
    repeats: Annotated[Count, Meta(description="Rollouts a task; they form a group.")] = 1
    limit: Annotated[Count | None, Meta(description="Take only the first tasks.")] = None
    concurrency: Annotated[Count, Meta(description="Episodes at once.")] = 16
    max_attempts: Annotated[Count, Meta(description="Attempts a rollout, when failures are retryable.")] = 3
    min_coverage: Annotated[
        float, Meta(ge=0, le=1, description="The share of rollouts with a verdict that makes exit status 0.")
    ] = 1.0
    budget_s: Annotated[
        PositiveSeconds | None, Meta(description="Wall-clock bound: then nothing new is sent, what runs is finished.")
    ] = None
    stop_s: Annotated[
        Seconds,
        Meta(
            description="Seconds that model calls still open get when the run has ended or Ctrl-C stopped it; then "
            "they are cancelled and recorded as aborted. A server's `limits.drain_s` may be shorter."
        ),
    ] = 10.0
    transport: Annotated[TransportConfig, Meta(description="Retries of calls between servers.")] = TransportConfig()
    out: Annotated[str | None, Meta(description="The run directory; absent: `runs/<date>-<name>-<short id>`.")] = None
    name: Annotated[str | None, Meta(description="The run's name in the directory's name; absent: the file's.")] = None


class TransportNames(msgspec.Struct, frozen=True, kw_only=True):
    """`token_id_capture.store` of your own: every process builds its own ends from these names."""

    sink: Annotated[str, Meta(description="The sink, as `module:Class`.")]
    source: Annotated[str | None, Meta(description="The source, as `module:Class`; absent: the sink is both.")] = None
    config: Annotated[dict[str, Any], Meta(description="Keyword arguments of both.")] = {}


class CaptureConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`token_id_capture`: the tokens of every call of selected agents, kept for training."""

    enabled: Annotated[bool, Meta(description="Capture the agents that say `token_id_capture: true`.")] = False
    all_agents: Annotated[bool, Meta(description="Capture every agent.")] = False
    store: Annotated[
        Literal["sqlite", "jsonl", "memory"] | TransportNames,
        Meta(
            description="Where evidence is kept: one file a run on a local disk, files in NeMo Gym's layout on any "
            "disk, memory (tests), or a transport of your own."
        ),
    ] = "sqlite"
    on_capture_error: Annotated[
        Literal["mask", "fail"], Meta(description="A loss after dispatch masks the rollout, or fails the model call.")
    ] = "mask"
    rebuild_response: Annotated[
        bool, Meta(description="Put the captured tokens into the rows. `false`: write evidence only.")
    ] = True
    max_mask_fraction: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="A higher share of masked rollouts stops the run."),
    ] = None
    mask_fraction_min_samples: Annotated[Count, Meta(description="Finalised rollouts before that share counts.")] = 50
    settle_s: Annotated[Seconds, Meta(description="How long delivery waits for calls still open.")] = 5.0
    format: Annotated[
        Literal["items", "trace"],
        Meta(
            description="How a row carries its tokens: in the items of `response.output`, or as the native trace. "
            "`items` of more than 32 MB are written as a trace, and counted."
        ),
    ] = "items"
    deliver: Annotated[
        Literal["single", "all_chains"],
        Meta(description="The one safe chain, or every safe chain as a trace of its own with its role."),
    ] = "single"
    source_timeout_s: Annotated[
        PositiveSeconds, Meta(description="How long the source may take to answer before the row that waits is masked.")
    ] = 120.0


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """A whole configuration file."""

    servers: Annotated[dict[str, Any], Meta(description="The servers by name; `role` says what each is.")]
    run: Annotated[RunConfig | None, Meta(description="What to collect.")] = None
    sandboxes: Annotated[
        dict[str, SandboxConfig],
        Meta(description="Providers of sandboxes by name, for servers that make, lend or borrow one."),
    ] = {}
    token_id_capture: Annotated[CaptureConfig, Meta(description="Token capture.")] = CaptureConfig()
