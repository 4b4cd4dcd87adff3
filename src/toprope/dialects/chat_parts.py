"""Content parts, tools and tool choices, between Chat's spelling and that of Responses.

Pure functions on wire objects. Fields of a part that we do not know stay on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toprope.dialects.losses import loss_name
from toprope.wire.fields import refuse
from toprope.wire.responses import Item, Tool

Part = dict[str, Any]

THOUGHT_PARTS = ("reasoning", "thinking")
"""Parts that LangChain leaves in assistant content from other providers: thoughts ..."""
CALL_PARTS = ("tool_use", "tool_call", "function_call")
"""... and tool calls, which also stand in `tool_calls`."""
_THOUGHT_TEXTS = ("thinking", "reasoning", "text", "content", "summary")
"""Where a thought part has its text: the first that is there counts."""


def parts_from_chat(content: Any, text_type: str, where: str) -> list[Part]:
    """Chat content (null, a string or parts) as a list of Responses parts; `text_type` is that of its text."""
    if content is None:
        return []
    if isinstance(content, str):
        return [text_part(content, text_type)]
    if not isinstance(content, list):
        raise refuse(where, content, "null, a string or a list of parts")
    return [_part_from_chat(part, text_type, f"{where}[{index}]") for index, part in enumerate(content)]


def check_parts(content: Any, where: str) -> None:
    """Raise `BadRequest` naming the place unless content is null, a string, or a list of parts."""
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise refuse(where, content, "null, a string or a list of parts")
    for index, part in enumerate(content):
        if not isinstance(part, str):
            _check_part(part, f"{where}[{index}]")


def _check_part(part: Any, where: str) -> Part:
    if not isinstance(part, dict):
        raise refuse(where, part, "an object with a type")
    if not isinstance(part.get("type"), str | None):
        raise refuse(f"{where}.type", part["type"], "the kind of a part")
    return part


def text_part(text: str, text_type: str) -> Part:
    """One text part; an assistant's carries the empty `annotations` that strict readers want."""
    if text_type == "output_text":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": text_type, "text": text}


def _part_from_chat(raw: Any, text_type: str, where: str) -> Part:
    if isinstance(raw, str):
        return text_part(raw, text_type)
    part = _check_part(raw, where)
    kind = part.get("type")
    if is_text(part):
        told = part.get("annotations")
        text = {**part, **text_part(part.get("text") or "", text_type)}
        return {**text, "annotations": told} if told and isinstance(told, list) else text
    if kind == "image_url":
        image = part.get("image_url")
        inner = image if isinstance(image, dict) else {"url": image}
        if not inner.keys() <= {"url", "detail"}:
            return part  # the other form has no place for more
        rest = {k: v for k, v in part.items() if k not in ("type", "image_url")}
        return {"type": "input_image", "image_url": inner.get("url"), "detail": inner.get("detail") or "auto", **rest}
    if kind == "file" and isinstance(part.get("file"), dict):
        rest = {k: v for k, v in part.items() if k not in ("type", "file")}
        return {"type": "input_file", **part["file"], **rest}
    return part


def is_text(part: Mapping[str, Any]) -> bool:
    """Whether a part of a message is text, in either spelling."""
    kind = part.get("type")
    return kind in ("text", "input_text", "output_text") or (kind is None and isinstance(part.get("text"), str))


def is_text_alone(part: Any) -> bool:
    """Whether a part says no more than a string would."""
    return (
        isinstance(part, dict) and part.keys() == {"type", "text"} and is_text(part) and isinstance(part["text"], str)
    )


CONTENT_PARTS = "content_parts"
"""Where a Chat stream has the parts of a content of which text had left as a string. Clients send it back."""


def text_among(parts: Sequence[Any]) -> str:
    """The text that a client of such a stream has joined."""
    return "".join(part["text"] for part in parts if isinstance(part, dict) and is_text(part) and part.get("text"))


def with_its_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message that came back with `CONTENT_PARTS` as it was said; as it is where the client has changed its text."""
    parts, content = message[CONTENT_PARTS], message.get("content")
    if not isinstance(parts, list) or not isinstance(content, str) or text_among(parts) != content:
        return dict(message)
    return {name: parts if name == "content" else told for name, told in message.items() if name != CONTENT_PARTS}


def reply_part(part: Any) -> Part:
    """A part of a reply's content in Chat's spelling, with all that it has."""
    told = part.get("annotations") if isinstance(part, dict) else None
    return {**_part_to_chat(part), "annotations": told} if told else _part_to_chat(part)


_CITATION = {"url": str, "title": str, "start_index": int, "end_index": int}
"""What a reader of Responses demands of a citation."""


def annotations_from_chat(told: Any) -> list[Part]:
    """The annotations of a Chat message as those of an `output_text` part; none unless each has a form there that can
    be turned back."""
    flat: list[Part] = []
    for each in told if isinstance(told, list) else ():
        inner = each.get("url_citation") if isinstance(each, dict) else None
        if not isinstance(inner, dict) or each.keys() != {"type", "url_citation"} or "type" in inner:
            return []
        if each["type"] != "url_citation" or any(type(inner.get(name)) is not form for name, form in _CITATION.items()):
            return []
        flat.append({"type": "url_citation", **inner})
    return flat


def annotation_to_chat(told: Any) -> Any:
    """An annotation of a part as a Chat message has it."""
    if not isinstance(told, dict) or told.get("type") != "url_citation" or "url_citation" in told:
        return told
    return {"type": "url_citation", "url_citation": {k: v for k, v in told.items() if k != "type"}}


def content_to_chat(content: Any) -> str | list[Part]:
    """Responses content as Chat's: one text part becomes a string, several parts stay a list."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = [_part_to_chat(part) for part in content]
    if len(parts) == 1 and parts[0].get("type") == "text" and parts[0].keys() <= {"type", "text"}:
        return str(parts[0]["text"])
    return parts


def _part_to_chat(part: Any) -> Part:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text", "summary_text", "reasoning_text"):
        drop = ("annotations", "logprobs") if kind == "output_text" else ()
        return {**{k: v for k, v in part.items() if k not in drop}, "type": "text", "text": part.get("text") or ""}
    if kind == "input_image":
        image = {"url": part.get("image_url") or part.get("file_id")}
        if part.get("detail") not in (None, "auto"):
            image["detail"] = part["detail"]
        read = ("type", "image_url", "detail") if part.get("image_url") else ("type", "image_url", "detail", "file_id")
        rest = {k: v for k, v in part.items() if k not in read}
        return {"type": "image_url", "image_url": image, **rest}
    if kind == "input_file":
        return {"type": "file", "file": {k: v for k, v in part.items() if k != "type"}}
    return dict(part)


def plain_text(content: Any) -> str:
    """The text of content, parts joined without a separator; refusals count as text, images do not."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = [p.get("text") or p.get("refusal") if isinstance(p, dict) else p for p in content]
    return "".join(text for text in texts if isinstance(text, str))


def thought_of_part(part: Mapping[str, Any]) -> str | None:
    """The text of a thought part: a string, or a list of nothing but texts; empty where it has none at all.

    None where the text has a shape that we do not know: such a part is nobody's to take apart.
    """
    told = next((part[name] for name in _THOUGHT_TEXTS if part.get(name)), "")
    if isinstance(told, str):
        return told
    if not isinstance(told, list) or not all(map(_is_text, told)):
        return None
    return plain_text(told)


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, Mapping) and isinstance(part.get("text"), str))


def is_foreign(part: Any) -> bool:
    """Whether a part of an assistant's content is a thought or a call, which stand in other fields of a message."""
    if not isinstance(part, Mapping) or part.get("type") not in (*THOUGHT_PARTS, *CALL_PARTS):
        return False
    return part["type"] in CALL_PARTS or thought_of_part(part) is not None


def reasoning_text(item: Item) -> str:
    """The thought of a reasoning item: its content, or where that is empty its summary."""
    return plain_text(item.get("content")) or plain_text(item.get("summary"))


def tools_from_chat(tools: Sequence[Any]) -> tuple[Tool, ...]:
    """Chat tools in Responses' flat spelling; tools that are flat already, and foreign kinds, stay as they are."""
    flat: list[Tool] = []
    for tool in tools:
        inner = tool.get(str(tool.get("type")))
        if isinstance(inner, dict) and tool.get("type") in ("function", "custom"):
            rest = {k: v for k, v in tool.items() if k not in ("type", tool["type"])}
            shape = inner.get("format")
            if isinstance(shape, dict) and isinstance(shape.get("grammar"), dict):
                inner = {**inner, "format": {"type": shape.get("type"), **shape["grammar"]}}
            flat.append({"type": tool["type"], **inner, **rest})
        else:
            flat.append(tool)
    return tuple(flat)


_TOOL_FIELDS = {
    "function": ("name", "description", "parameters", "strict"),
    "custom": ("name", "description", "format"),
}


def tools_to_chat(tools: Sequence[Tool], *, custom: bool = False) -> tuple[list[Tool], list[str]]:
    """The functions, and if `custom` the custom tools, in Chat's nested spelling, and the kinds that are left out."""
    nested: list[Tool] = []
    lost: list[str] = []
    for tool in tools:
        kind = tool.get("type")
        if isinstance(tool.get("function"), dict):
            nested.append(tool)
        elif kind == "function" or (kind == "custom" and custom):
            names = _TOOL_FIELDS[kind]
            inner = {name: tool[name] for name in names if tool.get(name) is not None}
            shape = inner.get("format")
            if isinstance(shape, dict) and shape.get("type") == "grammar" and "grammar" not in shape:
                inner["format"] = {"type": "grammar", "grammar": {k: v for k, v in shape.items() if k != "type"}}
            rest = {k: v for k, v in tool.items() if k not in names and k != "type" and v is not None}
            nested.append({"type": kind, kind: inner, **rest})
        else:
            lost.append(loss_name("tools", kind))
    return nested, lost


def check_choice(choice: str | Mapping[str, Any] | None, where: str = "tool_choice") -> None:
    """Raise `BadRequest` naming the field unless a tool choice, in any dialect's spelling, can be converted."""
    if not isinstance(choice, Mapping):
        return
    kind = choice.get("type")
    if not isinstance(kind, str | None):
        raise refuse(f"{where}.type", kind, "the kind of a choice")
    if not isinstance(choice.get("name"), str | None):
        raise refuse(f"{where}.name", choice["name"], "the name of a tool")
    inner = choice.get(kind) if kind in ("function", "custom", "allowed_tools") else None
    if inner is not None:
        if not isinstance(inner, Mapping):
            raise refuse(f"{where}.{kind}", inner, "an object")
        if not isinstance(inner.get("name"), str | None):
            raise refuse(f"{where}.{kind}.name", inner["name"], "the name of a tool")
    if kind != "allowed_tools":
        return
    for holder, place in ((choice, where), (inner or {}, f"{where}.{kind}")):
        tools = holder.get("tools")
        if tools is not None and not isinstance(tools, list):
            raise refuse(f"{place}.tools", tools, "a list of tools")
        for index, tool in enumerate(tools or ()):
            if not isinstance(tool, Mapping) or tool.get("type") == "allowed_tools":
                raise refuse(f"{place}.tools[{index}]", tool, "an object that names one tool")
            check_choice(tool, f"{place}.tools[{index}]")


def choice_from_chat(choice: str | Mapping[str, Any] | None) -> str | Mapping[str, Any] | None:
    """Chat's tool choice in Responses' spelling. Raises `BadRequest` as `check_choice`."""
    check_choice(choice)
    return _choice_from_chat(choice)


def _choice_from_chat(choice: str | Mapping[str, Any] | None) -> str | Mapping[str, Any] | None:
    if not isinstance(choice, Mapping):
        return choice
    kind = choice.get("type")
    inner = choice.get(str(kind))
    if kind in ("function", "custom") and isinstance(inner, Mapping):
        return {"type": kind, "name": inner.get("name")}
    if kind == "allowed_tools" and isinstance(inner, Mapping):
        return {
            "type": kind,
            "mode": inner.get("mode"),
            "tools": [_choice_from_chat(tool) for tool in inner.get("tools") or ()],
        }
    return choice


_MODES = (None, "auto", "none", "required", "any")
"""Kinds of a choice that name no tool."""


def choice_to_chat(
    choice: str | Mapping[str, Any] | None, tools: Sequence[Tool], *, all_there: bool
) -> tuple[str | Mapping[str, Any] | None, list[str]]:
    """Responses' tool choice, one that `check_choice` accepts, in Chat's spelling, and what had to be left out of it
    (`tool_choice.<kind>`).

    `tools` are those that Chat lists, `all_there` says that none was left out. A choice does not outlive its tool,
    which a provider would refuse: it goes, and where of allowed tools none is there, no tool may be called.
    """
    if not isinstance(choice, Mapping):
        return (choice, []) if tools else (None, [loss_name("tool_choice", choice)] if choice == "required" else [])
    if choice.get("type") != "allowed_tools":
        there = bool(tools) and _is_there(choice, tools, all_there)
        return (_nested(choice), []) if there else (None, [loss_name("tool_choice", choice.get("type"))])
    allowed = choice.get("tools") or ()
    kept = [_nested(tool) for tool in allowed if _is_there(tool, tools, all_there)]
    lost = [loss_name("tool_choice", tool.get("type")) for tool in allowed if not _is_there(tool, tools, all_there)]
    if not tools or (allowed and not kept):
        return ("none" if tools else None), lost
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": kept}}, lost


def _is_there(choice: Mapping[str, Any], tools: Sequence[Tool], all_there: bool) -> bool:
    """Whether the one tool that is named is among `tools`. One that the client listed nowhere is its own affair."""
    kind = choice.get("type")
    if kind not in _TOOL_FIELDS:
        return kind in _MODES
    listed = (tool.get(kind) for tool in tools)
    return all_there or any(isinstance(each, dict) and each.get("name") == choice.get("name") for each in listed)


def _nested(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = choice.get("type")
    return {"type": kind, kind: {"name": choice["name"]}} if kind in _TOOL_FIELDS and "name" in choice else choice
