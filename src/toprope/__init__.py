"""Toprope runs LLM agents in environments and brings back rollouts that are safe to train on.

The names that users type, loaded when they are asked for, so that importing one room loads one room.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toprope.capture.delivery import finalize_rollout_token_capture as finalize_rollout_token_capture
    from toprope.capture.delivery import retire_rollout_token_capture as retire_rollout_token_capture
    from toprope.collector.collect import Collector as Collector
    from toprope.correlation.context import current_rollout_id as current_rollout_id
    from toprope.correlation.context import rollout_context as rollout_context
    from toprope.correlation.context import run_in_context as run_in_context
    from toprope.errors.tree import ToolError as ToolError
    from toprope.http.rollout_layer import RolloutContextMiddleware as RolloutContextMiddleware
    from toprope.http.rollout_layer import RolloutContextPeekMiddleware as RolloutContextPeekMiddleware
    from toprope.launch.evidence import open_store as open_store
    from toprope.servers.agent.agent import Agent as Agent
    from toprope.servers.model.server import ModelServer as ModelServer
    from toprope.servers.resources.environment import Environment as Environment
    from toprope.servers.resources.environment import Verdict as Verdict
    from toprope.servers.resources.environment import final_text as final_text
    from toprope.tools.spec import tool as tool

_HOMES = {
    "Agent": "toprope.servers.agent.agent",
    "Collector": "toprope.collector.collect",
    "Environment": "toprope.servers.resources.environment",
    "ModelServer": "toprope.servers.model.server",
    "RolloutContextMiddleware": "toprope.http.rollout_layer",
    "RolloutContextPeekMiddleware": "toprope.http.rollout_layer",
    "ToolError": "toprope.errors.tree",
    "Verdict": "toprope.servers.resources.environment",
    "current_rollout_id": "toprope.correlation.context",
    "final_text": "toprope.servers.resources.environment",
    "finalize_rollout_token_capture": "toprope.capture.delivery",
    "open_store": "toprope.launch.evidence",
    "retire_rollout_token_capture": "toprope.capture.delivery",
    "rollout_context": "toprope.correlation.context",
    "run_in_context": "toprope.correlation.context",
    "tool": "toprope.tools.spec",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'toprope' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
