"""What an environment author subclasses: state, tools, verify. No ids, locks, cookies or deduplication.

    class Counter(Environment):
        def seed(self, task): return {"count": 0}
        @tool
        def add(self, state, n: int) -> int:
            "Add n to the counter."
            state["count"] += n
            return state["count"]
        def verify(self, state, task, response): return float(state["count"] == task["goal"])

Every method may be plain or `async`; plain ones run in worker threads with the rollout's context kept. Left to others:
how it is served (`server`), and everything about sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import msgspec

from toprope.protocol.episode import Task
from toprope.sandbox.spec import SandboxSpec
from toprope.tools.spec import ToolSpec, tools_of


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify` found. `extra` fields stand in the reply, and in the stored row, beside the reward.

    `mask_sample` keeps the row and its reward, but out of every statistic and out of training. `failure_kind` and
    `failure_reason` describe a reward that the environment itself calls a failure.
    """

    reward: float
    mask_sample: bool = False
    failure_kind: str | None = None
    failure_reason: str | None = None
    reward_components: dict[str, float] | None = None
    env_session_id: str | None = None
    extra: dict[str, Any] = {}


class Environment:
    """The base of every environment. Override `verify`, and what else is needed; `@tool` methods become tools.

    Keyword arguments of the subclass's `__init__` are the `config` of its server.
    """

    gradable_on_timeout: ClassVar[bool] = False
    """Whether the state can be scored after the agent ran out of time."""

    serial_tools: ClassVar[bool] = True
    """Whether tools of one session run one at a time."""

    worker_threads: ClassVar[int] = 8
    """How many plain functions run at once, over all sessions."""

    deterministic: bool = True
    """Whether equal sessions get equal replies: the same calls the same results, the same state and response the same
    reward. The conformance suite holds an environment to it; one that asks a model, or the world, says False."""

    verify_bound_s: float | None = None
    """Seconds within which `verify` ends itself, with a verdict: a bound of its own for what hostile answers can do.
    An environment server that gives it less time is refused: the answer would be an infrastructure's failure then."""

    sandbox: SandboxSpec | None = None
    """The sandbox that each session gets: made before `seed`, which is given it; stopped after `release`."""

    lends_sandbox: ClassVar[bool] = False
    """Whether the agent may borrow the session's sandbox: run programs in it, read and write its files."""

    class_tools: ClassVar[Mapping[str, ToolSpec]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.class_tools = tools_of(cls)

    @property
    def tools(self) -> Mapping[str, ToolSpec]:
        """The tools of this instance, by name: those of the class, unless a subclass offers fewer."""
        return self.class_tools

    @property
    def stateful(self) -> bool:
        """Whether sessions hold state: then nothing is verified without one."""
        return type(self).seed is not Environment.seed or self.sandbox is not None

    def seed(self, task: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The fresh state of one episode, made from the task's `task_data`. Runs once an episode.

        Override it as `seed(self, task)`; where `sandbox` is set, as `seed(self, task, sandbox)`: the session's
        `toprope.sandbox.provider.Sandbox`. Without an override the sandbox itself is the state.
        """
        return kwargs.get("sandbox")

    def session_tools(self, state: Any, task: dict[str, Any]) -> Any:
        """The names of the tools that this session may call, out of `tools`; asked once, after the seed. All of them
        unless a subclass says less: then the others do not exist for this session, over HTTP and MCP alike."""
        return list(self.tools)

    def verify(self, state: Any, task: dict[str, Any], response: dict[str, Any]) -> Any:
        """The reward of a finished episode: a finite float, or a `Verdict`.

        `task` is the task's `task_data`, `response` the agent's Responses object. An exception is a failure of the
        episode that can be tried again, never a reward; raise a typed error to say otherwise.
        """
        raise TypeError(f"{type(self).__name__} does not define verify(state, task, response)")

    def release(self, state: Any) -> Any:
        """Free what `seed` took. Called when no tool runs any more; called again later if it raises."""

    def env_session_id(self, state: Any) -> str | None:
        """A provider's handle for what the episode uses (container, lease), for people who look for orphans."""
        return None

    def tasks(self, size: int, seed: int) -> Iterable[Task]:
        """`size` materialised tasks, the same for the same `seed`; for environments that make their own tasks."""
        raise TypeError(f"{type(self).__name__} makes no tasks of its own; give a file of tasks")

    def tool_list(self, *, strict: bool = False) -> list[dict[str, Any]]:
        """The `tools` of a Responses request for this environment's tools, in order of their names."""
        return [spec.as_tool(strict=strict) for spec in self.tools.values()]


def final_text(response: Mapping[str, Any]) -> str:
    """The text of the last assistant message of a Responses object; "" where there is none."""
    for item in reversed(response.get("output") or []):
        if item.get("type", "message") == "message" and item.get("role", "assistant") == "assistant":
            content = item.get("content")
            if isinstance(content, str):
                return content
            return "".join(
                part["text"] for part in content or [] if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
    return ""
