"""A request read as what it adds to the one before is the request that a plain reading gives, whatever was changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toprope.dialects.chat_request import request_from_chat
from toprope.dialects.incremental import ReadRequest, RequestMemory
from toprope.dialects.pivot import has_media
from toprope.dialects.responses import request_from_responses
from toprope.errors.tree import BadRequest
from toprope.wire.fields import read_object
from toprope.wire.responses import Item, ResponsesRequest

PLAIN: dict[str, Callable[[dict[str, Any]], ResponsesRequest]] = {
    "chat": request_from_chat,
    "responses": request_from_responses,
}
FIELD = {"chat": "messages", "responses": "input"}
FILLER = "x" * 5_000  # a request below some size is read plainly

Carried = tuple[Item, ...]


class Counting:
    """`carry`: all items of a conversation; notes how many were new each time, and whether anything went before."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, int]] = []

    def __call__(self, before: Carried | None, items: Sequence[Item]) -> Carried:
        self.seen.append((before is not None, len(items)))
        return (*(before or ()), *items)


def text_of(body: dict[str, Any], **how: Any) -> bytes:
    return json.dumps(body, **how).encode()


def chat(*messages: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "system", "content": FILLER}, *messages], **rest}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, *calls: str) -> dict[str, Any]:
    made = [{"id": call, "type": "function", "function": {"name": "f", "arguments": "{ }"}} for call in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def expect_plain(got: ReadRequest[Carried], dialect: str, data: bytes) -> None:
    body = read_object(data)
    assert got.body == body
    assert list(got.body) == list(body)
    assert got.request == PLAIN[dialect](body)
    assert got.digest == hashlib.sha256(data).hexdigest()
    assert got.media == has_media(got.request)
    if got.carried is not None:
        assert got.carried == got.request.input


def compare(memory: RequestMemory[Carried], dialect: str, data: bytes) -> None:
    """The reading is the plain one, or the refusal is."""
    refusal = None
    try:
        PLAIN[dialect](read_object(data))
    except BadRequest as error:
        refusal = str(error)
    if refusal is None:
        expect_plain(memory.read(dialect, "r", data), dialect, data)
    else:
        with pytest.raises(BadRequest) as raised:
            memory.read(dialect, "r", data)
        assert str(raised.value) == refusal


def read_all(dialect: str, *bodies: bytes) -> list[tuple[bool, int]]:
    """Read them in this order as one rollout's; every reading is a plain one's. What `carry` was asked."""
    carry = Counting()
    memory = RequestMemory(carry)
    for data in bodies:
        expect_plain(memory.read(dialect, "r", data), dialect, data)
    return carry.seen


# -- what it saves --------------------------------------------------------------------------------------------------


def test_a_tool_result_without_an_id_answers_the_oldest_open_call_of_what_was_known() -> None:
    one = [user("a"), assistant("", "c1", "c2"), {"role": "tool", "tool_call_id": "c1", "content": "r1"}]
    two = [*one, {"role": "tool", "content": "r2"}]
    three = [*two, {"role": "tool", "content": "of no call"}]
    assert [known for known, _ in read_all("chat", *(text_of(chat(*each)) for each in (one, two, three)))][1:] == [
        True
    ] * 2


@pytest.mark.parametrize("form", [{}, {"separators": (",", ":")}, {"indent": 1}], ids=["spaces", "compact", "indented"])
def test_of_a_longer_conversation_only_what_it_adds_is_read(form: dict[str, Any]) -> None:
    one = [user("a"), assistant("b", "c1")]
    two = [*one, {"role": "tool", "tool_call_id": "c1", "content": "r"}, user("c")]
    three = [*two, assistant('d é \\ " ]} \u2028')]
    assert read_all("chat", *(text_of(chat(*each), **form) for each in (one, two, two, three))) == [
        (False, 4),  # system, user, text, call
        (True, 2),
        (True, 0),
        (True, 1),
    ]


def test_a_responses_input_grows_likewise() -> None:
    one = [{"role": "user", "content": FILLER}, {"type": "message", "role": "assistant", "content": "b"}]
    two = [*one, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]
    bodies = [text_of({"input": each, "instructions": "be brief", "temperature": 0.5}) for each in (one, two)]
    assert read_all("responses", *bodies) == [(False, 2), (True, 1)]


def test_conversations_of_one_rollout_take_turns() -> None:
    left, right = [user("left")], [user("right")]
    bodies = []
    for turn in range(3):
        left, right = [*left, assistant(f"l{turn}")], [*right, assistant(f"r{turn}")]
        bodies += [text_of(chat(*left)), text_of(chat(*right))]
    assert [known for known, _ in read_all("chat", *bodies)] == [False, False, True, True, True, True]


def test_settings_that_stand_after_the_history_may_change() -> None:
    assert read_all("chat", text_of(chat(user("a"), temperature=0)), text_of(chat(user("a"), user("b"), n=1)))[1][0]


# -- what must not be taken for known -------------------------------------------------------------------------------


def test_a_field_of_the_same_name_elsewhere_or_written_twice_is_not_the_history() -> None:
    known, other = json.dumps(chat(user("a"))["messages"]), json.dumps([user("other")])
    first = b'{"messages": %s, "model": "m"}' % known.encode()
    for tail in (
        b', "messages": %s}' % other.encode(),
        b', "model": "m", "messages": [{"role": "user", "content": "z"}], "x": {"messages": []}}',
        b', "messages": null}',
        b', "messages": ["text"]}',
    ):
        again = first[: first.rindex(b', "model"')] + tail
        carry = Counting()
        memory = RequestMemory(carry)
        memory.read("chat", "r", first)
        compare(memory, "chat", again)
        assert not any(known for known, _ in carry.seen)
    nested = b'{"metadata": {"messages": %s}, "messages": %s}' % (known.encode(), other.encode())
    assert read_all("chat", nested, nested.replace(b'}], "', b'}, {"role": "user", "content": "n"}], "', 1))


def test_one_rollout_is_not_read_by_the_memory_of_another_nor_one_dialect_by_another() -> None:
    data = text_of({"messages": [user(FILLER)], "input": [user(FILLER)]})
    carry = Counting()
    memory = RequestMemory(carry)
    for dialect, key in (("chat", "a"), ("chat", "b"), ("responses", "a")):
        expect_plain(memory.read(dialect, key, data), dialect, data)
    assert carry.seen == [(False, 1)] * 3


def test_a_request_of_nobody_and_a_short_one_are_not_remembered() -> None:
    carry = Counting()
    memory = RequestMemory(carry)
    for key, data in ((None, text_of(chat(user("a")))), ("r", text_of({"messages": [user("a")]}))):
        got = memory.read("chat", key, data)
        assert got.carried is None
        expect_plain(got, "chat", data)
    assert (carry.seen, memory.held_bytes) == ([], 0)


def test_what_is_held_stays_within_its_bound_and_the_oldest_goes_first() -> None:
    carry = Counting()
    data = text_of(chat(user("a")))
    memory = RequestMemory(carry, max_bytes=3 * len(data))
    for key in ("a", "b", "c", "d", "d", "b", "a"):
        memory.read("chat", key, data)
        assert memory.held_bytes <= 3 * len(data)
    assert [known for known, _ in carry.seen] == [False, False, False, False, True, True, False]
    for branch in range(20):
        memory.read("chat", "e", text_of(chat(user(f"branch {branch}"))))
        assert memory.held_bytes <= 3 * len(data) + 100
    roomy = RequestMemory(carry, max_bytes=1_000 * len(data))
    for branch in range(100, 120):
        roomy.read("chat", "e", text_of(chat(user(f"branch {branch}"))))
    assert len(data) < roomy.held_bytes < 6 * len(data)
    huge = text_of(chat(user("a" * 4 * len(data))))
    expect_plain(memory.read("chat", "f", huge), "chat", huge)
    assert memory.held_bytes == 0


def test_a_rollout_that_ended_leaves_nothing_and_takes_nothing_of_others_along() -> None:
    carry = Counting()
    memory = RequestMemory(carry)
    for dialect in ("chat", "responses"):
        for key in ("a", "b"):
            memory.read(dialect, key, text_of({"messages": [user(FILLER)], "input": [user(FILLER)]}))
    held = memory.held_bytes
    memory.forget("a")
    memory.forget("a")
    memory.forget("never seen")
    assert memory.held_bytes == held // 2
    memory.forget("b")
    assert memory.held_bytes == 0


# -- every edit -----------------------------------------------------------------------------------------------------

words = st.sampled_from(
    ["", "a", 'q"\\', "]}", "},{", "\u00e9\u2028", "\x01\n", "\ud83d\ude00", "messages", FILLER[:300]]
)
json_values: st.SearchStrategy[Any] = st.sampled_from(
    [None, 0, -0.0, 1e22, 12345678901234567890, 2**70, "s", [], {}, [1, {"messages": []}]]
)
messages = st.one_of(
    st.builds(user, words),
    st.builds(assistant, words),
    st.builds(assistant, words, st.sampled_from(["c1", "c2", ""])),
    st.builds(
        lambda call, text: {"role": "tool", "tool_call_id": call, "content": text}, st.sampled_from(["c1", "c2"]), words
    ),
    st.builds(lambda text: {"role": "tool", "content": text}, words),
    st.builds(lambda value: {"role": "user", "content": "u", "extra": value}, json_values),
    st.just({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}),
    st.just({"role": "wizard", "content": "refused"}),
    st.just("no object"),
)
forms: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{}, {"separators": (",", ":")}, {"indent": 0}, {"ensure_ascii": False}]
)
tails = st.sampled_from([b"", b" ", b"\n\n"])


@st.composite
def requests(draw: st.DrawFn) -> list[bytes]:
    """Requests of one client, who extends its history, cuts it, edits it, and now and then breaks its JSON."""
    form, head = draw(forms), draw(st.booleans())
    history: list[Any] = []
    out = []
    for _ in range(draw(st.integers(2, 6))):
        edit = draw(st.sampled_from(["add", "add", "add", "cut", "change", "same"]))
        if edit == "add":
            history = [*history, *draw(st.lists(messages, min_size=1, max_size=3))]
        elif edit == "cut":
            history = history[: draw(st.integers(0, len(history)))]
        elif edit == "change" and history:
            at = draw(st.integers(0, len(history) - 1))
            history = [*history[:at], draw(messages), *history[at + 1 :]]
        whole = [{"role": "user", "content": FILLER}, *history]
        rest: dict[str, Any] = {"temperature": draw(st.sampled_from([0, 1.5, "hot"]))} if draw(st.booleans()) else {}
        body = (
            {"model": "m", "messages": whole, "input": whole, **rest}
            if head
            else {"messages": whole, "input": whole, **rest}
        )
        if draw(st.booleans()):
            body = dict(reversed(body.items()))
        data = json.dumps(body, **form).encode("utf-8", "surrogatepass") + draw(tails)
        if draw(st.integers(0, 9)) == 0:
            at = draw(st.integers(len(data) - 200, len(data) - 1))
            data = data[:at] + draw(st.sampled_from([b"", b"]", b'"', b"}", b" ", b"\xff", b"1"])) + data[at + 1 :]
        out.append(data)
    return out


@settings(max_examples=400, deadline=None)
@given(requests(), st.sampled_from(["chat", "responses"]))
def test_every_reading_and_every_error_is_the_plain_one(bodies: list[bytes], dialect: str) -> None:
    memory = RequestMemory(Counting())
    for data in bodies:
        compare(memory, dialect, data)


def test_every_byte_of_a_continued_request_counts() -> None:
    """One request, and its continuation with each byte in turn changed: never the unchanged one's reading."""
    first = text_of({"messages": [user(FILLER[:4_100]), assistant("b")], "model": "m"})
    cut = first.index(b"]", 4_100)
    second = first[:cut] + b', {"role": "user", "content": "c"}' + first[cut:]
    for at in range(len(second)):
        if 40 < at < 4_000:
            continue  # filler
        changed = second[:at] + bytes([second[at] ^ 1]) + second[at + 1 :]
        memory = RequestMemory(Counting())
        memory.read("chat", "r", first)
        compare(memory, "chat", changed)
