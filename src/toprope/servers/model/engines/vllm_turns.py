"""What follows a recorded turn on vLLM, told by the server's own `/tokenize`: no renderer, no tokeniser here.

    F = ids of the whole history, with the head of the turn to generate
    H = ids of the history through the parent's turn, without one
    next = what closes the parent's turn and was not sampled, then F[len(H):]      where H is a prefix of F

Templates that treat the last turn apart (Qwen3's writes a thought into it, and drops it later) make H no prefix of F.
Then F is asked for twice with two texts in place of the parent's turn: what both end with follows any turn there. It
must begin with what closes a turn, which is found the same way. Where neither holds, nothing is guessed.

`/tokenize` takes fewer settings than a call does. What a template is handed of the others stands in
`chat_template_kwargs` instead, as vLLM itself puts it there; what is not known never to shape a prompt is refused. That
both roads end alike is not taken on trust: each set of settings is tried once on a call of one token, whose prompt ids
must be what `/tokenize` says of it. That call may wait behind others, so all turns that need it wait for the same one.

Seen on vLLM 0.32; the route is at the server's root, beside `/v1`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from toprope.dialects.chat_history import messages_from_items
from toprope.errors.tree import EngineUnavailable
from toprope.servers.model.engines.base import CannotContinue, NextTurn
from toprope.servers.model.engines.prompt_settings import (
    CARRIED,
    NOT_CARRIED,
    STEERING,
    UNREAD,
    check_carried,
    template_kwargs,
)
from toprope.servers.model.engines.proofs import Proofs
from toprope.tokens.items import value_mark

Prompt = Callable[[dict[str, Any]], Awaitable[list[int]]]
"""A body -> the ids of its prompt: of `/tokenize`, or those that a call was answered with. Raises `EngineError`."""

_PROBES = ("x", "yy 7")
"""Two texts that end in different tokens."""
_ASK = {"role": "user", "content": "1"}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_STEERED: Mapping[str, Mapping[str, Any]] = {
    "tool_choice": {"tools": [_TOOL], "tool_choice": "required"},
    "response_format": {"response_format": {"type": "json_object"}},
}
"""What shows whether the template reads a setting at all."""
_REMEMBERED = 256


class TurnTails:
    """Tells the ids after recorded turns of one engine; remembers what closes a turn, which is the template's.

    `tokenize` is its `/tokenize`; `rendered` are the prompt ids of a call of one token.
    """

    def __init__(self, tokenize: Prompt, rendered: Prompt, reasoning_field: str) -> None:
        self._tokenize = tokenize
        self._rendered = rendered
        self._reasoning_field = reasoning_field
        self._closings: OrderedDict[str, list[int]] = OrderedDict()
        self._proofs = Proofs()

    async def after(self, turn: NextTurn, settings: Mapping[str, Any]) -> list[int]:
        """As `ContinuesTurns.next_turn`; `settings` are the call's Chat body without its messages."""
        check_carried(settings, (*CARRIED, *STEERING, *UNREAD), "/tokenize")
        fields = _fields(settings)
        history, lost = messages_from_items(turn.items[: turn.tail], reasoning_field=self._reasoning_field)
        new, lost_too = messages_from_items(turn.items[turn.tail :], reasoning_field=self._reasoning_field)
        if lost or lost_too:
            raise CannotContinue("items_not_written", f"Chat cannot carry {', '.join((*lost, *lost_too))}")
        await self._prove(settings)
        for name in turn.changed:
            await self._prove({"model": settings.get("model"), **_STEERED[name]})
        closing = await self._closing(fields)
        return [
            *_unsampled(closing, turn.generation_token_ids.tolist()),
            *await self._tail(history, new, fields, closing),
        ]

    async def close(self) -> None:
        """On return no call of one token is in hand any more."""
        await self._proofs.close()

    async def _tail(
        self, history: list[dict[str, Any]], new: list[dict[str, Any]], fields: Mapping[str, Any], closing: list[int]
    ) -> list[int]:
        """What the template writes after the parent's turn and what closes it."""
        whole = await self._ids([*history, *new], fields, head=True)
        before = await self._ids(history, fields, head=False)
        if whole[: len(before)] == before and before[-len(closing) :] == closing:
            return whole[len(before) :]
        last = max(index for index, message in enumerate(history) if message.get("role") == "assistant")
        one, two = [
            await self._ids([*history[:last], {"role": "assistant", "content": text}, *new], fields, head=True)
            for text in _PROBES
        ]
        after = _common_end(one, two)
        if after[: len(closing)] != closing:
            raise CannotContinue(
                "template_rewrites_history",
                "the engine's template renders the history so far differently once something follows it, and what "
                "follows cannot be told apart",
            )
        return after[len(closing) :]

    async def _closing(self, fields: Mapping[str, Any]) -> list[int]:
        """What the template writes after the words of a turn: the end of the turn and what separates it."""
        key = value_mark(fields)
        known = self._closings.get(key)
        if known is None:
            one, two = [
                await self._ids([_ASK, {"role": "assistant", "content": text}], fields, head=False) for text in _PROBES
            ]
            known = self._closings[key] = _common_end(one, two)
            if len(self._closings) > _REMEMBERED:
                self._closings.popitem(last=False)
        if not known:
            raise CannotContinue("turns_have_no_end", "the engine's template writes nothing after a turn")
        return known

    async def _prove(self, settings: Mapping[str, Any]) -> None:
        """Returns if a call with these settings is rendered as `/tokenize` is told to render it."""
        names = ("model", "tools", *CARRIED, *STEERING, *UNREAD)
        asked = {name: settings[name] for name in names if settings.get(name) is not None}
        why = await self._proofs.why_not(value_mark(asked), lambda: self._differs(asked))
        if why is not None:
            raise CannotContinue(NOT_CARRIED, why)

    async def _differs(self, asked: Mapping[str, Any]) -> str | None:
        """Why a call that asks so is not what `/tokenize` says of it; None where it is.

        Raises `EngineUnavailable` where it does not say what its prompt was.
        """
        rendered = await self._rendered({**asked, "messages": [_ASK]})
        if not rendered:  # says nothing about the template
            raise EngineUnavailable("the engine answered a call of one token without the ids of its prompt")
        if rendered == await self._ids([_ASK], _fields(asked), head=True):
            return None
        named = ", ".join(sorted(asked.keys() - {"model"})) or "nothing"
        return (
            f"the engine renders a call that sets {named} to other ids than its /tokenize, which cannot be told "
            "of all that its template reads"
        )

    async def _ids(self, messages: list[dict[str, Any]], fields: Mapping[str, Any], *, head: bool) -> list[int]:
        return await self._tokenize(
            {"messages": messages, **fields, "add_generation_prompt": head, "add_special_tokens": False}
        )


def _fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What `/tokenize` is told of a call's settings."""
    named, made = template_kwargs(settings)
    fields = {name: settings[name] for name in ("model", "tools", "chat_template") if settings.get(name) is not None}
    if named or made:
        fields["chat_template_kwargs"] = {**named, **made}
    return fields


def _unsampled(closing: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """What of `closing` was not sampled: all but the longest beginning of it that the sampled ids end with.

    How the turn ended is not asked. A limit and a stop string leave any id last, also one that closes a turn further
    on: the newline after ChatML's end is the newline of a text. Such an id says nothing about the end before it.
    """
    size = min(len(closing), len(sampled))
    while size and list(sampled[-size:]) != list(closing[:size]):
        size -= 1
    return list(closing[size:])


def _common_end(one: Sequence[int], two: Sequence[int]) -> list[int]:
    size = 0
    while size < min(len(one), len(two)) and one[-1 - size] == two[-1 - size]:
        size += 1
    return list(one[len(one) - size :])
