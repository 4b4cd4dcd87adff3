"""One assistant message of Chat as items, and a call's item as Chat has it.

What a model said stands in many places: text, a refusal and thoughts under several names, parts that libraries leave in
the content, calls in two spellings. Whatever is not read stays: fields of the message on its message item, fields of a
call on the call's. Left to others: what of it a history says anew (`chat_unread`), whole histories (`chat_history`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toprope.canonical.json import NotJson, dumps
from toprope.dialects.chat_parts import (
    CALL_PARTS,
    THOUGHT_PARTS,
    annotations_from_chat,
    is_foreign,
    is_text,
    parts_from_chat,
    thought_of_part,
)
from toprope.dialects.pivot import without_token_fields
from toprope.errors.tree import BadRequest
from toprope.wire.chat import THOUGHT_FIELDS
from toprope.wire.fields import refuse
from toprope.wire.message_fields import says_something
from toprope.wire.responses import Item

_PLAIN_ASSISTANT = frozenset(("role", "content", "tool_calls"))
_TEXT_FIELDS = frozenset((*THOUGHT_FIELDS, "refusal"))
_CALL_FIELDS = frozenset(("id", "type", "function", "custom", "index"))
_FUNCTION_FIELDS = frozenset(("name", "arguments"))


def items_from_assistant(message: Mapping[str, Any], where: str, *, id_seed: str) -> list[Item]:
    """One assistant message, an upstream's answer, as items; at least one, maybe an empty message.

    Fields that we do not read stay on the message item. A turn without text has none: if one of those fields says
    something that the items do not, a message without parts holds them, after the calls, so that whatever of the turn
    left already keeps its place. (Without any: the public Responses client parses every text where a form was asked
    for, an empty one too.) `id_seed` makes ids for calls that have none.
    """
    items, rest = read_turn(message, where, id_seed)
    if any(map(says_something, rest.values())) and not any(item["type"] == "message" for item in items):
        items.append({**rest, "type": "message", "role": "assistant", "content": []})
    return items


def read_turn(message: Mapping[str, Any], where: str, id_seed: str) -> tuple[list[Item], dict[str, Any]]:
    """An assistant message as items, and the fields that are not read; a message item among them has those too."""
    raw_content = message.get("content")
    if message.keys() <= _PLAIN_ASSISTANT and not isinstance(raw_content, list):
        return _plain_turn(message, raw_content, where, id_seed), {}
    message = without_token_fields(dict(message))
    odd = raw_content if isinstance(raw_content, list) and any(map(is_foreign, raw_content)) else ()
    plain = [part for part in odd if not is_foreign(part)] if odd else raw_content
    items: list[Item] = []
    if thought := _thought(message):
        text = {"type": "reasoning_text", "text": thought}
        items.append({"type": "reasoning", "summary": [], "content": [text]})
    calls = _calls(message, odd, where, id_seed)
    content = parts_from_chat(plain, "output_text", f"{where}.content")
    if isinstance(message.get("refusal"), str) and message["refusal"]:
        content.append({"type": "refusal", "refusal": message["refusal"]})
    rest = {k: v for k, v in message.items() if v is not None and not _is_read(k, v, calls)}
    _annotate(content, rest)
    if blocks := _sealed_blocks(message.get("thinking_blocks")):
        rest["thinking_blocks"] = blocks
    if any(_says_something(part) for part in content) or not (items or calls):
        items.append({**rest, "type": "message", "role": "assistant", "content": content})
    return items + calls, rest


def _annotate(content: Sequence[dict[str, Any]], rest: dict[str, Any]) -> None:
    """Put the annotations of a message, and of its parts, on its first text, where a Chat client will have one string
    of it, and each of them has a form there."""
    told = rest.get("annotations")
    texts = [part for part in content if is_text(part)]
    own = [each for part in texts for each in part["annotations"]]
    if not (told or own) or not any(part["text"] for part in texts):
        return
    if all(is_text(part) or part.get("type") == "refusal" for part in content):
        flat = annotations_from_chat([*own, *told] if isinstance(told, list) else told or own)
        if flat:
            for part in texts:
                part["annotations"] = []
            texts[0]["annotations"] = flat
            rest.pop("annotations", None)


def _is_read(name: str, value: Any, calls: Sequence[Item]) -> bool:
    """Whether the items of a turn, which has these calls, show what stands in this field of its message."""
    if name in _TEXT_FIELDS:
        return isinstance(value, str)
    if name == "thinking_blocks":
        return isinstance(value, list)
    if name == "function_call":  # the older spelling of the first call
        first = calls[0] if calls else {}
        return isinstance(value, dict) and all(
            value.get(each) in (None, first.get(each)) or not isinstance(value[each], str)
            for each in ("name", "arguments")
        )
    return name in _PLAIN_ASSISTANT


def _plain_turn(message: Mapping[str, Any], content: Any, where: str, id_seed: str) -> list[Item]:
    """A turn of text and calls and nothing else: the common case."""
    calls = _calls(message, (), where, id_seed) if message.get("tool_calls") else []
    if calls and not content:
        return calls
    parts = parts_from_chat(content, "output_text", f"{where}.content")
    return [{"type": "message", "role": "assistant", "content": parts}, *calls]


def _says_something(part: Mapping[str, Any]) -> bool:
    return part.get("type") not in ("output_text", "refusal") or bool(part.get("text") or part.get("refusal"))


def _thought(message: Mapping[str, Any]) -> str:
    """The thought of a message, in its fields, among the parts of its content, or else in blocks.

    What is told twice counts once; different texts both count, in the order in which they stand."""
    if said := thought_of_message(message):
        return said
    blocks = message.get("thinking_blocks")
    return thoughts_among(blocks) if isinstance(blocks, list) else ""


def _sealed_blocks(blocks: Any) -> list[Any]:
    """Blocks of thoughts of which one holds more than its text, which its provider wants back; else none.

    A stream has them in pieces, the last one of a thought with the signature: those are put together.
    """
    if not isinstance(blocks, list) or not any(map(_is_sealed, blocks)):
        return []
    whole: list[Any] = []
    run: list[Mapping[str, Any]] = []
    for block in blocks:
        is_thought = isinstance(block, dict) and isinstance(block.get("thinking"), str)
        if run and (_is_sealed(run[-1]) or not is_thought):
            whole.append(_joined_blocks(run))
            run = []
        if is_thought:
            run.append(block)
        else:
            whole.append(block)
    return [*whole, _joined_blocks(run)] if run else whole


def _is_sealed(block: Any) -> bool:
    beside = block.items() if isinstance(block, dict) else ()
    return any(says_something(value) for name, value in beside if name not in ("type", "thinking", "index"))


def _joined_blocks(run: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    told = {name: value for block in run for name, value in block.items() if value not in (None, "")}
    return {**told, "thinking": "".join(block["thinking"] for block in run)}


def thought_of_message(message: Mapping[str, Any]) -> str:
    """The thought in the fields of a message and among the parts of its content; empty where there is none."""
    texts: dict[str, None] = {}
    for name, value in message.items():
        if name in THOUGHT_FIELDS and isinstance(value, str):
            texts[value] = None
        elif name == "content" and isinstance(value, list):
            texts[thoughts_among(value)] = None
    return "".join(texts)


def thoughts_among(parts: Iterable[Any]) -> str:
    """The thoughts among parts of a content, or among blocks, as one text."""
    thoughts = (part for part in parts if isinstance(part, dict) and part.get("type") in THOUGHT_PARTS)
    return "".join(thought_of_part(part) or "" for part in thoughts)


def _calls(message: Mapping[str, Any], odd_parts: Iterable[Any], where: str, id_seed: str) -> list[Item]:
    raw = message.get("tool_calls")
    if raw is not None and not isinstance(raw, list):
        raise refuse(f"{where}.tool_calls", raw, "null or a list of tool calls")
    items: list[Item] = []
    for index, call in enumerate(raw or ()):
        if not isinstance(call, dict):
            raise refuse(f"{where}.tool_calls[{index}]", call, "an object")
        items.append(_call(call, f"{where}.tool_calls[{index}]", f"call_{id_seed}_{index}"))
    legacy = message.get("function_call")
    if isinstance(legacy, dict) and not items:
        items.append(_call({"function": legacy}, f"{where}.function_call", f"call_{id_seed}_0"))
    known = [item["call_id"] for item in items]
    for index, part in enumerate(odd_parts):
        if is_foreign(part) and part["type"] in CALL_PARTS and (call := call_of_part(part))["id"] not in known:
            items.append(_call(call, f"{where}.content[{index}]", f"call_{id_seed}_p{index}"))
    return items


def call_of_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A call that stands among the parts of a content as one of `tool_calls`, whose `id` may be null."""
    arguments = part.get("arguments", part.get("args", part.get("input")))
    name, call_id = part.get("name"), part.get("id") or part.get("call_id")
    function = {"name": name if isinstance(name, str) else "", "arguments": argument_text(arguments)}
    return {"id": call_id if isinstance(call_id, str) else None, "type": "function", "function": function}


def _call(call: Mapping[str, Any], where: str, fallback_id: str) -> Item:
    """A call's item. Fields that we do not know stay on it, those of its function under that name."""
    call_id = call["id"] if isinstance(call.get("id"), str) and call["id"] else fallback_id
    custom = call.get("type") == "custom" and isinstance(call.get("custom"), dict)
    kind, says = ("custom", "input") if custom else ("function", "arguments")
    inner = call.get(kind)
    if not isinstance(inner, dict):
        raise refuse(f"{where}.function", inner, "an object with name and arguments")
    rest: dict[str, Any] = {}
    if not (call.keys() <= _CALL_FIELDS and inner.keys() <= _FUNCTION_FIELDS):
        rest = {k: v for k, v in call.items() if k not in ("id", "index", "status", kind) and v is not None}
        beside = {k: v for k, v in inner.items() if k not in ("name", says, "parsed_arguments") and v is not None}
        rest = without_token_fields({**rest, kind: beside} if beside else rest)
    return {
        **rest,
        "type": "custom_tool_call" if custom else "function_call",
        "call_id": call_id,
        "name": inner["name"] if isinstance(inner.get("name"), str) else "",
        says: argument_text(inner.get(says)),
    }


def call_to_chat(item: Item) -> dict[str, Any]:
    """The call of an item as one of `tool_calls`, without the item's fields that we do not know."""
    custom = item["type"] == "custom_tool_call"
    kind, says = ("custom", "input") if custom else ("function", "arguments")
    beside = item.get(kind)
    inner = {"name": item.get("name") or "", says: argument_text(item.get(says))}
    inner = {**beside, **inner} if isinstance(beside, dict) else inner
    return {"id": item.get("call_id") or item.get("id"), "type": kind, kind: inner}


def argument_text(arguments: Any) -> str:
    """Arguments as the string that stands in the wire: a string as it is; an object, which has no own bytes, dumped.

    Raises `BadRequest` for an object that is nested too deeply.
    """
    if isinstance(arguments, str):
        return arguments
    try:
        return "" if arguments is None else dumps(arguments).decode()
    except NotJson as error:
        raise BadRequest(f"the arguments of a tool call cannot be written as JSON: {error}", status=400) from error
