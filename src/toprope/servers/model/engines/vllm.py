"""Stock vLLM as an engine: exact ids, plain and streamed, proved at the start, and prompts given as ids.

    asked for with a captured call   return_token_ids, logprobs, never a null top_logprobs
    prompt ids                       at the top of a reply, on a stream's first chunk
    sampled ids, logprobs            on the choice, in a stream on every chunk, whatever its delta
    a prompt of ids                  kv_transfer_params.prompt_token_ids beside the messages: tool parsing is kept, and
                                     the prompt ids that come back say whether it was obeyed (with images it is not)

All dialects go through `/chat/completions`, since vLLM's own Responses and Messages routes lose ids. Two answers may
bear one response id (`X-Request-Id` decides it there), so nothing is keyed by it. Fields: vLLM 0.32,
https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html. Left to others: placeholders for logprobs that
are missing, which the record refuses (`tokens.entry`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from toprope.errors.tree import ConfigError, EngineUnavailable, ModelRejected
from toprope.http.client import Client
from toprope.http.peer import MAX_REPLY_BYTES
from toprope.servers.model.engines.base import Capabilities, EngineRequest, LogprobsMode, NextTurn
from toprope.servers.model.engines.chat_endpoint import ChatEndpoint
from toprope.servers.model.engines.openai import BaseUrls, OpenAIEngine, pin_tokens
from toprope.servers.model.engines.prompt_settings import place_effort, sent_settings
from toprope.servers.model.engines.vllm_turns import TurnTails
from toprope.tokens.entry import BadRecord, as_log_probs
from toprope.wire.chat import ChatReply

log = logging.getLogger(__name__)

_TOKEN_PROMPT = "kv_transfer_params"
_PROBE = "Größe 10², 你好:\n\tdef f(x1): return x1  # 2026"
"""Text of many kinds, so that tokenisers differ on it."""
_NEEDS = (
    "Toprope needs a vLLM that knows `return_token_ids`, reached directly and not through a proxy that drops "
    "fields it does not know; for an endpoint without ids use the engine `openai`."
)


class VllmEngine(OpenAIEngine):
    """vLLM at `base_url` (with its `/v1`), or several that serve the same model: `replicas` are further base URLs.

    `model` is the served name, learnt at the start if there is one only. `token_prompts: false` never gives prompts as
    ids. `logprobs_mode` is what the server was started with (`--logprobs-mode`: "raw" for raw_logprobs, "processed").
    `probe_timeout_s` bounds each call of the start's probe, which may have to warm the engine up. What `next_turn` asks
    later may have to wait as long as any call of a busy engine, and is bounded as one. Bounds as for `openai`.
    `max_model_len` is known once started, where vLLM says it.
    """

    def __init__(
        self,
        *,
        client: Client,
        base_url: str,
        replicas: BaseUrls = (),
        model: str | None = None,
        api_key: str | None = None,
        token_prompts: bool = True,
        logprobs_mode: LogprobsMode = "raw",
        reasoning_field: str = "reasoning",
        probe_timeout_s: float = 120.0,
        max_attempts: int = 3,
        retry_budget_s: float = 60.0,
        timeout_s: float | None = None,
        idle_timeout_s: float | None = 600.0,
        max_reply_bytes: int = MAX_REPLY_BYTES,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if not probe_timeout_s > 0:
            raise ConfigError(f"probe_timeout_s {probe_timeout_s}: expected seconds above 0")
        super().__init__(
            client=client,
            base_url=base_url,
            replicas=replicas,
            model=model,
            api_key=api_key,
            return_token_ids=True,
            logprobs_mode=logprobs_mode,
            reasoning_field=reasoning_field,
            max_attempts=max_attempts,
            retry_budget_s=retry_budget_s,
            timeout_s=timeout_s,
            idle_timeout_s=idle_timeout_s,
            max_reply_bytes=max_reply_bytes,
            pause=pause,
        )
        self.capabilities = Capabilities(
            returns_ids=True, accepts_token_prompt=token_prompts, streams_ids=True, logprobs_mode=logprobs_mode
        )
        self.max_model_len: int | None = None
        self._probe_timeout_s = probe_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._tails = TurnTails(self._tokenize, self._rendered, reasoning_field)

    async def start(self) -> None:
        """On return every replica returned exact ids for a tiny call, plain and streamed, all of them the same for its
        prompt, and `capabilities` say whether all take prompts of ids.

        Raises `EngineUnavailable` naming the URL and what was missing, or the provider's own refusal.
        """
        accepts = self.capabilities.accepts_token_prompt
        first: list[int] | None = None
        for replica, models in zip(self._replicas.all, await self._learn_models(), strict=True):
            prompt, accepts = await self._probe(replica.endpoint, models, token_prompts=accepts)
            first = prompt if first is None else first
            if prompt != first:
                raise EngineUnavailable(
                    f"the vLLM at {replica.endpoint.base_url} renders a prompt to other ids than the one at "
                    f"{self.base_url}: {prompt[:20]}, not {first[:20]}. Replicas need the same tokeniser and the same "
                    "chat template.",
                    retryable=False,
                )
        if self.capabilities.accepts_token_prompt and not accepts:
            log.warning("%s: prompts cannot be given as ids here; token-in is off", self.base_url)
        self.capabilities = replace(self.capabilities, accepts_token_prompt=accepts)

    async def close(self) -> None:
        """On return nothing is asked of the server any more; connections belong to the client that was given."""
        await self._tails.close()
        await super().close()

    async def next_turn(self, turn: NextTurn) -> list[int]:
        """What follows a recorded turn, for token-in, told by the server's own tokeniser and template.

        Raises `CannotContinue` where that is not certain, `EngineError` where the server does not answer.
        """
        settings = sent_settings(turn)
        settings["model"] = self.model or settings.get("model") or self._only_model
        return await self._tails.after(turn, settings)

    async def _tokenize(self, body: dict[str, Any]) -> list[int]:
        return await self._replicas.run(None, lambda endpoint: endpoint.tokenize(body))

    async def _rendered(self, body: dict[str, Any]) -> list[int]:
        asked = {**body, "max_tokens": 1, "temperature": 0}
        pin_tokens(asked)
        # The only byte of a whole reply is its first: what bounds a stream without a byte bounds the wait for it.
        wait = self._idle_timeout_s
        reply = await self._replicas.run(None, lambda endpoint: self._tried(endpoint, asked, wait))
        return [] if reply.prompt_ids is None else reply.prompt_ids.tolist()

    def _pins(self, request: EngineRequest) -> bool:
        return request.want_tokens or request.prompt_token_ids is not None

    def _body(self, request: EngineRequest) -> tuple[dict[str, Any], tuple[str, ...]]:
        body, losses = super()._body(request)
        place_effort(body, request.dialect)
        if request.prompt_token_ids is not None and self.capabilities.accepts_token_prompt:
            given = body.get(_TOKEN_PROMPT)
            kept = given if isinstance(given, dict) else {}
            body[_TOKEN_PROMPT] = {**kept, "prompt_token_ids": request.prompt_token_ids.tolist()}
        return body, losses

    async def _probe(
        self, endpoint: ChatEndpoint, models: list[dict[str, Any]], *, token_prompts: bool
    ) -> tuple[list[int], bool]:
        """One plain call and one streamed: the prompt ids of the plain one, and whether the other obeyed its prompt of
        ids, where it was given one."""
        url = endpoint.base_url
        model = self.model or self._only_model
        served = [str(entry.get("id")) for entry in models]
        if model is None or (served and model not in served):
            raise EngineUnavailable(
                f"the vLLM at {url} serves {', '.join(served) or 'no model'}; `model` is {model!r}: name one of them"
            )
        self._learn_length(next((entry for entry in models if entry.get("id") == model), {}))
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": _PROBE}],
            "max_tokens": 1,
            "temperature": 0,
        }
        pin_tokens(body)
        plain = await self._tried(endpoint, body, self._probe_timeout_s)
        prompt, ids = _exact(plain, f"the vLLM at {url} answered a plain call")
        given = [*prompt, *ids]
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        reply = None
        if token_prompts:
            try:
                asked = {**streamed, _TOKEN_PROMPT: {"prompt_token_ids": given}}
                reply = await self._tried(endpoint, asked, self._probe_timeout_s)
            except ModelRejected as error:  # a version that refuses the field: it serves well without
                log.warning("%s", error)
        if reply is None:
            reply = await self._tried(endpoint, streamed, self._probe_timeout_s)
        seen, _ = _exact(reply, f"the vLLM at {url} answered a streamed call")
        return prompt, token_prompts and seen == given

    async def _tried(self, endpoint: ChatEndpoint, body: dict[str, Any], wait_s: float | None) -> ChatReply:
        try:
            async with asyncio.timeout(wait_s):
                if body.get("stream"):
                    return await endpoint.stream(body, {}, call_id="probe", emit=lambda delta: None)
                return await endpoint.complete(body, {})
        except TimeoutError:
            raise EngineUnavailable(
                f"the vLLM at {endpoint.base_url} did not answer a call of one token within {wait_s:g} s"
            ) from None

    def _learn_length(self, entry: dict[str, Any]) -> None:
        length = entry.get("max_model_len")
        if isinstance(length, int) and not isinstance(length, bool):
            self.max_model_len = length if self.max_model_len is None else min(self.max_model_len, length)


def _exact(reply: ChatReply, who: str) -> tuple[list[int], list[int]]:
    """The prompt ids and the sampled ids of a probe. Raises `EngineUnavailable` saying what was not right."""
    prompt, ids, log_probs = reply.prompt_ids, reply.token_ids, reply.log_probs
    parts = {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": log_probs}
    missing = [name for name, value in parts.items() if value is None or not len(value)]
    why = reply.token_fault or (f"without {', '.join(missing)}" if missing else None)
    if prompt is None or ids is None or log_probs is None or why is not None:
        raise EngineUnavailable(f"{who} {why}. {_NEEDS}", retryable=False)
    try:
        as_log_probs(log_probs)
    except BadRecord as error:
        raise EngineUnavailable(f"{who} with a logprob that is none: {error}. {_NEEDS}", retryable=False) from error
    if len(ids) != len(log_probs) or reply.usage.output_tokens not in (None, len(ids)):
        counted = f"{len(ids)} ids, {len(log_probs)} logprobs, {reply.usage.output_tokens} tokens by its usage"
        raise EngineUnavailable(f"{who} with counts that disagree: {counted}. {_NEEDS}", retryable=False)
    return prompt.tolist(), ids.tolist()
