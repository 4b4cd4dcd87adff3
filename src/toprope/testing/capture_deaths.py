"""What transports must keep between processes, one of which may die at any moment.

For transports that are named (`capture_endpoints.Endpoints`), since another process has to build its own client.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from toprope.capture.protocols import AbortingSink, CallJournal, SupersedingSource, own_verb
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
    takes,
)

_SETTLE_S = 10.0
"""Seconds that `settle` may take to see that a writer is dead: only a transport that never sees it waits so long."""


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
        if own_verb(before.sink, "begin_call") is None:
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


async def what_was_ended_stays_ended_after_a_death(connect: Connect, scale: Scale) -> None:
    """A freeze, an abort and a key that was made new are as durable as a put."""
    frozen, aborted, used = new_key(), new_key(), new_key()
    async with client(connect) as before, _another(connect, before.sink) as there:
        for key in (frozen, used):
            await there.tell("put", key, "c1")
        await there.tell("freeze", frozen)
        seen = await before.source.freeze(frozen)
        if isinstance(before.sink, AbortingSink):
            await there.tell("begin", aborted, "c1")
            await there.tell("abort", aborted, "c1")
        if isinstance(before.source, SupersedingSource):
            await there.tell("supersede", used)
        await there.kill()
    async with client(connect) as after:
        demand(await after.source.freeze(frozen) == seen, "a snapshot went with the process that froze it")
        await refused(after.sink.put(sample_entry(frozen, "c2")), "a frozen set was open again after a death")
        if isinstance(after.sink, AbortingSink):
            demand(not (await after.source.freeze(aborted)).incomplete, "an abort went with the process that made it")
        if isinstance(after.source, SupersedingSource):
            demand(await frozen_ids(after, used) == [], "what was set aside came back after a death")


async def calls_of_dead_writers_are_settled_and_of_live_ones_not(connect: Connect, scale: Scale) -> None:
    plain, streamed, retried, living = (new_key() for _ in range(4))
    async with client(connect) as here:
        if not takes(own_verb(here.sink, "begin_call"), "intent"):
            raise Skipped("begin_call takes no intent: nothing says whose a call is")
        settle = own_verb(here.source, "settle")
        async with _another(connect, here.sink) as there:
            for key in (plain, streamed, retried, living):
                intent = {"stream": key == streamed, "request_digest": "d", "writer_epoch": f"{plain}-writer"}
                await there.tell("begin", key, "c1", intent=intent)
            if isinstance(here.source, CallJournal):
                live = [call.live for call in await here.source.begun_calls(plain)]
                demand(live == [True], "the journal says that a live writer of another process is dead")
            if settle is not None:
                demand(await settle(plain, 0.05) is False, "settle does not wait for a call of another process")
            seen = await here.source.freeze(living)
            demand(seen.incomplete, "an open call of a live writer of another process was forgotten")
            await there.kill()
        await here.sink.put(sample_entry(retried, "c2"))
        if settle is not None:
            demand(await settle(plain, _SETTLE_S) is True, "settle waits for a writer that is dead")
        demand(
            (await here.source.freeze(streamed)).incomplete, "a streamed call that its writer died over is forgotten"
        )
        for key, what in ((plain, "alone"), (retried, "and was tried again")):
            demand(
                not (await here.source.freeze(key)).incomplete,
                f"a call that was not streamed {what} counts as lost: its writer is dead, nobody had its reply",
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


async def a_torn_last_write_takes_nothing_along(connect: Connect, scale: Scale) -> None:
    """What grew in the last write is cut anywhere, as a power cut leaves it: the records before it are whole."""
    if not isinstance(connect, Endpoints):
        raise Skipped("nothing says where this transport keeps its files: it is not named as module:Class")
    places = {name: Path(value) for name, value in connect.kwargs.items() if _names_files(value)}
    if not places:
        raise Skipped("none of its arguments is the path of something that it made")
    key = new_key()
    first, last = sample_entry(key, "c0"), sample_entry(key, "c1")
    with TemporaryDirectory(prefix="torn-", dir=next(iter(places.values())).absolute().parent) as root:
        written, after = await _last_write(_moved(connect, places, Path(root, "whole")), Path(root, "whole"), key)
        for n, (name, size) in enumerate(_tears(written, after, scale.tears)):
            torn = Path(root, f"torn-{n}")
            for each, data in after.items():
                (torn / each).parent.mkdir(parents=True, exist_ok=True)
                (torn / each).write_bytes(data[:size] if each == name else data)
            where = f"{name} ends after {size - len(written[name])} of {len(after[name]) - len(written[name])} bytes"
            async with client(_moved(connect, places, torn)) as later:
                found = {entry.model_call_id: entry for entry in (await later.source.freeze(key)).entries}
            demand(found.pop("c0", None) == first, f"{where} of the last write: a record before it is gone or changed")
            demand(found in ({}, {"c1": last}), f"{where} of the last write: it came back changed")
            demand(bool(found) or size < len(after[name]), "what was acknowledged is gone, and nothing was torn")
            shutil.rmtree(torn)


def _names_files(value: object) -> bool:
    return isinstance(value, str) and bool(value) and Path(value).exists()


def _moved(endpoints: Endpoints, places: Mapping[str, Path], directory: Path) -> Endpoints:
    directory.mkdir(exist_ok=True)
    kwargs = {**endpoints.kwargs, **{name: str(directory / path.name) for name, path in places.items()}}
    return Endpoints(endpoints.sink, endpoints.source, kwargs)


async def _last_write(endpoints: Endpoints, directory: Path, key: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The files of a transport before and after the put of call c1, by a process that was killed then."""

    def files() -> dict[str, bytes]:
        return {str(each.relative_to(directory)): each.read_bytes() for each in directory.rglob("*") if each.is_file()}

    async with client(endpoints) as here, _another(endpoints, here.sink) as there:
        await there.tell("put", key, "c0")
        before = files()
        await there.tell("put", key, "c1")
        after = files()
        await there.kill()
    return before, after


def _tears(before: Mapping[str, bytes], after: Mapping[str, bytes], most: int) -> Iterator[tuple[str, int]]:
    """Each file that the last write was appended to, with the sizes to cut it to; the whole size comes last."""
    for name, data in after.items():
        size = len(before.get(name, data))
        if size < len(data) and data.startswith(before[name]):
            step = max(1, (len(data) - size) // most)
            yield from ((name, at) for at in (*range(size, len(data), step), len(data) - 1, len(data)))


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
