"""The way out of a sandbox: a unix socket that leads to one URL and nowhere else.

Code inside speaks HTTP to a forwarder on its own loopback, which passes bytes to the socket. Here, outside, each
request is parsed and judged, and a new one is sent: only to the one server, only below the one path, never by a
redirect, an absolute target, a tunnel or an upgrade. Replies stream through. The key that the model server asks for is
the caller's own; nothing of the host is added.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import aiohttp
from aiohttp import web
from yarl import URL

from toprope.errors.tree import ConfigError, Forbidden

log = logging.getLogger("toprope.sandbox")

INSIDE_PORT = 8642
"""The port of the forwarder on the sandbox's own loopback."""

MAX_CONNECTIONS = 64
MAX_BODY_BYTES = 256 * 2**20

_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"}
    | {"upgrade", "host", "content-length", "expect", "proxy-connection", "x-forwarded-for", "forwarded"}
)
_HOSTS = frozenset({f"127.0.0.1:{INSIDE_PORT}", f"localhost:{INSIDE_PORT}"})
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


def url_of_run(sandbox_id: str, of_sandbox: str | None, of_run: str | None) -> str | None:
    """The one URL that a run reaches. Raises `Forbidden` if its sandbox was made for another than it asks for."""
    if of_run is None:
        return of_sandbox
    if of_sandbox is not None and of_sandbox.rstrip("/") != of_run.rstrip("/"):
        raise Forbidden(f"sandbox {sandbox_id} reaches {of_sandbox} only; a run cannot have another model_url")
    return check_url(of_run)


class Gate:
    """One unix socket that leads to `url`."""

    def __init__(self, url: str, path: Path) -> None:
        self.url = check_url(url)
        self.path = path
        parts = urlsplit(self.url)
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._prefix = parts.path
        self._client: aiohttp.ClientSession | None = None
        self._server: asyncio.Server | None = None
        # What code inside sends is its affair: it must not be able to fill our log with it.
        self._parser = web.Server(self._pass, access_log=None, logger=logging.Logger("gate", logging.CRITICAL + 1))
        self.refused = 0

    async def open(self) -> None:
        """On return the socket exists and accepts, for every user who can reach its path."""
        self._client = aiohttp.ClientSession(
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
            trust_env=False,
        )
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # A socket's path has 108 bytes at most; by the handle of its directory any will do.
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            sock.bind(f"/proc/self/fd/{directory}/{self.path.name}")
            os.chmod(self.path, 0o666)
            sock.setblocking(False)
            self._server = await asyncio.get_running_loop().create_unix_server(self._accept, sock=sock)
        except BaseException:
            sock.close()
            await self._client.close()
            raise
        finally:
            os.close(directory)

    async def close(self) -> None:
        """On return the socket is gone and nothing passes any more."""
        if self._server is not None:
            self._server.close()
        await self._parser.shutdown(0.1)
        if self._client is not None:
            await self._client.close()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> asyncio.Protocol:
        if len(self._parser.connections) >= MAX_CONNECTIONS:  # code inside could use up the owner's handles
            return _Refuse()
        return self._parser()

    async def _pass(self, request: web.BaseRequest) -> web.StreamResponse:
        if (why := self._refusal(request)) is not None:
            self.refused += 1
            if self.refused == 1:  # the others are counted
                log.warning("a sandbox asked for %s %.200s: refused, %s", request.method, request.raw_path, why)
            return web.json_response(
                {
                    "error": {
                        "kind": "forbidden",
                        "message": f"this sandbox reaches its model only: {why}",
                        "retryable": False,
                    }
                },
                status=403,
            )
        assert self._client is not None
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _HOP]
        try:
            async with self._client.request(
                request.method,
                URL(self._origin + request.raw_path, encoded=True),
                headers=headers,
                data=_bounded(request.content) if request.body_exists else None,
                allow_redirects=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            ) as answer:
                reply = web.StreamResponse(status=answer.status, reason=answer.reason)
                for name, value in answer.headers.items():
                    if name.lower() not in _HOP:
                        reply.headers.add(name, value)
                await reply.prepare(request)
                async for chunk in answer.content.iter_any():
                    await reply.write(chunk)
                await reply.write_eof()
                return reply
        except aiohttp.ClientConnectionError as error:
            return web.json_response(
                {"error": {"kind": "model_unavailable", "message": f"the model server: {error}", "retryable": True}},
                status=502,
            )

    def _refusal(self, request: web.BaseRequest) -> str | None:
        target = request.raw_path
        path, _, _ = target.partition("?")
        if request.method in ("CONNECT", "TRACE") or "upgrade" in request.headers.get("connection", "").lower():
            return "no tunnels and no upgrades"
        if not target.startswith("/") or request.headers.get("host", "").lower() not in _HOSTS:
            return "another host"
        if not _PLAIN.fullmatch(path) or _leaves(path):
            return "a path with parts that some servers resolve"
        if path != self._prefix and not path.startswith(f"{self._prefix}/"):
            return "a path outside the model's"
        return None


def _leaves(path: str) -> bool:
    """Whether a server could read another path out of this one."""
    for _ in range(3):  # decoded twice by servers behind proxies
        if "//" in path or "\\" in path or "\0" in path or any(part in (".", "..") for part in path.split("/")):
            return True
        if "%2f" in path.lower() or "%5c" in path.lower() or ";" in path:
            return True
        path = unquote(path)
    return False


async def _bounded(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    total = 0
    async for chunk in content.iter_any():
        total += len(chunk)
        if total > MAX_BODY_BYTES:
            raise aiohttp.ClientPayloadError(f"a request of more than {MAX_BODY_BYTES} bytes")
        yield chunk


class _Refuse(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
