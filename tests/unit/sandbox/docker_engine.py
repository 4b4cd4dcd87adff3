"""A small container engine that speaks the few calls the Docker SDK makes for us, since no engine runs in tests.

A container is a directory; an exec is a real process over it (bubblewrap gives it the container's paths). aiohttp and
not starlette: `exec start` hijacks the connection for the engine's own framing, below HTTP.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import secrets
import shutil
import stat
import struct
import tarfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

API = "1.47"


@dataclass
class Container:
    """One container: what it was made of, its files, its running execs."""

    name: str
    settings: dict[str, Any]
    root: Path
    running: bool = False
    execs: set[asyncio.subprocess.Process] = field(default_factory=set)

    def kill(self) -> None:
        self.running = False
        for process in self.execs:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


class Engine:
    """The engine: `containers` by name, `calls` as method and path."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.containers: dict[str, Container] = {}
        self.execs: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.leaving: set[str] = set()
        """Containers that somebody else is removing."""
        self.facts = {"ServerVersion": "stand-in", "MemoryLimit": True, "PidsLimit": True}
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        for method, path, handler in (
            ("GET", "/version", self.version),
            ("GET", "/v{api}/info", self.info),
            ("POST", "/v{api}/containers/create", self.create),
            ("GET", "/v{api}/containers/{name}/json", self.inspect),
            ("POST", "/v{api}/containers/{name}/start", self.start),
            ("POST", "/v{api}/containers/{name}/kill", self.kill),
            ("POST", "/v{api}/containers/{name}/wait", self.wait),
            ("DELETE", "/v{api}/containers/{name}", self.remove),
            ("PUT", "/v{api}/containers/{name}/archive", self.put_archive),
            ("GET", "/v{api}/containers/{name}/archive", self.get_archive),
            ("POST", "/v{api}/containers/{name}/exec", self.exec_create),
            ("POST", "/v{api}/exec/{exec}/start", self.exec_start),
            ("GET", "/v{api}/exec/{exec}/json", self.exec_inspect),
        ):
            app.router.add_route(method, path, handler)
        return app

    def _container(self, request: web.Request) -> Container:
        self.calls.append(f"{request.method} {request.path.partition('/containers/')[2]}")
        name = request.match_info["name"]
        if name not in self.containers:
            raise web.HTTPNotFound(text=json.dumps({"message": f"No such container: {name}"}))
        return self.containers[name]

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"ApiVersion": API, "MinAPIVersion": "1.24", "Version": "stand-in"})

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response(self.facts)

    async def create(self, request: web.Request) -> web.Response:
        name, settings = request.query["name"], await request.json()
        if settings["Image"] == "absent":
            raise web.HTTPNotFound(text=json.dumps({"message": "No such image: absent"}))
        root = self.directory / name
        (root / "work").mkdir(parents=True)
        self.containers[name] = Container(name, settings, root)
        return web.json_response({"Id": name, "Warnings": []}, status=201)

    async def inspect(self, request: web.Request) -> web.Response:
        container = self._container(request)
        state = {"Running": container.running, "OOMKilled": False}
        return web.json_response({"Id": container.name, "Name": container.name, "State": state, "Config": {}})

    async def start(self, request: web.Request) -> web.Response:
        self._container(request).running = True
        return web.Response(status=204)

    async def kill(self, request: web.Request) -> web.Response:
        container = self._container(request)
        if not container.running:
            raise web.HTTPConflict(text=json.dumps({"message": "container is not running"}))
        container.kill()
        return web.Response(status=204)

    async def wait(self, request: web.Request) -> web.Response:
        assert not self._container(request).running
        return web.json_response({"StatusCode": 137})

    async def remove(self, request: web.Request) -> web.Response:
        container = self._container(request)
        container.kill()
        if container.name in self.leaving:
            message = f"removal of container {container.name} is already in progress"
            raise web.HTTPConflict(text=json.dumps({"message": message}))
        del self.containers[container.name]
        for process in tuple(container.execs):  # an exec that ends leaves the set meanwhile
            await process.wait()
        shutil.rmtree(container.root)
        return web.Response(status=204)

    async def put_archive(self, request: web.Request) -> web.Response:
        container = self._container(request)
        base = container.root / request.query["path"].strip("/")
        with tarfile.open(fileobj=io.BytesIO(await request.read())) as archive:
            for member in archive:
                target = base / member.name
                if member.isdir():
                    target.mkdir(exist_ok=True)
                    continue
                target.unlink(missing_ok=True)
                file = archive.extractfile(member)
                assert file is not None
                target.write_bytes(file.read())
                target.chmod(member.mode)
        return web.Response()

    async def get_archive(self, request: web.Request) -> web.Response:
        container = self._container(request)
        path = container.root / request.query["path"].strip("/")
        try:
            facts = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            raise web.HTTPNotFound(text=json.dumps({"message": "no such file"})) from None
        bits = {stat.S_IFDIR: 1 << 31, stat.S_IFLNK: 1 << 27, stat.S_IFIFO: 1 << 25}.get(stat.S_IFMT(facts.st_mode), 0)
        told = {"name": path.name, "size": facts.st_size, "mode": bits | stat.S_IMODE(facts.st_mode)}
        told["linkTarget"] = os.readlink(path) if stat.S_ISLNK(facts.st_mode) else ""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.add(path, arcname=path.name, recursive=False)
        header = base64.b64encode(json.dumps(told).encode()).decode()
        return web.Response(body=buffer.getvalue(), headers={"X-Docker-Container-Path-Stat": header})

    async def exec_create(self, request: web.Request) -> web.Response:
        container = self._container(request)
        if not container.running:
            raise web.HTTPConflict(text=json.dumps({"message": "container is not running"}))
        name = secrets.token_hex(8)
        self.execs[name] = {"container": container, "order": await request.json(), "ExitCode": None}
        return web.json_response({"Id": name}, status=201)

    async def exec_start(self, request: web.Request) -> web.StreamResponse:
        entry = self.execs[request.match_info["exec"]]
        container, order = entry["container"], entry["order"]
        process = await asyncio.create_subprocess_exec(
            *self._bwrap(container),
            *order["Cmd"],
            env=dict(pair.split("=", 1) for pair in [*container.settings["Env"], *order["Env"]])
            | {"PATH": os.environ["PATH"]},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        container.execs.add(process)
        if not container.running:  # killed while the process was made, when there was nothing to kill yet
            process.kill()
        out = request.transport
        assert out is not None
        out.write(b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\n")
        out.write(b"Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n")

        async def carry(number: int, stream: asyncio.StreamReader) -> None:
            while data := await stream.read(65536):
                out.write(struct.pack(">BxxxL", number, len(data)) + data)
                await asyncio.sleep(0)

        assert process.stdout is not None
        assert process.stderr is not None
        await asyncio.gather(carry(1, process.stdout), carry(2, process.stderr))
        status = await process.wait()
        container.execs.discard(process)
        entry["ExitCode"] = status if status >= 0 else 128 - status
        out.close()
        return web.Response()

    async def exec_inspect(self, request: web.Request) -> web.Response:
        return web.json_response({"ExitCode": self.execs[request.match_info["exec"]]["ExitCode"]})

    def _bwrap(self, container: Container) -> list[str]:
        source, target, _ = container.settings["HostConfig"]["Binds"][0].split(":")
        words = ["bwrap", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        for name in os.listdir("/"):
            path = f"/{name}"
            if os.path.islink(path):
                words += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path) and name not in ("proc", "dev", "sys", "tmp", "run", "work"):
                words += ["--ro-bind", path, path]
        words += ["--ro-bind", source, target, "--bind", str(container.root / "work"), "/work"]
        return [*words, "--unshare-all", "--die-with-parent", "--as-pid-1", "--chdir", "/work", "--"]


@contextlib.asynccontextmanager
async def running_engine(directory: Path) -> AsyncIterator[Engine]:
    """The engine on a loopback port; on leaving its containers are killed, not removed."""
    engine = Engine(directory)
    runner = web.AppRunner(engine.app(), shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine.url = "tcp://{}:{}".format(*runner.addresses[0][:2])
    try:
        yield engine
    finally:
        for container in engine.containers.values():
            container.kill()
        await runner.cleanup()
