"""One forward pass in NumPy, and the interface that both backends have. The fallback, and the oracle of the other one.

A pass takes a block of neighbouring cache rows and the ids to append to each, writes their keys and values into the
cache in place, and gives logits. It knows nothing of requests, sampling or time.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from toprope.servers.model.engines.embedded.weights import Array, Shape, Weights, rope_tables

Cache = NDArray[np.float32]
"""(layers, 2, rows, kv_heads, capacity, head_dim): keys at 0, values at 1."""


class Forward(Protocol):
    """`fwd(first, ids, before, keep) -> logits`."""

    def __call__(self, first: int, ids: NDArray[np.int64], before: Sequence[int], keep: int) -> NDArray[np.float32]:
        """Appends `ids` (rows, steps) to cache rows `first`, `first + 1`, ...; `before[i]` tokens are in row i already.

        On return the cache holds them and the logits (rows, keep, vocabulary) of the last `keep` steps are given.
        Several rows take one step at a time: rows > 1 requires steps == 1.
        """


def new_cache(shape: Shape, rows: int, capacity: int) -> Cache:
    """An empty cache. Memory is taken as rows fill up: 46 KB a token for SmolLM2-135M."""
    sizes = (shape.layers, 2, rows, shape.kv_heads, capacity, shape.head_dim)
    pages = mmap.mmap(-1, int(np.prod(sizes, dtype=np.int64)) * 4)
    # A row is 180 stripes far apart: huge pages would take 2 MB for the first token in each of them.
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype=np.float32).reshape(sizes)


class NumpyForward:
    """The llama forward pass, written to be read."""

    def __init__(self, weights: Weights, cache: Cache) -> None:
        self._w = weights
        self._cache = cache
        self._cosine, self._sine = rope_tables(weights.shape)

    def __call__(self, first: int, ids: NDArray[np.int64], before: Sequence[int], keep: int) -> NDArray[np.float32]:
        shape, (rows, steps) = self._w.shape, ids.shape
        assert rows == 1 or steps == 1
        positions = np.asarray(before)[:, None] + np.arange(steps)
        x = self._w.embedding[ids]
        for index, layer in enumerate(self._w.layers):
            qkv = self._norm(x, layer.attention_norm) @ layer.qkv
            heads = qkv.reshape(rows, steps, -1, shape.head_dim)
            turned = self._turn(heads[:, :, : shape.heads + shape.kv_heads], positions)
            queries, keys = turned[:, :, : shape.heads], turned[:, :, shape.heads :]
            attended = np.empty_like(queries)
            for i in range(rows):
                store = self._cache[index, :, first + i]
                store[0, :, before[i] : before[i] + steps] = keys[i].swapaxes(0, 1)
                store[1, :, before[i] : before[i] + steps] = heads[i, :, shape.heads + shape.kv_heads :].swapaxes(0, 1)
                attended[i] = self._attend(queries[i], store[:, :, : before[i] + steps], before[i])
            x = x + attended.reshape(rows, steps, -1) @ layer.attention_out
            both = self._norm(x, layer.ffn_norm) @ layer.gate_up
            gate, up = both[..., : shape.inner], both[..., shape.inner :]
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down
        logits: NDArray[np.float32] = self._norm(x[:, -keep:], self._w.final_norm) @ self._w.embedding.T
        return logits

    def _norm(self, x: Array, scale: Array) -> Array:
        mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
        root = np.sqrt(mean + np.float32(self._w.shape.epsilon), dtype=np.float32)
        return np.multiply(x / root, scale, dtype=np.float32)

    def _turn(self, x: Array, positions: NDArray[np.int64]) -> Array:
        cosine, sine = self._cosine[positions][:, :, None], self._sine[positions][:, :, None]
        half = self._w.shape.head_dim // 2
        left, right = x[..., :half], x[..., half:]
        return np.concatenate([left * cosine - right * sine, right * cosine + left * sine], axis=-1)

    def _attend(self, queries: Array, store: Array, before: int) -> Array:
        """(steps, heads, dim) queries on (2, kv_heads, length, dim) keys and values; query s sees before + s + 1."""
        shape, steps, length = self._w.shape, len(queries), store.shape[2]
        group = shape.heads // shape.kv_heads
        grouped = queries.reshape(steps, shape.kv_heads, group, shape.head_dim).transpose(1, 2, 0, 3)
        scores = grouped.reshape(shape.kv_heads, group * steps, -1) @ store[0].swapaxes(1, 2)
        scores = scores.reshape(shape.kv_heads, group, steps, length) * np.float32(shape.head_dim**-0.5)
        if steps > 1:
            hidden = np.arange(length) > before + np.arange(steps)[:, None]
            scores = np.where(hidden, np.float32(-np.inf), scores)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = scores.reshape(shape.kv_heads, group * steps, length) @ store[1]
        out: Array = mixed.reshape(shape.kv_heads, group, steps, -1).transpose(2, 0, 1, 3)
        return out.reshape(steps, shape.heads, shape.head_dim)
