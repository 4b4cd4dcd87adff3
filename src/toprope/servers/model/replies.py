"""What a client gets: an engine's reply, or an error, in the dialect that was called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toprope.dialects.chat_reply import chat_reply
from toprope.dialects.errors import error_headers, error_status, openai_error
from toprope.dialects.pivot import PivotReply, with_item_ids
from toprope.dialects.responses import responses_reply
from toprope.errors.tree import TopropeError
from toprope.http.reply import Reply, json_reply
from toprope.http.request import Request
from toprope.servers.model.call import ModelCall
from toprope.servers.model.engines.base import Dialect, EngineReply, SampledTokens, Usage
from toprope.tokens.entry import BadRecord, as_ids, as_log_probs

_ID_PREFIX: dict[Dialect, str] = {"chat": "chatcmpl-", "responses": "resp_", "messages": "msg_"}


def response_id(call: ModelCall) -> str:
    """The id that the client will see on the reply, which is recorded as a witness of the call."""
    return _ID_PREFIX[call.dialect] + call.reply_id


def finished(call: ModelCall, made: EngineReply) -> EngineReply:
    """The engine's reply as it is recorded and rendered: every item with id and status, none with token arrays."""
    return replace(made, output=with_item_ids(made.output, call.reply_id))


def render_reply(call: ModelCall, made: EngineReply) -> Reply:
    """The whole reply. Ids and logprobs stand on its last item or message only where the caller asked for them."""
    reply = PivotReply(
        output=made.output,
        finish_reason=made.finish_reason,
        model=made.model,
        usage=_usage(made),
        reply_id=call.reply_id,
        created=int(call.started),
        tokens=token_bundle(made.tokens) if call.include_tokens else None,
        logprobs=made.logprobs,
        extra=made.extra,
    )
    return json_reply(chat_reply(reply) if call.dialect == "chat" else responses_reply(reply, call.request))


def render_error(error: TopropeError, request: Request | None = None) -> Reply:
    """The error in the shape of the OpenAI dialects, with the status and headers that client libraries act on."""
    status = error_status(error)
    return json_reply(openai_error(error, status), status, headers=error_headers(error, status))


def token_bundle(tokens: SampledTokens | None) -> dict[str, Any] | None:
    """NeMo Gym's triple as plain lists, or None where any part of it is missing or not fit to be a record."""
    if tokens is None or len(tokens.generation_token_ids) != len(tokens.generation_log_probs):
        return None
    try:
        return {
            "prompt_token_ids": as_ids(tokens.prompt_token_ids, "prompt_token_ids").tolist(),
            "generation_token_ids": as_ids(tokens.generation_token_ids, "generation_token_ids").tolist(),
            "generation_log_probs": as_log_probs(tokens.generation_log_probs).tolist(),
        }
    except BadRecord:
        return None


def _usage(made: EngineReply) -> Usage:
    """The engine's counts; where it gave none and the ids are known, they are counted."""
    if made.usage.output_tokens is not None or made.tokens is None:
        return made.usage
    return Usage(len(made.tokens.prompt_token_ids), len(made.tokens.generation_token_ids))
