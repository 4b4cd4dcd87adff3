"""The conversation as the model reads it: ChatML, with tools and tool results, which the model's own template lacks.

    <|im_start|>system\\n{instructions}{tools}<|im_end|>\\n<|im_start|>user\\n{text}<|im_end|>\\n<|im_start|>assistant\\n

A call is `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>` in an assistant turn (the Hermes form), a
result is a sentence in a user turn. Reasoning items are left out: this model writes none. Left to others: which ids an
assistant turn has (`Recall`), what a reply's text means (`replies`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toprope.errors.tree import ModelRejected
from toprope.servers.model.engines.embedded.tokenizer import STOP_IDS, TURN_END, TURN_START, Vocabulary
from toprope.wire.responses import Item, ResponsesRequest

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
_RESULT, _ASK = "The result is {}.", " What is the answer?"
"""Plain words, because the usual `<tool_response>` tags make this small model go on in code: after a right `add` call
it ended with the sum in 3 of 36 replies with the tags, in 13 of 36 with these words (temperature 1)."""
_TOOLS = """

You can call these functions:
{}
To call one, reply with
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

Recall = Callable[[Sequence[int], str], Sequence[int] | None]
"""(ids of the prompt up to and with the assistant header, text of the turn) -> the ids it was sampled as, if known."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. `parts` are the texts of its items, joined by newlines; only assistant and tool turns have several."""

    role: str
    parts: tuple[str, ...]

    @property
    def text(self) -> str:
        return turn_text(self.parts)


@dataclass(frozen=True, slots=True)
class Function:
    """A function the model may call; `parameters` is its JSON schema, enforced when a call is forced and `strict`."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    strict: bool


def turn_text(parts: Sequence[str]) -> str:
    """The text of a turn of several items."""
    return "\n".join(part for part in parts if part)


def functions(request: ResponsesRequest) -> tuple[Function, ...]:
    """The request's functions, flat (Responses) or nested (Chat). Raises `ModelRejected` for another kind of tool."""
    found = []
    for tool in request.tools:
        inner = tool.get("function", tool)
        if tool.get("type") != "function" or not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise ModelRejected(
                f"The embedded engine knows tools of type 'function' with a name only; got {tool!r:.200}."
            )
        schema = inner.get("parameters") or {"type": "object"}
        found.append(Function(inner["name"], inner.get("description"), schema, inner.get("strict") is True))
    return tuple(found)


def call_text(name: str, arguments: Any) -> str:
    """A call as text. `arguments` is the JSON text, kept as it is, or an object, written with `, ` and `: `."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{CALL_OPEN}\n{{"name": {json.dumps(name)}, "arguments": {text or "{}"}}}\n{CALL_CLOSE}'


def item_text(item: Item) -> str:
    """One assistant or tool item as text. Raises `ModelRejected` for content that is not text."""
    kind = item.get("type", "message")
    if kind == "function_call":
        return call_text(str(item.get("name")), item.get("arguments"))
    if kind == "function_call_output":
        return _RESULT.format(_content_text(item.get("output")))
    return _content_text(item.get("content"))


def _content_text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return json.dumps(content, ensure_ascii=False)
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise ModelRejected(
                f"The embedded engine reads text only; got a content part of type {part.get('type')!r}."
            )
        texts.append(text)
    return "".join(texts)


def turns(request: ResponsesRequest) -> list[Turn]:
    """The conversation in turns, a system turn first. Raises `ModelRejected` for an item that cannot be written."""
    found = item_turns(request.input)
    if request.instructions is not None:
        found.insert(0, Turn("system", (request.instructions,)))
    elif not found or found[0].role != "system":
        found.insert(0, Turn("system", (DEFAULT_SYSTEM,)))
    tools = functions(request)
    if tools:
        found[0] = Turn("system", (found[0].text + _tools_text(tools),))
    return found


def item_turns(items: Iterable[Item]) -> list[Turn]:
    """Items in turns, and nothing else. Raises `ModelRejected` as `turns`."""
    found: list[Turn] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind not in ("message", "function_call", "function_call_output"):
            raise ModelRejected(
                f"The embedded engine cannot read an input item of type {kind!r}; it reads message, function_call, "
                "function_call_output and reasoning."
            )
        role = {"function_call": "assistant", "function_call_output": "tool"}.get(kind, item.get("role", "user"))
        role = "system" if role == "developer" else role
        if role not in ("system", "user", "assistant", "tool"):
            raise ModelRejected(
                f"The embedded engine knows no role {role!r}; it knows system, developer, user, assistant."
            )
        if found and role == found[-1].role and role in ("assistant", "tool"):
            found[-1] = Turn(role, (*found[-1].parts, item_text(item)))
        else:
            found.append(Turn(role, (item_text(item),)))
    return found


def _tools_text(tools: Sequence[Function]) -> str:
    lines = []
    for tool in tools:
        entry: dict[str, Any] = {"name": tool.name}
        if tool.description:
            entry["description"] = tool.description
        lines.append(json.dumps(entry | {"parameters": tool.parameters}, ensure_ascii=False))
    return _TOOLS.format("\n".join(lines))


def prompt_ids(conversation: Sequence[Turn], vocabulary: Vocabulary, recall: Recall) -> list[int]:
    """The ids of the whole prompt, the header of the coming assistant turn last.

    An assistant turn that `recall` knows goes in as the ids it was sampled as, and is closed with what was not
    sampled: the newline, after a cut also the end of the turn. So a prompt of a later turn is the earlier prompt, its
    generation, that closing and the new turns, id for id.
    """
    newline, header = vocabulary.encode("\n"), [TURN_START, *vocabulary.encode("assistant\n")]
    ids: list[int] = []
    for turn in conversation:
        if turn.role == "assistant":
            _add_assistant(ids, turn, vocabulary, recall, header, newline)
        else:
            ids += _others_turn(turn, vocabulary, newline)
    return ids + header


def next_turn_ids(new: Iterable[Item], sampled: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """What follows the `sampled` ids of an assistant turn in the next prompt, if others then said `new`.

    Raises `ModelRejected` as `turns`.
    """
    newline = vocabulary.encode("\n")
    ids = _closing(sampled, newline)
    for turn in item_turns(new):
        ids += _others_turn(turn, vocabulary, newline)
    return [*ids, TURN_START, *vocabulary.encode("assistant\n")]


def _others_turn(turn: Turn, vocabulary: Vocabulary, newline: list[int]) -> list[int]:
    role, text = ("user", turn.text + _ASK) if turn.role == "tool" else (turn.role, turn.text)
    return [TURN_START, *vocabulary.encode(f"{role}\n{text}"), TURN_END, *newline]


def _closing(sampled: Sequence[int], newline: list[int]) -> list[int]:
    """What closes a turn and was not sampled: the newline, after a cut also the end of the turn."""
    return [*([] if len(sampled) and sampled[-1] in STOP_IDS else [TURN_END]), *newline]


def _add_assistant(
    ids: list[int], turn: Turn, vocabulary: Vocabulary, recall: Recall, header: list[int], newline: list[int]
) -> None:
    """Neighbouring assistant items may be one sampled turn or several: the longest known run wins each time."""
    parts = turn.parts
    while parts:
        for size in range(len(parts), 0, -1):
            sampled = recall(ids + header, turn_text(parts[:size]))
            if sampled is not None:
                ids += [*header, *sampled, *_closing(sampled, newline)]
                parts = parts[size:]
                break
        else:
            ids += [TURN_START, *vocabulary.encode(f"assistant\n{turn_text(parts)}"), TURN_END, *newline]
            return
