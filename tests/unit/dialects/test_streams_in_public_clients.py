"""Streams put together by the public client libraries equal the plain reply that the same library reads."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import anthropic
import httpx2
import openai
import pydantic
import pytest
from tests.campaigns import campaign
from tests.unit.dialects.odd_turns import TURNS
from tests.unit.dialects.scripted_replies import Told, chopped, told, written
from tests.unit.dialects.upstream_streams import said

from toprope.dialects.chat_reply import chat_reply, finish_from_chat, output_from_chat
from toprope.dialects.chat_stream_reader import ChatStreamReader
from toprope.dialects.messages_reply import messages_reply
from toprope.dialects.pivot import PivotReply, with_item_ids
from toprope.dialects.responses import request_from_responses, responses_reply
from toprope.dialects.stream import open_stream
from toprope.wire.responses import Usage

SEEDS = pytest.mark.parametrize("seeds", campaign(700, 5000))
REQUEST = request_from_responses({"input": "x", "metadata": {"a": "b"}})
SAY = [{"role": "user", "content": "x"}]


class Served(httpx2.BaseTransport, httpx2.SyncByteStream):
    """Answers every request with what stands in `pieces`, one after the other."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.media_type = ""

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": self.media_type}, stream=self)

    def __iter__(self) -> Iterator[bytes]:
        yield from self.pieces

    def stream(self, dialect: str, script: Told, rng: random.Random) -> None:
        reply = script.reply
        opened = {"reply_id": reply.reply_id, "model": reply.model, "created": reply.created}
        data = written(open_stream(dialect, REQUEST, **opened, include_usage=True), script, rng)
        self.pieces, self.media_type = chopped(data, rng), "text/event-stream"

    def plain(self, body: dict) -> None:
        self.pieces, self.media_type = [json.dumps(body).encode()], "application/json"


@pytest.fixture
def served() -> Served:
    return Served()


@pytest.fixture
def openai_client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key="k", base_url="http://x/v1", http_client=httpx2.Client(transport=served)) as client:
        yield client


def _scripts(seeds: int, *, objects_only: bool = False) -> Iterator[tuple[Told, random.Random]]:
    """Random replies; every fourth one has its items in an odd order, as a stream may have said them."""
    for seed in range(seeds):
        yield told(seed, objects_only=objects_only, odd_order=seed % 4 == 0), random.Random(-seed - 1)


@SEEDS
@pytest.mark.promise("MS-1")
def test_a_chat_stream_put_together_by_the_openai_library_is_the_plain_reply(served, openai_client, seeds, say):
    for script, rng in _scripts(seeds):
        served.plain(chat_reply(script.reply))
        plain = openai_client.chat.completions.create(model="m", messages=SAY).model_dump()
        served.stream("chat", script, rng)
        with openai_client.chat.completions.stream(model="m", messages=SAY) as stream:
            assert list(stream)
            whole = stream.current_completion_snapshot.model_dump()
        message = whole["choices"][0]["message"]
        message.pop("parsed")
        for place, call in enumerate(message["tool_calls"] or ()):
            assert call.pop("index") == place
            call["function"].pop("parsed_arguments")
        assert whole == plain
    say(f"streams put together by public clients: {seeds:,} over Chat")


@SEEDS
@pytest.mark.promise("MS-1")
def test_a_responses_stream_put_together_by_the_openai_library_is_the_plain_reply(served, openai_client, seeds, say):
    for script, rng in _scripts(seeds):
        served.plain(responses_reply(script.reply, REQUEST))
        plain = openai_client.responses.create(model="m", input="x").to_dict()
        served.stream("responses", script, rng)
        said: dict[int, str] = {}
        done, ends = [], []
        with openai_client.responses.stream(model="m", input="x") as stream:
            for number, event in enumerate(stream):
                assert event.sequence_number == number
                if event.type.endswith((".output_text.delta", ".reasoning_text.delta", "_arguments.delta")):
                    said[event.output_index] = said.get(event.output_index, "") + event.delta
                elif event.type == "response.output_item.done":
                    done.append(event.item.to_dict())
                elif event.type in ("response.completed", "response.incomplete"):
                    ends.append(_unparsed(event.response.to_dict()))
        assert [plain] == ends
        assert done == plain["output"]
        texts = [i["arguments"] if "arguments" in i else i["content"][0]["text"] for i in plain["output"]]
        assert [said.get(index, "") for index in range(len(texts))] == texts
    say(f"streams put together by public clients: {seeds:,} over Responses")


def _unparsed(response: dict) -> dict:
    """A Response without what the library adds to the one of a helper's stream."""
    for item in response["output"]:
        item.pop("parsed_arguments", None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return response


class Form(pydantic.BaseModel):
    n: int


@pytest.mark.promise("MS-2")
@pytest.mark.parametrize("message", [message for message, _ in TURNS.values() if message.get("tool_calls")])
def test_a_turn_of_calls_is_no_answer_in_the_form_that_was_asked_for(served, openai_client, message):
    """The library parses every text of the reply as that form; a turn of calls without text must have none."""
    if message.get("content"):
        message = {**message, "content": '{"n": 1}'}
    items = with_item_ids(output_from_chat({"role": "assistant", **message}, "r1"), "r1")
    reply = PivotReply(items, "tool_calls", "m", Usage(1, 1), "r1", 1)
    served.plain(responses_reply(reply, REQUEST))
    parsed = openai_client.responses.parse(model="m", input="x", text_format=Form)
    assert parsed.output_parsed == (Form(n=1) if message.get("content") else None)


@SEEDS
@pytest.mark.promise("MS-1")
def test_a_messages_stream_put_together_by_the_anthropic_library_is_the_plain_reply(served, seeds, say):
    http = httpx2.Client(transport=served)
    with anthropic.Anthropic(api_key="k", base_url="http://x", http_client=http) as client:
        for script, rng in _scripts(seeds, objects_only=True):
            served.plain(messages_reply(script.reply))
            plain = client.messages.create(model="m", max_tokens=9, messages=SAY).model_dump()
            served.stream("messages", script, rng)
            with client.messages.stream(model="m", max_tokens=9, messages=SAY) as stream:
                whole = stream.get_final_message().model_dump()
            for block in whole["content"]:
                block.pop("parsed_output", None)
            assert whole == plain
    say(f"streams put together by public clients: {seeds:,} over Messages")


def _odd(message: dict, deltas: list[dict]) -> Told:
    """A turn with more than text, thought and calls of functions, as an upstream's stream of it is read."""
    reader = ChatStreamReader("r1")
    head = {"id": "x", "created": 1, "model": "m"}
    early = [each for delta in deltas for each in reader.feed({**head, "choices": [{"delta": delta}]})]
    output = with_item_ids(output_from_chat(message, "r1"), "r1")
    return Told(PivotReply(output, finish_from_chat(None, output), "m", Usage(1, 1), "r1", 1), tuple(early))


def _told(fields: dict) -> dict:
    """Without the fields that the library sets to null."""
    return {name: value for name, value in fields.items() if value is not None}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize(("message", "deltas"), TURNS.values(), ids=TURNS)
def test_what_else_an_upstream_said_is_put_together_by_the_public_libraries(served, openai_client, message, deltas):
    script, rng = _odd(message, deltas), random.Random(1)
    check_chat(served, openai_client, script, rng)
    check_responses(served, openai_client, script, rng)
    http = httpx2.Client(transport=served)
    with anthropic.Anthropic(api_key="k", base_url="http://x", http_client=http) as client:
        check_messages(served, client, script, rng)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.promise("MS-1")
@pytest.mark.parametrize("seeds", campaign(250, 4000))
def test_an_upstream_that_says_anything_in_any_order_is_put_together_by_the_public_libraries(
    served, openai_client, seeds, say
):
    http = httpx2.Client(transport=served)
    with anthropic.Anthropic(api_key="k", base_url="http://x", http_client=http) as client:
        for seed in range(seeds):
            in_one, in_order, rng = *_relayed(said(seed).deltas), random.Random(seed)
            check_chat(served, openai_client, in_one, rng)
            check_responses(served, openai_client, in_order, rng)
            check_messages(served, client, in_order, rng)
    say(f"streams of all that an upstream may say put together by public clients: {seeds:,} in each dialect")


def _relayed(deltas: tuple[dict, ...]) -> tuple[Told, Told]:
    """What an upstream streamed, as a Chat client gets it, and as those do that keep the order."""
    reader = ChatStreamReader("r1")
    chunks = [{"delta": delta} for delta in deltas] + [{"delta": {}, "finish_reason": "stop"}]
    early = tuple(each for chunk in chunks for each in reader.feed({"id": "x", "choices": [chunk]}))
    read = reader.reply()
    outputs = [with_item_ids(output_from_chat(read.message, "r1", order), "r1") for order in ((), read.order)]
    made = [PivotReply(output, finish_from_chat(None, output), "m", Usage(1, 1), "r1", 1) for output in outputs]
    return Told(made[0], early), Told(made[1], early)


def check_chat(served, client, script: Told, rng: random.Random) -> None:
    served.plain(chat_reply(script.reply))
    plain = client.chat.completions.create(model="m", messages=SAY).choices[0].message.to_dict(warnings=False)
    served.stream("chat", script, rng)
    with client.chat.completions.stream(model="m", messages=SAY) as stream:
        assert list(stream)
        whole = stream.current_completion_snapshot.choices[0].message.to_dict(warnings=False)
    calls = whole.get("tool_calls") or ()
    for place, call in enumerate(calls):
        assert call.pop("index") == place
        (call.get("function") or {}).pop("parsed_arguments", None)
    if "content_parts" in whole:  # text had left as a string: the library joins strings
        assert whole["content"] == "".join(part.get("text", "") for part in whole["content_parts"])
        whole["content"] = whole.pop("content_parts")
    assert _told({**whole, "tool_calls": [_told(call) for call in calls] or None}) == _told(plain)


def check_responses(served, client, script: Told, rng: random.Random) -> None:
    served.plain(responses_reply(script.reply, REQUEST))
    plain = client.responses.create(model="m", input="x").to_dict(warnings=False)
    served.stream("responses", script, rng)
    with client.responses.stream(model="m", input="x") as stream:
        events = list(stream)
        assert _unparsed(stream.get_final_response().to_dict(warnings=False)) == plain
    done = [e.item.to_dict(warnings=False) for e in events if e.type.endswith("item.done")]
    added = [e.annotation.to_dict() for e in events if e.type.endswith("annotation.added")]
    parts = [part for item in plain["output"] for part in item.get("content") or ()]
    assert added == [each for part in parts for each in part.get("annotations") or ()]
    last = len(done) - 1
    for place, (item, whole) in enumerate(zip(_unparsed({"output": done})["output"], plain["output"], strict=True)):
        # what was told of an item after its end is not in its done event
        assert item == whole or (place < last and _without_late(item) == _without_late(whole))


_LATE = ("images", "audio", "annotations", "note", "reasoning_details")


def _without_late(item: dict) -> dict:
    parts = [{k: v for k, v in part.items() if k not in _LATE} for part in item.get("content") or ()]
    return {**{k: v for k, v in item.items() if k not in _LATE}, "content": parts}


def check_messages(served, client, script: Told, rng: random.Random) -> None:
    served.plain(messages_reply(script.reply))
    plain = client.messages.create(model="m", max_tokens=9, messages=SAY).to_dict(warnings=False)
    served.stream("messages", script, rng)
    with client.messages.stream(model="m", max_tokens=9, messages=SAY) as stream:
        whole = stream.get_final_message().to_dict(warnings=False)
    for block in whole["content"]:
        block.pop("parsed_output", None)
    assert _told(whole) == _told(plain)
