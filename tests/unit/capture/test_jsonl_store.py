"""The jsonl store on real files: NeMo Gym's layout both ways, every damage seen in the wild, several processes."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from toprope.canonical.digest import digest_tokens
from toprope.capture.jsonl_store import JsonlStore
from toprope.capture.protocols import Intent
from toprope.errors.tree import CaptureClosed, CaptureError
from toprope.storage.lock import FileLock
from toprope.testing.capture_suite import sample_entry
from toprope.tokens.entry import TokenEntry

LOST = "write_failed:the state file is lost, the rollout may have been frozen before"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[JsonlStore]:
    made = JsonlStore(tmp_path / "captures")
    yield made
    await made.close()


def file(store: JsonlStore, name: str) -> Path:
    return store.directory / name


async def calls(store: JsonlStore, key: str) -> list[str]:
    return [e.model_call_id for e in (await store.freeze(key)).entries]


# -- what NeMo Gym reads ----------------------------------------------------------------------------------------------


def as_nemo_reads(store: JsonlStore, key: str) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """Records, state and dangling intents, by the rules of its store: every line whole, the index no longer than it."""
    data = file(store, f"{key}.tokens.jsonl").read_bytes()
    state = json.loads(file(store, f"{key}.tokens.state.json").read_bytes())
    assert state["indexed_size"] <= len(data)
    lines = data.splitlines()
    records = [json.loads(line) for line in lines]
    index = {each["model_call_id"]: hashlib.sha256(lines[n]).hexdigest() for n, each in enumerate(records)}
    assert state["entry_digests"].items() <= index.items()
    intents = file(store, f"{key}.tokens.intents")
    begun = [line.strip() for line in intents.read_text().splitlines()] if intents.exists() else []
    return records, state, [call for call in begun if call not in index]


async def test_what_we_write_is_read_by_nemo_gyms_rules(store: JsonlStore) -> None:
    prompt = [1, 2, 3, 100, 101, 7]
    for call in ("c1", "c2", "c3", "c4"):
        await store.begin_call("k", call, intent=Intent(stream=True, request_digest="d"))
    await store.put(sample_entry("k", "c1"))
    await store.put(sample_entry("k", "c2", prompt=prompt, parent_decision="resolved", parent_call_id="c1"))
    await store.abort_call("k", "c3", reason="upstream:500")
    records, state, dangling = as_nemo_reads(store, "k")
    assert dangling == ["c4"]
    assert [(r["model_call_id"], r["prompt_token_ids"], r["prompt_is_delta"]) for r in records] == [
        ("c1", [1, 2, 3], False),
        ("c2", [7], True),
    ]
    assert records[1]["digest"] == digest_tokens([*prompt, 100, 101])
    assert (state["frozen"], state["retired"], state["incomplete"], state["version"]) == (False, False, False, 0)
    snapshot = await store.freeze("k")
    records, state, _ = as_nemo_reads(store, "k")
    assert (state["frozen"], state["incomplete"], state["version"]) == (True, True, snapshot.version)
    assert state["snapshot_id"] == snapshot.snapshot_id
    assert state["indexed_size"] == file(store, "k.tokens.jsonl").stat().st_size
    assert len(state["entry_digests"]) == 2
    assert file(store, "k.tokens.incomplete").read_text() == "dangling_intent:c4\n"
    assert await store.drop("k", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    left = {name for name in os.listdir(store.directory) if name.startswith("k.tokens.")}
    assert left == {f"k.tokens.{each}" for each in ("state.json", "receipts", "lock", "lock.turn")}
    assert json.loads(file(store, "k.tokens.state.json").read_bytes())["retired"] is True


# -- what NeMo Gym wrote ----------------------------------------------------------------------------------------------


def nemo_line(key: str, call: str, prompt: list[int], generation: list[int], **told: Any) -> bytes:
    whole = told.pop("whole", [*prompt, *generation])
    record = {
        "schema_version": 1,
        "rollout_id": key,
        "model_call_id": call,
        "model": "policy",
        "prompt_token_ids": prompt,
        "generation_token_ids": generation,
        "generation_log_probs": [-0.25] * len(generation),
        "routed_experts": None,
        "output_items": [{"type": "message", "role": "assistant", "content": []}],
        "token_item_index": 0,
        "created_at": 7.5,
        "response_id": "resp",
        "parent_call_id": None,
        "parent_resolution": "root",
        "parent_resolution_reason": None,
        "cum_len": len(whole),
        "digest": digest_tokens(whole),
        "prefix_supplied": True,
        **told,
    }
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def nemo_files(store: JsonlStore, key: str, lines: list[bytes], intents: str = "", **state: Any) -> None:
    store.directory.mkdir(exist_ok=True)
    data = b"".join(lines)
    index = {json.loads(line)["model_call_id"]: hashlib.sha256(line.strip()).hexdigest() for line in lines}
    told = {"frozen": False, "retired": False, "incomplete": False, "snapshot_id": "", "version": len(lines)}
    file(store, f"{key}.tokens.jsonl").write_bytes(data)
    file(store, f"{key}.tokens.lock").touch()
    if intents:
        file(store, f"{key}.tokens.intents").write_text(intents)
    file(store, f"{key}.tokens.state.json").write_text(
        json.dumps({**told, "entry_digests": index, "indexed_size": len(data), **state})
    )


ROOT = nemo_line("k", "c1", [1, 2], [3])
CHILD: dict[str, Any] = {"parent_resolution": "resolved", "parent_call_id": "c1", "prompt_is_delta": True}


@pytest.mark.parametrize("told", [{"parent_resolution": None}, {}])
async def test_a_line_that_does_not_say_what_it_continues_is_no_first_call(
    store: JsonlStore, told: dict[str, Any]
) -> None:
    line = json.loads(nemo_line("k", "c1", [1, 2], [3]))
    del line["parent_resolution"]
    nemo_files(store, "k", [json.dumps({**line, **told}, sort_keys=True, separators=(",", ":")).encode() + b"\n"])
    assert [each.parent_decision for each in (await store.freeze("k")).entries] == ["unresolved"]


async def test_files_of_nemo_gym_are_a_source(store: JsonlStore) -> None:
    child = nemo_line("k", "c2", [9], [5, 6], whole=[1, 2, 3, 9, 5, 6], **CHILD)
    nemo_files(store, "k", [ROOT, child], "c1\nc2\n")
    first, second = await store.open_entries("k")
    assert (first.prompt_token_ids.tolist(), first.model, first.created_at) == ([1, 2], "policy", 7.5)
    assert dict(first.extra) == {"prefix_supplied": True}
    assert second.prompt_token_ids.tolist() == [1, 2, 3, 9]
    snapshot = await store.freeze("k")
    assert (snapshot.incomplete, snapshot.version) == (False, 3)
    assert [e.prompt_is_delta for e in snapshot.entries] == [False, True]
    assert await store.drop("k", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    with pytest.raises(CaptureClosed):
        await store.begin_call("k", "c3")


async def test_a_rollout_that_nemo_gym_froze_keeps_its_snapshot(store: JsonlStore) -> None:
    nemo_files(store, "k", [ROOT], frozen=True, snapshot_id="theirs", version=4)
    snapshot = await store.freeze("k")
    assert (snapshot.snapshot_id, snapshot.version) == ("theirs", 4)
    nemo_files(store, "lost", [ROOT.replace(b'"k"', b'"lost"')], "c1\nc9\n", refusals=[{"model_call_id": "c8"}])
    assert (await store.freeze("lost")).reasons == ("dangling_intent:c9",)


async def test_a_capital_letter_key_that_nemo_gym_wrote_is_found_under_its_name(store: JsonlStore) -> None:
    nemo_files(store, "Task-1", [nemo_line("Task-1", "c1", [1], [2])])
    assert [info.rollout_id for info in await store.list_captures()] == ["Task-1"]
    await store.put(sample_entry("Task-1", "c2"))
    await store.put(sample_entry("task-1", "c1"))
    assert await calls(store, "Task-1") == ["c1", "c2"]
    assert await calls(store, "task-1") == ["c1"]


async def test_an_index_that_lags_is_made_good_and_one_that_contradicts_is_damage(store: JsonlStore) -> None:
    nemo_files(store, "k", [ROOT, nemo_line("k", "c2", [1], [2])], version=1, entry_digests={}, indexed_size=0)
    snapshot = await store.freeze("k")
    assert (snapshot.version, snapshot.incomplete, len(snapshot.entries)) == (4, False, 2)
    nemo_files(store, "x", [nemo_line("x", "c1", [1], [2])], entry_digests={"c1": "0" * 64, "c2": "1" * 64})
    reasons = (await store.freeze("x")).reasons
    assert [reason.split(": ")[0] for reason in reasons] == ["write_failed:c1", "write_failed:c2"]


async def test_a_foreign_record_whose_ids_changed_is_left_out(store: JsonlStore) -> None:
    nemo_files(store, "k", [ROOT.replace(b"[1,2]", b"[1,4]"), nemo_line("k", "c2", [1], [2])])
    snapshot = await store.freeze("k")
    assert [e.model_call_id for e in snapshot.entries] == ["c2"]
    assert snapshot.reasons == ("write_failed:c1: call c1: its ids do not match their digest",)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"schema_version": 2}, "write_failed:c1"),
        ({"generation_log_probs": [-9999.0]}, "bad_logprob:c1"),
        ({"generation_log_probs": []}, "length_mismatch:c1"),
        ({"generation_token_ids": [-1]}, "no_token_ids:c1"),
        ({"output_items": 5}, "write_failed:c1"),
        ({"rollout_id": "another"}, "write_failed:c1"),
    ],
)
async def test_a_foreign_record_that_must_not_train_masks_with_its_reason(
    store: JsonlStore, told: dict[str, Any], reason: str
) -> None:
    nemo_files(store, "k", [nemo_line("k", "c1", [1], [2], **told), nemo_line("k", "c2", [1], [2])])
    snapshot = await store.freeze("k")
    assert [e.model_call_id for e in snapshot.entries] == ["c2"]
    assert snapshot.incomplete
    assert snapshot.reasons[0].startswith(reason)


# -- damage -----------------------------------------------------------------------------------------------------------


async def two(store: JsonlStore) -> None:
    for call in ("c1", "c2"):
        await store.begin_call("k", call)
        await store.put(sample_entry("k", call))
    await store.put(sample_entry("other", "c1"))


async def reopened(store: JsonlStore) -> JsonlStore:
    await store.close()
    return JsonlStore(store.directory)


@pytest.mark.parametrize("while_open", [True, False])
async def test_a_torn_last_line_is_dropped_and_the_next_put_stands_on_its_own(
    store: JsonlStore, while_open: bool
) -> None:
    await two(store)
    after = store if while_open else await reopened(store)
    with file(store, "k.tokens.jsonl").open("ab") as log:
        log.write(b'{"created_at":1.5,"gener')
    assert [e.model_call_id for e in await after.open_entries("k")] == ["c1", "c2"]
    await after.put(sample_entry("k", "c3"))
    snapshot = await after.freeze("k")
    assert ([e.model_call_id for e in snapshot.entries], snapshot.reasons) == (["c1", "c2", "c3"], ())
    assert len(as_nemo_reads(store, "k")[0]) == 3
    await after.close()


@pytest.mark.parametrize("while_open", [True, False])
async def test_a_whole_object_without_its_newline_counts_and_so_does_what_was_glued_to_it(
    store: JsonlStore, while_open: bool
) -> None:
    await two(store)
    log = file(store, "k.tokens.jsonl")
    line = log.read_bytes().splitlines()[0]
    after = store if while_open else await reopened(store)
    with log.open("r+b") as handle:
        handle.truncate(log.stat().st_size - 1)
    assert len(await after.open_entries("k")) == 2
    await after.put(sample_entry("k", "c3"))
    with log.open("ab") as handle:  # a foreign appender glues two more
        handle.write(nemo_line("k", "c4", [1], [2]).strip() + nemo_line("k", "c5", [1], [2]))
    assert line in log.read_bytes()
    snapshot = await after.freeze("k")
    assert [e.model_call_id for e in snapshot.entries] == ["c1", "c2", "c3", "c4", "c5"]
    assert not snapshot.incomplete
    await after.close()


@pytest.mark.parametrize("content", [b"", b"\0\0\0", b'{"frozen": tr', None])
@pytest.mark.parametrize("frozen", [True, False])
async def test_a_lost_state_file_masks_and_loses_no_entry(
    store: JsonlStore, content: bytes | None, frozen: bool
) -> None:
    await two(store)
    old = await store.freeze("k") if frozen else None
    state = file(store, "k.tokens.state.json")
    if content is None:
        state.unlink()
    else:
        state.write_bytes(content)
    after = await reopened(store)
    (info,) = [each for each in await after.list_captures() if each.rollout_id == "k"]
    assert (info.incomplete, info.entries, info.reasons) == (True, 2, (LOST,))
    assert len(await after.open_entries("k")) == 2
    if old is not None:
        assert not await after.drop("k", snapshot_id=old.snapshot_id, version=old.version)
    snapshot = await after.freeze("k")
    assert ([e.model_call_id for e in snapshot.entries], snapshot.reasons) == (["c1", "c2"], (LOST,))
    whole = await after.freeze("other")
    assert (len(whole.entries), whole.incomplete) == (1, False)
    await after.close()
    again = JsonlStore(store.directory)
    assert (await again.freeze("k")).snapshot_id == snapshot.snapshot_id
    await again.close()


async def test_a_tombstone_outlives_its_state_file(store: JsonlStore) -> None:
    await two(store)
    snapshot = await store.freeze("k")
    assert await store.drop("k", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    file(store, "k.tokens.state.json").write_bytes(b"")
    after = await reopened(store)
    with pytest.raises(CaptureClosed):
        await after.put(sample_entry("k", "c3"))
    receipts = await after.receipts("k")
    assert receipts is not None
    assert [r.model_call_id for r in receipts] == ["c1", "c2"]
    await after.close()


@pytest.mark.promise("CP-9")
async def test_records_cut_away_behind_a_call_that_saw_them_mask_by_name(tmp_path: Path) -> None:
    """Their calls look as if their writer had died over them, and were not streamed: aborted, without this."""
    store = JsonlStore(tmp_path / "captures")
    for n in range(3):
        await store.begin_call("k", f"c{n}", intent=Intent(writer_epoch="gone"))
        await store.put(sample_entry("k", f"c{n}", prompt=(1, n)))
    await store.close()
    path = file(store, "k.tokens.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    for kept, said in ((lines[0], "1 of at least 2"), (lines[0] + lines[1][:9], "1 of at least 2"), (b"", "2 of at")):
        path.write_bytes(kept)
        later = JsonlStore(tmp_path / "captures")
        assert [said in "".join(each.reasons) for each in await later.list_captures()] == [True]
        await later.close()
    path.write_bytes(b"".join(lines[:2]))  # the last one alone may be torn
    later = JsonlStore(tmp_path / "captures")
    assert not (await later.freeze("k")).incomplete
    await later.close()


async def test_a_torn_intent_glued_to_the_next_loses_nobody(store: JsonlStore) -> None:
    nemo_files(store, "k", [ROOT, nemo_line("k", "call-2", [1], [2])], "c1\ncall-call-2\n")
    snapshot = await store.freeze("k")
    assert (snapshot.incomplete, len(snapshot.entries)) == (False, 2)
    nemo_files(store, "x", [nemo_line("x", "c1", [1], [2])], "c1\ncall-call-2\n")
    assert (await store.freeze("x")).reasons == ("dangling_intent:call-call-2",)


async def test_a_torn_intent_is_dropped_before_the_next_is_written(store: JsonlStore) -> None:
    await two(store)
    with file(store, "k.tokens.intents").open("ab") as log:
        log.write(b"call-0")
    after = await reopened(store)
    await after.begin_call("k", "c3")
    assert (await after.freeze("k")).reasons == ("dangling_intent:c3",)
    await after.close()


@pytest.mark.promise("CP-2")
async def test_a_byte_flipped_on_the_disk_is_seen_on_read_while_the_store_is_open(store: JsonlStore) -> None:
    await two(store)
    log = file(store, "k.tokens.jsonl")
    data = bytearray(log.read_bytes())
    at = data.index(b"-0.1")
    data[at + 3] ^= 0x01
    log.write_bytes(bytes(data))
    assert [e.model_call_id for e in await store.open_entries("k")] == ["c2"]
    snapshot = await store.freeze("k")
    assert [e.model_call_id for e in snapshot.entries] == ["c2"]
    assert snapshot.incomplete
    assert "line 1 of the token file is damaged: it does not match its hash" in snapshot.reasons[0]
    assert not (await store.freeze("other")).incomplete


async def test_a_child_of_a_damaged_record_is_named_and_not_completed_from_nothing(store: JsonlStore) -> None:
    await store.put(sample_entry("k", "c1"))
    told: dict[str, Any] = {"parent_decision": "resolved", "parent_call_id": "c1"}
    await store.put(sample_entry("k", "c2", prompt=[1, 2, 3, 100, 101, 7], **told))
    log = file(store, "k.tokens.jsonl")
    log.write_bytes(log.read_bytes().replace(b"[1,2,3]", b"[1,2,4]"))
    after = await reopened(store)
    snapshot = await after.freeze("k")
    assert (snapshot.entries, snapshot.incomplete) == ((), True)
    assert any(reason.startswith("write_failed:c2") for reason in snapshot.reasons)
    await after.close()


async def test_entries_missing_behind_a_frozen_index_mask(store: JsonlStore) -> None:
    await two(store)
    await store.freeze("k")
    log = file(store, "k.tokens.jsonl")
    log.write_bytes(log.read_bytes().splitlines(keepends=True)[0])
    after = await reopened(store)
    snapshot = await after.freeze("k")
    assert [e.model_call_id for e in snapshot.entries] == ["c1"]
    assert snapshot.reasons == ("write_failed:c2: its stored record is missing",)
    await after.close()


async def test_conflicting_copies_in_a_file_mask(store: JsonlStore) -> None:
    nemo_files(store, "k", [ROOT])
    with file(store, "k.tokens.jsonl").open("ab") as log:
        log.write(ROOT + nemo_line("k", "c1", [1, 2], [4]))
    assert (await store.freeze("k")).reasons == ("conflict:c1",)


# -- keys as names ----------------------------------------------------------------------------------------------------


async def test_awkward_keys_have_files_of_their_own_inside_the_directory(tmp_path: Path) -> None:
    keys = ["../x", "/etc/x", "a/../../x", "..", ".", "CON", "x" * 300, "a\nb", "Task", "task", "tasK", "", "a~1"]
    store = JsonlStore(tmp_path / "root" / "captures")
    for key in keys:
        await store.begin_call(key, "c1")
        await store.put(sample_entry(key, "c1"))
    assert sorted(info.rollout_id for info in await store.list_captures()) == sorted(keys)
    for key in keys:
        snapshot = await store.freeze(key)
        assert (snapshot.entries, snapshot.incomplete) == ((sample_entry(key, "c1"),), False)
        assert await store.supersede(key) == f"{key}~1"
    assert {info.rollout_id for info in await store.list_captures() if info.abandoned} == {f"{key}~1" for key in keys}
    assert await calls(store, f"{keys[6]}~1") == ["c1"]
    await store.close()
    assert os.listdir(tmp_path) == ["root"]
    assert os.listdir(tmp_path / "root") == ["captures"]
    names = [name for name in os.listdir(store.directory) if name.endswith(".state.json")]
    assert len({name.casefold() for name in names}) == len(keys)


async def test_asking_for_unknown_keys_makes_no_file(store: JsonlStore) -> None:
    assert await store.open_entries("k") == ()
    assert await store.receipts("k") is None
    assert await store.list_captures(retired=True) == ()
    assert await store.sweep_retired(0.0) == 0
    assert await store.settle_dead_writers() == 0
    assert await store.settle("k", 1.0)
    assert not await store.drop("k", snapshot_id="x", version=0)
    assert await store.supersede("k") is None
    assert not store.directory.exists()


# -- processes and disks ----------------------------------------------------------------------------------------------

WRITER = """
import asyncio, sys
from toprope.capture.jsonl_store import JsonlStore
from toprope.testing.capture_suite import sample_entry

async def main():
    store = JsonlStore(sys.argv[1])
    for n in range(int(sys.argv[3])):
        await store.begin_call("shared", f"{sys.argv[2]}{n}")
        await store.put(sample_entry("shared", f"{sys.argv[2]}{n}"))
    await store.close()

asyncio.run(main())
"""


def spawn(program: str, *told: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *map(str, told)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


async def test_several_processes_write_one_rollout_and_nothing_is_lost(store: JsonlStore) -> None:
    writers = [spawn(WRITER, store.directory, name, 20) for name in "abc"]
    for writer in writers:
        _, error = await asyncio.to_thread(writer.communicate, timeout=60)
        assert writer.returncode == 0, error
    snapshot = await store.freeze("shared")
    assert sorted(e.model_call_id for e in snapshot.entries) == sorted(f"{w}{n}" for w in "abc" for n in range(20))
    assert not snapshot.incomplete


async def test_what_one_store_read_another_may_retire_supersede_and_write_anew(store: JsonlStore) -> None:
    other = JsonlStore(store.directory)
    await store.put(sample_entry("k", "c1"))
    assert len(await other.open_entries("k")) == 1
    snapshot = await store.freeze("k")
    assert await store.drop("k", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    with pytest.raises(CaptureClosed):
        await other.put(sample_entry("k", "c2"))
    await store.supersede("k")
    told: dict[str, Any] = {"parent_decision": "resolved", "parent_call_id": "c1"}
    await store.put(sample_entry("k", "c1", prompt=[7, 8, 9]))
    await other.put(sample_entry("k", "c2", prompt=[7, 8, 9, 100, 101, 5], **told))
    await other.put(sample_entry("k", "c3", prompt=[1, 2, 3, 100, 101, 5], **told))
    prompts = [e.prompt_token_ids.tolist() for e in (await store.freeze("k")).entries]
    assert prompts == [[7, 8, 9], [7, 8, 9, 100, 101, 5], [1, 2, 3, 100, 101, 5]]
    await other.close()


async def test_tombstones_go_by_age_and_those_of_nemo_gym_by_the_age_of_their_file(store: JsonlStore) -> None:
    nemo_files(store, "theirs", [], frozen=True, retired=True, snapshot_id="s")
    snapshot = await store.freeze("ours")
    assert await store.drop("ours", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    assert await store.sweep_retired(3600.0) == 0
    assert await store.sweep_retired(-1.0) == 2
    assert await store.list_captures(retired=True) == ()
    for key in ("ours", "theirs"):
        with pytest.raises(CaptureClosed):
            await store.begin_call(key, "c1")


async def test_a_rollout_whose_lock_is_held_waits_and_the_others_do_not(store: JsonlStore) -> None:
    await store.put(sample_entry("k", "c1"))
    lock = FileLock(file(store, "k.tokens.lock"))
    with lock.held():
        waiting = [asyncio.create_task(store.put(sample_entry("k", f"c{n}"))) for n in range(2, 60)]
        await store.put(sample_entry("other", "c1"))
        assert not any(task.done() for task in waiting)
    await asyncio.gather(*waiting)
    lock.close()
    assert await calls(store, "k") == [f"c{n}" for n in range(1, 60)]


async def test_an_archive_is_read_without_locks_and_refuses_writes(
    store: JsonlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two(store)
    await store.close()
    present = sorted(os.listdir(store.directory))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere: the kernel would not refuse
    archive = JsonlStore(store.directory)
    assert len(await archive.open_entries("k")) == 2
    assert len(await archive.list_captures()) == 2
    with pytest.raises(CaptureError, match="cannot be written"):
        await archive.put(sample_entry("k", "c3"))
    await archive.close()
    assert sorted(os.listdir(store.directory)) == present


FULL = """
import asyncio, resource, signal, sys
from toprope.capture.jsonl_store import JsonlStore
from toprope.errors.tree import CaptureError
from toprope.testing.capture_suite import sample_entry

async def main():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = JsonlStore(sys.argv[1])
    await store.put(sample_entry("k", "c1"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
    try:
        await store.put(sample_entry("k", "big", prompt=range(1, 5000)))
    except CaptureError as error:
        print("refused", error.__cause__.errno, str(error).count("tokens"))
    await store.put(sample_entry("k", "c2"))
    await store.close()

asyncio.run(main())
"""


async def test_a_full_disk_refuses_one_put_and_leaves_the_file_whole(store: JsonlStore) -> None:
    writer = spawn(FULL, store.directory)
    said, error = await asyncio.to_thread(writer.communicate, timeout=60)
    assert (writer.returncode, said) == (0, f"refused {errno.EFBIG} 1\n"), error
    assert len(as_nemo_reads(store, "k")[0]) == 2
    assert await calls(store, "k") == ["c1", "c2"]


# -- intents ----------------------------------------------------------------------------------------------------------


async def test_dead_writers_are_settled_and_live_ones_waited_for(store: JsonlStore) -> None:
    dead = JsonlStore(store.directory)
    await dead.begin_call("plain", "c1", intent=Intent(writer_epoch="dead"))
    await dead.begin_call("streamed", "c1", intent=Intent(stream=True, writer_epoch="dead"))
    assert not await store.settle("plain", 0.01)
    assert await store.settle_dead_writers() == 0
    await dead.close()
    assert {info.writer for info in await store.list_captures()} == {"dead"}
    assert await store.settle("plain", 5.0)
    assert await store.settle_dead_writers() == 1
    assert file(store, "plain.tokens.intents").read_bytes() == b""
    assert not (await store.freeze("plain")).incomplete
    assert (await store.freeze("streamed")).reasons == ("dangling_intent:c1",)


async def test_a_replayed_reply_is_not_gone(store: JsonlStore) -> None:
    gone: TokenEntry = sample_entry("k", "c1", client_gone=True)
    await store.put(gone)
    await store.begin_call("k", "c2")
    await store.abort_call("k", "c2", reason="replay_of:c1")
    assert await store.put(gone)
    assert [e.client_gone for e in (await store.freeze("k")).entries] == [False]
