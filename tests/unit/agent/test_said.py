"""What a model said last, read from what passed the gate: three dialects, plain and streamed, whole and cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toprope.catalog.command import CommandAgent
from toprope.catalog.prompts import prompt_of
from toprope.catalog.said import Said, said
from toprope.errors.tree import BadRequest
from toprope.http.client import Client
from toprope.sandbox.gate import Heard

from .workshop import ASK, KEY, text_of, workshop

TALK = (
    ASK
    + """
path, stream = sys.argv[1], sys.argv[2] == 'stream'
message = [{"role": "user", "content": "x"}]
body = {"model": "m", "stream": stream, **({"input": "x"} if path == "/responses" else {"messages": message})}
if path == "/messages":
    body["max_tokens"] = 100
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
with urllib.request.urlopen(asked, timeout=30) as reply:
    reply.read()
"""
)


@pytest.mark.parametrize("how", ["plain", "stream"])
@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages"])
async def test_the_last_words_are_those_of_the_call_that_the_server_recorded(
    path: str, how: str, tmp_path: Path, client: Client
) -> None:
    agent = CommandAgent(
        directory=tmp_path, argv=["python3", "t.py", path, how, "{prompt}"], files={"t.py": TALK}, answer="model"
    )
    words = "caf\u00e9 \u2028 four"
    async with workshop(agent, tmp_path, client, script=[{"text": words, "reasoning": "hm"}]) as house:
        await house.seed()
        reply = await house.activate({"input": "go"})
        assert text_of(reply) == words
        (entry,) = (await house.store.freeze(KEY)).entries
        assert reply.json()["terminal_response_id"] == entry.response_id
        await house.close()


def heard(body: Any, content_type: str = "application/json", *, whole: bool = True) -> Heard:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Heard("/v1/chat/completions", content_type, data, whole)


@pytest.mark.parametrize(
    "reply",
    [
        heard(b"no json"),
        heard({"choices": []}),
        heard({"choices": [{"message": None}]}),
        heard([1]),
        heard({"id": "x"}),
        heard({"choices": [{"message": {"content": "cut"}}]}, whole=False),
        heard(b"data: [DONE]\n\n", "text/event-stream"),
        heard(b'data: {"choices": [{"delta"', "text/event-stream"),
        None,
    ],
)
def test_what_cannot_be_read_is_nothing_and_not_a_guess(reply: Heard | None) -> None:
    assert said(reply) is None


def test_a_reply_that_only_calls_tools_says_nothing() -> None:
    assert said(heard({"id": "r", "choices": [{"message": {"content": None}}]})) == Said("", "r")


def test_a_stream_that_is_cut_gives_what_came() -> None:
    events = b'data: {"id":"c","choices":[{"delta":{"content":"fo"}}]}\n\ndata: {"id":"c","choi'
    assert said(heard(events, "text/event-stream", whole=False)) == Said("fo", "c")


@pytest.mark.parametrize(
    ("request_", "prompt"),
    [
        ({"input": "x"}, "x"),
        ({"input": [{"role": "user", "content": "x"}], "instructions": "be short"}, "be short\n\nx"),
        ({"input": [{"role": "user", "content": [{"text": "a"}, {"text": "b"}]}]}, "a\nb"),
        (
            {
                "input": [
                    {"role": "user", "content": "x"},
                    {"type": "reasoning", "summary": []},
                    {"type": "function_call", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "output": "1"},
                    {"role": "assistant", "content": "y"},
                ]
            },
            "user: x\n\nassistant: called f with {}\n\ntool: 1\n\nassistant: y",
        ),
    ],
)
def test_a_request_as_a_prompt(request_: dict[str, Any], prompt: str) -> None:
    assert prompt_of(request_) == prompt


@pytest.mark.parametrize(
    "item",
    [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}, {"type": "file_search_call"}],
)
def test_what_is_no_text_is_refused(item: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="cannot be put into a prompt"):
        prompt_of({"input": [item]})
