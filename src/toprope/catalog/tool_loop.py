"""The tool loop: call the model, run its function calls over the session's grants, give it the outputs, again.

It ends when the model calls no function, when the model's turn is not complete (cut by its token limit), after
`max_steps` model calls, or when a later call is refused because the rollout's budget is used up or the history has
outgrown the model's context; then the status is `incomplete`. The output holds every item in order, the model's own and
the function outputs between them. A `tool_choice` that forces a call holds until the first function call was made; from
then on it is `auto`, since a model that is forced for ever could never answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from toprope.canonical import json
from toprope.canonical.json import NotJson
from toprope.errors.kinds import Kind
from toprope.errors.tree import ConfigError, PeerError
from toprope.servers.agent.agent import Activation, Agent
from toprope.tools.outcome import MAX_OUTPUT_CHARS

DEFAULT_MAX_STEPS = 32
ENDS = frozenset({Kind.LIMIT_REACHED, Kind.MODEL_CONTEXT_LENGTH})
"""Refusals of a model server that end a trajectory: what was sampled before them stands and is worth a verdict."""
BAD_TOOL_ARGUMENTS = "bad_tool_arguments"
"""The kind `<agent server>:bad_tool_arguments`: broken arguments of a tool call that the model server then refused."""


class ToolLoop(Agent):
    """`ToolLoop(max_steps=32, max_tool_chars=262144)`. A bound of the agent server (`max_steps` there) wins.

    `max_tool_chars`: characters of one tool's output that the model is told; a longer one is cut, and says so.
    """

    def __init__(self, *, max_steps: int = DEFAULT_MAX_STEPS, max_tool_chars: int = MAX_OUTPUT_CHARS) -> None:
        for name, value in (("max_steps", max_steps), ("max_tool_chars", max_tool_chars)):
            if value < 1:
                raise ConfigError(f"{name}: {value} given; accepted: an integer of at least 1")
        self.max_steps = max_steps
        self.max_tool_chars = max_tool_chars

    async def respond(self, activation: Activation) -> dict[str, Any]:
        """As `Agent.respond`. Trouble with the model or with a tool's server raises, and ends the activation."""
        steps = activation.max_steps or self.max_steps
        activation.tools.max_output_chars = self.max_tool_chars
        request = dict(activation.request)
        history = _as_items(request.get("input"))
        output: list[dict[str, Any]] = []
        usage: list[Any] = []
        reply: dict[str, Any] = {}
        for step in range(1, steps + 1):
            try:
                reply = await _ask(activation, {**request, "input": history + output}, output)
            except PeerError as refusal:
                if refusal.kind not in ENDS or not output:
                    raise  # a first call that is refused has sampled nothing that could be judged
                return _cut_short(reply, output, usage, activation, refusal.kind)
            usage.append(reply.get("usage"))
            output.extend(reply["output"])
            activation.partial = partial(_unfinished, reply, output, usage)
            calls = [item for item in reply["output"] if item.get("type") == "function_call"]
            if not calls or reply.get("status") in ("incomplete", "failed"):
                return _finished(reply, output, usage, activation, reply.get("status", "completed"))
            for call in calls:
                result = await activation.call_tool(call)
                call_id = call.get("call_id") or call.get("id")
                output.append({"type": "function_call_output", "call_id": call_id, "output": result.text})
            if _forces(request.get("tool_choice")):
                request["tool_choice"] = "auto"
            if step == steps:
                break
        return _cut_short(reply, output, usage, activation, "max_steps")


async def _ask(activation: Activation, body: Mapping[str, Any], output: list[dict[str, Any]]) -> dict[str, Any]:
    """One model call. Where the model server refuses a history in which the model's own call has arguments that are no
    JSON, the failure says so: it is the model's doing, and no trouble of any server."""
    try:
        return await activation.model.responses(body)
    except PeerError as error:
        broken = [item for item in output if item.get("type") == "function_call" and not _is_json(item)]
        if error.kind != Kind.MODEL_REJECTED or not broken:
            raise
        names = ", ".join(str(item.get("name")) for item in broken)
        raise PeerError(
            f"the model's own call of {names} has arguments that are no JSON, and its server refuses the history with "
            f"them: {error.message}",
            kind=f"{activation.observations.source}:{BAD_TOOL_ARGUMENTS}",
            retryable=False,
            delivery=error.delivery,
            upstream_status=error.upstream_status,
        ) from error


def _is_json(call: Mapping[str, Any]) -> bool:
    try:
        json.loads(call.get("arguments") or "{}")
    except (NotJson, TypeError, ValueError):
        return False
    return True


def _finished(
    reply: Mapping[str, Any], output: list[dict[str, Any]], usage: list[Any], activation: Activation, status: str
) -> dict[str, Any]:
    final = {**reply, "status": status, "output": output, "usage": _total(usage)}
    if activation.extended and isinstance(reply.get("id"), str):
        final["terminal_response_id"] = reply["id"]
    return final


def _cut_short(
    reply: Mapping[str, Any], output: list[dict[str, Any]], usage: list[Any], activation: Activation, reason: str
) -> dict[str, Any]:
    final = _finished(reply, output, usage, activation, "incomplete")
    # The format itself knows no such reason.
    final["incomplete_details"] = {"reason": str(reason) if activation.extended else None}
    return final


def _unfinished(reply: Mapping[str, Any], output: list[dict[str, Any]], usage: list[Any]) -> dict[str, Any]:
    return {**reply, "status": "incomplete", "output": list(output), "usage": _total(usage)}


def _as_items(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return list(given)


def _forces(choice: Any) -> bool:
    return choice not in (None, "auto", "none")


def _total(usages: list[Any]) -> Any:
    """The sum over all calls, leaf by leaf; None where a call told nothing (unknown is not zero)."""
    if not usages or any(not isinstance(usage, Mapping) for usage in usages):
        return None
    return _sum(usages)


def _sum(values: list[Any]) -> Any:
    if all(isinstance(value, Mapping) for value in values):
        return {key: _sum([value.get(key) for value in values]) for key in values[0]}
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return sum(values)
    return None
