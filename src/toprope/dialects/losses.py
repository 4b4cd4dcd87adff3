"""What each conversion keeps, renames, drops or refuses: one table, read by the code and printed in the docs.

The code takes its renames, drops and refusals from here, so that the table cannot say something else than the
program does. `render_table()` writes `docs/reference/dialects.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fate = Literal["renamed", "dropped", "refused", "folded"]
Direction = Literal[
    "chat -> pivot",
    "chat -> chat",
    "responses -> pivot",
    "messages -> pivot",
    "pivot -> chat",
    "chat reply -> pivot",
    "pivot -> chat reply",
    "pivot -> responses reply",
    "pivot -> messages reply",
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
    Rule("chat -> pivot", "message.tool_calls of type custom", "folded", "custom_tool_call items"),
    Rule("chat -> pivot", "assistant parts reasoning, thinking, tool_use, tool_call", "folded", "items"),
    Rule("chat -> pivot", "other fields of such parts", "dropped", why="as on the way to an upstream, `chat -> chat`"),
    Rule("chat -> pivot", "assistant fields we do not know", "folded", "a message item", "an empty one without text"),
    Rule(
        "chat -> pivot",
        "fields of a turn or a call that say nothing, or what its items say",
        "dropped",
        why="copies that programs add; a Chat upstream gets them",
    ),
    Rule("chat -> pivot", "index, status of a call; parsed_arguments", "dropped", why="notes of client libraries"),
    Rule("chat -> pivot", "token arrays echoed in messages", "dropped", why="ours, sent back by the client"),
    Rule("chat -> pivot", "a turn of calls alone after a turn of text", "folded", "one turn", "items have no borders"),
    Rule("chat -> pivot", "n", "refused", why="one call makes one choice; send n calls"),
    Rule("chat -> pivot", "stream_options", "dropped", why="about the transport, not the generation"),
    Rule("chat -> pivot", "return_token_ids", "dropped", why="ask with the header X-Toprope-Include: token_ids"),
    Rule("chat -> chat", "n, stream, stream_options, return_token_ids", "dropped", why="ours to say"),
    Rule("chat -> chat", "tool_choice, parallel_tool_calls", "dropped", why="only without tools, which engines refuse"),
    Rule("chat -> chat", "token arrays echoed in messages", "dropped", why="ours, sent back by the client"),
    Rule("chat -> chat", "tool_calls.index, parsed_arguments", "dropped", why="notes of client libraries"),
    Rule(
        "chat -> chat",
        "assistant parts reasoning, thinking",
        "folded",
        "reasoning_content",
        "or the field that has a thought already; two that differ are joined in the message's order",
    ),
    Rule(
        "chat -> chat",
        "assistant parts tool_use, tool_call",
        "folded",
        "tool_calls",
        "a copy of a call that is there is left out; another one under its id is named in the call's record",
    ),
    Rule(
        "chat -> chat",
        "signatures, sealed thoughts and other fields of such parts",
        "dropped",
        why="no place in a message; in the call's record",
    ),
    Rule("chat -> chat", "content_parts that a stream of ours told", "folded", "content", "where its text is the same"),
    Rule("chat -> chat", "texts beside such parts", "folded", "content", "one string, where nothing else stands there"),
    Rule("responses -> pivot", "token arrays echoed in items", "dropped", why="ours, sent back by the client"),
    Rule("responses -> pivot", "Chat-shaped turns in input", "folded", "items"),
    Rule("responses -> pivot", "previous_response_id", "refused", why="replies are not stored; send the whole input"),
    Rule("responses -> pivot", "conversation", "refused", why="conversations are not stored; send the whole input"),
    Rule("responses -> pivot", "prompt", "refused", why="prompt templates live at the provider"),
    Rule("responses -> pivot", "background", "refused", why="a call is answered in its own request"),
    Rule("responses -> pivot", "item_reference", "refused", why="items are not stored; send the item itself"),
    Rule("responses -> pivot", "stream_options", "dropped", why="about the transport, not the generation"),
    Rule("messages -> pivot", "messages", "renamed", "input"),
    Rule("messages -> pivot", "system", "folded", "first system item"),
    Rule("messages -> pivot", "billing line at the head of system", "dropped", why="another in every request"),
    Rule("messages -> pivot", "max_tokens", "renamed", "max_output_tokens"),
    Rule("messages -> pivot", "stop_sequences", "renamed", "stop"),
    Rule("messages -> pivot", "tools.input_schema", "renamed", "tools.parameters"),
    Rule("messages -> pivot", "tool_choice any, tool", "renamed", "tool_choice required, function"),
    Rule("messages -> pivot", "tool_choice.disable_parallel_tool_use", "folded", "parallel_tool_calls"),
    Rule("messages -> pivot", "output_config.effort", "folded", "reasoning.effort"),
    Rule("messages -> pivot", "output_config.format, output_format", "folded", "text.format"),
    Rule("messages -> pivot", "other fields of output_config", "dropped", why="no other dialect has a place for them"),
    Rule("messages -> pivot", "blocks thinking, redacted_thinking", "folded", "reasoning items"),
    Rule("messages -> pivot", "signature of a thought of ours", "folded", "the item's id"),
    Rule("messages -> pivot", "blocks tool_use, tool_result", "folded", "function_call, function_call_output items"),
    Rule(
        "messages -> pivot", "tool_use.input", "folded", "arguments", "the recorded string, if the value is that one's"
    ),
    Rule("messages -> pivot", "tool_use fields we do not know", "dropped", why="a call is its name and arguments"),
    Rule("messages -> pivot", "blocks image, document", "folded", "input_image, input_file or text parts"),
    Rule("messages -> pivot", "document.context", "dropped", why="no part carries it"),
    Rule("messages -> pivot", "other fields of a document of text", "dropped", why="its text alone is what is sent"),
    Rule("messages -> pivot", "block.citations", "dropped", why="about the provider's search"),
    Rule("messages -> pivot", "cache_control", "dropped", why="wanders between requests; engines cache by prefix"),
    Rule("messages -> pivot", "tools.eager_input_streaming", "dropped", why="about the transport, not the generation"),
    Rule("messages -> pivot", "token arrays echoed in blocks", "dropped", why="ours, sent back by the client"),
    Rule("messages -> pivot", "thinking", "dropped", why="a budget of the provider's own models"),
    Rule("messages -> pivot", "context_management", "dropped", why="history is never cut here"),
    Rule("messages -> pivot", "mcp_servers", "dropped", why="the provider's own tools are not run"),
    Rule("messages -> pivot", "container", "dropped", why="the provider's own tools are not run"),
    Rule("messages -> pivot", "betas", "dropped", why="switches of the provider's"),
    Rule("messages -> pivot", "diagnostics", "dropped", why="about the provider's cache"),
    Rule("messages -> pivot", "inference_geo", "dropped", why="about the provider's machines"),
    Rule("messages -> pivot", "speed", "dropped", why="about the provider's machines"),
    Rule("messages -> pivot", "service_tier", "dropped", why="other providers have other words"),
    Rule("messages -> pivot", "user_profile_id", "dropped", why="an account of the provider's"),
    Rule("messages -> pivot", "workspace_id", "dropped", why="an account of the provider's"),
    Rule("pivot -> chat", "instructions", "folded", "first system message"),
    Rule("pivot -> chat", "input", "renamed", "messages"),
    Rule("pivot -> chat", "max_output_tokens", "renamed", "max_tokens"),
    Rule("pivot -> chat", "text.format", "folded", "response_format"),
    Rule("pivot -> chat", "text.verbosity", "folded", "verbosity"),
    Rule("pivot -> chat", "other fields of text", "dropped", why="Chat has no such object; in the call's record"),
    Rule("pivot -> chat", "reasoning.effort", "folded", "reasoning_effort"),
    Rule(
        "pivot -> chat",
        "reasoning with fields we do not know",
        "folded",
        "reasoning",
        "with the effort in it: routers have the same object in Chat, and refuse the effort in both places",
    ),
    Rule("pivot -> chat", "reasoning.summary, generate_summary", "dropped", why="Chat has no summaries"),
    Rule("pivot -> chat", "reasoning.context, mode", "dropped", why="of Responses alone; in the call's record"),
    Rule("pivot -> chat", "tools of type custom", "folded", "custom", "only where the engine has `custom_tools`"),
    Rule(
        "pivot -> chat",
        "other tools that are no functions",
        "dropped",
        why="Chat does not list them; in the call's record",
    ),
    Rule(
        "pivot -> chat",
        "a tool choice whose tool is dropped",
        "dropped",
        why="engines refuse it; in the call's record",
    ),
    Rule(
        "pivot -> chat",
        "custom_tool_call and custom_tool_call_output items",
        "folded",
        "tool_calls, tool messages",
        "only where the engine has `custom_tools`",
    ),
    Rule("pivot -> chat", "allowed_tools of which none is left", "folded", "none", "no other tool was allowed"),
    Rule("pivot -> chat", "item types without a Chat form", "dropped", why="in the call's record"),
    Rule("pivot -> chat", "item ids and statuses", "dropped", why="Chat messages have none"),
    Rule("pivot -> chat", "text and refusal parts of an assistant turn", "folded", "content", "one string"),
    Rule(
        "pivot -> chat",
        "other parts of an assistant turn, fields of parts we do not know",
        "dropped",
        why="its content is one string; in the call's record",
    ),
    Rule(
        "pivot -> chat",
        "fields of a thought we do not know, fields that two joined items say differently or that Chat means otherwise",
        "dropped",
        why="no place in a message; in the call's record",
    ),
    Rule("pivot -> chat", "annotations, logprobs of text", "dropped", why="about a reply, not the prompt"),
    Rule("pivot -> chat", "cache_control, citations in an assistant turn", "dropped", why="about the provider's cache"),
    Rule("pivot -> chat", "summary of a thought that has text", "dropped", why="the text says more"),
    Rule("pivot -> chat", "signatures and sealed thoughts", "dropped", why="only their provider can read them"),
    Rule("pivot -> chat", "function_call_output.is_error", "dropped", why="the output says it in words"),
    Rule("pivot -> chat", "include", "dropped", why="names parts of a Responses reply"),
    Rule("pivot -> chat", "store", "dropped", why="nothing is stored at the provider"),
    Rule("pivot -> chat", "truncation", "dropped", why="history is never cut here"),
    Rule("pivot -> chat", "max_tool_calls", "dropped", why="counts the provider's own tools"),
    Rule("pivot -> chat", "client_metadata", "dropped", why="the client's own notes"),
    Rule("pivot -> chat", "prompt_cache_key", "dropped", why="X-Session-ID keeps a rollout on one engine"),
    Rule(
        "chat reply -> pivot",
        "top-level fields we do not know",
        "dropped",
        why="all but system_fingerprint and service_tier; fields of the message are kept",
    ),
    Rule(
        "chat reply -> pivot", "message.reasoning / reasoning_content, where it is a string", "folded", "reasoning item"
    ),
    Rule("chat reply -> pivot", "message.thinking_blocks", "folded", "reasoning item", "kept too where one is signed"),
    Rule("chat reply -> pivot", "parts reasoning, thinking, tool_use, tool_call", "folded", "items"),
    Rule(
        "chat reply -> pivot",
        "signatures, sealed thoughts and other fields of such parts",
        "dropped",
        why="only their provider can read them",
    ),
    Rule(
        "chat reply -> pivot",
        "message.annotations, each a whole url_citation",
        "folded",
        "output_text.annotations",
        "of any other form, or beside parts that are no text, they stay on the message",
    ),
    Rule("chat reply -> pivot", "message.refusal, where it is empty", "dropped", why="it refuses nothing"),
    Rule("chat reply -> pivot", "message.tool_calls of type custom", "folded", "custom_tool_call items"),
    Rule(
        "chat reply -> pivot",
        "fields of a turn without text",
        "folded",
        "an empty message item, the last",
        "what says nothing (null, empty, true) is dropped",
    ),
    Rule("chat reply -> pivot", "index, status of a call; parsed_arguments", "dropped", why="an item has its own"),
    Rule("chat reply -> pivot", "choices[0].stop_reason", "renamed", "stop_sequence", "where it is a string"),
    Rule("chat reply -> pivot", "choice fields we do not know", "dropped", why="nothing reads them"),
    Rule(
        "chat reply -> pivot",
        "entries of a list that have the same `index`, in a stream",
        "folded",
        "one entry",
        "an unread field comes in pieces so, and public clients put it together so",
    ),
    Rule("chat reply -> pivot", "white space after a streamed call", "dropped", why="a parser's; plain has none"),
    Rule("pivot -> chat reply", "item ids and statuses", "dropped", why="Chat messages have none"),
    Rule("pivot -> chat reply", "reasoning item", "folded", "message.reasoning_content"),
    Rule("pivot -> chat reply", "custom_tool_call item", "folded", "message.tool_calls of type custom"),
    Rule("pivot -> chat reply", "a second text or thought", "folded", "the same string"),
    Rule("pivot -> chat reply", "empty text beside a thought or calls", "folded", "null"),
    Rule(
        "pivot -> chat reply",
        "parts that are no text or refusal",
        "folded",
        "message.content, a list then",
        "in a stream of which text left as a string the list is `content_parts` of the last delta",
    ),
    Rule("pivot -> chat reply", "annotations of a text", "folded", "message.annotations", "or on its part in a list"),
    Rule("pivot -> chat reply", "other fields of a text", "dropped", why="content is one string, where all is text"),
    Rule("pivot -> chat reply", "fields of a thought beside its text", "dropped", why="it is one string"),
    Rule("pivot -> chat reply", "items of kinds we do not know", "dropped", why="in the call's record"),
    Rule("pivot -> responses reply", "finish reason length, content_filter", "folded", "status incomplete"),
    Rule("pivot -> responses reply", "unknown token counts", "folded", "0", "of a stream: programs go round for ever"),
    Rule("pivot -> responses reply", "Chat logprobs", "dropped", why="no output text parts carry them yet"),
    Rule(
        "pivot -> messages reply", "finish reasons", "renamed", "end_turn, stop_sequence, max_tokens, tool_use, refusal"
    ),
    Rule("pivot -> messages reply", "a stop string that no engine named", "dropped", why="end_turn: few say it"),
    Rule("pivot -> messages reply", "reasoning item", "folded", "thinking block", "signed with the item's id"),
    Rule("pivot -> messages reply", "sealed form of a thought with text", "dropped", why="a block has one of the two"),
    Rule("pivot -> messages reply", "function_call.arguments", "folded", "tool_use.input", "the string is on record"),
    Rule(
        "pivot -> messages reply",
        "arguments that are no JSON object",
        "folded",
        "tool_use.input.raw_arguments",
        "but what began as an object has left in a stream, and the client reads of it what it can",
    ),
    Rule("pivot -> messages reply", "custom_tool_call.input", "folded", "tool_use.input.raw_arguments"),
    Rule("pivot -> messages reply", "refusal part", "folded", "text block"),
    Rule("pivot -> messages reply", "empty text", "dropped", why="the API refuses empty blocks"),
    Rule("pivot -> messages reply", "several text parts of one message", "folded", "one text block"),
    Rule("pivot -> messages reply", "item ids and statuses", "dropped", why="blocks have none"),
    Rule(
        "pivot -> messages reply",
        "fields of a message or a call we do not know (images, audio)",
        "dropped",
        why="blocks are strict; in the call's record",
    ),
    Rule(
        "pivot -> messages reply",
        "parts that are no text or refusal",
        "dropped",
        why="no block of a reply holds an image or sound; in the call's record",
    ),
    Rule(
        "pivot -> messages reply",
        "annotations of a text",
        "dropped",
        why="a citation there holds its provider's own index; in the call's record",
    ),
    Rule("pivot -> messages reply", "items of kinds we do not know", "dropped", why="in the call's record"),
    Rule("pivot -> messages reply", "unknown token counts", "folded", "0", "clients demand integers"),
    Rule("pivot -> messages reply", "system_fingerprint, service_tier", "dropped", why="a message has none"),
    Rule("pivot -> messages reply", "Chat logprobs", "dropped", why="blocks have none"),
)


def fields_of(way: Direction, fate: Fate) -> tuple[tuple[str, str], ...]:
    """The (field, why) pairs of one fate on one way, as the converters use them."""
    return tuple((rule.field, rule.why) for rule in RULES if rule.way == way and rule.fate == fate)


_LONGEST_NAME = 120
"""Of a loss, in characters: clients choose the names, and the record of a call is no place for a megabyte."""


def loss_name(*parts: object) -> str:
    """The name of what a call lost, as its record has it: joined by dots, in ASCII, not longer than 120 characters."""
    return ".".join(map(str, parts)).encode("ascii", "backslashreplace").decode()[:_LONGEST_NAME]


def render_table() -> str:
    """The loss table as the Markdown page of the reference."""
    lines = [
        "# Dialect conversion",
        "",
        "Made from `toprope.dialects.losses`; do not edit. What is not listed is carried as it is, unknown fields too,",
        "explicit nulls excepted: a null is an absent field. Tool-call argument strings keep their bytes on every way.",
        "The pivot is the Responses form; an upstream that speaks Chat gets a Chat client's own body, cleaned, and",
        "otherwise what `pivot -> chat` makes. What a call lost (`tools.web_search`, `items.compaction`,",
        "`items.message.input_image`) stands in its model-call record; what of its reply a Messages client is not told",
        "(`reply.message.images`, `reply.message.annotations`) stands there too. Fields of an upstream's message that",
        "are not read stand on its last text, annotations on its first; where that text ended in a Responses stream",
        "before they were known, `response.completed` has them and `response.output_item.done` does not.",
    ]
    for way in dict.fromkeys(rule.way for rule in RULES):
        lines += ["", f"## {way}", "", "| field | what becomes of it | why |", "| --- | --- | --- |"]
        for rule in RULES:
            if rule.way == way:
                fate = f"{rule.fate} into `{rule.into}`" if rule.into else rule.fate
                lines.append(f"| {rule.field} | {fate} | {rule.why} |")
    return "\n".join(lines) + "\n"
