"""The journal that retries are decided by: every store tells it alike, in order, in every process."""

from __future__ import annotations

import pytest

from toprope.capture.jsonl_store import JsonlStore
from toprope.capture.memory_store import MemoryStore
from toprope.capture.protocols import CallJournal, Intent
from toprope.capture.sqlite_store import SqliteStore
from toprope.testing.capture_suite import sample_entry

pytestmark = pytest.mark.promise("MS-4")

STORES = {
    "memory": lambda directory: MemoryStore(),
    "sqlite": lambda directory: SqliteStore(directory / "c.sqlite"),
    "jsonl": lambda directory: JsonlStore(directory / "c"),
}


def intent(tag, count=0, epoch="one"):
    return Intent(request_digest=tag, retry_count=count, writer_epoch=epoch)


def told(calls):
    return [(call.call_id, call.recorded, call.abort) for call in calls]


@pytest.mark.parametrize("kind", sorted(STORES))
async def test_the_journal_tells_each_call_in_the_order_of_its_beginning(tmp_path, kind):
    store = STORES[kind](tmp_path)
    assert isinstance(store, CallJournal)
    assert await store.begun_calls("k") == ()
    for number, name in enumerate(("c3", "c1", "c2", "c4")):
        await store.begin_call("k", name, intent=intent("t", number))
    await store.put(sample_entry("k", "c1"))
    await store.abort_call("k", "c2", reason="client_gone")
    await store.abort_call("k", "c4", reason="replay_of:c1")
    calls = await store.begun_calls("k")
    assert told(calls) == [
        ("c3", False, None),
        ("c1", True, None),
        ("c2", False, "client_gone"),
        ("c4", False, "replay_of:c1"),
    ]
    assert [call.intent.retry_count for call in calls] == [0, 1, 2, 3]
    assert {call.intent.request_digest for call in calls} == {"t"}
    assert [call.open for call in calls] == [True, False, False, False]
    await store.put(sample_entry("k", "c2"))  # drained: the record removes the abort
    assert told(await store.begun_calls("k"))[2] == ("c2", True, None)
    assert await store.begun_calls("other") == ()
    await store.close()


@pytest.mark.parametrize("kind", ["sqlite", "jsonl"])
async def test_another_store_on_the_same_place_sees_it_at_once_and_who_is_gone(tmp_path, kind):
    one, two = STORES[kind](tmp_path), STORES[kind](tmp_path)
    for number in range(4):
        writer, epoch = ((one, "one"), (two, "two"))[number % 2]
        await writer.begin_call("k", f"c{number}", intent=intent("t", epoch=epoch))
        assert [call.call_id for call in await one.begun_calls("k")] == [f"c{n}" for n in range(number + 1)]
        assert await two.begun_calls("k") == await one.begun_calls("k")
    assert all(call.live for call in await one.begun_calls("k"))
    await one.close()
    assert [call.live for call in await two.begun_calls("k")] == [False, True, False, True]
    await two.close()
