"""What a client gets: an engine's reply, one from the record, or an error, in the dialect that was called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from toprope.dialects.chat_reply import chat_reply
from toprope.dialects.chat_request import wants_usage
from toprope.dialects.emitted import data_event
from toprope.dialects.errors import error_headers, error_status, messages_error, openai_error
from toprope.dialects.messages_reply import messages_reply
from toprope.dialects.pivot import PivotReply, with_item_ids
from toprope.dialects.responses import responses_reply
from toprope.dialects.stream import StreamWriter, open_stream
from toprope.errors.tree import TopropeError
from toprope.http.reply import Reply, json_reply
from toprope.http.request import Request
from toprope.protocol.headers import SHOULD_RETRY
from toprope.servers.model.call import ModelCall
from toprope.servers.model.engines.base import Dialect, EngineReply, SampledTokens, Usage
from toprope.tokens.entry import BadRecord, TokenEntry, as_ids, as_log_probs

_ID_PREFIX: dict[Dialect, str] = {"chat": "chatcmpl-", "responses": "resp_", "messages": "msg_"}
_STREAM_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache"}


def response_id(call: ModelCall) -> str:
    """The id that the client will see on the reply, which is recorded as a witness of the call."""
    return _ID_PREFIX[call.dialect] + call.reply_id


def finished(call: ModelCall, made: EngineReply) -> EngineReply:
    """The engine's reply as it is recorded and rendered: every item with id and status, none with token arrays.

    Items of a streamed call are named by us whatever the engine calls them: deltas left under those names before the
    engine had said its own.
    """
    output = made.output
    if call.stream:
        output = tuple({name: value for name, value in item.items() if name != "id"} for item in output)
    return replace(made, output=with_item_ids(output, call.reply_id))


def pivot_reply(call: ModelCall, made: EngineReply) -> PivotReply:
    """The reply as every dialect renders it. Ids and logprobs stand in it only where the caller asked for them."""
    return PivotReply(
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


def render_reply(call: ModelCall, made: EngineReply) -> Reply:
    """The whole reply as one body; of a streamed call all its events at once."""
    reply = pivot_reply(call, made)
    if call.stream:
        writer = stream_writer(call, made.model)
        return Reply(200, writer.open() + writer.finish(reply), _STREAM_HEADERS)
    match call.dialect:
        case "chat":
            return json_reply(chat_reply(reply))
        case "responses":
            return json_reply(responses_reply(reply, call.request))
        case "messages":
            return json_reply(messages_reply(reply))


def stream_writer(call: ModelCall, model: str) -> StreamWriter:
    """The writer of the call's stream. `model` is the name to give before the engine said one."""
    return open_stream(
        call.dialect,
        call.request,
        reply_id=call.reply_id,
        model=model,
        created=int(call.started),
        include_usage=wants_usage(call.body),
    )


def reply_details(made: EngineReply) -> dict[str, Any]:
    """What a reply says beyond its record's own fields, for a retry that is answered from the record."""
    details: dict[str, Any] = {}
    usage, counted = made.usage, made.tokens
    told = usage.cached_tokens is not None or usage.reasoning_tokens is not None
    if told or (counted is not None and usage.input_tokens not in (None, len(counted.prompt_token_ids))):
        details["usage"] = {name: value for name, value in asdict(usage).items() if value is not None}
    if made.logprobs:
        details["logprobs"] = made.logprobs
    if made.extra:
        details["extra"] = dict(made.extra)
    return details


def recorded_reply(call: ModelCall, entry: TokenEntry) -> tuple[ModelCall, EngineReply]:
    """The reply that `entry` records, and the call it was given to, for `call`, a repeat of that call."""
    details: Mapping[str, Any] = entry.extra.get("reply") or {}
    tokens = SampledTokens(entry.prompt_token_ids, entry.generation_token_ids, entry.generation_log_probs)
    counts = {"input_tokens": len(tokens.prompt_token_ids), "output_tokens": len(tokens.generation_token_ids)}
    made = EngineReply(
        output=entry.output_items,
        finish_reason=entry.finish_reason or "stop",  # type: ignore[arg-type]  # our own word, read back
        model=entry.model,
        usage=Usage(**{**counts, **(details.get("usage") or {})}),
        tokens=tokens,
        response_id=entry.response_id,
        logprobs=details.get("logprobs"),
        extra=details.get("extra") or {},
    )
    return replace(call, call_id=entry.model_call_id, started=entry.created_at), made


def render_error(error: TopropeError, request: Request | None = None) -> Reply:
    """The error in the shape of the called dialect, with the status and headers that client libraries act on."""
    status = error_status(error)
    body = messages_error if request is not None and "/v1/messages" in request.path else openai_error
    return json_reply(body(error, status), status, headers=error_headers(error, status))


def late_error(dialect: Dialect, error: TopropeError, opened: bytes) -> bytes | None:
    """The event that tells a terminal error in a stream of which only `opened`, its head, and keep-alives have left.

    None for an error that a resend may mend: clients resend after a cut, and would take an event for the last word.
    """
    status = error_status(error)
    if SHOULD_RETRY not in error_headers(error, status):
        return None
    match dialect:
        case "chat":
            return data_event(openai_error(error, status))
        case "responses":  # the event type's own fields, and `error`, at which the public client raises
            told = openai_error(error, status)
            own = {name: told["error"][name] for name in ("code", "message", "param")}
            return data_event({"type": "error", **own, "sequence_number": opened.count(b"\n\n"), **told}, "error")
        case "messages":
            return data_event(messages_error(error, status), "error")


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
