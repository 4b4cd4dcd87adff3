"""Any OpenAI-compatible endpoint as an engine: `POST <base_url>/chat/completions`.

A Chat client's own body is sent on, cleaned; other dialects are converted. Where the call is captured and the
endpoint returns ids (`return_token_ids`), the fields that make it do so are pinned, whatever the client said: ids,
logprobs, and a number for `top_logprobs`, whose explicit null makes engines return no logprobs at all. Left to others:
the meaning of provider errors (`provider_errors`), judging ids (the recorder).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from toprope.dialects.chat_reply import finish_from_chat, output_from_chat
from toprope.dialects.chat_request import clean_chat_body, request_to_chat
from toprope.errors.tree import BadRequest, ConfigError, EngineError, EngineUnavailable, ModelRejected, TransportError
from toprope.http.client import Client
from toprope.http.reply import Reply
from toprope.protocol.headers import CLIENT_SESSION
from toprope.servers.model.engines.base import Capabilities, EngineReply, EngineRequest, LogprobsMode, SampledTokens
from toprope.servers.model.engines.provider_errors import provider_error
from toprope.wire.chat import BadChatReply, ChatReply, read_chat_reply
from toprope.wire.fields import write_object

log = logging.getLogger(__name__)


class OpenAIEngine:
    """An endpoint at `base_url` (with its `/v1`).

    `model` is sent upstream instead of what the client names; without it the client's name is, and one that names none
    gets the endpoint's only model. `return_token_ids` declares that the endpoint returns ids and logprobs when asked
    as vLLM is. `max_attempts` and `retry_budget_s` bound what is sent again after 429 and 5xx; `timeout_s` bounds one
    generation. Raises `ConfigError` for a base URL that is none.
    """

    def __init__(
        self,
        *,
        client: Client,
        base_url: str,
        model: str | None = None,
        api_key: str | None = None,
        return_token_ids: bool = False,
        logprobs_mode: LogprobsMode = "raw",
        reasoning_field: str = "reasoning_content",
        max_attempts: int = 3,
        retry_budget_s: float = 60.0,
        timeout_s: float | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if max_attempts < 1:
            raise ConfigError(f"max_attempts {max_attempts}: expected at least 1")
        self.base_url = base_url.rstrip("/")
        try:
            self._peer = client.peer(self.base_url, None, api_key=api_key)
        except ValueError as error:
            raise ConfigError(f"base_url: {error}") from error
        self.capabilities = Capabilities(returns_ids=return_token_ids, logprobs_mode=logprobs_mode)
        self.model = model
        self._only_model: str | None = None
        self._reasoning_field = reasoning_field
        self._max_attempts = max_attempts
        self._retry_budget_s = retry_budget_s
        self._timeout_s = timeout_s
        self._pause = pause

    async def start(self) -> None:
        """On return the endpoint answered `/models`. Raises `EngineUnavailable` or `ModelAuth` naming the URL."""
        try:
            reply = await self._peer.request("GET", "/models", timeout_s=10.0)
        except TransportError as error:
            raise EngineUnavailable(f"the engine at {self.base_url} cannot be reached: {error.message}") from error
        if reply.status in (404, 405, 501):  # not every endpoint lists its models; one that answers is alive
            return
        if reply.status >= 400:
            raise provider_error(reply)
        models = _model_names(reply)
        if len(models) == 1:
            self._only_model = models[0]

    async def close(self) -> None:
        """Nothing to close: connections belong to the client that was given."""

    async def generate(self, request: EngineRequest) -> EngineReply:
        """One completion. Raises `EngineError` with the provider's status and words once the bounds are reached."""
        body, losses = self._body(request)
        pinned = request.want_tokens and self.capabilities.returns_ids
        asked = request.dialect == "chat" and request.body.get("logprobs") is True
        headers = {} if request.session is None else {CLIENT_SESSION: request.session}
        reply = await self._send(write_object(body), headers)
        try:
            completion = read_chat_reply(reply.body, keep_logprobs=asked)
            output = output_from_chat(completion.message, request.call_id)
        except (BadChatReply, BadRequest) as error:
            raise EngineUnavailable(f"{reply.url} answered 200 with what is no chat completion: {error}") from error
        tokens, fault = _tokens(completion, request.want_tokens, pinned)
        return EngineReply(
            output=output,
            finish_reason=finish_from_chat(completion.finish_reason, output),
            model=completion.model or str(body["model"]),
            usage=completion.usage,
            tokens=tokens,
            token_fault=fault,
            response_id=completion.id,
            logprobs=completion.logprobs,
            extra=completion.extra,
            losses=losses,
        )

    def _body(self, request: EngineRequest) -> tuple[dict[str, Any], tuple[str, ...]]:
        losses: tuple[str, ...] = ()
        if request.dialect == "chat" and request.body:
            body = clean_chat_body(request.body)
        else:
            body, losses = request_to_chat(request.request, reasoning_field=self._reasoning_field)
        model = self.model or body.get("model") or self._only_model
        if model is None:
            raise ModelRejected(f"the request names no model, and the engine at {self.base_url} has no single one")
        body["model"] = model
        if request.want_tokens and self.capabilities.returns_ids:
            body["return_token_ids"] = True
            body["logprobs"] = True
            top = body.get("top_logprobs")
            body["top_logprobs"] = top if isinstance(top, int) and not isinstance(top, bool) and top > 0 else 0
        return body, losses

    async def _send(self, body: bytes, headers: dict[str, str]) -> Reply:
        """The 200 of the endpoint; 429 and 5xx are sent again within one counter, Retry-After honoured."""
        deadline = time.monotonic() + self._retry_budget_s
        attempt = 0
        while True:
            attempt += 1
            error = await self._attempt(body, headers)
            if isinstance(error, Reply):
                return error
            delay = _delay(error, attempt)
            again = error.retryable and attempt < self._max_attempts and time.monotonic() + delay <= deadline
            if attempt == 1:  # said at once: a run that waits for an ailing provider should not look idle
                log.warning("%s [%s]; %s", error, error.kind, f"again in {delay:.1f} s" if again else "not sent again")
            if not again:
                raise error
            await self._pause(delay)

    async def _attempt(self, body: bytes, headers: dict[str, str]) -> Reply | EngineError:
        try:
            reply = await self._peer.request(
                "POST", "/chat/completions", body=body, headers=headers, timeout_s=self._timeout_s
            )
        except TransportError as error:
            # Whether it was delivered is unknown or was tried again already: the client's turn, not ours.
            raise EngineUnavailable(
                f"the engine at {self.base_url} did not answer: {error.message}", delivery=error.delivery
            ) from error
        return reply if reply.status < 400 else provider_error(reply)


def _tokens(completion: ChatReply, want_tokens: bool, pinned: bool) -> tuple[SampledTokens | None, str | None]:
    """The ids of a completion, or why there are none although they are wanted."""
    if completion.token_fault is not None:
        return None, completion.token_fault
    prompt, ids, log_probs = completion.prompt_ids, completion.token_ids, completion.log_probs
    if prompt is not None and ids is not None and log_probs is not None:
        return SampledTokens(prompt, ids, log_probs), None
    if not want_tokens:
        return None, None
    parts = {"prompt ids": prompt, "generated ids": ids, "logprobs": log_probs}
    missing = ", ".join(name for name, value in parts.items() if value is None)
    asked = "asked for and not returned" if pinned else "not asked for (return_token_ids is off)"
    return None, f"no_token_ids: {missing} were {asked}"


def _delay(error: EngineError, attempt: int) -> float:
    """Seconds until the next try: what the provider asks for, else 0.5, 1, 2 ..."""
    try:
        return max(0.0, float(error.headers.get("retry-after", "")))
    except ValueError:
        return 0.5 * 2.0 ** (attempt - 1)


def _model_names(reply: Reply) -> list[str]:
    body = reply.json()
    data = body.get("data") if isinstance(body, dict) else None
    names = [entry.get("id") for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []
    return [name for name in names if isinstance(name, str)]
