"""What transports must keep between processes, one of which may die at any moment.

For transports that are named (`capture_endpoints.Endpoints`), since another process has to build its own client.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from toprope.testing.capture_endpoints import Endpoints, OtherProcess
from toprope.testing.capture_kit import (
    Connect,
    Scale,
    Skipped,
    client,
    demand,
    frozen_ids,
    new_key,
    refused,
    sample_entry,
)


async def what_another_process_puts_is_visible_at_once(connect: Connect, scale: Scale) -> None:
    async with client(connect) as here, _another(connect, here.sink) as there:
        for n in range(max(3, scale.races // 10)):
            key = new_key()
            await there.tell("put", key, "c1")
            snapshot = await here.source.freeze(key)
            demand(
                snapshot.entries == (sample_entry(key, "c1"),),
                f"round {n}: an entry that another process acknowledged is missing or changed",
            )


async def what_was_acknowledged_survives_the_death_of_its_process(connect: Connect, scale: Scale) -> None:
    key, marked = new_key(), new_key()
    async with client(connect) as before, _another(connect, before.sink) as there:
        await there.tell("put", key, "c", count=5)
        await there.tell("put", marked, "c1")
        await there.tell("mark", marked, "lost")
        await there.kill()
    async with client(connect) as after:
        found = sorted((await after.source.freeze(key)).entries, key=lambda entry: entry.model_call_id)
        demand(
            found == [sample_entry(key, f"c{n}") for n in range(5)],
            f"5 entries were acknowledged, {len(found)} are there after the process was killed",
        )
        demand((await after.source.freeze(marked)).incomplete, "a mark went with the process that made it")


async def an_intent_survives_the_death_of_its_process(connect: Connect, scale: Scale) -> None:
    key = new_key()
    async with client(connect) as before:
        if getattr(before.sink, "begin_call", None) is None:
            raise Skipped("the sink has no begin_call")
        async with _another(connect, before.sink) as there:
            await there.tell("begin", key, "c1")
            await there.kill()
    async with client(connect) as after:
        demand((await after.source.freeze(key)).incomplete, "a call that a process died over left no trace")


async def a_tombstone_survives_the_death_of_its_process(connect: Connect, scale: Scale) -> None:
    key = new_key()
    async with client(connect) as before, _another(connect, before.sink) as there:
        await there.tell("put", key, "c1")
        await there.tell("retire", key)
        await there.kill()
    async with client(connect) as after:
        await refused(
            after.sink.put(sample_entry(key, "c2")), "a rollout came back after the process that retired it died"
        )


async def several_processes_write_one_rollout(connect: Connect, scale: Scale) -> None:
    key, count = new_key(), max(10, scale.entries // 20)
    async with client(connect) as here, _another(connect, here.sink) as first, _another(connect, here.sink) as second:
        for other, name in ((first, "a"), (second, "b")):
            await other.tell("put", key, name, count=count)
            await here.sink.put(sample_entry(key, f"here-{name}"))
        await first.end()
        await second.end()
        wanted = {f"{name}{n}" for name in "ab" for n in range(count)} | {"here-a", "here-b"}
        found = await frozen_ids(here, key)
        demand(sorted(found) == sorted(wanted), f"{len(wanted)} entries of three processes, {len(found)} are there")


@asynccontextmanager
async def _another(connect: Connect, sink: object) -> AsyncIterator[OtherProcess]:
    if not isinstance(connect, Endpoints):
        raise Skipped("another process cannot build this transport: it is not named as module:Class")
    if not connect.durable(sink):
        raise Skipped("the sink says that it keeps nothing beyond its process")
    other = await OtherProcess.start(connect)
    try:
        yield other
    finally:
        await other.kill()
