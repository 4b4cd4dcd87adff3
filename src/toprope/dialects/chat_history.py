"""Conversation history between Chat messages and Responses items, in both directions.

An assistant message is a run of items (thought, text, calls), and what a model said in one turn stays one turn. (Two
turns become one only where text is followed by a turn of calls alone: items cannot tell that from one turn.) Argument
strings are passed as they are. Repeated call ids stay repeated: a tool message without an id is paired with the oldest
call that has no answer yet. Left to others: all other fields of a request (`chat_request`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toprope.dialects.chat_parts import (
    CONTENT_PARTS,
    content_to_chat,
    parts_from_chat,
    plain_text,
    reasoning_text,
    with_its_parts,
)
from toprope.dialects.chat_turn import argument_text as argument_text
from toprope.dialects.chat_turn import call_to_chat, read_turn
from toprope.dialects.chat_unread import may_hold_more, unread_of, without_copies
from toprope.dialects.losses import loss_name
from toprope.dialects.pivot import CALLS
from toprope.wire.chat import ROLES
from toprope.wire.fields import refuse
from toprope.wire.message_fields import ABOUT_A_MESSAGE
from toprope.wire.responses import Item

Message = dict[str, Any]

_SPEAKERS = ("system", "developer", "user")


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
            open_calls.extend(item["call_id"] for item in turn if item["type"] in CALLS)
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
    """One assistant message of history as items. What stands in fields that the items do not show, stays on a message,
    or on its call.

    An upstream that speaks Chat gets those fields as they are, so that lineage must see them: a client may keep what
    was sampled in any of them. A field that says again what the items say is left out; programs add such copies.
    """
    message = with_its_parts(message) if CONTENT_PARTS in message else message
    turn, rest = read_turn(message, where, id_seed)
    if not may_hold_more(message):
        return turn
    unread = unread_of(message, turn)
    if "annotations" not in rest:
        unread.pop("annotations", None)  # they stand on the text
    turn = without_copies(turn)
    place = next((at for at, item in enumerate(turn) if item["type"] == "message"), None)
    if place is not None:
        known = {k: v for k, v in turn[place].items() if k in ABOUT_A_MESSAGE}
        turn[place] = {**known, **unread}
    elif unread:
        thoughts = sum(item["type"] == "reasoning" for item in turn)
        turn.insert(thoughts, {**unread, "type": "message", "role": "assistant", "content": []})
    return turn


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
    items: Sequence[Item], *, reasoning_field: str = "reasoning_content", custom_tools: bool = False
) -> tuple[list[Message], list[str]]:
    """Responses items as Chat messages, and what Chat cannot carry of them, each name once. Calls of custom tools, and
    what they gave, are carried if `custom_tools`: few upstreams take them.

    An item of a kind that Chat does not have is `items.<type>`; a part or a field that has no place in a message is
    `items.<type>.<kind of part or field>`. Fields that we do not know go on to the message, call or output.
    """
    writer = _Writer(reasoning_field, custom_tools)
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
    "custom_tool_call": frozenset(("type", "id", "status", "call_id", "name", "input")),
    "custom_tool_call_output": frozenset(("type", "id", "status", "call_id", "output")),
}
"""The fields of items that are read, or that the table of losses names as dropped. Any other is carried on."""
_CALL_KINDS = ("function", "custom")
_TEXT_PARTS = ("output_text", "input_text", "text", "refusal")
_PART_FIELDS = frozenset(("type", "text", "refusal", "annotations", "logprobs", "cache_control", "citations"))
_NO_FIELD = frozenset(("tool_calls", "tool_call_id", "function_call"))
"""Fields that say something else in Chat: a message of the items' with one cannot keep it there."""


class _Writer:
    """Writes items into messages, one after another. `lost` are the names of what got no place, in order."""

    def __init__(self, reasoning_field: str, custom_tools: bool) -> None:
        self.messages: list[Message] = []
        self.lost: dict[str, None] = {}
        self._reasoning_field = reasoning_field
        self._custom_tools = custom_tools
        self._turn: Message | None = None

    def write(self, item: Item) -> None:
        """The next item, in the open assistant message or in one of its own."""
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind in ("custom_tool_call", "custom_tool_call_output") and not self._custom_tools:
            self._turn = None
            self._lose(kind)
            return
        if kind in ("reasoning", *CALLS) or (kind == "message" and item.get("role") == "assistant"):
            self._turn = self._join(self._turn, item, kind)
            return
        self._turn = None
        if kind == "message":
            message = {"role": item.get("role"), "content": content_to_chat(item.get("content"))}
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = content_to_chat(item.get("output"))
            message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
        else:
            self._lose(kind)
            return
        self._carry(item, str(kind), message)
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
            call = call_to_chat(item)
            self._carry(item, str(kind), call)
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
            if name in _CALL_KINDS and isinstance(value, dict) and target is not None and name in target:
                continue  # beside the name and the arguments, where `call_to_chat` put it
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
        self.lost[loss_name("items", *names)] = None

    def _begin(self) -> Message:
        message: Message = {"role": "assistant", "content": None}
        self.messages.append(message)
        return message
