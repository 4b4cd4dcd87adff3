"""The argument strings that a rollout's recorded calls sampled, for dialects that carry objects instead.

Read from the record when a request first names a tool call, then only what was recorded since. Left to others: whether
an object is what a string says (`dialects.messages_arguments`).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace

from toprope.capture.recorder import Recorder
from toprope.dialects.messages_arguments import called_ids, restore_arguments
from toprope.servers.model.call import ModelCall

log = logging.getLogger(__name__)

_MAX_ROLLOUTS = 4096


class _Known:
    __slots__ = ("arguments", "read")

    def __init__(self) -> None:
        self.arguments: dict[str, list[str]] = {}  # oldest first: some engines give an id again
        self.read = 0  # entries that were looked at


class SampledArguments:
    """What one server's record knows of tool calls."""

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self._rollouts: OrderedDict[str, _Known] = OrderedDict()

    async def restore(self, call: ModelCall) -> ModelCall:
        """`call` with the strings that were sampled in place of those its history was given.

        Calls of its history that no record bears out stand in its losses (`arguments.<call id>`): what they were made
        from cannot be matched with what was sampled.
        """
        if not call.captured or call.rollout_id is None or not (wanted := called_ids(call.request)):
            return call
        known = await self._known(call.rollout_id, wanted)
        done = restore_arguments(call.request, known.get)
        losses = tuple(f"arguments.{each}" for each in done.unmatched)
        return replace(call, request=done.request, losses=(*call.losses, *losses))

    async def _known(self, key: str, wanted: tuple[str, ...]) -> dict[str, list[str]]:
        known = self._rollouts.setdefault(key, _Known())
        self._rollouts.move_to_end(key)
        if len(self._rollouts) > _MAX_ROLLOUTS:
            self._rollouts.popitem(last=False)
        if self._recorder is None or all(each in known.arguments for each in wanted):
            return known.arguments
        since = known.read
        try:
            entries = await self._recorder.recorded(key, since)
        except Exception:  # nothing is restored then, and said so
            log.exception("%s: recorded calls could not be read", key)
            entries = ()
        for entry in entries[known.read - since :]:  # another call may have looked at the first of them meanwhile
            known.read += 1
            for item in entry.output_items:
                if item.get("type") == "function_call":
                    known.arguments.setdefault(item["call_id"], []).append(item["arguments"])
        return known.arguments
