"""A Messages request read into the pivot.

Pure. History is `messages_history`'s, the argument strings of its calls are `messages_arguments`'s, what gets lost
stands in `losses`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toprope.dialects.chat_parts import check_choice
from toprope.dialects.losses import fields_of
from toprope.dialects.messages_history import items_from_system, items_from_turns
from toprope.wire.fields import (
    bool_field,
    choice_field,
    int_field,
    number_field,
    objects_field,
    refuse,
    stop_field,
    text_field,
)
from toprope.wire.responses import ResponsesRequest, Tool

_NAMED = frozenset(
    (
        "messages", "model", "system", "tools", "tool_choice", "max_tokens", "temperature", "top_p", "top_k", "seed",
        "stop_sequences", "stream", "output_config", "output_format",
    )
)  # fmt: skip
_DROPPED = frozenset(name for name, _ in fields_of("messages -> pivot", "dropped"))
_TOOL_NAMED = frozenset(("type", "name", "description", "input_schema"))
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def request_from_messages(body: Mapping[str, Any]) -> ResponsesRequest:
    """The pivot of a Messages body (`count_tokens` has the same one). Raises `BadRequest` (400) naming the field.

    A call in its history has the argument string that its object gives when written out; `restore_arguments` puts
    what was sampled in its place.
    """
    turns = body.get("messages")
    if not isinstance(turns, list) or not turns:
        raise refuse("messages", turns, "a list with at least one message")
    tools = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(objects_field(body, "tools")))
    choice, parallel = _choice(choice_field(body, "tool_choice"))
    return ResponsesRequest(
        input=(*items_from_system(body.get("system")), *items_from_turns(turns)),
        model=text_field(body, "model"),
        tools=tools,
        tool_choice=choice if tools else None,
        parallel_tool_calls=parallel if tools else None,
        max_output_tokens=int_field(body, "max_tokens"),
        temperature=number_field(body, "temperature"),
        top_p=number_field(body, "top_p"),
        top_k=int_field(body, "top_k"),
        seed=int_field(body, "seed"),
        stop=stop_field(body, "stop_sequences"),
        stream=bool(bool_field(body, "stream")),
        extra=_extra(body),
    )


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    """A client tool as a function; a tool of the provider's own (`web_search_...`) stays as it is, listed, not run."""
    kind = tool.get("type")
    if kind not in (None, "custom"):
        return {name: value for name, value in tool.items() if name != "cache_control"}
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise refuse(f"{where}.name", tool.get("name"), "the name of the tool")
    flat: Tool = {"type": "function", "name": tool["name"]}
    if tool.get("description") is not None:
        flat["description"] = tool["description"]
    if tool.get("input_schema") is not None:
        flat["parameters"] = tool["input_schema"]
    ignored = (*_TOOL_NAMED, "cache_control", "eager_input_streaming")
    return {**flat, **{k: v for k, v in tool.items() if k not in ignored and v is not None}}


def _choice(choice: Any) -> tuple[str | Mapping[str, Any] | None, bool | None]:
    """The tool choice in Responses' spelling, and whether calls may be parallel where it says so."""
    if choice is None or isinstance(choice, str):
        return _CHOICES.get(choice or "", choice), None
    check_choice(choice)
    flag = choice.get("disable_parallel_tool_use")
    parallel = not flag if isinstance(flag, bool) else None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "name": choice.get("name")}, parallel
    return _CHOICES.get(str(kind), choice), parallel


def _extra(body: Mapping[str, Any]) -> dict[str, Any]:
    named = _NAMED | _DROPPED
    extra = {name: value for name, value in body.items() if name not in named and value is not None}
    config = body.get("output_config")
    config = config if isinstance(config, dict) else {}
    shape = config.get("format") or body.get("output_format")
    if isinstance(shape, dict):
        wanted = {"name": "output", **shape} if shape.get("type") == "json_schema" else shape
        extra["text"] = {"format": wanted}
    if config.get("effort") is not None:
        extra["reasoning"] = {"effort": config["effort"]}
    return extra
