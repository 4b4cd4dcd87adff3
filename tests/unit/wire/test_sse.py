"""Server-sent events, cut anywhere."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toprope.wire.sse import SseEvent, SseReader, SseTooLarge

STREAM = (
    "\ufeff: hello\n"
    "event: first\r\n"
    'data: {"text":"a\u2028b\u2029c\u0085d é 🦥"}\r\n'
    "\r\n"
    ": keep-alive\n\n"
    "data:no space\n"
    "data:  one space kept\n"
    "data\n"
    "id: 7\nretry: 10\nunknown: x\n\n"
    "event: nameless has no data\n\n"
    "data: by cr\r\r"
    "data: [DONE]\n\n"
).encode()
EVENTS = [
    SseEvent("first", '{"text":"a\u2028b\u2029c\u0085d é 🦥"}'.encode()),
    SseEvent(None, b"no space\n one space kept\n"),
    SseEvent(None, b"by cr"),
    SseEvent(None, b"[DONE]"),
]


def read(*pieces: bytes, limit: int = 1 << 20) -> list[SseEvent]:
    reader = SseReader(limit)
    return [event for piece in pieces for event in reader.feed(piece)] + reader.end()


def test_a_stream_means_the_same_wherever_its_bytes_are_cut() -> None:
    assert read(STREAM) == EVENTS
    assert read(*(STREAM[n : n + 1] for n in range(len(STREAM)))) == EVENTS
    for cut in range(len(STREAM)):
        assert read(STREAM[:cut], b"", STREAM[cut:]) == EVENTS, cut


def test_events_of_one_line_mean_the_same_among_others_and_wherever_they_are_cut() -> None:
    text = b'data: {"a": 1}\n\n: comment\n\ndata:b\n\n\nevent: c\ndata: 1\ndata: 2\n\ndata\n\nid: 3\n\ndata: [DONE]\n\n'
    expected = [
        SseEvent(None, b'{"a": 1}'),
        SseEvent(None, b"b"),
        SseEvent("c", b"1\n2"),
        SseEvent(None, b""),
        SseEvent(None, b"[DONE]"),
    ]
    assert read(*(text[n : n + 1] for n in range(len(text)))) == expected
    for bom in (b"", b"\xef\xbb\xbf"):
        whole = bom + text
        assert read(whole) == expected
        for cut in range(len(whole)):
            assert read(whole[:cut], whole[cut:]) == expected, cut


def test_an_event_is_given_by_the_very_byte_that_completes_it() -> None:
    for end in (b"\n\n", b"\r\n\r\n", b"\r\r"):
        reader = SseReader(100)
        needed = len(end) - (end == b"\r\n\r\n")  # a CR ends its line; the LF after it adds nothing
        assert reader.feed(b"data: 1" + end[: needed - 1]) == []
        assert reader.feed(end[needed - 1 : needed]) == [SseEvent(None, b"1")]
        assert reader.feed(end[needed:] + b"data: 2\n\n") == [SseEvent(None, b"2")]


@pytest.mark.parametrize("tail", [b"data: [DONE]\n", b"data: [DONE]", b"data: [DONE]\r"])
def test_a_last_event_without_its_blank_line_is_given_at_the_end(tail: bytes) -> None:
    reader = SseReader(100)
    assert reader.feed(b"data: 1\n\n" + tail) == [SseEvent(None, b"1")]
    assert reader.end() == [SseEvent(None, b"[DONE]")]
    assert reader.end() == []


def test_an_event_over_the_limit_is_refused_by_name_whole_or_in_lines_or_as_a_comment() -> None:
    assert read(b"data:" + b"x" * 95 + b"\n\n", limit=100)[0].data == b"x" * 95
    for over in (b"data:" + b"x" * 96, b"data:" + b"x" * 50 + b"\ndata:" + b"y" * 46, b":" + b"c" * 100):
        with pytest.raises(SseTooLarge, match="100 bytes"):
            read(*(over[n : n + 1] for n in range(len(over))), limit=100)
    with pytest.raises(SseTooLarge, match="100 bytes"):
        read(b"data:\n" * 200, limit=100)  # lines that hold nothing count too


def test_many_comments_and_events_within_the_limit_never_add_up() -> None:
    assert len(read(b": " + b"c" * 90 + b"\n", *[b"data: " + b"x" * 80 + b"\n\n: c\n"] * 50, limit=100)) == 50


def test_a_multi_megabyte_event_is_read_in_time_linear_in_its_bytes() -> None:
    text = json.dumps({"a": "é\u2028" * 700_000}, ensure_ascii=False).encode()
    body = b"data: " + text + b"\r\n\r\n"
    assert [event.data for event in read(*(body[n : n + 4096] for n in range(0, len(body), 4096)), limit=8 << 20)] == [
        text
    ]
    # Byte by byte: a reader that joined or scanned again what it has would copy 10^11 bytes here.
    short = b"data: " + b"x" * 450_000 + b"\n\n"
    assert len(read(*(short[n : n + 1] for n in range(len(short))))[0].data) == 450_000


texts = st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=["Cs"]), max_size=20)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(texts, st.sampled_from(["\n", "\r\n", "\r"]), st.booleans(), st.booleans()), max_size=8),
    st.lists(st.integers(0, 400), max_size=20),
)
def test_whatever_was_written_comes_back_however_it_is_cut(
    lines: list[tuple[str, str, bool, bool]], cuts: list[int]
) -> None:
    stream = "".join(
        f"data: {text}{end}" + (f": note{end}" if note else "") + (end if closed else "")
        for text, end, note, closed in lines
    ).encode()
    events: list[list[bytes]] = [[]]
    for text, _, _, closed in lines:
        events[-1].append(text.encode())
        if closed:
            events.append([])
    wanted = [b"\n".join(data) for data in events if data]
    # (A CR before a LF would be one line end, so a text that follows a CR never begins with LF: texts hold none.)
    places = sorted({min(cut, len(stream)) for cut in cuts})
    pieces = [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]
    assert [event.data for event in read(*pieces)] == wanted


@settings(max_examples=500, deadline=None)
@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"data:", b"\r", b"\n", b": ", b"event:", b"\xff\xe2\x80"])))
def test_any_bytes_are_read_without_an_error_and_alike_in_one_piece(pieces: list[bytes]) -> None:
    assert read(*pieces) == read(b"".join(pieces))
