"""Streams of the embedded engine: the same tokens and items as plain, and nothing that is taken back."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toprope.dialects.deltas import TextDelta, ToolCallDelta
from toprope.servers.model.engines.base import EngineRequest
from toprope.servers.model.engines.embedded.replies import CallIds, output_items
from toprope.servers.model.engines.embedded.sampling import Knobs, Sampler
from toprope.servers.model.engines.embedded.sequence import Limits, Sequence
from toprope.servers.model.engines.embedded.streaming import ItemStream
from toprope.wire.responses import ResponsesRequest

STORY = "Tell me a story about the sea."


def bare(items):
    """Items without the ids that are minted for each reply."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def assert_they_begin(deltas, items):
    """Every delta continues its item, and items come one after the other."""
    said = {}
    for delta in deltas:
        assert delta.index in (max(said, default=0), max(said, default=-1) + 1)
        said.setdefault(delta.index, []).append(delta)
    for index, mine in said.items():
        item = items[index]
        if item["type"] == "function_call":
            (only,) = mine
            assert (only.name, only.call_id, only.arguments) == (item["name"], item["call_id"], item["arguments"])
        else:
            assert all(isinstance(delta, TextDelta) and delta.text for delta in mine)
            assert item["content"][0]["text"].startswith("".join(delta.text for delta in mine))


FRAME = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é</"}}\n</tool_call>'
_texts = st.lists(
    st.text(max_size=5)
    | st.sampled_from(["<tool_call>", "</tool_call>", "<tool", "_call>", " \n", "<", FRAME, FRAME + FRAME, "🦥", "{}"]),
    max_size=8,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(
    _texts, st.booleans(), st.lists(st.integers(0, 300), max_size=12), st.sampled_from([b"", b"\xf0\x9f", b"\xff\xc3"])
)
def test_deltas_begin_the_items_of_the_whole_text_however_its_bytes_come(text, calls, cuts, tail):
    data = text.encode() + tail
    ids = CallIds()
    stream = ItemStream(calls=calls, call_ids=ids)
    places = sorted({min(cut, len(data)) for cut in cuts})
    deltas = [
        delta for a, b in zip([0, *places], [*places, len(data)], strict=True) for delta in stream.feed(data[a:b])
    ]
    items = output_items(data.decode("utf-8", "replace"), calls=calls, complete=True, call_ids=ids)
    assert_they_begin(deltas, items)
    for index, item in enumerate(items):  # what may be held back is small: white space, half a sequence, a frame
        text = "" if item["type"] == "function_call" else item["content"][0]["text"]
        sent = "".join(d.text for d in deltas if isinstance(d, TextDelta) and d.index == index)
        rest = text[len(sent) :].strip("\ufffd")
        assert not rest.strip() or (calls and (rest.startswith("<") or "<tool_call>" in rest))


@pytest.mark.parametrize("stop", [("the sea",), ("sea", "a boat"), ("\n\n",), ("no such text", "never")])
def test_a_text_that_may_become_a_stop_text_is_held_until_it_is_none(vocabulary, stop):
    text = "Once by the seaside there was a boat.\n\nIt sank."
    limits = Limits(200, tuple(each.encode() for each in stop))
    sequence = Sequence([1, 2, 3], Sampler(Knobs(seed=1)), limits, vocabulary)
    sent = b""
    for token in vocabulary.encode(text):
        if sequence.finish:
            break
        sequence._add(token, forced=False)
        new = sequence.settled(len(sent))
        sent += new
        assert not any(each.encode() in sent for each in stop)
    assert sent.decode() == sequence.text


@pytest.mark.parametrize("temperature", [0.0, 1.8])
async def test_a_stream_gives_the_same_ids_logprobs_and_items_as_a_plain_call(talk, temperature):
    """At 1.8 the model samples broken UTF-8 and odd bytes by itself."""
    asked, heard = [], []
    for seed in range(2):
        request = ResponsesRequest(
            (talk.user(STORY),), temperature=temperature, seed=seed, max_output_tokens=32, stop=("whale", "\n\n\n")
        )
        deltas = []
        heard.append(deltas)
        asked.append(EngineRequest(request, "call-1", want_tokens=True))
        asked.append(EngineRequest(request, "call-1", want_tokens=True, emit=deltas.append))
    replies = await asyncio.gather(*(talk.engine.generate(each) for each in asked))
    for plain, reply, deltas in zip(replies[::2], replies[1::2], heard, strict=True):
        assert talk.ids(reply) == talk.ids(plain)
        assert talk.logprobs(reply) == talk.logprobs(plain)
        assert bare(reply.output) == bare(plain.output)
        assert reply.finish_reason == plain.finish_reason
        assert_they_begin(deltas, reply.output)
        assert len(deltas) > 8


async def test_a_forced_call_leaves_as_one_call_and_its_frame_never_as_text(talk):
    request = ResponsesRequest(
        (talk.user("What is 7 + 8?"),), tools=(talk.add,), tool_choice="required", seed=1, max_output_tokens=80
    )
    deltas = []
    reply = await talk.engine.generate(EngineRequest(request, "call-1", emit=deltas.append))
    (call,) = reply.output
    assert deltas == [ToolCallDelta(0, call["arguments"], "add", call["call_id"])]
    cut = []
    short = replace(request, max_output_tokens=20)  # inside the frame: no call came to be, so none was said
    reply = await talk.engine.generate(EngineRequest(short, "call-1", emit=cut.append))
    assert (reply.output[0]["type"], cut) == ("message", [])


async def test_deltas_come_while_the_model_still_samples(talk):
    first = asyncio.Event()
    request = ResponsesRequest((talk.user("Count on and on."),), temperature=0.0, max_output_tokens=200)
    running = asyncio.create_task(
        talk.engine.generate(EngineRequest(request, "call-1", emit=lambda delta: first.set()))
    )
    await asyncio.wait_for(first.wait(), 30)
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_cancelling_a_stream_frees_its_place_and_ends_its_deltas(talk):
    deltas = []
    first = asyncio.Event()

    def emit(delta):
        deltas.append(delta)
        first.set()

    request = ResponsesRequest((talk.user("Count on, never stop."),), max_output_tokens=900)
    running = [
        asyncio.create_task(talk.engine.generate(EngineRequest(request, f"call-{n}", emit=emit))) for n in range(8)
    ]
    await asyncio.wait_for(first.wait(), 30)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    count = len(deltas)
    assert len(talk.ids(await talk(STORY, max_output_tokens=4))) <= 4  # a place was free
    assert len(deltas) == count
    assert talk.engine.running == 0
    assert talk.engine._streams == []
