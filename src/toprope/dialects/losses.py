"""What each conversion keeps, renames, drops or refuses: one table, read by the code and printed in the docs.

The code takes its renames, drops and refusals from here, so that the table cannot say something else than the
program does. `render_table()` writes `docs/reference/dialects.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fate = Literal["renamed", "dropped", "refused", "folded"]
Direction = Literal[
    "chat -> pivot", "responses -> pivot", "pivot -> chat", "pivot -> chat reply", "pivot -> responses reply"
]


@dataclass(frozen=True, slots=True)
class Rule:
    """One field on one way. `into` is the name it has afterwards (renamed, folded); `why` is one clause."""

    way: Direction
    field: str
    fate: Fate
    into: str = ""
    why: str = ""


RULES: tuple[Rule, ...] = (
    Rule("chat -> pivot", "messages", "renamed", "input"),
    Rule("chat -> pivot", "max_completion_tokens", "renamed", "max_output_tokens"),
    Rule("chat -> pivot", "max_tokens", "renamed", "max_output_tokens", "max_completion_tokens wins"),
    Rule("chat -> pivot", "response_format", "folded", "text.format"),
    Rule("chat -> pivot", "verbosity", "folded", "text.verbosity"),
    Rule("chat -> pivot", "reasoning_effort", "folded", "reasoning.effort"),
    Rule("chat -> pivot", "functions", "folded", "tools", "the older spelling of tools"),
    Rule("chat -> pivot", "message.reasoning / reasoning_content / thinking_blocks", "folded", "reasoning item"),
    Rule("chat -> pivot", "message.tool_calls / function_call", "folded", "function_call items"),
    Rule("chat -> pivot", "assistant parts reasoning, thinking, tool_use, tool_call", "folded", "items"),
    Rule("chat -> pivot", "assistant fields we do not know", "dropped", why="only when the turn holds no text"),
    Rule("chat -> pivot", "token arrays echoed in messages", "dropped", why="ours, sent back by the client"),
    Rule("chat -> pivot", "a turn of calls alone after a turn of text", "folded", "one turn", "items have no borders"),
    Rule("chat -> pivot", "n", "refused", why="one call makes one choice; send n calls"),
    Rule("chat -> pivot", "stream_options", "dropped", why="about the transport, not the generation"),
    Rule("chat -> pivot", "return_token_ids", "dropped", why="ask with the header X-Toprope-Include: token_ids"),
    Rule("responses -> pivot", "token arrays echoed in items", "dropped", why="ours, sent back by the client"),
    Rule("responses -> pivot", "Chat-shaped turns in input", "folded", "items"),
    Rule("responses -> pivot", "previous_response_id", "refused", why="replies are not stored; send the whole input"),
    Rule("responses -> pivot", "conversation", "refused", why="conversations are not stored; send the whole input"),
    Rule("responses -> pivot", "prompt", "refused", why="prompt templates live at the provider"),
    Rule("responses -> pivot", "background", "refused", why="a call is answered in its own request"),
    Rule("responses -> pivot", "item_reference", "refused", why="items are not stored; send the item itself"),
    Rule("responses -> pivot", "stream_options", "dropped", why="about the transport, not the generation"),
    Rule("pivot -> chat", "instructions", "folded", "first system message"),
    Rule("pivot -> chat", "input", "renamed", "messages"),
    Rule("pivot -> chat", "max_output_tokens", "renamed", "max_tokens"),
    Rule("pivot -> chat", "text.format", "folded", "response_format"),
    Rule("pivot -> chat", "text.verbosity", "folded", "verbosity"),
    Rule("pivot -> chat", "reasoning.effort", "folded", "reasoning_effort"),
    Rule("pivot -> chat", "reasoning.summary", "dropped", why="Chat has no summaries"),
    Rule(
        "pivot -> chat", "tools that are no functions", "dropped", why="Chat lists functions only; in the call's record"
    ),
    Rule("pivot -> chat", "tool_choice", "dropped", why="only when no tool is left, which engines refuse"),
    Rule("pivot -> chat", "item types without a Chat form", "dropped", why="in the call's record"),
    Rule("pivot -> chat", "item ids and statuses", "dropped", why="Chat messages have none"),
    Rule("pivot -> chat", "include", "dropped", why="names parts of a Responses reply"),
    Rule("pivot -> chat", "store", "dropped", why="nothing is stored at the provider"),
    Rule("pivot -> chat", "truncation", "dropped", why="history is never cut here"),
    Rule("pivot -> chat", "max_tool_calls", "dropped", why="counts the provider's own tools"),
    Rule("pivot -> chat", "client_metadata", "dropped", why="the client's own notes"),
    Rule("pivot -> chat", "prompt_cache_key", "dropped", why="X-Session-ID keeps a rollout on one engine"),
    Rule("pivot -> chat reply", "item ids and statuses", "dropped", why="Chat messages have none"),
    Rule("pivot -> chat reply", "reasoning item", "folded", "message.reasoning_content"),
    Rule("pivot -> chat reply", "a second text or thought", "folded", "the same string"),
    Rule("pivot -> responses reply", "finish reason length, content_filter", "folded", "status incomplete"),
    Rule("pivot -> responses reply", "Chat logprobs", "dropped", why="no output text parts carry them yet"),
)


def fields_of(way: Direction, fate: Fate) -> tuple[tuple[str, str], ...]:
    """The (field, why) pairs of one fate on one way, as the converters use them."""
    return tuple((rule.field, rule.why) for rule in RULES if rule.way == way and rule.fate == fate)


def render_table() -> str:
    """The loss table as the Markdown page of the reference."""
    lines = [
        "# Dialect conversion",
        "",
        "Made from `toprope.dialects.losses`; do not edit. What is not listed is carried as it is, unknown fields too,",
        "explicit nulls excepted: a null is an absent field. Tool-call argument strings keep their bytes on every way.",
        "The pivot is the Responses form; an upstream that speaks Chat gets a Chat client's own body, cleaned, and",
        "otherwise what `pivot -> chat` makes. What a call lost (`tools.web_search`, `items.compaction`) stands in its",
        "model-call record.",
    ]
    for way in dict.fromkeys(rule.way for rule in RULES):
        lines += ["", f"## {way}", "", "| field | what becomes of it | why |", "| --- | --- | --- |"]
        for rule in RULES:
            if rule.way == way:
                fate = f"{rule.fate} into `{rule.into}`" if rule.into else rule.fate
                lines.append(f"| {rule.field} | {fate} | {rule.why} |")
    return "\n".join(lines) + "\n"
