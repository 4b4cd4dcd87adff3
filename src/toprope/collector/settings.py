"""What a run may be told: frozen, checked where they are made. Where the values come from is `launch`'s."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from toprope.correlation.ids import check_rollout_id
from toprope.errors.tree import ConfigError
from toprope.http.client import Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How tasks are run.

    `run_id` stands at the head of every default rollout id (None: a fresh one). `repeats` rollouts a task;
    `concurrency` episodes in flight at most. A retryable failure is tried again as a new attempt, `max_attempts` in
    all, after `backoff_s` doubling up to `backoff_cap_s` (seconds, with jitter). After `budget_s` seconds nothing new
    is dispatched. `request_timeout_s` bounds one `/run` call, as a guard against a server that never answers: it
    should lie above the episode's own deadlines. A reward of at least `pass_threshold` counts as passed in pass@k.
    `scoring` holds every setting that changes what a reward means, and `servers` their versions: the manifest keeps
    digests of them.
    """

    run_id: str | None = None
    name: str = "run"
    repeats: int = 1
    concurrency: int = 16
    max_attempts: int = 3
    min_coverage: float = 1.0
    budget_s: float | None = None
    backoff_s: float = 1.0
    backoff_cap_s: float = 30.0
    request_timeout_s: float | None = 4500.0
    pass_threshold: float = 1.0
    scoring: Mapping[str, Any] = field(default_factory=dict)
    servers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("repeats", "concurrency", "max_attempts"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"run.{name} is {value!r}; accepted: an integer of at least 1.")
        if not 0.0 <= self.min_coverage <= 1.0:
            raise ConfigError(f"run.min_coverage is {self.min_coverage!r}; accepted: a number from 0 to 1.")
        for name in ("budget_s", "request_timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"run.{name} is {value!r}; accepted: a number of seconds above 0, or nothing.")
        for name in ("backoff_s", "backoff_cap_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"run.{name} is {getattr(self, name)!r}; accepted: a number of seconds from 0.")
        if self.run_id is not None:
            try:
                check_rollout_id(self.run_id)
            except ValueError as error:
                raise ConfigError(f"run.run_id: {error}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """Token capture of a run. Whether an agent is selected stands at its `Destination`.

    `format`: how a rebuilt row carries its tokens; `items` falls back to the native trace above 32 MB. `deliver`:
    `single`, the one safe chain, or `all_chains`, every safe chain as a trace of its own. A source that does not answer
    within `source_timeout_s` seconds masks the row that waits for it. `journal_receipts`: keep the receipts in the
    journal even where the source keeps them, for an audit that has no source.
    """

    enabled: bool = False
    all_agents: bool = False
    rebuild_response: bool = True
    max_mask_fraction: float | None = None
    mask_fraction_min_samples: int = 50
    settle_s: float = 5.0
    format: Literal["items", "trace"] = "items"
    deliver: Literal["single", "all_chains"] = "single"
    source_timeout_s: float = 120.0
    journal_receipts: bool = False

    def __post_init__(self) -> None:
        fraction = self.max_mask_fraction
        if fraction is not None and not 0.0 <= fraction <= 1.0:
            raise ConfigError(f"token_id_capture.max_mask_fraction is {fraction!r}; accepted: a number from 0 to 1.")
        if self.format not in ("items", "trace"):
            raise ConfigError(f"token_id_capture.format is {self.format!r}; accepted: items or trace.")
        if self.deliver not in ("single", "all_chains"):
            raise ConfigError(f"token_id_capture.deliver is {self.deliver!r}; accepted: single or all_chains.")
        for name, least in (("settle_s", 0.0), ("source_timeout_s", 1e-3)):
            if not least <= getattr(self, name) < math.inf:
                raise ConfigError(f"token_id_capture.{name} is {getattr(self, name)!r}; accepted: a number of seconds.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where the tasks of one task set go.

    `name` is the environment's, `selected` whether its agent's tokens are captured, `weight` its share of the
    dispatches while several task sets still have tasks, `sampling` what is set in `responses_create_params` of every
    task (over what the task says). `read` is the `read` of the environment's protocol, where it is known: a task that
    it refuses is bad input, and nothing runs. `agent_run`: the peer is an agent, whose own `/run` runs the episode.
    `tells_sessions`: the server tells its sessions by itself (inline), so it need not be asked for those of a lost
    attempt.
    """

    peer: Peer
    name: str = "environment"
    selected: bool = False
    weight: float = 1.0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Mapping[str, Any]], object] | None = None
    agent_run: bool = False
    tells_sessions: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ConfigError(f"run.environment.{self.name}.weight is {self.weight!r}; accepted: a number above 0.")
