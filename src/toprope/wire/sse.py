"""Server-sent events, read from bytes that may be cut anywhere.

Lines end at LF, CRLF or CR and nowhere else: U+2028, U+2029 and U+0085 may stand raw inside JSON and stay inside.
Comments are skipped, `data:` needs no space after it, one event may be many megabytes long; the work is linear in the
bytes however they were cut. Format: https://html.spec.whatwg.org/multipage/server-sent-events.html, from which one
thing differs: an event that the stream ended without a blank line is given by `end` and not thrown away, since some
servers leave that line out after their last event. Left to others: what the data mean.
"""

from __future__ import annotations

import re

import msgspec

_LINE_END = re.compile(rb"\r\n?|\n")
_BOM = b"\xef\xbb\xbf"


class SseTooLarge(ValueError):
    """One event is longer than the reader takes."""


class SseEvent(msgspec.Struct, frozen=True, gc=False):
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
        events: list[SseEvent] = []
        if self._first and not self._line and data[:1] not in (b"", _BOM[:1]):
            self._first = False
        if b"\r" in data or self._after_cr or self._first:
            self._feed_lines(data, events)
            return events
        if not self._between:  # the rest of an event that was cut
            end = data.find(b"\n\n") + 2
            if end < 2:
                self._feed_lines(data, events)
                return events
            self._feed_lines(data[:end], events)
            data = data[end:]
        lines = data.split(b"\n")
        if any(lines[1::2]):  # an event of several lines
            self._feed_lines(data, events)
            return events
        # Events of one line, which most are: every second line is blank, and the last one has not ended.
        ended = (len(lines) - 1) // 2 * 2
        for line in lines[:ended:2]:
            if line[:6] == b"data: " and len(line) <= self._limit:
                events.append(SseEvent(None, line[6:]))
            else:
                self._feed_lines(line + b"\n\n", events)
        self._feed_lines(b"\n".join(lines[ended:]), events)
        return events

    def _feed_lines(self, data: bytes, events: list[SseEvent]) -> None:
        if self._after_cr and data:
            self._after_cr = False
            if data[:1] == b"\n":
                data = data[1:]
        at = 0
        for found in _LINE_END.finditer(data):
            self._take(data[at : found.start()])
            at = found.end()
            self._end_line(events)
        if at < len(data):
            self._take(data[at:] if at else data)
        elif data[-1:] == b"\r":
            self._after_cr = True

    @property
    def _between(self) -> bool:
        """Whether nothing of an event is waiting for the rest."""
        return not self._line and not self._data and self._event is None

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
