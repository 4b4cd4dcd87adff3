"""Server-sent events, read from bytes that may be cut anywhere.

Lines end at LF, CRLF or CR and nowhere else: U+2028, U+2029 and U+0085 may stand raw inside JSON and stay inside.
Comments are skipped, `data:` needs no space after it, one event may be many megabytes long; the work is linear in the
bytes however they were cut. Format: https://html.spec.whatwg.org/multipage/server-sent-events.html, from which one
thing differs: an event that the stream ended without a blank line is given by `end` and not thrown away, since some
servers leave that line out after their last event. Left to others: what the data mean.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n?|\n")
_BOM = b"\xef\xbb\xbf"


class SseTooLarge(ValueError):
    """One event is longer than the reader takes."""


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event. `event` is its name, None where the stream gave none; several `data` lines are joined by newlines."""

    event: str | None
    data: bytes


class SseReader:
    """Events out of bytes. Raises `SseTooLarge` naming `max_event_bytes` (line ends not counted)."""

    def __init__(self, max_event_bytes: int) -> None:
        self._limit = max_event_bytes
        self._line: list[bytes] = []  # the line that has not ended, in pieces
        self._line_size = 0
        self._data: list[bytes] = []
        self._data_size = 0
        self._event: str | None = None
        self._after_cr = False  # the last byte seen was a CR: a LF that follows belongs to it
        self._first = True

    def feed(self, data: bytes) -> list[SseEvent]:
        """The events that are complete with these bytes, in order."""
        if self._between and data[:5] == b"data:" and data[-2:] == b"\n\n" and len(data) <= self._limit:
            line = data[
                5:-2
            ]  # one whole event by itself: how most of them come (a third of the time of the general way)
            if b"\n" not in line and b"\r" not in line:
                return [SseEvent(None, line[1:] if line[:1] == b" " else line)]
        if self._after_cr and data:
            self._after_cr = False
            if data[:1] == b"\n":
                data = data[1:]
        events: list[SseEvent] = []
        at = 0
        for found in _LINE_END.finditer(data):
            self._take(data[at : found.start()])
            at = found.end()
            self._end_line(events)
        if at < len(data):
            self._take(data[at:] if at else data)
        elif data[-1:] == b"\r":
            self._after_cr = True
        return events

    @property
    def _between(self) -> bool:
        """Whether nothing of an event is waiting for the rest."""
        begun = self._first or self._after_cr or self._line or self._data
        return not begun and self._event is None

    def end(self) -> list[SseEvent]:
        """What the stream's clean end completes. Not to be called for a stream that was cut."""
        events: list[SseEvent] = []
        if self._line_size:
            self._end_line(events)
        self._dispatch(events)
        return events

    def _take(self, piece: bytes) -> None:
        self._line.append(piece)
        self._line_size += len(piece)
        if self._line_size + self._data_size > self._limit:
            raise SseTooLarge(f"one event of the stream is larger than the limit of {self._limit} bytes")

    def _end_line(self, events: list[SseEvent]) -> None:
        line = self._line[0] if len(self._line) == 1 else b"".join(self._line)
        self._line = []
        self._line_size = 0
        if self._first:
            self._first = False
            line = line.removeprefix(_BOM)
        if not line:
            self._dispatch(events)
            return
        name, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if name == b"data":
            self._data.append(value)
            self._data_size += len(value) + 1
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")

    def _dispatch(self, events: list[SseEvent]) -> None:
        if self._data:
            data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
            events.append(SseEvent(self._event, data))
            self._data = []
            self._data_size = 0
        self._event = None
