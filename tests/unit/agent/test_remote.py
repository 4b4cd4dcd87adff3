"""A stranger's agent behind a URL: what it is sent, which answers count, and that it is told when it is over."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from toprope.catalog.masking import Mask
from toprope.catalog.remote import RemoteAgent
from toprope.errors.tree import ConfigError
from toprope.http.client import Client

from .workshop import KEY, invocation, text_of, workshop

Handler = Callable[[dict[str, Any]], Awaitable[Any]]


@asynccontextmanager
async def stranger(handler: Handler) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers POST /solve with what `handler` gives, and notes what POST /cancel is told."""
    cancelled: list[dict[str, Any]] = []

    async def solve(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        body["authorization"] = request.headers.get("authorization")
        value = await handler(body)
        return value if isinstance(value, web.StreamResponse) else web.json_response(value)

    async def cancel(request: web.Request) -> web.Response:
        cancelled.append(await request.json())
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/solve", solve)
    app.router.add_post("/solve/cancel", cancel)
    runner = web.AppRunner(app, shutdown_timeout=0.5, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/solve", cancelled
    finally:
        await runner.cleanup()


async def ask(body: dict[str, Any], text: str = "x", key: str | None = None) -> tuple[int, Any]:
    """A chat call as the stranger makes it."""
    headers = {"authorization": f"Bearer {key or body['api_key']}"}
    message = {"model": body["model"], "messages": [{"role": "user", "content": text}]}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{body['base_url']}/chat/completions", json=message, headers=headers) as reply,
    ):
        return reply.status, await reply.json()


async def test_a_strangers_agent_solves_a_task_with_the_policy(tmp_path: Path, client: Client) -> None:
    seen: list[dict[str, Any]] = []

    async def solve(body: dict[str, Any]) -> Any:
        seen.append(body)
        status, reply = await ask(body)
        refused, _ = await ask(body, key="guessed")
        assert (status, refused) == (200, 401)
        return {"answer": reply["choices"][0]["message"]["content"] + "!"}

    async with stranger(solve) as (url, _):
        agent = RemoteAgent(client=client, url=url, api_key="for-the-stranger")
        async with workshop(agent, tmp_path, client, api_key="sk-of-the-server") as house:
            await house.seed()
            reply = await house.activate({"input": "2 and 2?", "instructions": "Be short.", "model": "m1"})
            assert text_of(reply) == "said!"
            assert len((await house.store.freeze(KEY)).entries) == 1
            assert invocation(await house.close())["model_calls"] == 1
    (body,) = seen
    assert body["prompt"] == "Be short.\n\n2 and 2?"
    assert body["request"]["input"] == "2 and 2?"
    assert (body["model"], body["session_id"], body["activation"]) == ("m1", "a1", 1)
    assert body["base_url"] == f"{body['root_url']}/v1"
    assert body["authorization"] == "Bearer for-the-stranger"
    assert "sk-of-the-server" not in str(body), "the key of the model server stays here"


@pytest.mark.parametrize(
    ("answer", "status", "kind", "retryable"),
    [
        ({"answer": 4}, 502, "bad_reply", False),
        (["four"], 502, "bad_reply", False),
        ({"answer": "x", "status": "great"}, 502, "bad_reply", False),
        (web.Response(text="<html>"), 502, "bad_reply", False),
        (web.json_response({"detail": "no"}, status=400), 502, "agent_failed", False),
        (web.json_response({"detail": "busy"}, status=503), 502, "agent_failed", True),
    ],
    ids=["number", "list", "status", "html", "400", "503"],
)
async def test_what_is_no_answer_is_a_failure(
    answer: Any, status: int, kind: str, retryable: bool, tmp_path: Path, client: Client
) -> None:
    async def solve(body: dict[str, Any]) -> Any:
        return answer

    async with stranger(solve) as (url, _), workshop(RemoteAgent(client=client, url=url), tmp_path, client) as house:
        reply, _ = await house.one()
        error = reply.json()["error"]
        assert (reply.status, error["kind"], error["retryable"]) == (status, kind, retryable)


async def test_a_response_object_passes_and_a_failed_answer_is_for_the_verifier(tmp_path: Path, client: Client) -> None:
    answers: list[Any] = [
        {"id": "r", "output": [{"type": "message", "role": "assistant", "content": "own"}], "extra": 1},
        {"answer": "half", "status": "failed", "error": "ran out of ideas"},
    ]

    async def solve(body: dict[str, Any]) -> Any:
        return answers.pop(0)

    async with stranger(solve) as (url, _), workshop(RemoteAgent(client=client, url=url), tmp_path, client) as house:
        await house.seed()
        assert (await house.activate({"input": "1"})).json()["extra"] == 1
        failed = (await house.activate({"input": "2"})).json()
        assert (failed["status"], failed["error"]["message"]) == ("failed", "ran out of ideas")
        await house.close()


NO_RESPONSES: list[dict[str, Any]] = [
    {"output": [], "status": 42},
    {"output": [], "status": "in_progress"},
    {"output": ["text"]},
    {"output": [{}]},
    {"output": [], "object": "chat.completion"},
]


@pytest.mark.parametrize("answer", NO_RESPONSES, ids=str)
async def test_what_only_looks_like_a_response_object_is_no_answer(
    answer: dict[str, Any], tmp_path: Path, client: Client
) -> None:
    async def solve(body: dict[str, Any]) -> Any:
        return answer

    async with stranger(solve) as (url, _), workshop(RemoteAgent(client=client, url=url), tmp_path, client) as house:
        reply, _ = await house.one()
        assert (reply.status, reply.json()["error"]["kind"]) == (502, "bad_reply")
        assert "`output`" in reply.json()["error"]["message"]


def escaped(key: str, *, times: int = 1, upper: bool = False) -> str:
    """The inside of a JSON text that is `key` once it was parsed `times` times."""
    codes = [f"{ord(char):04X}" if upper else f"{ord(char):04x}" for char in key]
    return "".join("\\" * (2 ** (times - 1)) + f"u{code}" for code in codes)


ECHOES: dict[str, Callable[[str], str]] = {
    "as it is": lambda key: key,
    "first letter": lambda key: escaped(key[0]) + key[1:],
    "every letter": escaped,
    "upper case": lambda key: escaped(key, upper=True),
    "json in json": lambda key: escaped(key, times=2),
    "json in json in json": lambda key: escaped(key, times=3),
}


@pytest.mark.parametrize("echo", ECHOES)
@pytest.mark.parametrize("way", ["answer", "status", "no json", "cut", "failed", "output", "name", "bad"])
async def test_a_key_that_an_agent_says_back_goes_no_further(
    way: str, echo: str, tmp_path: Path, client: Client
) -> None:
    keys: list[str] = []

    async def solve(body: dict[str, Any]) -> Any:
        keys.append(body["api_key"])
        key = ECHOES[echo](keys[0])
        said = {
            "status": f'{{"detail": "bad key {key}"}}',
            "no json": f"<b>{key}</b>",
            "cut": f'{{"answer": "{key}',
            "output": f'{{"output": [{{"role": "assistant", "content": [{{"text": "a \\"{key}\\" b"}}]}}]}}',
            "name": f'{{"output": [{{"role": "assistant", "content": "x", "{key}": 1}}]}}',
            "bad": f'{{"nothing": ["{key}"]}}',
        }.get(
            way, f'{{"answer": "{key}", "status": "{"failed" if way == "failed" else "completed"}", "error": "{key}"}}'
        )
        return web.Response(text=said, content_type="application/json", status=400 if way == "status" else 200)

    async with stranger(solve) as (url, _), workshop(RemoteAgent(client=client, url=url), tmp_path, client) as house:
        reply, closed = await house.one()
        told = reply.text + str(closed)
        for _ in range(4):  # as it is told, and as whoever reads it may read it further
            assert keys[0][:12] not in told
            told = re.sub(r"\\+u00([0-9a-fA-F]{2})", lambda found: chr(int(found[1], 16)), told)
        assert "[the gate" in reply.text


def test_a_mask_leaves_everything_else_as_it_was() -> None:
    mask = Mask("tr-Ab_9", "[gone]")
    for body in (
        b'{"a": "b", "n": 1.50, "x": [null, true]}',
        b'{"path": "c:\\\\u0074r", "quote": "\\"tr-\\"", "e": "\\u00e9\\ud800"}',
        b"no json \\u0074r-",
        "gr\u00fc\u00dfe \\".encode(),
        b'"\xff\\',
    ):
        assert mask.body(body) == body
    assert (
        mask.body(b'{"n": 1.50, "k": "x\\u0074r-Ab_9y", "e": "\\ud800"}')
        == b'{"n": 1.50, "k": "x[gone]y", "e": "\\ud800"}'
    )
    assert mask.body(b"[" * 100_000 + b'"tr-Ab_9"' + b"]" * 100_000).count(b"[gone]") == 1
    assert mask.body(b'"' + b"\\n" * 1_000_000 + b'tr-Ab_9"') == b'"' + b"\\n" * 1_000_000 + b'[gone]"'


def test_what_a_stranger_says_is_masked_in_time_that_grows_with_its_length() -> None:
    """Each takes under a second; where time grew with the square, a minute to hours."""
    mask = Mask("tr-Ab_9", "[gone]")
    run, open_text = b"\\" * 400_000, b'"' + b'\\"' * 200_000
    for body in (run, b'"' + run + b'"', b'"\\u0041' + run + b'"', open_text + b"\\u0041", open_text + b"\\"):
        assert mask.body(body) == body
    hidden = b"\\u0074r-\\u0041b_9"
    assert mask.body(open_text + hidden) == open_text + b"[gone]"
    assert mask.body(b'"\\\\\\u00750074r-Ab_9"') == b'"[gone]"', "the u of an escape written as one"
    assert mask.body(b'"\\u005cu0074r-Ab_9"') == b'"[gone]"', "its backslash"


async def test_a_reply_over_the_limit_is_not_read(tmp_path: Path, client: Client) -> None:
    async def solve(body: dict[str, Any]) -> Any:
        return {"answer": "x" * 100_000}

    async with stranger(solve) as (url, _):
        agent = RemoteAgent(client=client, url=url, max_reply_bytes=10_000)
        async with workshop(agent, tmp_path, client) as house:
            reply, _ = await house.one()
            assert reply.status == 502
            assert "10000" in reply.json()["error"]["message"].replace(",", "").replace("_", "")


@pytest.mark.promise("EP-10")
async def test_a_stopped_activation_cuts_the_connection_tells_the_agent_and_ends_its_key(
    tmp_path: Path, client: Client
) -> None:
    held: list[dict[str, Any]] = []
    began, left = asyncio.Event(), asyncio.Event()

    async def solve(body: dict[str, Any]) -> Any:
        await ask(body)
        held.append(body)
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    async with stranger(solve) as (url, cancelled):
        agent = RemoteAgent(client=client, url=url, cancel_path="/cancel")
        async with workshop(agent, tmp_path, client) as house:
            await house.seed()
            running = asyncio.ensure_future(house.activate({"input": "go"}))
            await began.wait()
            closed = await house.close()
            await left.wait()
            assert (await running).json()["error"]["kind"] == "cancelled"
            assert cancelled == [{"session_id": "a1", "activation": 1}]
            assert closed["partial_response"]["output"][0]["content"][0]["text"] == "said"
            with pytest.raises(aiohttp.ClientConnectionError):
                await ask(held[0])


async def test_an_agent_that_takes_too_long_is_named(tmp_path: Path, client: Client) -> None:
    async def solve(body: dict[str, Any]) -> Any:
        await asyncio.Event().wait()

    async with stranger(solve) as (url, cancelled):
        agent = RemoteAgent(client=client, url=url, timeout_s=0.2, cancel_path="/cancel")
        async with workshop(agent, tmp_path, client) as house:
            reply, _ = await house.one()
            error = reply.json()["error"]
            assert (error["kind"], error["retryable"]) == ("agent_timeout", True)
            assert len(cancelled) == 1


async def test_an_agent_that_is_not_there_is_a_failure_that_names_it(tmp_path: Path, client: Client) -> None:
    agent = RemoteAgent(client=client, url="http://127.0.0.1:9/solve")
    async with workshop(agent, tmp_path, client) as house:
        reply, _ = await house.one()
        assert reply.json()["error"]["kind"] == "transport_unreachable"
        assert "127.0.0.1:9" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"url": "ftp://x"}, "url"), ({"timeout_s": 0}, "timeout_s"), ({"gate_bind": "0.0.0.0"}, "gate_host")],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RemoteAgent(**{"client": Client(), "url": "http://127.0.0.1:9/", **settings})
