"""What an engine says while it generates: pieces of output items, in the order in which they were sampled.

A delta names the output item that it belongs to by `index`, its position in the final output; all pieces of one item
joined are what the finished item holds. Engines emit deltas, dialects write them as events. Left to others: the finish
(the engine's whole reply says it) and when it may leave (the model server).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """A piece of the text of the message item at `index`; the first one may be empty and only opens the item."""

    index: int
    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """A piece of the thought of the reasoning item at `index`."""

    index: int
    text: str


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """A piece of the arguments of the function call at `index`. The first piece of a call carries its `name`, and its
    `call_id` where the engine gave one; later pieces leave both None."""

    index: int
    arguments: str = ""
    name: str | None = None
    call_id: str | None = None


Delta: TypeAlias = TextDelta | ReasoningDelta | ToolCallDelta
Emit: TypeAlias = Callable[[Delta], None]
"""Called on the event loop for each delta, in order, never after the reply was returned. It never blocks or raises."""
