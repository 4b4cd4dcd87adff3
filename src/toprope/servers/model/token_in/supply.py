"""The prompt ids of one call: the recorded ids of the turn that it continues, and what came since.

    no turn of the model's in the request    the engine renders it; nothing is given up
    one recorded call says the same          its prompt + its generation + what follows (engine or renderer)
    anything else                            `auto`: the engine renders it, said once a reason and counted
                                             `required`: the call is refused

That the engine used what it was given is shown by the prompt ids which it returns; where they differ the call is no
evidence. Left to others: which call is continued (`record`), rendering (`ContinuesTurns`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from toprope.capture.recorder import Recorder
from toprope.dialects.pivot import request_items
from toprope.errors.tree import ConfigError, EngineError, RefusedError
from toprope.servers.model.call import ModelCall
from toprope.servers.model.engines.base import (
    CannotContinue,
    ContinuesTurns,
    Engine,
    EngineReply,
    NextTurn,
)
from toprope.servers.model.engines.prompt_settings import STEERING
from toprope.servers.model.token_in.record import Conversations
from toprope.servers.model.token_in.said import Conversation

log = logging.getLogger(__name__)

TokenInMode = Literal["off", "auto", "required"]

EXACT = "exact"
FIRST = "first"


@dataclass(frozen=True, slots=True)
class Supply:
    """What one call is given. `outcome` is `exact`, `first` or `fallback:<reason>`; `note` is kept with its record.

    `prompt_token_ids` (P,) uint32 and `parent`, the call that they continue, only where it is `exact`.
    """

    outcome: str
    note: Mapping[str, Any]
    prompt_token_ids: NDArray[np.uint32] | None = None
    parent: str | None = None
    forgiven: Mapping[str, int] = field(default_factory=dict)


class TokenIn:
    """The token-in of one server: `renderer` says what follows a recorded turn, the engine itself unless given."""

    def __init__(
        self,
        mode: TokenInMode,
        *,
        server: str,
        engine: Engine,
        recorder: Recorder | None,
        renderer: ContinuesTurns | None = None,
    ) -> None:
        if mode not in ("off", "auto", "required"):
            raise ConfigError(f"{server}: token_in is {mode!r}; accepted: off, auto, required")
        self._mode = mode
        self._server = server
        self._engine = engine
        self._renderer = renderer if renderer is not None else engine if isinstance(engine, ContinuesTurns) else None
        self._recorder = recorder
        self._conversations = Conversations(recorder) if recorder is not None and recorder.readable else None
        self._said: set[str] = set()

    def check(self) -> None:
        """After the engine's start. Raises `ConfigError` naming what `token_in: required` lacks here."""
        lacks = self._lacks()
        if self._mode == "required" and lacks is not None:
            raise ConfigError(f"{self._server}: token_in is required, but {lacks}")

    async def supply(self, call: ModelCall) -> Supply | None:
        """What `call` is given; None where token-in is not for it: off, not captured, or nothing here can do it.

        Raises in mode `required` `RefusedError` for a call that continues no recorded turn exactly, and the
        `EngineError` of an engine that did not answer, which may be asked again.
        """
        conversations = self._conversations
        if self._mode == "off" or not call.captured or call.rollout_id is None or self._lacks() is not None:
            return None
        if conversations is None:
            return None
        said = conversations.reader(call.rollout_id).conversation(call.request)
        if not said.segments:
            return Supply(FIRST, _known_by(said))
        try:
            return await self._continued(call, call.rollout_id, said)
        except CannotContinue as why:
            return self._fall_back(said, why)
        except EngineError as error:
            if self._mode == "required" and error.retryable:
                raise
            return self._fall_back(said, CannotContinue("renderer_failed", error.message))

    async def _continued(self, call: ModelCall, key: str, said: Conversation) -> Supply:
        assert self._renderer is not None
        assert self._conversations is not None
        items = request_items(call.request)
        prefilled = _prefilled(call, ends_with_the_models=said.tail == len(items))
        try:
            parent = await self._conversations.parent_of(key, said)
        except CannotContinue as why:
            raise prefilled or why from why
        if parent is None:  # turns that were shown to the model, not sampled by it
            return Supply(FIRST, _stated(said))
        if prefilled is not None:
            raise prefilled
        if call.media:
            raise CannotContinue("media", "the conversation holds images, sound or files, which are not ids alone")
        turn = NextTurn(
            request=call.request,
            items=items,
            tail=said.tail,
            prompt_token_ids=parent.prompt_token_ids,
            generation_token_ids=parent.generation_token_ids,
            dialect=call.dialect,
            body=call.body,
            changed=tuple(name for name in STEERING if parent.steering.get(name) != said.steering.get(name)),
        )
        tail = np.asarray(await self._renderer.next_turn(turn), dtype=np.uint32)
        counts = dict(parent.forgiven)
        note = {**_known_by(said), "after": parent.call_id, "forgiven": counts}
        ids = np.concatenate([parent.prompt_token_ids, parent.generation_token_ids, tail])
        return Supply(EXACT, note, ids, parent.call_id, counts)

    def _fall_back(self, said: Conversation, why: CannotContinue) -> Supply:
        if self._mode == "required":
            raise RefusedError(
                f"{self._server}: token_in is required, and this call cannot be built from recorded ids: {why} "
                f"({why.reason}). Send the history and the settings as they were, and none that is not carried, or "
                "set `token_in: auto`.",
                status=422,
            )
        if why.reason not in self._said:
            self._said.add(why.reason)
            log.warning(
                "%s: a prompt is the engine's own rendering and not the recorded ids: %s (%s); said once, counted in "
                "each rollout's metrics",
                self._server,
                why,
                why.reason,
            )
        return Supply(f"fallback:{why.reason}", {**_stated(said), "fallback": why.reason})

    def _lacks(self) -> str | None:
        if not self._engine.capabilities.accepts_token_prompt:
            return "the engine takes no prompts of ids"
        if self._renderer is None:
            return "neither the engine nor a renderer can say what follows a recorded turn (`token_in_renderer`)"
        if self._recorder is not None and self._conversations is None:
            return "the capture store cannot be read while a rollout runs"
        return None


def obeyed(made: EngineReply, supply: Supply | None) -> EngineReply:
    """The reply; with a fault where the engine did not generate from the ids that it was given."""
    if supply is None or supply.prompt_token_ids is None or made.tokens is None or made.token_fault is not None:
        return made
    returned = np.asarray(made.tokens.prompt_token_ids)
    if np.array_equal(returned, supply.prompt_token_ids):
        return made
    fault = (
        f"no_token_ids: {len(supply.prompt_token_ids)} prompt ids were given, the engine used {len(returned)} others"
    )
    return replace(made, token_fault=fault)


def _prefilled(call: ModelCall, *, ends_with_the_models: bool) -> CannotContinue | None:
    """Why the prompt is not to end with the head of a new turn, where it is not."""
    if ends_with_the_models:
        return CannotContinue("prefilled", "the request ends with words of the model's")
    for name in ("continue_final_message", "add_generation_prompt"):
        if call.request.extra.get(name) not in (None, name == "add_generation_prompt"):
            return CannotContinue("prefilled", f"{name} is set")
    return None


def _stated(said: Conversation) -> dict[str, Any]:
    return {**_known_by(said), "segments": [segment.as_json() for segment in said.segments]}


def _known_by(said: Conversation) -> dict[str, Any]:
    steering = {"steering": dict(said.steering)} if said.steering else {}
    return {"skeleton": said.skeleton(len(said.segments)), **steering}
