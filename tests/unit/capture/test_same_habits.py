"""What the three stores do alike beyond the conformance suite: orders of events that are rare and must not differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toprope.capture.jsonl_store import JsonlStore
from toprope.capture.memory_store import MemoryStore
from toprope.capture.protocols import Intent
from toprope.capture.sqlite_store import SqliteStore
from toprope.errors.tree import CaptureError
from toprope.testing.capture_kit import sample_entry
from toprope.tokens.entry import BadRecord

Open = Callable[[Path], Any]
STORES: dict[str, Open] = {
    "memory": lambda path: MemoryStore(),
    "sqlite": lambda path: SqliteStore(path / "c.sqlite"),
    "jsonl": lambda path: JsonlStore(path / "captures"),
}
INTENT = Intent(stream=True, request_digest="d", writer_epoch="w")
every_store = pytest.mark.parametrize("opened", STORES.values(), ids=STORES)


@every_store
async def test_a_put_takes_the_abort_of_its_call_back(opened: Open, memory_dir: Path) -> None:
    """A drained reply: what was said of the call before is no longer true, here and after the store is opened again."""
    store = opened(memory_dir)
    await store.begin_call("k", "c1", intent=INTENT)
    await store.abort_call("k", "c1", reason="truncated:context_overflow")
    await store.put(sample_entry("k", "c1"))
    for again in (False, True):
        if again and not isinstance(store, MemoryStore):
            await store.close()
            store = opened(memory_dir)
        assert [(call.abort, call.recorded) for call in await store.begun_calls("k")] == [(None, True)]
        (info,) = await store.list_captures()
        assert (info.aborts, info.reasons, info.open_intents, info.calls) == ((), (), 0, 1)
    snapshot = await store.freeze("k")
    assert (snapshot.reasons, snapshot.incomplete) == ((), False)
    await store.abort_call("k", "c1", reason="truncated:late")
    assert await store.freeze("k") == snapshot
    await store.close()


@every_store
async def test_a_begin_that_comes_after_the_put_or_the_abort_of_its_call_is_in_no_journal(
    opened: Open, memory_dir: Path
) -> None:
    store = opened(memory_dir)
    await store.put(sample_entry("k", "put"))
    await store.abort_call("k", "aborted", reason="client_gone")
    for call in ("put", "aborted", "begun"):
        await store.begin_call("k", call, intent=INTENT)
    assert [call.call_id for call in await store.begun_calls("k")] == ["begun"]
    await store.close()


@every_store
async def test_a_closed_store_takes_nothing(opened: Open, memory_dir: Path) -> None:
    store = opened(memory_dir)
    await store.begin_call("k", "c1")
    await store.close()
    for work in (
        lambda: store.begin_call("k", "c2"),
        lambda: store.put(sample_entry("k", "c1")),
        lambda: store.abort_call("k", "c1", reason="x"),
        lambda: store.mark_incomplete("k", "c1"),
        lambda: store.freeze("k"),
    ):
        with pytest.raises(RuntimeError, match="is closed"):
            await work()
    await store.close()


@every_store
async def test_a_call_id_that_is_no_unicode_is_refused_by_name_and_a_mark_says_it_in_escapes(
    opened: Open, memory_dir: Path
) -> None:
    """JSON can say half a surrogate pair and no file can hold it; a loss must be said all the same."""
    store, name = opened(memory_dir), "c\ud800"
    with pytest.raises(CaptureError, match="an id must be Unicode text"):
        await store.begin_call("k", name)
    with pytest.raises(CaptureError, match="an id must be Unicode text"):
        await store.abort_call("k", name, reason="x")
    with pytest.raises(BadRecord, match="no Unicode text"):
        await store.put(sample_entry("k", name))
    assert await store.list_captures() == ()
    await store.mark_incomplete("k", name)
    assert (await store.freeze("k")).reasons == ("write_failed:c\\ud800",)
    await store.close()
