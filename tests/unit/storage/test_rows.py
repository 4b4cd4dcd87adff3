"""Append-only files: acknowledged rows survive, torn ones are cut, nothing is appended behind a fragment."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path

import pytest

from toprope.errors.tree import TopropeError
from toprope.storage.rows import DurableRows, read_rows


async def _append(path: Path, *rows: bytes) -> list[int]:
    file = DurableRows(path)
    try:
        return [await file.append(row) for row in rows]
    finally:
        await file.close()


def _data(path: Path) -> list[bytes]:
    return [row.data for row in read_rows(path)]


async def test_offsets_and_numbers_name_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    offsets = await _append(path, b'{"a":1}', b'{"b":"\xe2\x80\xa8"}')
    rows = list(read_rows(path))
    assert [row.offset for row in rows] == offsets == [0, 8]
    assert [row.line_no for row in rows] == [1, 2]
    assert rows[-1].end == path.stat().st_size
    assert [row.data for row in read_rows(path, offset=8, line_no=2)] == [rows[1].data]


@pytest.mark.promise("CO-5")
async def test_a_row_torn_at_any_byte_is_cut_and_earlier_rows_stay(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first, last = b'{"n":1}\n', b'{"n":2,"text":"}{"}'
    for cut in range(len(last)):
        path.write_bytes(first + last[:cut])
        damage = [row.damage for row in read_rows(path)]
        assert damage == ([None] if cut == 0 else [None, "torn"])
        await _append(path, b'{"n":3}')
        assert path.read_bytes() == first + b'{"n":3}\n', cut


@pytest.mark.promise("CO-5")
async def test_a_whole_last_row_without_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":2}')
    assert [row.damage for row in read_rows(path)] == [None, None]
    await _append(path, b'{"n":3}')
    assert _data(path) == [b'{"n":1}', b'{"n":2}', b'{"n":3}']


@pytest.mark.promise("CO-5")
async def test_a_corrupt_middle_line_is_reported_with_its_number_and_left(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n":1}\n\x00\x00\x00\n{"n":3}\n')
    await _append(path, b'{"n":4}')
    assert [(row.line_no, row.damage) for row in read_rows(path)] == [
        (1, None),
        (2, "not an object"),
        (3, None),
        (4, None),
    ]


async def test_a_fragment_longer_than_one_block_is_cut_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n":1}\n{"x":"' + b"y" * 200_000)
    await _append(path, b'{"n":2}')
    assert _data(path) == [b'{"n":1}', b'{"n":2}']


async def test_a_fragment_that_another_writer_left_is_repaired_before_the_next_append(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    mine = DurableRows(path)
    await mine.append(b'{"n":1}')
    with path.open("ab") as other:
        other.write(b'{"n":2}\n{"n":3,"half')
    await mine.append(b'{"n":4}')
    await mine.close()
    assert _data(path) == [b'{"n":1}', b'{"n":2}', b'{"n":4}']


async def test_two_writers_of_one_file_never_mix_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    writers = [DurableRows(path), DurableRows(path)]
    rows = [b'{"n":%d,"pad":"%s"}' % (n, b"x" * (n % 50)) for n in range(200)]
    await asyncio.gather(*(writers[n % 2].append(row) for n, row in enumerate(rows)))
    for writer in writers:
        await writer.close()
    assert sorted(_data(path)) == sorted(rows)


async def test_one_sync_serves_all_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = 0
    real = os.fdatasync

    def counted(handle: int) -> None:
        nonlocal syncs
        syncs += 1
        real(handle)

    monkeypatch.setattr(os, "fdatasync", counted)
    file = DurableRows(tmp_path / "rows.jsonl")
    await file.open()
    offsets = await asyncio.gather(*(file.append(b'{"n":1}') for _ in range(500)))
    await file.close()
    assert sorted(offsets) == [8 * n for n in range(500)]
    assert 1 <= syncs < 100


async def test_a_refused_append_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = DurableRows(path)
    await file.append(b'{"n":1}')
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))  # the disk is "full" after 64 bytes
    try:
        with pytest.raises(OSError):
            await file.append(b'{"pad":"' + b"x" * 200 + b'"}')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b'{"n":1}\n'
    await file.append(b'{"n":2}')
    await file.close()
    assert _data(path) == [b'{"n":1}', b'{"n":2}']


async def test_a_file_cut_under_the_writer_is_an_error_not_a_silent_hole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = DurableRows(path)
    await file.append(b'{"n":1}')
    path.write_bytes(b"")
    with pytest.raises(TopropeError, match="was cut from 8 to 0"):
        await file.append(b'{"n":2}')
    await file.close()


async def test_rows_that_are_no_line_of_an_object_are_refused(tmp_path: Path) -> None:
    file = DurableRows(tmp_path / "rows.jsonl")
    for bad in (b"", b"12", b'{"a":\n1}', b'{"a":1', b"[]"):
        with pytest.raises(ValueError, match="one JSON object"):
            await file.append(bad)
    await file.close()
    with pytest.raises(RuntimeError, match="closed"):
        await file.append(b"{}")


def test_a_missing_file_has_no_rows_and_reading_makes_none(tmp_path: Path) -> None:
    assert list(read_rows(tmp_path / "none.jsonl")) == []
    assert not (tmp_path / "none.jsonl").exists()
