"""A Chat request: read into the pivot, made from the pivot, or cleaned for an upstream that speaks Chat too.

Pure. History is `chat_history`'s, parts and tools are `chat_parts`'s, what gets lost stands in `losses`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toprope.canonical.json import NotJson, loads
from toprope.dialects.chat_history import Message, items_from_messages, messages_from_items
from toprope.dialects.chat_parts import (
    CALL_PARTS,
    CONTENT_PARTS,
    THOUGHT_PARTS,
    choice_from_chat,
    choice_to_chat,
    is_foreign,
    plain_text,
    tools_from_chat,
    tools_to_chat,
    with_its_parts,
)
from toprope.dialects.chat_turn import argument_text, call_of_part, thought_of_message
from toprope.dialects.losses import fields_of, loss_name
from toprope.dialects.pivot import request_items, without_token_fields
from toprope.errors.tree import BadRequest
from toprope.wire.chat import THOUGHT_FIELDS
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
from toprope.wire.message_fields import says_something
from toprope.wire.responses import Item, ResponsesRequest

_NAMED = frozenset(
    (
        "messages", "model", "tools", "functions", "tool_choice", "parallel_tool_calls", "max_completion_tokens",
        "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "n", "response_format", "verbosity",
        "reasoning_effort", "stream_options", "return_token_ids",
    )
)  # fmt: skip
_OURS = frozenset(("n", "stream", "stream_options", "return_token_ids"))
_CALL_FIELDS = frozenset(("id", "type", "function"))
_FUNCTION_FIELDS = frozenset(("name", "arguments"))
_DROPPED_FOR_CHAT = frozenset(name for name, _ in fields_of("pivot -> chat", "dropped"))
_RESPONSES_REASONING = ("context", "mode")
"""Fields of `reasoning` that OpenAI's Responses has and its Chat has not."""


def request_from_chat(body: Mapping[str, Any], items: tuple[Item, ...] | None = None) -> ResponsesRequest:
    """The pivot of a Chat body. Raises `BadRequest` (400) naming the field that cannot be read or honoured.

    `items` are its messages as items, from whoever has converted them.
    """
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise refuse("messages", body.get("messages"), "a list with at least one message")
    if body.get("n") not in (None, 1):
        raise BadRequest(
            f"n: {body['n']!r} is not supported: {dict(fields_of('chat -> pivot', 'refused'))['n']}", status=400
        )
    tools = objects_field(body, "tools") or [{"type": "function", **f} for f in objects_field(body, "functions")]
    choice = choice_from_chat(choice_field(body, "tool_choice"))
    limit = int_field(body, "max_completion_tokens")
    return ResponsesRequest(
        input=items_from_messages(body["messages"]) if items is None else items,
        model=text_field(body, "model"),
        tools=tools_from_chat(tools),
        tool_choice=choice if tools else None,
        parallel_tool_calls=bool_field(body, "parallel_tool_calls"),
        max_output_tokens=limit if limit is not None else int_field(body, "max_tokens"),
        temperature=number_field(body, "temperature"),
        top_p=number_field(body, "top_p"),
        top_k=int_field(body, "top_k"),
        seed=int_field(body, "seed"),
        stop=stop_field(body),
        stream=bool(bool_field(body, "stream")),
        extra=_extra_from_chat(body),
    )


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether a Chat client asked for usage at the end of its stream (`stream_options.include_usage`)."""
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _extra_from_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    extra = {name: value for name, value in body.items() if name not in _NAMED and value is not None}
    text: dict[str, Any] = {}
    shape = body.get("response_format")
    if isinstance(shape, dict):
        inner = shape.get("json_schema")
        text["format"] = {"type": "json_schema", **inner} if isinstance(inner, dict) else shape
    if body.get("verbosity") is not None:
        text["verbosity"] = body["verbosity"]
    if text:
        extra["text"] = text
    if body.get("reasoning_effort") is not None:
        extra["reasoning"] = {"effort": body["reasoning_effort"]}
    return extra


def request_to_chat(
    request: ResponsesRequest, *, reasoning_field: str = "reasoning_content", custom_tools: bool = False
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A Chat body made from the pivot, and the names of what Chat could not carry (`tools.<kind>`,
    `tool_choice.<kind>`, `text.<field>`, `reasoning.<field>`, and as `messages_from_items`).

    `custom_tools` says that the upstream takes tools of type custom, which few do.
    """
    messages, lost = messages_from_items(
        request_items(request), reasoning_field=reasoning_field, custom_tools=custom_tools
    )
    tools, lost_tools = tools_to_chat(request.tools, custom=custom_tools)
    choice, lost_choice = choice_to_chat(request.tool_choice, tools, all_there=not lost_tools)
    body: dict[str, Any] = {"model": request.model, "messages": messages}
    if tools:
        body["tools"] = tools
        body["tool_choice"] = choice
        body["parallel_tool_calls"] = request.parallel_tool_calls
    body["max_tokens"] = request.max_output_tokens
    for name in ("temperature", "top_p", "top_k", "seed"):
        body[name] = getattr(request, name)
    if request.stop:
        body["stop"] = list(request.stop)
    extra, lost_extra = _extra_to_chat(request.extra)
    body.update(extra)
    names = dict.fromkeys((*lost_tools, *lost_choice, *lost_extra, *lost))
    return {name: value for name, value in body.items() if value is not None}, tuple(names)


def _extra_to_chat(extra: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    out = {n: v for n, v in extra.items() if n not in _DROPPED_FOR_CHAT and n not in ("text", "reasoning")}
    lost = [name for name in ("text", "reasoning") if not isinstance(extra.get(name) or {}, dict)]
    text, reasoning = extra.get("text"), extra.get("reasoning")
    if isinstance(text, dict):
        shape = text.get("format")
        if isinstance(shape, dict) and shape.get("type") == "json_schema":
            inner = {name: value for name, value in shape.items() if name != "type" and value is not None}
            out["response_format"] = {"type": "json_schema", "json_schema": inner}
        elif isinstance(shape, dict) and shape.get("type") != "text":
            out["response_format"] = shape
        elif shape is not None and not isinstance(shape, dict):
            lost.append("text.format")
        out["verbosity"] = text.get("verbosity")
        lost += [loss_name("text", n) for n, v in text.items() if n not in ("format", "verbosity") and v is not None]
    if isinstance(reasoning, dict):
        told = {n: v for n, v in reasoning.items() if n not in ("summary", "generate_summary") and v is not None}
        lost += [loss_name("reasoning", n) for n in _RESPONSES_REASONING if told.pop(n, None) is not None]
        if told.keys() <= {"effort"}:
            out["reasoning_effort"] = told.get("effort")
        else:  # a router's own, which Chat bodies have there too; one of them refuses the effort in both places
            out["reasoning"] = told
    return out, lost


def clean_chat_body(body: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A Chat client's own body as an upstream gets it: the same, without nulls, our own echoes and odd parts; and the
    names of what those parts had that is not sent (`items.message.<kind of part>.<field>`).

    Nulls are dropped from the body and from messages (`"top_logprobs": null` makes engines return no logprobs at all,
    `"tool_calls": []` is refused by some); a tool choice without tools goes; a turn with neither text nor calls gets
    empty text. Content and argument strings are the client's own objects.
    """
    lost: dict[str, None] = {}
    out = {name: value for name, value in body.items() if value is not None and name not in _OURS}
    out["messages"] = [_clean_message(message, lost) for message in body["messages"]]
    if not out.get("tools"):
        out.pop("tools", None)
        if not out.get("functions"):
            out.pop("tool_choice", None)
            out.pop("parallel_tool_calls", None)
    return out, tuple(lost)


def _clean_message(message: Message, lost: dict[str, None]) -> Message:
    if message.get("role") != "assistant":
        return message if None not in message.values() else {k: v for k, v in message.items() if v is not None}
    message = with_its_parts(message) if CONTENT_PARTS in message else message
    content = message.get("content")
    clean = {
        name: value
        for name, value in without_token_fields(message).items()
        if value is not None and not (name == "tool_calls" and not value)
    }
    if "tool_calls" in clean:
        clean["tool_calls"] = [_clean_call(call) for call in clean["tool_calls"]]
    if isinstance(content, list) and any(map(is_foreign, content)):
        return _without_foreign(message, clean, lost)
    if "content" not in clean and "tool_calls" not in clean and "function_call" not in clean:
        clean["content"] = ""
    elif "content" in message and content is None and "content" not in clean:
        clean["content"] = None
    return clean


def _without_foreign(message: Message, clean: Message, lost: dict[str, None]) -> Message:
    """`clean` with the thoughts and calls that its content holds in fields of their own, all else as the client has it.

    A thought goes where the message has one, both texts if they differ; a call to the others, unless it is there.
    """
    foreign = [part for part in message["content"] if is_foreign(part)]
    own = [part for part in message["content"] if not is_foreign(part)]
    if any(part["type"] in THOUGHT_PARTS for part in foreign) and (thought := thought_of_message(message)):
        named = [name for name in THOUGHT_FIELDS if isinstance(message.get(name), str) and message[name]]
        free = [name for name in THOUGHT_FIELDS if not message.get(name)]
        for name in named or free[:1]:
            clean[name] = thought
        if not named and not free:
            lost[loss_name("items", "message", "thinking")] = None
    told = [call for call in clean.get("tool_calls") or () if isinstance(call.get("id"), str)]
    calls = {call["id"]: call.get("function") for call in told}
    for part in foreign:
        call = call_of_part(part) if part["type"] in CALL_PARTS else None
        if call is not None and call["id"] not in calls:
            call["id"] = call["id"] or f"call_{len(calls)}"
            clean.setdefault("tool_calls", []).append(call)
            calls[call["id"]] = call["function"]
        elif call is not None and not _is_copy(call["function"], calls[call["id"]]):
            lost[loss_name("items", "message", part["type"])] = None
        for name, value in part.items():
            if name not in _FOREIGN_FIELDS and says_something(value):
                lost[loss_name("items", "message", part["type"], name)] = None
    if not own:
        clean["content"] = None if "tool_calls" in clean or "function_call" in clean else ""
    elif all(isinstance(part, str) or part.keys() <= {"type", "text"} for part in own):
        clean["content"] = plain_text(own)
    else:
        clean["content"] = own
    return clean


_FOREIGN_FIELDS = frozenset(
    (
        "type", "id", "call_id", "index", "status", "name", "arguments", "args", "input", "cache_control",
        "thinking", "reasoning", "text", "content", "summary",
    )
)  # fmt: skip
"""Fields of a thought or a call among the parts that are read, or that are notes about it."""


def _is_copy(part: Mapping[str, Any], function: Any) -> bool:
    """Whether a call among the parts says what the function of the same id does, however it is spelled."""
    if not isinstance(function, Mapping) or part["name"] != function.get("name"):
        return False
    try:
        return bool(loads(part["arguments"] or "{}") == loads(argument_text(function.get("arguments")) or "{}"))
    except (NotJson, RecursionError):
        return bool(part["arguments"] == function.get("arguments"))


def _clean_call(call: Any) -> Any:
    """A call without what the public library's stream helper adds to it (a place, parsed arguments)."""
    function = call.get("function")
    if call.keys() <= _CALL_FIELDS and (not isinstance(function, dict) or function.keys() <= _FUNCTION_FIELDS):
        return call
    clean = {name: value for name, value in call.items() if name != "index" and value is not None}
    if isinstance(function, dict):
        clean["function"] = {k: v for k, v in function.items() if k != "parsed_arguments" and v is not None}
    return clean
