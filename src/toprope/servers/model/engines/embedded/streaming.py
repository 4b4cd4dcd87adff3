"""A generation's text as deltas while it grows: exactly the items that `replies` makes of the whole.

Nothing leaves that a later id could change: half a UTF-8 sequence, a text that may become a stop text, a frame that may
become a call, white space before a call. So a call leaves whole, when its frame closes. Pure, but for `Outlet`, which
carries deltas from the engine's thread to the caller's loop.
"""

from __future__ import annotations

import asyncio
import codecs

from toprope.dialects.deltas import Delta, Emit, TextDelta, ToolCallDelta
from toprope.servers.model.engines.embedded.replies import CallIds, parse_call
from toprope.servers.model.engines.embedded.sequence import Sequence
from toprope.servers.model.engines.embedded.template import CALL_CLOSE, CALL_OPEN


class ItemStream:
    """The deltas of one reply. `calls` and `call_ids` are those that the whole reply is made with."""

    def __init__(self, *, calls: bool, call_ids: CallIds) -> None:
        self._calls = calls
        self._call_ids = call_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._fed = 0  # bytes of the sequence's text that were decoded
        self._text = ""
        self._start = 0  # where the text of the item at `_index` begins
        self._sent = 0
        self._scan = 0  # no frame opens before this
        self._index = 0
        self._opened = False

    def advance(self, sequence: Sequence) -> list[Delta]:
        """What the sequence said for good since the last time."""
        new = sequence.settled(self._fed)
        self._fed += len(new)
        return self.feed(new)

    def feed(self, data: bytes) -> list[Delta]:
        """The deltas of so many more bytes of text."""
        self._text += self._decoder.decode(data)
        deltas: list[Delta] = []
        while self._calls and (frame := self._text.find(CALL_OPEN, self._scan)) >= 0:
            self._say(frame, deltas)
            self._scan = frame
            close = self._text.find(CALL_CLOSE, frame + len(CALL_OPEN))
            if close < 0:
                return deltas
            self._scan = close + len(CALL_CLOSE)
            call = parse_call(self._text[frame + len(CALL_OPEN) : close])
            if call is not None:
                self._call(*call, deltas)
        limit = len(self._text) - (_begun(self._text, CALL_OPEN, self._scan) if self._calls else 0)
        self._say(limit, deltas)
        self._scan = max(self._scan, limit)
        return deltas

    def _say(self, upto: int, deltas: list[Delta]) -> None:
        if upto <= self._sent or not (self._opened or self._text[self._start : upto].strip()):
            return
        deltas.append(TextDelta(self._index, self._text[self._sent : upto]))
        self._opened, self._sent = True, upto

    def _call(self, name: str, arguments: str, deltas: list[Delta]) -> None:
        self._index += self._opened
        deltas.append(ToolCallDelta(self._index, arguments, name, self._call_ids.of(self._index)))
        self._index += 1
        self._opened = False
        self._start = self._sent = self._scan


class Outlet:
    """The way of deltas to whoever waits for the reply, on the loop in which it was made."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._loop = asyncio.get_running_loop()
        self._open = True

    def send(self, deltas: list[Delta]) -> None:
        """From any thread: the deltas are given on the loop, in order, before a reply that is sent later."""
        if not deltas:
            return
        try:
            self._loop.call_soon_threadsafe(self._give, deltas)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self._open = False

    def close(self) -> None:
        """On return nothing more is given."""
        self._open = False

    def _give(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if self._open:
                self._emit(delta)


def _begun(text: str, mark: str, start: int) -> int:
    """How many last characters of `text` from `start` on may be the beginning of `mark`."""
    for size in range(min(len(mark) - 1, len(text) - start), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
