"""Conversation history between Chat messages and Responses items, in both directions.

An assistant message is a run of items (thought, text, calls), and what a model said in one turn stays one turn. (Two
turns become one only where text is followed by a turn of calls alone: items cannot tell that from one turn.) Argument
strings are passed as they are. Repeated call ids stay repeated: a tool message without an id is paired with the oldest
call that has no answer yet. Left to others: all other fields of a request (`chat_request`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toprope.canonical.json import NotJson, dumps
from toprope.dialects.chat_parts import (
    CALL_PARTS,
    THOUGHT_PARTS,
    content_to_chat,
    parts_from_chat,
    plain_text,
    reasoning_text,
)
from toprope.dialects.chat_unread import may_hold_more, unread_of
from toprope.dialects.pivot import without_token_fields
from toprope.errors.tree import BadRequest
from toprope.wire.chat import ROLES, THOUGHT_FIELDS
from toprope.wire.fields import refuse
from toprope.wire.message_fields import ABOUT_A_MESSAGE
from toprope.wire.responses import Item

Message = dict[str, Any]

_LONGEST_NAME = 120
"""Of a loss, in characters: clients choose the names, and the record of a call is no place for a megabyte."""
_SPEAKERS = ("system", "developer", "user")
_PLAIN_ASSISTANT = frozenset(("role", "content", "tool_calls"))
_READ_OF_ASSISTANT = frozenset(
    ("role", "content", "refusal", "reasoning", "reasoning_content", "tool_calls", "function_call", "thinking_blocks")
)


def items_from_messages(
    messages: Sequence[Any], where: str = "messages", *, first: int = 0, open_calls: list[str] | None = None
) -> tuple[Item, ...]:
    """Chat messages as Responses items. Raises `BadRequest` naming the message that is none.

    A history may be read in parts: `first` is the place of the first message, `open_calls` the ids of the calls before
    it that have no answer yet. That list is brought up to date, whoever goes on reading gives it again.
    """
    items: list[Item] = []
    open_calls = [] if open_calls is None else open_calls
    for index, message in enumerate(messages, first):
        place = f"{where}[{index}]"
        if not isinstance(message, dict):
            raise refuse(place, message, "an object with a role")
        role = message.get("role")
        content = message.get("content")
        if isinstance(content, str) and len(message) == 2 and role in _SPEAKERS:  # the common case, ten times as fast
            items.append({"type": "message", "role": role, "content": content})
        elif role == "assistant":
            turn = _turn_of_history(message, place, id_seed=f"h{index}")
            open_calls.extend(item["call_id"] for item in turn if item.get("type") == "function_call")
            items.extend(turn)
        elif role in ("tool", "function"):
            items.append(_tool_output(message, open_calls, place))
        elif role in ROLES:
            rest = {k: v for k, v in message.items() if k not in ("role", "content") and v is not None}
            if not isinstance(content, str):
                content = parts_from_chat(content, "input_text", f"{place}.content")
            items.append({**rest, "type": "message", "role": role, "content": content})
        else:
            raise refuse(f"{place}.role", role, " or ".join((", ".join(ROLES[:-1]), ROLES[-1])))
    return tuple(items)


def _turn_of_history(message: Mapping[str, Any], where: str, *, id_seed: str) -> list[Item]:
    """One assistant message of history as items. What stands in fields that the items do not show, stays on a message.

    An upstream that speaks Chat gets those fields as they are, so that lineage must see them: a client may keep what
    was sampled in any of them. A field that says again what the items say is left out; programs add such copies.
    """
    turn = items_from_assistant(message, where, id_seed=id_seed)
    if not may_hold_more(message):
        return turn
    unread = unread_of(message, turn)
    place = next((at for at, item in enumerate(turn) if item["type"] == "message"), None)
    if place is not None:
        known = {k: v for k, v in turn[place].items() if k in ABOUT_A_MESSAGE}
        turn[place] = {**known, **unread}
    elif unread:
        thoughts = sum(item["type"] == "reasoning" for item in turn)
        turn.insert(thoughts, {**unread, "type": "message", "role": "assistant", "content": []})
    return turn


def items_from_assistant(message: Mapping[str, Any], where: str, *, id_seed: str) -> list[Item]:
    """One assistant message (of history, or an upstream's answer) as items; at least one, maybe an empty message.

    Fields that we do not read stay on the message item. `id_seed` makes ids for calls that have none.
    """
    raw_content = message.get("content")
    if message.keys() <= _PLAIN_ASSISTANT and not isinstance(raw_content, list):
        return _plain_turn(message, raw_content, where, id_seed)
    message = without_token_fields(dict(message))
    items: list[Item] = []
    odd = isinstance(raw_content, list) and any(
        isinstance(p, dict) and p.get("type") in (*THOUGHT_PARTS, *CALL_PARTS) for p in raw_content
    )
    plain = [p for p in raw_content or () if not _is_odd(p)] if odd else raw_content
    thought = _thought(message) or ("".join(_odd_thoughts(raw_content)) if odd else "")
    if thought:
        text = {"type": "reasoning_text", "text": thought}
        items.append({"type": "reasoning", "summary": [], "content": [text]})
    calls = _calls(message, raw_content if odd and raw_content else (), where, id_seed)
    content = parts_from_chat(plain, "output_text", f"{where}.content")
    if isinstance(message.get("refusal"), str):
        content.append({"type": "refusal", "refusal": message["refusal"]})
    rest = {k: v for k, v in message.items() if k not in _READ_OF_ASSISTANT and v is not None}
    if any(_says_something(part) for part in content) or not (items or calls):
        items.append({**rest, "type": "message", "role": "assistant", "content": content})
    return items + calls


def _plain_turn(message: Mapping[str, Any], content: Any, where: str, id_seed: str) -> list[Item]:
    """A turn of text and calls and nothing else: the common case."""
    calls = _calls(message, (), where, id_seed) if message.get("tool_calls") else []
    if calls and not content:
        return calls
    parts = parts_from_chat(content, "output_text", f"{where}.content")
    return [{"type": "message", "role": "assistant", "content": parts}, *calls]


def _says_something(part: Mapping[str, Any]) -> bool:
    return part.get("type") not in ("output_text", "refusal") or bool(part.get("text") or part.get("refusal"))


def _is_odd(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in (*THOUGHT_PARTS, *CALL_PARTS)


def _thought(message: Mapping[str, Any]) -> str:
    """The thought of a message under any of its three names; two different texts under two of them both count."""
    texts = [message[name] for name in THOUGHT_FIELDS if isinstance(message.get(name), str)]
    if said := "".join(dict.fromkeys(texts)):
        return said
    blocks = message.get("thinking_blocks")
    return "".join(_odd_thoughts(blocks)) if isinstance(blocks, list) else ""


def _odd_thoughts(parts: Any) -> Iterable[str]:
    for part in parts or ():
        if isinstance(part, dict) and part.get("type") in THOUGHT_PARTS:
            text = part.get("thinking") or part.get("reasoning") or part.get("text") or plain_text(part.get("summary"))
            if isinstance(text, str):
                yield text


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
        if _is_odd(part) and part.get("type") in CALL_PARTS and part.get("id") not in known:
            arguments = part.get("arguments", part.get("args", part.get("input")))
            function = {"name": part.get("name"), "arguments": arguments}
            call = {"id": part.get("id") or part.get("call_id"), "function": function}
            items.append(_call(call, f"{where}.content[{index}]", f"call_{id_seed}_p{index}"))
    return items


def _call(call: Mapping[str, Any], where: str, fallback_id: str) -> Item:
    call_id = call["id"] if isinstance(call.get("id"), str) and call["id"] else fallback_id
    if call.get("type") == "custom" and isinstance(call.get("custom"), dict):
        custom = call["custom"]
        return {
            "type": "custom_tool_call",
            "call_id": call_id,
            "name": custom.get("name"),
            "input": custom.get("input") or "",
        }
    function = call.get("function")
    if not isinstance(function, dict):
        raise refuse(f"{where}.function", function, "an object with name and arguments")
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": function["name"] if isinstance(function.get("name"), str) else "",
        "arguments": argument_text(function.get("arguments")),
    }


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


def _tool_output(message: Mapping[str, Any], open_calls: list[str], where: str) -> Item:
    call_id = message.get("tool_call_id")
    if call_id in open_calls:
        open_calls.remove(call_id)
    elif not call_id:
        call_id = open_calls.pop(0) if open_calls else "call_unknown"
    content = message.get("content")
    if isinstance(content, str) and len(message) == 3 and call_id is not None:
        return {"type": "function_call_output", "call_id": call_id, "output": content}
    output: Any = "" if content is None else content
    if not isinstance(output, str):
        output = parts_from_chat(output, "input_text", f"{where}.content")
    rest = {k: v for k, v in message.items() if k not in ("role", "content", "tool_call_id") and v is not None}
    return {**rest, "type": "function_call_output", "call_id": call_id, "output": output}


def messages_from_items(
    items: Sequence[Item], *, reasoning_field: str = "reasoning_content"
) -> tuple[list[Message], list[str]]:
    """Responses items as Chat messages, and what Chat cannot carry of them, each name once.

    An item of a kind that Chat does not have is `items.<type>`; a part or a field that has no place in a message is
    `items.<type>.<kind of part or field>`. Fields that we do not know go on to the message, call or output.
    """
    writer = _Writer(reasoning_field)
    for item in items:
        writer.write(item)
    for message in writer.messages:
        if message["role"] == "assistant" and message["content"] is None and "tool_calls" not in message:
            message["content"] = ""  # a lone thought: providers refuse a turn with neither text nor calls
        elif message["role"] == "assistant" and "tool_calls" in message and not message["content"]:
            message["content"] = None
    return writer.messages, list(writer.lost)


_ITEM_FIELDS = {
    "message": frozenset(("type", "role", "content", "id", "status")),
    "reasoning": frozenset(("type", "id", "status", "summary", "content", "encrypted_content", "signature")),
    "function_call": frozenset(("type", "id", "status", "call_id", "name", "arguments")),
    "function_call_output": frozenset(("type", "id", "status", "call_id", "output", "is_error")),
}
"""The fields of items that are read, or that the table of losses names as dropped. Any other is carried on."""
_TEXT_PARTS = ("output_text", "input_text", "text", "refusal")
_PART_FIELDS = frozenset(("type", "text", "refusal", "annotations", "logprobs", "cache_control", "citations"))
_NO_FIELD = frozenset(("tool_calls", "tool_call_id", "function_call"))
"""Fields that say something else in Chat: a message of the items' with one cannot keep it there."""


class _Writer:
    """Writes items into messages, one after another. `lost` are the names of what got no place, in order."""

    def __init__(self, reasoning_field: str) -> None:
        self.messages: list[Message] = []
        self.lost: dict[str, None] = {}
        self._reasoning_field = reasoning_field
        self._turn: Message | None = None

    def write(self, item: Item) -> None:
        """The next item, in the open assistant message or in one of its own."""
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant"):
            self._turn = self._join(self._turn, item, kind)
            return
        self._turn = None
        if kind == "message":
            message = {"role": item.get("role"), "content": content_to_chat(item.get("content"))}
        elif kind == "function_call_output":
            content = content_to_chat(item.get("output"))
            message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
        else:
            self._lose(kind)
            return
        self._carry(item, kind, message)
        self.messages.append(message)

    def _join(self, turn: Message | None, item: Item, kind: Any) -> Message:
        """Put an item of the model's into the open assistant message, or begin the next one.

        One message holds thought, text, calls in this order; an item that would stand before what is there begins
        anew. Only text after a call is put before it: between a call and its result providers accept no other message.
        """
        if kind == "reasoning":
            named = self._reasoning_field
            if turn is None or named in turn or turn["content"] is not None or "tool_calls" in turn:
                turn = self._begin()
            thought = reasoning_text(item)
            if thought:  # a sealed one says nothing to another provider
                turn[named] = thought
            self._carry(item, kind, None)
            self._name_lost_parts(item.get("content") or item.get("summary"), kind, ("reasoning_text", "summary_text"))
        elif kind == "message":
            if turn is None or (turn["content"] is not None and "tool_calls" not in turn):
                turn = self._begin()
            turn["content"] = (turn["content"] or "") + plain_text(item.get("content"))
            self._carry(item, kind, turn)
            self._name_lost_parts(item.get("content"), kind, _TEXT_PARTS)
        else:
            if turn is None:
                turn = self._begin()
            function = {"name": item.get("name") or "", "arguments": argument_text(item.get("arguments"))}
            call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
            self._carry(item, kind, call)
            turn.setdefault("tool_calls", []).append(call)
        return turn

    def _carry(self, item: Item, kind: str, target: Message | None) -> None:
        """The fields of `item` that are not read, onto `target`; without one, or where it says other things, lost."""
        read = _ITEM_FIELDS[kind]
        if item.keys() <= read:
            return
        for name, value in item.items():
            if name in read or value is None:
                continue
            fits = name not in _NO_FIELD and (name != "name" or isinstance(value, str))
            if target is None or not fits or target.get(name, value) != value:
                self._lose(kind, name)
            else:
                target[name] = value

    def _name_lost_parts(self, content: Any, kind: str, words: Sequence[str]) -> None:
        """What `plain_text` leaves of the content of a turn: parts that are no text, fields of those that are."""
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict):
                continue
            known = part.get("type")
            if not (known is None or known in words):
                self._lose(kind, known)
            elif not part.keys() <= _PART_FIELDS:
                for name, value in part.items():
                    if name not in _PART_FIELDS and value is not None:
                        self._lose(kind, f"{known or 'part'}.{name}")

    def _lose(self, *names: Any) -> None:
        name = ".".join(("items", *map(str, names)))
        self.lost[name.encode("ascii", "backslashreplace").decode()[:_LONGEST_NAME]] = None

    def _begin(self) -> Message:
        message: Message = {"role": "assistant", "content": None}
        self.messages.append(message)
        return message
