"""A sandboxed program reaches exactly one URL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.unit.sandbox.conftest import Make
from tests.unit.sandbox.docker_engine import running_engine

from toprope.errors.tree import ConfigError, Forbidden
from toprope.sandbox import gate as module
from toprope.sandbox.bubblewrap import Bubblewrap
from toprope.sandbox.docker import Docker
from toprope.sandbox.gate import Gate, GateKeys, inside_url
from toprope.sandbox.spec import SandboxSpec

PREFIX = "/ng-rollout/run.0-0-a1/v1"


class Model:
    """A server that notes what reaches it; `/stream` goes on only when `/go` was called."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str, str]] = []
        self.go = asyncio.Event()
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = (await request.read()).decode()
        self.seen.append((request.method, request.raw_path, request.headers.get("Authorization", ""), body))
        if request.path.endswith("/go"):
            self.go.set()
        if request.path.endswith("/away"):
            raise web.HTTPFound("http://127.0.0.1:1/other")
        if request.path.endswith("/stream"):
            reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await reply.prepare(request)
            await reply.write(b"data: first\n\n")
            await self.go.wait()
            await reply.write(b"data: last\n\n")
            return reply
        return web.json_response({"echo": body}, headers={"X-Kept": "yes"})


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    model = Model()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", model.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    model.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield model
    await runner.cleanup()


CALL = """
import json, os, urllib.request
base = os.environ["BASE"]
body, headers = json.dumps({"m": "é"}).encode(), {"Authorization": "Bearer own"}
asked = urllib.request.Request(base + "/chat/completions?a=b%20c", body, headers)
reply = urllib.request.urlopen(asked, timeout=20)
print(reply.status, reply.headers["X-Kept"], reply.read().decode())
stream = urllib.request.urlopen(base + "/stream", timeout=20)
print(stream.readline().decode().strip())
urllib.request.urlopen(base + "/go", timeout=20).read()
print(stream.read().decode().strip())
"""


async def test_the_model_answers_and_streams_through_the_sandbox(make: Make, model: Model) -> None:
    sandbox = await make()
    url = f"{model.url}{PREFIX}"
    env = {"BASE": sandbox.inside_url(url)}
    done = await sandbox.run(["python3", "-c", CALL], env=env, model_url=url)
    assert done.stdout.text.splitlines() == [
        '200 yes {"echo": "{\\"m\\": \\"\\\\u00e9\\"}"}',
        "data: first",
        "data: last",
    ], done
    assert model.seen[0] == ("POST", f"{PREFIX}/chat/completions?a=b%20c", "Bearer own", '{"m": "\\u00e9"}')
    alone = await sandbox.run(["python3", "-c", CALL], env=env)
    assert alone.exit == 1, "a run without a model URL reaches nothing"


async def test_the_same_way_leads_out_of_a_container(model: Model, tmp_path: Path) -> None:
    async with running_engine(tmp_path / "engine") as engine:
        provider = Docker(tmp_path / "leases", engine=engine.url, image="image:1")
        sandbox = await provider.create(SandboxSpec(model_url=f"{model.url}{PREFIX}"))
        env = {"BASE": sandbox.inside_url(f"{model.url}{PREFIX}")}
        done = await sandbox.run(["python3", "-c", CALL], env=env)
        await sandbox.stop()
    assert done.exit == 0, done
    assert done.stdout.text.endswith("data: last\n")


ATTEMPTS = [
    b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:8642\r\n\r\n",
    b"GET {prefix}/../../../admin HTTP/1.1\r\nHost: 127.0.0.1:8642\r\n\r\n",
    b"GET {prefix}/%2e%2e/x HTTP/1.1\r\nHost: 127.0.0.1:8642\r\n\r\n",
    b"GET {prefix}/%252e%252e/x HTTP/1.1\r\nHost: 127.0.0.1:8642\r\n\r\n",
    b"GET {prefix}/..%2fx HTTP/1.1\r\nHost: 127.0.0.1:8642\r\n\r\n",
    b"GET {prefix}/..;/x HTTP/1.1\r\nHost: 127.0.0.1:8642\r\n\r\n",
    b"GET {prefix}/\\..\\x HTTP/1.1\r\nHost: 127.0.0.1:8642\r\n\r\n",
    b"GET {prefix}evil HTTP/1.1\r\nHost: 127.0.0.1:8642\r\n\r\n",
    b"GET /{prefix}/x HTTP/1.1\r\nHost: 127.0.0.1:8642\r\n\r\n",
    b"GET {prefix}/x HTTP/1.1\r\nHost: other:80\r\n\r\n",
    b"GET {prefix}/x HTTP/1.1\r\n\r\n",
    b"GET http://other{prefix}/x HTTP/1.1\r\nHost: 127.0.0.1:8642\r\n\r\n",
    b"CONNECT other:443 HTTP/1.1\r\nHost: other:443\r\n\r\n",
    b"GET {prefix}/x HTTP/1.1\r\nHost: 127.0.0.1:8642\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"POST {prefix}/x HTTP/1.1\r\nHost: 127.0.0.1:8642\r\n"
    b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"garbage\r\n\r\n",
]


async def exchange(path: Path, request: bytes) -> bytes:
    """All that comes back on one connection; the last request must make the server close it."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(request)
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.split(b" HTTP")[0].decode()[:40])
async def test_nothing_but_the_one_url_is_passed_on(model: Model, tmp_path: Path, attempt: bytes) -> None:
    gate = Gate(f"{model.url}{PREFIX}", tmp_path / "socket")
    await gate.open()
    try:
        attempt = attempt.replace(b"{prefix}", PREFIX.encode()).replace(
            b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1
        )
        answer = await exchange(gate.path, attempt)
        assert answer[:13] in (b"HTTP/1.1 403 ", b"HTTP/1.1 400 ", b"HTTP/1.0 400 ")
        assert model.seen == []
        good = f"GET {PREFIX}/x HTTP/1.1\r\nHost: localhost:8642\r\nConnection: close\r\n\r\n".encode()
        assert b"200 OK" in await exchange(gate.path, good)
    finally:
        await gate.close()
    assert not gate.path.exists()


async def test_a_second_request_behind_the_first_is_judged_too(model: Model, tmp_path: Path) -> None:
    gate = Gate(f"{model.url}{PREFIX}", tmp_path / "socket")
    await gate.open()
    good = f"POST {PREFIX}/x HTTP/1.1\r\nHost: localhost:8642\r\nContent-Length: 2\r\n\r\nhi"
    bad = "GET /admin HTTP/1.1\r\nHost: localhost:8642\r\nConnection: close\r\n\r\n"
    answer = await exchange(gate.path, f"{good}{bad}".encode())
    await gate.close()
    assert answer.index(b"200 OK") < answer.index(b"403 Forbidden")
    assert [row[1] for row in model.seen] == [f"{PREFIX}/x"]


async def test_a_redirect_is_handed_back_and_not_followed(model: Model, tmp_path: Path) -> None:
    gate = Gate(f"{model.url}{PREFIX}", tmp_path / "socket")
    await gate.open()
    request = f"GET {PREFIX}/away HTTP/1.1\r\nHost: localhost:8642\r\nConnection: close\r\n\r\n".encode()
    answer = await exchange(gate.path, request)
    await gate.close()
    assert answer.startswith(b"HTTP/1.1 302")
    assert len(model.seen) == 1


async def test_a_model_that_does_not_answer_is_a_502(tmp_path: Path) -> None:
    gate = Gate("http://127.0.0.1:9/v1", tmp_path / "socket")
    await gate.open()
    answer = await exchange(gate.path, b"GET /v1/x HTTP/1.1\r\nHost: localhost:8642\r\nConnection: close\r\n\r\n")
    await gate.close()
    assert answer.startswith(b"HTTP/1.1 502")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["kind"] == "model_unavailable"


async def test_a_crowd_of_connections_is_turned_away(model: Model, tmp_path: Path) -> None:
    gate = Gate(f"{model.url}{PREFIX}", tmp_path / "socket")
    await gate.open()
    crowd = [await asyncio.open_unix_connection(str(gate.path)) for _ in range(80)]
    ended = [asyncio.ensure_future(reader.read()) for reader, _ in crowd]
    done, _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
    assert all(each.result() == b"" for each in done)
    await gate.close()
    await asyncio.wait(ended)
    for _, writer in crowd:
        writer.close()


@pytest.mark.promise("EP-14")
@pytest.mark.parametrize("way", ["said before", "chunked"])
async def test_a_body_over_the_bound_is_refused_and_is_no_trouble_of_the_model(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(module, "MAX_BODY_BYTES", 1000)
    head = f"POST {PREFIX}/chat/completions HTTP/1.1\r\nHost: localhost:8642\r\nConnection: close\r\n"
    for size, status in ((1000, b"200"), (1001, b"413")):
        text = "x" * size
        body = f"Content-Length: {size}\r\n\r\n{text}"
        if way == "chunked":
            body = f"Transfer-Encoding: chunked\r\n\r\n{size:x}\r\n{text}\r\n0\r\n\r\n"
        async with Gate(f"{model.url}{PREFIX}", tmp_path / f"socket-{size}") as gate:
            assert gate.path is not None
            reply = await exchange(gate.path, (head + body).encode())
            assert reply.startswith(b"HTTP/1.1 " + status), reply
            assert (gate.trouble, gate.refused) == (None, int(status == b"413"))
    assert [len(body) for _, _, _, body in model.seen] == [1000], "what is too long does not arrive"


async def ask_gate(gate: Gate, path: str, **headers: str) -> tuple[int, Any]:
    url = f"{gate.inside()}{path}"
    async with aiohttp.ClientSession() as session, session.post(url, json={"a": 1}, headers=headers) as reply:
        return reply.status, await reply.json()


@pytest.mark.promise("EP-14")
async def test_a_gate_with_keys_opens_for_its_own_and_puts_in_the_servers(model: Model) -> None:
    keys = GateKeys(server="sk-of-the-server")
    async with Gate(f"{model.url}{PREFIX}", keys=keys) as gate:
        for wrong in ({}, {"authorization": "Bearer sk-of-the-server"}, {"x-api-key": keys.own[:-1]}, {"api-key": ""}):
            status, body = await ask_gate(gate, "/chat/completions", **wrong)
            assert (status, body["error"]["kind"], body["error"]["retryable"]) == (401, "forbidden", False)
        assert model.seen == []
        for right in ({"authorization": f"bearer {keys.own}"}, {"x-api-key": keys.own}, {"api-key": keys.own}):
            assert (await ask_gate(gate, "/chat/completions", **right))[0] == 200
        assert {authorization for _, _, authorization, _ in model.seen} == {"Bearer sk-of-the-server"}
        assert (gate.calls, gate.refused) == (3, 4)
    assert keys.own not in repr(keys), "no key in a log"
    assert "sk-of" not in repr(keys)


async def test_a_gate_on_loopback_ends_with_its_activation(model: Model) -> None:
    async with Gate(f"{model.url}{PREFIX}", keys=GateKeys()) as gate:
        assert gate.keys is not None
        key = {"authorization": f"Bearer {gate.keys.own}"}
        assert (await ask_gate(gate, "/responses", **key))[0] == 200
        assert gate.inside("host.example").startswith("http://host.example:")
        assert gate.inside().endswith(PREFIX)
    with pytest.raises(aiohttp.ClientConnectionError):
        await ask_gate(gate, "/responses", **key)


async def test_a_gate_hears_the_last_reply_and_knows_trouble_from_refusal(model: Model) -> None:
    async with Gate(f"{model.url}{PREFIX}") as gate:
        await ask_gate(gate, "/chat/completions")
        await ask_gate(gate, "/models")
        assert gate.calls == 1
        assert gate.heard is not None
        assert gate.heard.whole
        assert json.loads(gate.heard.body) == {"echo": '{"a": 1}'}
        assert gate.trouble is None
    async with Gate("http://127.0.0.1:9/v1") as gate:
        assert (await ask_gate(gate, "/messages"))[0] == 502
        assert gate.trouble is not None
        assert (gate.calls, gate.heard) == (0, None)


async def test_a_sandbox_without_a_network_has_no_gate(provider: Bubblewrap) -> None:
    sandbox = await provider.create(SandboxSpec(network="none"))
    try:
        with pytest.raises(Forbidden, match="network: none"):
            sandbox.gate("http://127.0.0.1:9/v1")
        assert (await sandbox.run(["true"])).exit == 0
    finally:
        await sandbox.stop()
    with pytest.raises(ConfigError, match="network"):
        SandboxSpec(network="none", model_url="http://127.0.0.1:9/v1")


@pytest.mark.parametrize("url", ["ftp://x/v1", "http://", "http://u:p@h/v1", "http://h/v1?x=1", "v1"])
async def test_a_url_that_names_no_server_is_refused(make: Make, url: str) -> None:
    with pytest.raises(ConfigError, match="model_url"):
        await make(model_url=url)


async def test_a_run_cannot_choose_another_model_than_the_owner(make: Make) -> None:
    sandbox = await make(model_url="http://127.0.0.1:9/v1")
    with pytest.raises(Forbidden):
        await sandbox.run(["true"], model_url="http://127.0.0.1:10/v1")


def test_the_url_inside_keeps_the_path() -> None:
    assert inside_url(f"http://10.1.2.3:77{PREFIX}/") == f"http://127.0.0.1:8642{PREFIX}"
