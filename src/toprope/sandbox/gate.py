"""The way out of a sandbox: a socket that leads to one URL and nowhere else, and opens for one key.

Code inside speaks HTTP to a forwarder on its own loopback, which passes bytes to a unix socket. Here, outside, each
request is parsed and judged, and a new one is sent: only to the one server, only below the one path, never by a
redirect, an absolute target, a tunnel or an upgrade. Replies stream through. With `GateKeys` a request must carry the
key that was made for it; the key of the model server is put in its place and never seen inside. A program that runs in
no sandbox gets the same gate on a port of our loopback.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlsplit

import aiohttp
from aiohttp import web
from yarl import URL

from toprope.errors.tree import ConfigError, Forbidden
from toprope.sandbox.spec import SandboxSpec

log = logging.getLogger("toprope.sandbox")

INSIDE_PORT = 8642
"""The port of the forwarder on the sandbox's own loopback."""

MAX_CONNECTIONS = 64
MAX_BODY_BYTES = 256 * 2**20
MAX_HEARD_BYTES = 4 * 2**20

_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"}
    | {"upgrade", "host", "content-length", "expect", "proxy-connection", "x-forwarded-for", "forwarded"}
)
_KEY_HEADERS = frozenset({"authorization", "x-api-key", "api-key"})
_GENERATES = ("/chat/completions", "/responses", "/messages")
_PLAIN = re.compile(r"[A-Za-z0-9/._~!$&'()*+,;=:@%-]*")


def inside_url(url: str) -> str:
    """Under which URL code inside reaches `url`."""
    return f"http://127.0.0.1:{INSIDE_PORT}{urlsplit(url).path.rstrip('/')}"


def check_url(url: str) -> str:
    """`url` without a slash at its end. Raises `ConfigError` for one that names no server and path."""
    parts = urlsplit(url)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.query
        or parts.fragment
        or "@" in parts.netloc
    ):
        raise ConfigError(
            f"sandbox model_url {url!r}: expected http://host:port/path or https, without user, query and fragment"
        )
    return url.rstrip("/")


def allowed_url(sandbox_id: str, spec: SandboxSpec, wanted: str) -> str:
    """`wanted`, if code in a sandbox of this spec may reach it. Raises `Forbidden` where it may not."""
    if spec.network == "none":
        raise Forbidden(f"sandbox {sandbox_id} reaches nothing (network: none); a run cannot have a model_url")
    if spec.model_url is not None and spec.model_url.rstrip("/") != wanted.rstrip("/"):
        raise Forbidden(f"sandbox {sandbox_id} reaches {spec.model_url} only; a run cannot have another model_url")
    return check_url(wanted)


@dataclass(frozen=True, slots=True)
class GateKeys:
    """`own`: what a request from inside must carry, as a bearer token, `x-api-key` or `api-key`. `server`: what is sent
    on in its place; None: nothing."""

    own: str = field(default_factory=lambda: f"tr-{secrets.token_urlsafe(24)}", repr=False)
    server: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Heard:
    """The last whole reply to a call that generates: the request's path, the reply's type and the body, at most
    `MAX_HEARD_BYTES` of it (`whole` says whether that is all)."""

    path: str
    content_type: str
    body: bytes
    whole: bool


class Gate:
    """One socket that leads to `url`: a unix socket at `path`, or a port of the address `bind` where `path` is None.

    `calls` counts requests to routes that generate and got a 2xx; `heard` is the last of their replies; `trouble` says
    why the last such request failed, if it did and not for what it asked. `refused` counts what was not passed on.
    """

    def __init__(
        self, url: str, path: Path | None = None, *, keys: GateKeys | None = None, bind: str = "127.0.0.1"
    ) -> None:
        self.url = check_url(url)
        self.path = path
        self.keys = keys
        self.calls = 0
        self.refused = 0
        self.heard: Heard | None = None
        self.trouble: str | None = None
        parts = urlsplit(self.url)
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._prefix = parts.path
        self._bind = bind
        self._port = INSIDE_PORT
        self._client: aiohttp.ClientSession | None = None
        self._server: asyncio.Server | None = None
        # What code inside sends is its affair: it must not be able to fill our log with it.
        self._parser = web.Server(self._pass, access_log=None, logger=logging.Logger("gate", logging.CRITICAL + 1))

    def inside(self, host: str = "127.0.0.1") -> str:
        """The URL under which a program reaches `url` once the gate is open; `host` names this machine to it."""
        return f"http://{host}:{self._port}{self._prefix}"

    async def __aenter__(self) -> Gate:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(self.close())

    async def open(self) -> None:
        """On return the socket exists and accepts, for every user who can reach it."""
        self._client = aiohttp.ClientSession(
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
            trust_env=False,
        )
        try:
            loop = asyncio.get_running_loop()
            if self.path is None:
                self._server = await loop.create_server(self._accept, self._bind, 0)
                self._port = self._server.sockets[0].getsockname()[1]
            else:
                self._server = await loop.create_unix_server(self._accept, sock=_unix_socket(self.path))
        except BaseException:
            await self._client.close()
            raise

    async def close(self) -> None:
        """On return the socket is gone and nothing passes any more."""
        if self._server is not None:
            self._server.close()
        await self._parser.shutdown(0.1)
        if self._client is not None:
            await self._client.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _accept(self) -> asyncio.Protocol:
        if len(self._parser.connections) >= MAX_CONNECTIONS:  # code inside could use up the owner's handles
            return _Refuse()
        return self._parser()

    async def _pass(self, request: web.BaseRequest) -> web.StreamResponse:
        if (why := self._refusal(request)) is not None:
            return self._refuse(request, 403, why)
        if self.keys is not None and not _carries(request, self.keys.own):
            return self._refuse(request, 401, "the key is not the one that was given to this program")
        assert self._client is not None
        headers, body = self._headers(request), _Body(request)
        if body.too_large:
            return self._refuse(request, 413, body.why)
        try:
            async with self._client.request(
                request.method,
                URL(self._origin + request.raw_path, encoded=True),
                headers=headers,
                data=body.pieces() if request.body_exists else None,
                allow_redirects=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            ) as answer:
                reply = web.StreamResponse(status=answer.status, reason=answer.reason)
                for name, value in answer.headers.items():
                    if name.lower() not in _HOP:
                        reply.headers.add(name, value)
                await reply.prepare(request)
                hearing = self._hear(request, answer)
                self._judge(request, answer.status)
                try:
                    async for chunk in answer.content.iter_any():
                        hearing.add(chunk)
                        await reply.write(chunk)
                    await reply.write_eof()
                finally:  # some clients leave as soon as they have read what ends the reply, before its body ends
                    if (heard := hearing.end()) is not None:
                        self.calls += 1
                        self.heard = heard
                return reply
        except aiohttp.ClientError as error:
            if body.too_large:  # the program's doing, and no trouble of the model server
                return self._refuse(request, 413, body.why)
            self._judge(request, 502, str(error))
            return web.json_response(
                {"error": {"kind": "model_unavailable", "message": f"the model server: {error}", "retryable": True}},
                status=502,
            )

    def _headers(self, request: web.BaseRequest) -> list[tuple[str, str]]:
        dropped = _HOP if self.keys is None else _HOP | _KEY_HEADERS
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in dropped]
        if self.keys is not None and self.keys.server is not None:
            headers.append(("Authorization", f"Bearer {self.keys.server}"))
        return headers

    def _judge(self, request: web.BaseRequest, status: int, why: str = "") -> None:
        if request.method == "POST" and request.path.endswith(_GENERATES):
            failed = status >= 500 or status in (408, 425, 429)
            self.trouble = f"status {status}{': ' if why else ''}{why}" if failed else None

    def _hear(self, request: web.BaseRequest, answer: aiohttp.ClientResponse) -> _Hearing:
        path = request.path
        wanted = request.method == "POST" and 200 <= answer.status < 300 and path.endswith(_GENERATES)
        return _Hearing(path, answer.headers, wanted=wanted)

    def _refuse(self, request: web.BaseRequest, status: int, why: str) -> web.Response:
        self.refused += 1
        if self.refused == 1:  # the others are counted
            log.warning("a sandbox asked for %s %.200s: refused, %s", request.method, request.raw_path, why)
        kind = "bad_request" if status == 413 else "forbidden"
        message = f"this program reaches its model only, within bounds: {why}"
        body = {"error": {"kind": kind, "message": message, "retryable": False}}
        return web.json_response(body, status=status)

    def _refusal(self, request: web.BaseRequest) -> str | None:
        target = request.raw_path
        path, _, _ = target.partition("?")
        if request.method in ("CONNECT", "TRACE") or "upgrade" in request.headers.get("connection", "").lower():
            return "no tunnels and no upgrades"
        if not target.startswith("/") or not self._is_here(request.headers.get("host", "")):
            return "another host"
        if not _PLAIN.fullmatch(path) or _leaves(path):
            return "a path with parts that some servers resolve"
        if path != self._prefix and not path.startswith(f"{self._prefix}/"):
            return "a path outside the model's"
        return None

    def _is_here(self, host: str) -> bool:
        """Whether a `Host` names this gate; one that is bound for other machines has names that it does not know."""
        if self.path is None and self._bind != "127.0.0.1":
            return host.endswith(f":{self._port}")
        return host.lower() in (f"127.0.0.1:{self._port}", f"localhost:{self._port}")


class _Hearing:
    """One reply on its way through."""

    def __init__(self, path: str, headers: Mapping[str, str], *, wanted: bool) -> None:
        self._path = path
        self._type = headers.get("content-type", "")
        self._wanted = wanted
        self._readable = headers.get("content-encoding", "identity").lower() == "identity"
        self._data = bytearray()
        self._total = 0

    def add(self, chunk: bytes) -> None:
        self._total += len(chunk)
        if self._wanted and self._readable and len(self._data) < MAX_HEARD_BYTES:
            self._data += chunk[: MAX_HEARD_BYTES - len(self._data)]

    def end(self) -> Heard | None:
        if not self._wanted:
            return None
        return Heard(self._path, self._type, bytes(self._data), whole=len(self._data) == self._total)


def _carries(request: web.BaseRequest, key: str) -> bool:
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    said = [request.headers.get(name, "") for name in ("x-api-key", "api-key")]
    if scheme.lower() == "bearer":
        said.append(bearer.strip())
    return any(hmac.compare_digest(each.encode("utf-8", "replace"), key.encode()) for each in said)


def _unix_socket(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # A socket's path has 108 bytes at most; by the handle of its directory any will do.
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sock.bind(f"/proc/self/fd/{directory}/{path.name}")
        os.chmod(path, 0o666)
        sock.setblocking(False)
        return sock
    except BaseException:
        sock.close()
        raise
    finally:
        os.close(directory)


def _leaves(path: str) -> bool:
    """Whether a server could read another path out of this one."""
    for _ in range(3):  # decoded twice by servers behind proxies
        if "//" in path or "\\" in path or "\0" in path or any(part in (".", "..") for part in path.split("/")):
            return True
        if "%2f" in path.lower() or "%5c" in path.lower() or ";" in path:
            return True
        path = unquote(path)
    return False


class _Body:
    """The body of one request on its way out. `too_large`: it has, or says that it has, more than may pass."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._content = request.content
        self.too_large = (request.content_length or 0) > MAX_BODY_BYTES
        self.why = f"a body of more than {MAX_BODY_BYTES} bytes"

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, as far as it may pass."""
        total = 0
        async for chunk in self._content.iter_any():
            total += len(chunk)
            if total > MAX_BODY_BYTES:
                self.too_large = True
                raise aiohttp.ClientPayloadError(self.why)
            yield chunk


class _Refuse(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
