"""Which fields of a conversation's message say something: notes about it do not, any other may hold a model's words.

Programs and providers add fields of their own to messages and send them back; an upstream that speaks Chat is given
them as they came. Left to others: what such a field says of the origin of a call (`toprope.tokens.items`), which of it
is a copy of what is read already (`toprope.dialects.chat_unread`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ABOUT_A_MESSAGE = frozenset(
    (
        "type", "role", "content", "id", "uuid", "status", "name", "phase", "object", "model", "provider", "created",
        "created_at", "timestamp", "usage", "cost", "index", "finish_reason", "stop_reason", "stop_sequence",
        "container", "context_management", "logprobs", "cache_control", "prefix", "partial", "weight",
    )
)  # fmt: skip
"""Fields of a message that are read already, or say when, by whom and at what price it was made: no words of a model.
Text in any other field counts as the model's."""
ABOUT_A_CALL = frozenset(
    (
        "type", "call_id", "id", "name", "arguments", "parsed_arguments", "status", "index", "created_by",
        "cache_control", "namespace", "caller", "async", "async_",
    )
)  # fmt: skip
"""The same of the item of a function call. Who calls it and where the tool stands is no word of a model; `async_` is
how a program spells `async` that dumps a model of the openai package by field name."""
ABOUT_A_CUSTOM_CALL = ABOUT_A_CALL - {"arguments", "parsed_arguments"} | {"input"}
"""The same of the call of a custom tool, which takes a text."""
MOVED_FIELDS = "provider_specific_fields"
"""Where LiteLLM puts fields that it does not know: they came as fields of the message, and count as such."""


def says_something(value: Any) -> bool:
    """Whether a value holds any text or number, however deep; null, true, false and what is empty say nothing."""
    rest = [value]
    while rest:
        each = rest.pop()
        if isinstance(each, Mapping):
            rest.extend(each.values())
        elif isinstance(each, list | tuple):
            rest.extend(each)
        elif each is not None and each != "" and not isinstance(each, bool):
            return True
    return False


def without_nulls(value: Any, depth: int = 8) -> Any:
    """`value` without the fields that are null: clients write out all that they have a name for.

    `depth`: no client's type goes deeper, and a value may be nested as deep as the interpreter goes.
    """
    if not depth:
        return value
    if isinstance(value, Mapping):
        return {name: without_nulls(each, depth - 1) for name, each in value.items() if each is not None}
    return [without_nulls(each, depth - 1) for each in value] if isinstance(value, list | tuple) else value
