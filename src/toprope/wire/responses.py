"""The Responses format: items, requests, replies. Other people's wire, kept as they spell it; never converts.

Items are the dictionaries of the wire (a `TypedDict` names the fields we read; unknown ones stay where they are), so
that what a client sent is what is recorded and what is sent on. Requests and replies are frozen values whose foreign
fields live in `extra`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
"""Why a generation ended, in Chat's words, which the other dialects are rendered from."""

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts")
"""NeMo Gym's token arrays on an output item or a message; clients echo them back in history."""

NOT_SAMPLING = frozenset(
    {"input", "stream", "stream_options", "background", "previous_response_id", "conversation", "prompt"}
)
"""Fields of a Responses request that say what is asked or how it is answered: no setting of how a model samples."""

# fmt: off
REQUEST_PARAMETERS = frozenset(
    (
        # of the Responses API
        "background", "conversation", "include", "input", "instructions", "max_output_tokens", "max_tool_calls",
        "metadata", "model", "parallel_tool_calls", "previous_response_id", "prompt", "prompt_cache_key", "reasoning",
        "safety_identifier", "service_tier", "store", "stream", "stream_options", "temperature", "text",
        "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "user",
        # what open engines take beside them
        "best_of", "frequency_penalty", "ignore_eos", "length_penalty", "logit_bias", "logprobs", "max_tokens",
        "min_p", "min_tokens", "n", "presence_penalty", "repetition_penalty", "seed", "skip_special_tokens", "stop",
        "stop_token_ids", "top_k",
    )
)
# fmt: on
"""Names that a request's sampling settings may have; a name that resembles one of them is taken for a slip."""

Item: TypeAlias = dict[str, Any]
"""One input or output item: message, reasoning, function_call, function_call_output or a kind we do not know."""

Tool: TypeAlias = dict[str, Any]
"""One entry of `tools`: `{"type": "function", "name", "description"?, "parameters", "strict"?}` or a foreign kind."""


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A Responses create request: the fields we read by name, all others in `extra`, in the order they came.

    `input` is always a tuple of items (a bare string becomes one user message). `seed`, `stop` and `top_k` are not
    OpenAI's but common among open engines, and accepted in every dialect.
    """

    input: tuple[Item, ...]
    model: str | None = None
    instructions: str | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the engine reported them; None is unknown, never zero."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
