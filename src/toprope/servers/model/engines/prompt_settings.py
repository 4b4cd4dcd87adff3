"""Which settings of a request shape its prompt, beside its items: what a template is handed, and what never gets there.

    never shapes a prompt     sampling, transport, accounts and caches: a list of names, since only these are known
    carried                   the template's own settings, handed on to whoever renders what is new
    steering                  tool_choice and the reply's format: no template of vLLM 0.32 reads them but Kimi K3's
    unread                    a router's `reasoning`: vLLM 0.32 minds it not, and a call shows whether another does
    anything else             may shape a prompt: it is not carried, and must not change between two turns

The list is vLLM 0.32's (`ChatCompletionRequest`, `build_chat_params`), what its earlier versions had, and what OpenAI's
two APIs and routers have beside. It is about prompts of text: images and sound are no matter of ids alone. Left to
others: comparing two requests (`token_in.said`), rendering (`vllm_turns`, `token_in.library`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from toprope.dialects.chat_request import request_to_chat
from toprope.servers.model.engines.base import CannotContinue, NextTurn

NOT_CARRIED = "settings_not_carried"
"""The reason of a turn whose settings may shape its prompt and cannot be handed on."""
CARRIED = ("chat_template", "chat_template_kwargs", "documents", "reasoning_effort")
STEERING = ("tool_choice", "response_format")
UNREAD = ("reasoning",)

_NEVER_SHAPES = frozenset(
    (
        # what is read by name, or cannot be set to anything here
        "model", "tools", "stream", "stream_options", "n", "background", "conversation", "prompt",
        "previous_response_id",
        # sampling
        "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "temperature", "top_p", "top_k",
        "min_p", "seed", "stop", "stop_token_ids", "frequency_penalty", "presence_penalty", "repetition_penalty",
        "length_penalty", "logit_bias", "allowed_token_ids", "bad_words", "ignore_eos", "use_beam_search",
        "thinking_token_budget", "repetition_detection", "watermarking", "vllm_xargs", "structured_outputs",
        "parallel_tool_calls", "max_tool_calls", "verbosity", "text", "best_of", "prediction",
        # what of the reply is returned
        "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "include_stop_str_in_output",
        "skip_special_tokens", "spaces_between_special_tokens", "include_reasoning", "echo", "return_token_ids",
        "return_tokens_as_token_ids", "return_token_offsets", "return_prompt_text", "routed_experts_prompt_start",
        "stream_interval", "include", "audio", "usage",
        # what a provider does of its own beside a generation, and vLLM does not
        "web_search_options", "context_management", "moderation", "access_programs", "image",
        # accounts, caches, queues
        "user", "metadata", "client_metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "prompt_cache_options", "cache_salt", "priority", "request_id", "session_id",
        "truncation", "provider", "background_options",
    )
)  # fmt: skip
_WITHOUT_EFFECT: Mapping[str, Any] = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
    "modalities": ["text"],
}
"""Settings that shape a prompt unless they have this value, which is the default of vLLM, or of OpenAI."""
_GRAMMARS = "guided_"
"""What settings of grammars begin with in vLLM before `structured_outputs`."""


def shaping(fields: Mapping[str, Any], apart: Iterable[str] = ()) -> dict[str, Any]:
    """Those of a request's `fields` that may shape its prompt, but for `apart`. A null is an absent field."""
    return {
        name: value
        for name, value in fields.items()
        if value is not None and name not in apart and not _is_harmless(name, value)
    }


def _is_harmless(name: str, value: Any) -> bool:
    if name == "kv_transfer_params":  # where to find what was computed already, unless it is the prompt itself
        return isinstance(value, Mapping) and "prompt_token_ids" not in value
    if name in _WITHOUT_EFFECT:
        default = _WITHOUT_EFFECT[name]
        return type(value) is type(default) and bool(value == default)
    return name in _NEVER_SHAPES or name.startswith(_GRAMMARS)


def sent_settings(turn: NextTurn) -> dict[str, Any]:
    """The Chat body of a call as an upstream gets it, without its messages."""
    if turn.dialect == "chat" and turn.body:  # a Chat client's own body is sent on
        sent = {name: value for name, value in turn.body.items() if value is not None}
        if not sent.get("tools"):
            sent.pop("tools", None)
            sent.pop("tool_choice", None)
    else:
        sent, _ = request_to_chat(replace(turn.request, input=(), instructions=None))
        place_effort(sent, turn.dialect)
    sent.pop("messages", None)
    return sent


def place_effort(body: dict[str, Any], dialect: str) -> None:
    """Write the effort of a router's `reasoning` where stock vLLM reads it; a Chat client's own body says it itself."""
    told = body.get("reasoning")
    if dialect != "chat" and isinstance(told, dict) and "effort" in told:
        body["reasoning_effort"] = told["effort"]


def check_carried(settings: Mapping[str, Any], carried: Iterable[str], who: str) -> None:
    """Raises `CannotContinue` naming what of `settings` may shape the prompt and is not `carried` to `who`."""
    lost = sorted(shaping(settings, carried))
    if lost:
        raise CannotContinue(
            NOT_CARRIED,
            f"the request sets {', '.join(lost)}, which may shape its prompt and {who} cannot be told of",
        )


def template_kwargs(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The variables that vLLM 0.32 hands to a template: those that the request names, and those made of its other
    settings, which go before them (`merge_kwargs` there; an effort also switches thinking on, or off with `none`).

    Raises `CannotContinue` for `chat_template_kwargs` that are no object.
    """
    given = settings.get("chat_template_kwargs")
    if given is not None and not isinstance(given, Mapping):
        raise CannotContinue(NOT_CARRIED, "chat_template_kwargs is no object")
    named = dict(given or {})
    made = {name: settings[name] for name in ("documents", "reasoning_effort") if settings.get(name) is not None}
    if "reasoning_effort" in made and "enable_thinking" not in named:
        made["enable_thinking"] = made["reasoning_effort"] != "none"
    return named, made
