"""A transport by name, `module:Class` with keyword arguments, as every process that uses it builds its own.

Also the other process: `python -m toprope.testing.capture_endpoints` builds the transport that it is told and does what
it reads, a line of JSON each, until its input ends or it is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from toprope.capture.bounds import within
from toprope.capture.protocols import AbortingSink, Intent, SupersedingSource
from toprope.errors.tree import ConfigError
from toprope.launch.construct import build, find
from toprope.launch.strict import Where
from toprope.testing.capture_kit import Nonconforming, Transport, sample_entry, takes

ANSWER_S = 60.0
"""Seconds that another process may take to answer: it starts an interpreter and opens a store, on a busy machine."""


class _Shared(Transport):
    """The one client of custody that lives in this process: it is closed with the process."""

    async def close(self) -> None:
        """Others use it too."""


@dataclass
class Endpoints:
    """Opens clients of `sink` and `source` (None: the sink is both). Each end gets those of `kwargs` that it takes.

    A sink that says that it is not durable (`durable = False`) lives in one process: all clients are one object.
    Raises `ConfigError` for a name that cannot be loaded or an argument that nothing takes.
    """

    sink: str
    source: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    _in_memory: Transport | None = None

    async def __call__(self) -> Transport:
        if self._in_memory is not None:
            return self._in_memory
        sink = self._end("sink", self.sink, also=self.source)
        source = sink if self.source is None else self._end("source", self.source, also=self.sink)
        if self.durable(sink):
            return Transport(sink, source)
        self._in_memory = _Shared(sink, source)
        return self._in_memory

    @staticmethod
    def durable(sink: object) -> bool:
        """Whether the sink claims to survive its process; one that says nothing does."""
        return getattr(sink, "durable", True) is not False

    def told(self) -> str:
        """The endpoints as one argument for another process."""
        return json.dumps({"sink": self.sink, "source": self.source, "kwargs": dict(self.kwargs)})

    def _end(self, option: str, name: str, *, also: str | None) -> Any:
        where = Where(f"--{option}")
        target = find(name, "toprope.capture", where)
        other = find(also, "toprope.capture", where) if also is not None else None
        given = {key: value for key, value in self.kwargs.items() if takes(target, key) or not takes(other, key)}
        return build(target, given, where)


class OtherProcess:
    """A process with a client of its own. `tell` returns when it has done what it was told."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, endpoints: Endpoints) -> OtherProcess:
        """On return its client is open."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "toprope.testing.capture_endpoints",
            endpoints.told(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)},
        )
        other = cls(process)
        await other._heard()
        return other

    async def tell(self, do: str, key: str, call_id: str = "", **more: Any) -> None:
        """On return it is done there. Raises `Nonconforming` with its words if it failed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, "key": key, "call_id": call_id, **more}).encode() + b"\n")
        await self._process.stdin.drain()
        await self._heard()

    async def kill(self) -> None:
        """On return it is dead by SIGKILL, in the middle of whatever it did."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.communicate()

    async def end(self) -> None:
        """On return it has closed its client and ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await within(ANSWER_S, self._process.wait(), "another process")
        finally:
            await self.kill()

    async def _heard(self) -> None:
        assert self._process.stdout is not None
        line = await within(ANSWER_S, self._process.stdout.readline(), "another process")
        if line.strip() != b"done":
            await self.kill()
            raise Nonconforming(f"another process failed: {line.decode(errors='replace').strip() or 'it died'}")


async def _serve(told: str) -> None:
    transport = await Endpoints(**json.loads(told))()
    print("done", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            await _do(transport, **json.loads(line))
        except Exception as error:  # told to who asked
            print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
        else:
            print("done", flush=True)
    await transport.close()


async def _do(
    transport: Transport, do: str, key: str, call_id: str, count: int = 1, intent: Mapping[str, Any] | None = None
) -> None:
    sink, source = transport.sink, transport.source
    if do == "put":
        for n in range(count):
            await sink.put(sample_entry(key, call_id if count == 1 else f"{call_id}{n}"))
    elif do == "begin":
        begin: Any = sink.begin_call
        await begin(key, call_id, **({"intent": Intent(**intent)} if intent is not None else {}))
    elif do == "mark":
        await sink.mark_incomplete(key, call_id)
    elif do == "abort" and isinstance(sink, AbortingSink):
        await sink.abort_call(key, call_id, reason="client_gone")
    elif do == "supersede" and isinstance(source, SupersedingSource):
        await source.supersede(key)
    elif do == "freeze":
        await source.freeze(key)
    elif do == "retire":
        snapshot = await source.freeze(key)
        if not await source.drop(key, snapshot_id=snapshot.snapshot_id, version=snapshot.version):
            raise ConfigError("drop with the right pair fails")


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
