"""`remote`: an agent of others that is reached by URL and knows nothing of Toprope. One request, one answer.

    POST <url>   {"prompt", "request", "base_url", "root_url", "api_key", "model", "session_id", "activation"}
    200          {"answer": "..."}, or a Responses object (with `output`)

`prompt` is the task as one text, `request` the whole Responses request. `base_url` (ends in /v1) and `root_url` (does
not) lead through a gate to the one model server, under this rollout, with a key that is made for this activation and
ends with it. `{"answer", "status": "failed" | "incomplete", "error"}` says that there is no whole answer; the verifier
decides. Any other status than a 2xx is a failure of the episode. When the activation is stopped the connection is cut,
and `cancel_path`, where it is configured, is told `{"session_id", "activation"}`.

A server that speaks NeMo Gym's agent protocol needs none of this: give its `url` as the agent. Left to others: the gate
(`sandbox.gate`), sessions (`servers.agent`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from toprope.catalog.masking import Mask
from toprope.catalog.prompts import prompt_of, response_of
from toprope.catalog.said import said
from toprope.errors.kinds import Kind
from toprope.errors.tree import ConfigError, PeerError, TopropeError, TransportError
from toprope.http.client import Client
from toprope.http.reply import Reply
from toprope.sandbox.gate import Gate, GateKeys
from toprope.servers.agent.agent import Activation, Agent

log = logging.getLogger("toprope.agent")

CANCEL_S = 5.0
_STATUSES = ("completed", "incomplete", "failed")
_WHY_NO_RESPONSE = (
    "`output` must be a list of objects that each have a `type`, or a `role` and `content`, and `status`, where there "
    "is one, one of " + ", ".join(_STATUSES)
)


class RemoteAgent(Agent):
    """`RemoteAgent(url="http://127.0.0.1:9000/solve")`.

    `api_key` is sent to it as a bearer token. `timeout_s` bounds one activation beside the episode's own deadline,
    `max_reply_bytes` its reply. `model`: the name it is given, where the task names none. An agent on another machine
    needs `gate_bind`, an address of this machine to listen on, and `gate_host`, the name under which it is reached.
    """

    needs_http_model = True

    def __init__(
        self,
        *,
        client: Client,
        url: str,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        model: str = "policy",
        timeout_s: float | None = None,
        max_reply_bytes: int = 16 * 2**20,
        cancel_path: str | None = None,
        gate_bind: str = "127.0.0.1",
        gate_host: str | None = None,
    ) -> None:
        if gate_bind in ("0.0.0.0", "::") and gate_host is None:
            raise ConfigError(f"gate_host: it is needed with gate_bind {gate_bind}; accepted: a name of this machine")
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigError(f"timeout_s: {timeout_s} given; accepted: seconds above 0")
        if max_reply_bytes < 1:
            raise ConfigError(f"max_reply_bytes: {max_reply_bytes} given; accepted: bytes, at least 1")
        try:
            self._peer = client.peer(url, None, api_key=api_key)
        except ValueError as error:
            raise ConfigError(f"url: {error}") from error
        self._headers = dict(headers or {})
        self._model = model
        self._timeout_s = timeout_s
        self._max_bytes = max_reply_bytes
        self._cancel_path = cancel_path
        self._bind, self._host = gate_bind, gate_host or gate_bind

    async def respond(self, activation: Activation) -> dict[str, Any]:
        """The agent's answer as a Responses object.

        Raises `TransportError` where no answer came, kind agent_timeout where it took longer than `timeout_s`,
        `PeerError` of kind agent_failed for an error and bad_reply for an answer that is none, with the agent's words.
        """
        model = str(activation.request.get("model") or self._model)
        keys = GateKeys(server=activation.model.api_key)
        async with Gate(activation.model.root_url(), keys=keys, bind=self._bind) as gate:
            activation.partial = partial(_unfinished, gate, model)
            root = gate.inside(self._host)
            body = {
                "prompt": prompt_of(activation.request),
                "request": activation.request,
                "base_url": f"{root}/v1",
                "root_url": root,
                "api_key": keys.own,
                "model": model,
                "session_id": activation.session_id,
                "activation": activation.number,
            }
            try:
                reply = await self._ask(body)
            except asyncio.CancelledError:
                await asyncio.shield(self._cancel(body))
                raise
            finally:
                activation.model.calls += gate.calls
                activation.invocation["refused_requests"] = gate.refused
                if activation.number == 1:
                    activation.observations.gap("what the remote agent did beside its model calls is not observed")
            # What it says of itself must not carry the key on: messages and rows are for many to read.
            mask = Mask(keys.own, "[the gate's key]")
            reply = replace(reply, body=await asyncio.to_thread(mask.body, reply.body))  # 16 MiB may take seconds
            return _read(_accepted(reply), model, extended=activation.extended)

    async def _ask(self, body: Mapping[str, Any]) -> Reply:
        try:
            return await self._peer.request(
                "POST", "", body=body, headers=self._headers, timeout_s=self._timeout_s, max_bytes=self._max_bytes
            )
        except TransportError as error:
            if error.kind == Kind.TRANSPORT_TIMEOUT and self._timeout_s is not None:
                await self._cancel(body)
                raise TopropeError(
                    f"remote agent: no answer within {self._timeout_s:g} s: {error.message}",
                    kind=Kind.AGENT_TIMEOUT,
                    status=504,
                    retryable=True,
                    delivery=error.delivery,
                ) from error
            raise

    async def _cancel(self, body: Mapping[str, Any]) -> None:
        if self._cancel_path is None:
            return
        named = {name: body[name] for name in ("session_id", "activation")}
        try:
            async with asyncio.timeout(CANCEL_S):
                await self._peer.request("POST", self._cancel_path, body=named, headers=self._headers)
        except (TopropeError, TimeoutError) as error:  # its key has ended with the gate: nothing more can be done
            log.warning("remote agent: it could not be told that session %s is over: %s", body["session_id"], error)


def _accepted(reply: Reply) -> Reply:
    if reply.status < 300:
        return reply
    info = reply.error_info()
    raise PeerError(
        f"remote agent: {reply.url} answered {reply.status}: {info.message}",
        kind=Kind.AGENT_FAILED,
        retryable=info.retryable,
        upstream_status=reply.status,
    )


def _read(reply: Reply, model: str, *, extended: bool) -> dict[str, Any]:
    value = reply.json()
    if isinstance(value, dict) and isinstance(value.get("output"), list):
        if not _is_response(value):
            raise _bad(reply, _WHY_NO_RESPONSE)
        return value
    if not isinstance(value, dict) or not isinstance(value.get("answer"), str):
        raise _bad(reply, "it has neither `answer`, a string, nor `output`, a list")
    status, error = value.get("status", "completed"), value.get("error")
    if status not in _STATUSES:
        raise _bad(reply, f"status {status!r} is none of {', '.join(_STATUSES)}")
    reason = str(error) if extended and error is not None else None
    text = str(error) if status == "failed" else None
    return response_of(value["answer"], model=model, status=status, error=text, reason=reason)


def _is_response(value: Mapping[str, Any]) -> bool:
    if value.get("object", "response") != "response" or value.get("status", "completed") not in _STATUSES:
        return False
    return all(
        isinstance(item, dict)
        and (isinstance(item.get("type"), str) or (isinstance(item.get("role"), str) and "content" in item))
        for item in value["output"]
    )


def _bad(reply: Reply, why: str) -> PeerError:
    return PeerError(
        f"remote agent: {reply.url} answered {reply.status} with a body that is no answer: {why}; it begins with "
        f"{reply.text[:200]!r}",
        kind=Kind.BAD_REPLY,
        retryable=False,
        upstream_status=reply.status,
    )


def _unfinished(gate: Gate, model: str) -> dict[str, Any]:
    last = said(gate.heard)
    return response_of("" if last is None else last.text, model=model, status="incomplete")
