"""The Responses dialect: requests into the pivot, replies out of it.

The pivot is this very form, so little is converted: shorthand is written out, Chat-shaped turns become items, token
arrays that a client echoed are taken off, and what could not be honoured is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toprope.dialects.chat_history import argument_text, items_from_messages
from toprope.dialects.chat_parts import check_parts, choice_from_chat, tools_from_chat
from toprope.dialects.losses import fields_of
from toprope.dialects.pivot import PivotReply, refuse_unsupported, without_token_fields
from toprope.errors.tree import BadRequest
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
from toprope.wire.responses import Item, ResponsesRequest, Usage

_NAMED = frozenset(
    (
        "input", "model", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens",
        "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options",
    )
)  # fmt: skip
_REFUSED = tuple((name, why) for name, why in fields_of("responses -> pivot", "refused") if name != "item_reference")
_PARTS = {
    "reasoning": ("content", "summary"),
    "function_call_output": ("output",),
    "custom_tool_call_output": ("output",),
}
_NO_REFERENCE = dict(fields_of("responses -> pivot", "refused"))["item_reference"]


def request_from_responses(body: Mapping[str, Any], items: tuple[Item, ...] | None = None) -> ResponsesRequest:
    """The pivot of a Responses body. Raises `BadRequest` (400) naming the field that cannot be read or honoured.

    `items` is its input as items, from whoever has converted it.
    """
    refuse_unsupported(body, _REFUSED)
    tools = objects_field(body, "tools")
    choice = choice_from_chat(choice_field(body, "tool_choice"))
    return ResponsesRequest(
        input=items_from_input(body.get("input")) if items is None else items,
        model=text_field(body, "model"),
        instructions=text_field(body, "instructions"),
        tools=tools_from_chat(tools),
        tool_choice=choice if tools else None,
        parallel_tool_calls=bool_field(body, "parallel_tool_calls"),
        max_output_tokens=int_field(body, "max_output_tokens"),
        temperature=number_field(body, "temperature"),
        top_p=number_field(body, "top_p"),
        top_k=int_field(body, "top_k"),
        seed=int_field(body, "seed"),
        stop=stop_field(body),
        stream=bool(bool_field(body, "stream")),
        extra={name: value for name, value in body.items() if name not in _NAMED and value is not None},
    )


def items_from_input(value: Any) -> tuple[Item, ...]:
    """`input` (a string, or a list of items in any of the shapes seen) as items that all have a type."""
    if isinstance(value, str):
        return ({"type": "message", "role": "user", "content": value},)
    if not isinstance(value, list) or not value:
        raise refuse("input", value, "a string or a list with at least one item")
    return items_from_list(value)


def items_from_list(values: Sequence[Any], first: int = 0) -> tuple[Item, ...]:
    """The entries of an `input` list as items; `first` is the place of the first one there."""
    items: list[Item] = []
    for index, item in enumerate(values, first):
        if not isinstance(item, dict):
            raise refuse(f"input[{index}]", item, "an object")
        items.extend(_items(item, f"input[{index}]"))
    return tuple(items)


def _items(item: Item, where: str) -> tuple[Item, ...]:
    kind, role = item.get("type"), item.get("role")
    if kind == "item_reference":
        raise BadRequest(f"{where}: item_reference is not supported: {_NO_REFERENCE}", status=400)
    if (kind is None and role is None) or not (kind is None or (isinstance(kind, str) and kind)):
        raise refuse(f"{where}.type", kind, "a type, or a role for a message")
    if kind in (None, "message"):
        if role in ("tool", "function") or item.get("tool_calls"):
            return items_from_messages([{k: v for k, v in item.items() if k != "type"}], where)
        if role not in ("user", "assistant", "system", "developer"):
            raise refuse(f"{where}.role", role, "user, assistant, system or developer")
        content = item.get("content")
        check_parts(content, f"{where}.content")
        if kind is None or content is None:
            item = {**item, "type": "message", "content": [] if content is None else content}
    for name in _PARTS.get(str(kind), ()):
        check_parts(item.get(name), f"{where}.{name}")
    if kind == "function_call" and not isinstance(item.get("arguments"), str):
        item = {**item, "arguments": argument_text(item.get("arguments"))}
    return (without_token_fields(item),)


def responses_reply(reply: PivotReply, request: ResponsesRequest) -> dict[str, Any]:
    """A complete Response object. `reply.tokens` stand on the last output item for a caller that asked."""
    cut = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(reply.finish_reason)
    begun = response_begun(request, reply_id=reply.reply_id, model=reply.model, created=reply.created)
    return {
        **reply.extra,
        **begun,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": cut} if cut else None,
        "output": output_with_tokens(reply),
        "usage": _usage(reply.usage),
    }


UNCOUNTED: Mapping[str, Any] = {
    "input_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 0,
}
"""The usage that ends a stream of unknown counts. No call has a prompt of 0 tokens, so nobody takes it for a count; a
program that finds none there (opencode 1.18) asks again for ever."""


def response_begun(request: ResponsesRequest, *, reply_id: str, model: str, created: int) -> dict[str, Any]:
    """A Response object of which nothing was sampled yet, as the first events of a stream carry it."""
    return {
        "id": f"resp_{reply_id}",
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "metadata": request.extra.get("metadata") or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_output_tokens": request.max_output_tokens,
        "tool_choice": request.tool_choice or "auto",
        "tools": list(request.tools),
        "usage": None,
    }


def output_with_tokens(reply: PivotReply) -> list[Item]:
    """The output items as a client gets them: the triple on the last one, where it was asked for."""
    output = list(reply.output)
    if reply.tokens and output:
        output[-1] = {**output[-1], **reply.tokens}
    return output


def _usage(usage: Usage) -> dict[str, Any] | None:
    """Null where the engine did not say; details default to 0 because client models demand integers there."""
    if usage.input_tokens is None or usage.output_tokens is None:
        return None
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }
