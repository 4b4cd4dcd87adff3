"""Any OpenAI-compatible endpoint as an engine: `POST <base_url>/chat/completions`.

A Chat client's own body is sent on, cleaned; other dialects are converted. Where the call is captured and the
endpoint returns ids (`return_token_ids`), the fields that make it do so are pinned, whatever the client said: ids,
logprobs, and a number for `top_logprobs`, whose explicit null makes engines return no logprobs at all. Left to others:
the meaning of provider errors (`provider_errors`), judging ids (the recorder).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec

from toprope.dialects.chat_reply import finish_from_chat, output_from_chat
from toprope.dialects.chat_request import clean_chat_body, request_to_chat
from toprope.dialects.messages_reply import lost_in_messages
from toprope.errors.tree import BadRequest, ConfigError, EngineUnavailable, ModelRejected
from toprope.http.client import Client
from toprope.http.peer import MAX_REPLY_BYTES, read_base_url
from toprope.protocol.headers import CLIENT_SESSION
from toprope.servers.model.engines.base import Capabilities, EngineReply, EngineRequest, LogprobsMode, SampledTokens
from toprope.servers.model.engines.chat_endpoint import ChatEndpoint, EndpointBounds, no_completion
from toprope.servers.model.engines.replicas import Replicas
from toprope.wire.chat import ChatReply

BaseUrls: TypeAlias = Annotated[Sequence[str], msgspec.Meta(title="a list of base URLs")]


class OpenAIEngine:
    """An endpoint at `base_url` (with its `/v1`), or several that serve the same: `replicas` are further base URLs.

    `model` is sent upstream instead of what the client names; without it the client's name is, and one that names none
    gets the endpoint's only model. `return_token_ids` declares that the endpoint returns ids and logprobs when asked
    as vLLM is. `stream_usage` asks for usage in streams, which an endpoint that refuses `stream_options` must not be.
    `custom_tools` says that it takes tools of type custom (OpenAI does, open engines refuse them): without it those of
    a Responses client are left out, and named in the call's record.
    `max_attempts` and `retry_budget_s` bound what is sent again after 429 and 5xx; `timeout_s` bounds one generation,
    `idle_timeout_s` the time without a byte of a stream, `max_reply_bytes` the reply. Raises `ConfigError` for a base
    URL that is none or stands there twice, and for a bound that cannot be one.
    """

    def __init__(
        self,
        *,
        client: Client,
        base_url: str,
        replicas: BaseUrls = (),
        model: str | None = None,
        api_key: str | None = None,
        return_token_ids: bool = False,
        logprobs_mode: LogprobsMode = "raw",
        reasoning_field: str = "reasoning_content",
        stream_usage: bool = True,
        custom_tools: bool = False,
        max_attempts: int = 3,
        retry_budget_s: float = 60.0,
        timeout_s: float | None = None,
        idle_timeout_s: float | None = 600.0,
        max_reply_bytes: int = MAX_REPLY_BYTES,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        _check_replicas(base_url, replicas)
        bounds = EndpointBounds(max_attempts, retry_budget_s, timeout_s, idle_timeout_s, max_reply_bytes)
        self._replicas = Replicas(
            [
                ChatEndpoint(client=client, base_url=url, api_key=api_key, bounds=bounds, pause=pause)
                for url in (base_url, *replicas)
            ]
        )
        self.base_url = self._replicas.all[0].endpoint.base_url
        self.capabilities = Capabilities(
            returns_ids=return_token_ids, streams_ids=return_token_ids, logprobs_mode=logprobs_mode
        )
        self.model = model
        self._only_model: str | None = None
        self._reasoning_field = reasoning_field
        self._stream_usage = stream_usage
        self._custom_tools = custom_tools

    async def start(self) -> None:
        """On return every endpoint answered `/models`, and all that list models serve the same.

        Raises `EngineUnavailable` or `ModelAuth` naming the URL."""
        await self._learn_models()

    async def _learn_models(self) -> list[list[dict[str, Any]]]:
        """The entries of `/models` of every endpoint, empty where it lists none. Learns the only model, if it is one.

        A call goes to any replica: `EngineUnavailable` where they do not all serve the model, without `model` the same
        ones.
        """
        entries = [await replica.endpoint.models() or [] for replica in self._replicas.all]
        named = [sorted({entry["id"] for entry in each if isinstance(entry.get("id"), str)}) for each in entries]
        told = [names for names in named if names]
        if self.model is None:
            rule, agree = "without `model` they must all list the same", all(names == told[0] for names in told)
        else:
            rule, agree = f"`model` is {self.model!r}, which each must list", all(self.model in names for names in told)
        if len(named) > 1 and not agree:
            places = [replica.endpoint.base_url for replica in self._replicas.all]
            serves = [f"{url} serves {', '.join(names)}" for url, names in zip(places, named, strict=True) if names]
            raise EngineUnavailable(
                f"the replicas of one engine serve different models: {'; '.join(serves)}; {rule}. Give other models an "
                "engine of their own.",
                retryable=False,
            )
        self._only_model = told[0][0] if told and len(told[0]) == 1 else None
        return entries

    async def close(self) -> None:
        """Nothing to close: connections belong to the client that was given."""

    async def generate(self, request: EngineRequest) -> EngineReply:
        """One completion. Raises `EngineError` with the provider's status and words once the bounds are reached."""
        body, losses = self._body(request)
        pinned = self._pins(request)
        if pinned:
            pin_tokens(body)
        return await self._replicas.run(
            request.rollout_id or request.session,
            lambda endpoint: generate_at(endpoint, request, body, losses, pinned=pinned),
        )

    def _pins(self, request: EngineRequest) -> bool:
        """Whether the engine is made to return ids."""
        return request.want_tokens and self.capabilities.returns_ids

    def _body(self, request: EngineRequest) -> tuple[dict[str, Any], tuple[str, ...]]:
        if request.dialect == "chat" and request.body:
            body, losses = clean_chat_body(request.body)
        else:
            body, losses = request_to_chat(
                request.request, reasoning_field=self._reasoning_field, custom_tools=self._custom_tools
            )
        model = self.model or body.get("model") or self._only_model
        if model is None:
            raise ModelRejected(f"the request names no model, and the engine at {self.base_url} has no single one")
        body["model"] = model
        body.pop(
            "stream_options", None
        )  # the client's own are about its stream; some engines refuse them in plain calls
        if request.emit is not None:
            body["stream"] = True
            if self._stream_usage:
                body["stream_options"] = {"include_usage": True}
        return body, losses


async def generate_at(
    endpoint: ChatEndpoint, request: EngineRequest, body: dict[str, Any], losses: tuple[str, ...], *, pinned: bool
) -> EngineReply:
    """Send `body` to `endpoint`, streamed if the request wants deltas, and read the reply. `pinned`: it asks for ids.
    Raises as `Engine.generate`."""
    asked = request.dialect == "chat" and request.body.get("logprobs") is True
    headers = {} if request.session is None else {CLIENT_SESSION: request.session}
    if request.emit is None:
        completion = await endpoint.complete(body, headers, keep_logprobs=asked)
    else:
        completion = await endpoint.stream(
            body, headers, call_id=request.call_id, emit=request.emit, keep_logprobs=asked
        )
    try:
        # A Chat client joins what it is told into one message and sends that back: no order is kept for it.
        order = () if request.dialect == "chat" else completion.order
        output = output_from_chat(completion.message, request.call_id, order)
    except (BadRequest, RecursionError) as error:
        raise no_completion(endpoint.base_url, error) from error
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
        losses=losses if request.dialect != "messages" else (*losses, *lost_in_messages(output)),
    )


def _check_replicas(base_url: str, replicas: Sequence[str]) -> None:
    if isinstance(replicas, str):
        raise ConfigError(f"replicas {replicas!r}: expected a list of base URLs")
    seen: set[tuple[str, str]] = set()
    for name, url in (("base_url", base_url), *(("replicas", url) for url in replicas)):
        try:
            origin, path = read_base_url(url)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error
        place = (str(origin).lower(), path)
        if place in seen:
            raise ConfigError(f"replicas: {url} stands there twice; `base_url` is the first replica, list only others")
        seen.add(place)


def pin_tokens(body: dict[str, Any]) -> None:
    """Make `body` ask for ids and for a logprob of each, whatever the client said."""
    body["return_token_ids"] = True
    body["logprobs"] = True
    top = body.get("top_logprobs")
    body["top_logprobs"] = top if isinstance(top, int) and not isinstance(top, bool) and top > 0 else 0


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
