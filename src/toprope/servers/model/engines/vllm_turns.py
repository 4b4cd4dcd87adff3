"""What follows a recorded turn on vLLM, told by the server's own `/tokenize`: no renderer, no tokeniser here.

    F = ids of the whole history, with the head of the turn to generate
    H = ids of the history through the parent's turn, without one
    next = what closes the parent's turn and was not sampled, then F[len(H):]      where H is a prefix of F

Templates that treat the last turn apart (Qwen3's writes a thought into it, and drops it later) make H no prefix of F.
Then F is asked for twice with two texts in place of the parent's turn: what both end with follows any turn there. It
must begin with what closes a turn, which is found the same way. Where neither holds, nothing is guessed.

Seen on vLLM 0.32; the route is at the server's root, beside `/v1`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from toprope.dialects.chat_history import messages_from_items
from toprope.dialects.chat_parts import tools_to_chat
from toprope.servers.model.engines.base import CannotContinue, NextTurn

Tokenize = Callable[[dict[str, Any]], Awaitable[list[int]]]
"""A `/tokenize` body without the model -> the ids. Raises `EngineError`."""

_PROBES = ("x", "yy 7")
"""Two texts that end in different tokens."""
_TEMPLATE_FIELDS = ("chat_template", "chat_template_kwargs")
_REMEMBERED = 256


class TurnTails:
    """Tells the ids after recorded turns of one engine; remembers what closes a turn, which is the template's."""

    def __init__(self, tokenize: Tokenize, reasoning_field: str) -> None:
        self._tokenize = tokenize
        self._reasoning_field = reasoning_field
        self._closings: OrderedDict[str, list[int]] = OrderedDict()

    async def after(self, turn: NextTurn) -> list[int]:
        """As `ContinuesTurns.next_turn`."""
        history, lost = messages_from_items(turn.items[: turn.tail], reasoning_field=self._reasoning_field)
        new, lost_too = messages_from_items(turn.items[turn.tail :], reasoning_field=self._reasoning_field)
        if lost or lost_too:
            raise CannotContinue("items_not_written", f"Chat cannot carry {', '.join((*lost, *lost_too))}")
        fields = {name: turn.request.extra[name] for name in _TEMPLATE_FIELDS if turn.request.extra.get(name)}
        tools, _ = tools_to_chat(turn.request.tools)
        if tools:
            fields["tools"] = tools
        closing = await self._closing(fields)
        return [
            *_unsampled(closing, turn.generation_token_ids.tolist()),
            *await self._tail(history, new, fields, closing),
        ]

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
        key = repr(sorted(fields.items(), key=lambda each: each[0]))
        known = self._closings.get(key)
        if known is None:
            ask = {"role": "user", "content": "1"}
            one, two = [
                await self._ids([ask, {"role": "assistant", "content": text}], fields, head=False) for text in _PROBES
            ]
            known = self._closings[key] = _common_end(one, two)
            if len(self._closings) > _REMEMBERED:
                self._closings.popitem(last=False)
        if not known:
            raise CannotContinue("turns_have_no_end", "the engine's template writes nothing after a turn")
        return known

    async def _ids(self, messages: list[dict[str, Any]], fields: Mapping[str, Any], *, head: bool) -> list[int]:
        return await self._tokenize(
            {"messages": messages, **fields, "add_generation_prompt": head, "add_special_tokens": False}
        )


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
