"""A stand-in for stock vLLM: the fields, ids and refusals of its chat endpoint, without a model.

It answers every conversation with `says`, one token for each UTF-8 byte, and follows the rules that were seen on
vLLM 0.32: ids only where `return_token_ids` is true, logprobs only where `logprobs` is true and `top_logprobs` no null,
a prompt of ids in `kv_transfer_params`, 400 with the param `input_tokens` for a prompt that is too long, ids of a
stream on every chunk while a parser holds its text back, usage only where it was asked for. Faults are attributes.
"""

from __future__ import annotations

import json
from typing import Any

from toprope.testing.upstream import ScriptedUpstream, UpstreamReply, UpstreamRequest, completion
from toprope.testing.upstream_stream import UpstreamStream, stream, streamed

EOS = 2
_TURN = 3


class VllmStandIn(ScriptedUpstream):
    """The stand-in. `message` replaces the text answer; `hold_back` streams half of the ids on empty deltas.

    `drops` names fields of a reply that get lost (`token_ids`, `prompt_token_ids`, `logprobs`), as a proxy in front
    loses them, and `drops_in_streams` those that streams lose; `placeholder` makes the first logprob -9999.0;
    `obeys_prompts=False` ignores prompts of ids, `refuses` names a request field that is answered with 400. With
    `closes_turns` every turn of a prompt has an end, a newline after it and a head for the reply, as ChatML has, and
    `/tokenize` answers with that.
    """

    def __init__(self, *, model: str = "m", says: str = "hello", max_model_len: int = 2048) -> None:
        super().__init__(answer=self._chat)
        self.says = says
        self.message: dict[str, Any] | None = None
        self.max_model_len = max_model_len
        self.hold_back = False
        self.drops: set[str] = set()
        self.drops_in_streams: set[str] = set()
        self.placeholder = False
        self.obeys_prompts = True
        self.refuses: str | None = None
        self.closes_turns = False
        entry = {"id": model, "object": "model", "owned_by": "vllm", "max_model_len": max_model_len}
        self.models = UpstreamReply(json.dumps({"object": "list", "data": [entry]}).encode())

    def prompt_of(self, body: dict[str, Any]) -> list[int]:
        """The prompt ids of a request: what was given, else each message's role and text, byte by byte."""
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if given is not None and self.obeys_prompts:
            return list(given)
        texts = (f"{message['role']}:{message.get('content')}" for message in body["messages"])
        end = (EOS, *b"\n") if self.closes_turns else ()
        ids = [token for text in texts for token in (_TURN, *text.encode(), *end)]
        headed = self.closes_turns and body.get("add_generation_prompt", True)
        return [*ids, _TURN, *b"assistant:"] if headed else ids

    def _chat(self, request: UpstreamRequest) -> UpstreamReply | UpstreamStream:
        body = request.json()
        if request.path == "/tokenize":
            return UpstreamReply(json.dumps({"tokens": self.prompt_of(body)}).encode())
        if self.refuses is not None and self.refuses in body:
            return _refusal(f"{self.refuses} is not permitted", self.refuses)
        prompt = self.prompt_of(body)
        most = body.get("max_tokens") or self.max_model_len
        if len(prompt) + min(most, 1) > self.max_model_len:
            why = f"This model's maximum context length is {self.max_model_len} tokens; the prompt has {len(prompt)}."
            return _refusal(why, "input_tokens")
        text = self.says if self.message is None else json.dumps(self.message)
        ids = [*text.encode(), EOS][:most]
        cut = len(ids) <= len(text.encode())
        said = ids if cut else ids[:-1]
        drops = self.drops | (self.drops_in_streams if body.get("stream") else set())
        wants_ids = body.get("return_token_ids") is True
        wants_log_probs = body.get("logprobs") is True and not ("top_logprobs" in body and body["top_logprobs"] is None)
        log_probs: list[float | None] = [
            -9999.0 if self.placeholder and n == 0 else -token / 256 for n, token in enumerate(ids)
        ]
        message = self.message or {"role": "assistant", "content": bytes(said).decode("utf-8", "replace")}
        calls = bool(message.get("tool_calls"))
        made = completion(
            message,
            prompt_token_ids=prompt if wants_ids and "prompt_token_ids" not in drops else None,
            token_ids=ids if wants_ids and "token_ids" not in drops else None,
            log_probs=log_probs if wants_log_probs and "logprobs" not in drops else None,
            finish_reason="length" if cut else "tool_calls" if calls else "stop",
            usage={
                "prompt_tokens": len(prompt),
                "completion_tokens": len(ids),
                "total_tokens": len(prompt) + len(ids),
            },
            id=f"chatcmpl-{request.headers.get('x-request-id', 'same')}",
        )
        if not body.get("stream"):
            return made
        chunks = streamed(made.body, hold_back=self.hold_back)
        asked = (body.get("stream_options") or {}).get("include_usage") is True
        return stream(chunks if asked else chunks[:-1])


def _refusal(message: str, param: str) -> UpstreamReply:
    error = {"message": message, "type": "BadRequestError", "param": param, "code": 400}
    return UpstreamReply(json.dumps({"error": error}).encode(), 400)
