"""One forward pass in ONNX Runtime: the committed graph, our weights handed over in memory, our cache bound in place.

The cache is one NumPy array. A block of its rows is bound as past and as present of every layer, so that a pass writes
into it and copies nothing. How the graph is made: `scripts/make_graph.py` in the repository.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toprope.servers.model.engines.embedded.forward import Cache
from toprope.servers.model.engines.embedded.weights import Array, Weights, rope_tables

GRAPH = Path(__file__).with_name("graph.onnx")


def _named(weights: Weights) -> dict[str, Array]:
    cosine, sine = rope_tables(weights.shape)
    arrays = {
        "rope_cosine": cosine,
        "rope_sine": sine,
        "embedding": weights.embedding,
        "final_norm": weights.final_norm,
    }
    for index, layer in enumerate(weights.layers):
        for name in layer.__slots__:
            arrays[f"{name}_{index}"] = getattr(layer, name)
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


class OnnxForward:
    """`Forward` on ONNX Runtime's CPU provider in float32. Raises ImportError if `onnxruntime` is not installed."""

    def __init__(self, weights: Weights, cache: Cache, threads: int) -> None:
        import onnxruntime as ort

        self._ort = ort
        self._cache = cache
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Threads that spin for work starve whatever else runs on a small machine.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        # The session reads these arrays for as long as it lives: the references are what keeps them there.
        self._arrays = _named(weights)
        self._values = [ort.OrtValue.ortvalue_from_numpy(array) for array in self._arrays.values()]
        options.add_external_initializers(list(self._arrays), self._values)
        self._session = ort.InferenceSession(GRAPH.read_bytes(), options, providers=["CPUExecutionProvider"])
        self._bindings: dict[tuple[int, int], Any] = {}

    def __call__(self, first: int, ids: NDArray[np.int64], before: Sequence[int], keep: int) -> NDArray[np.float32]:
        rows, steps = ids.shape
        assert rows == 1 or steps == 1
        after = np.asarray(before, dtype=np.int32) + np.int32(steps)
        binding = self._binding(first, rows)
        binding.bind_cpu_input("ids", np.ascontiguousarray(ids))
        binding.bind_cpu_input("lengths", after - np.int32(1))
        binding.bind_cpu_input("total", np.array(after.max(), dtype=np.int32))
        binding.bind_cpu_input("keep", np.array([keep], dtype=np.int64))
        binding.bind_output("logits", "cpu")
        self._session.run_with_iobinding(binding)
        logits: NDArray[np.float32] = binding.get_outputs()[0].numpy()
        return logits

    def _binding(self, first: int, rows: int) -> Any:
        """The binding of a block of rows, made once. Rows side by side are not side by side in memory across layers,
        but each layer's keys and values of the block are one contiguous piece."""
        found = self._bindings.get((first, rows))
        if found is None:
            found = self._session.io_binding()
            found.bind_output("logits", "cpu")
            for layer, pair in enumerate(self._cache):
                for part, block in zip(("key", "value"), pair, strict=True):
                    value = self._ort.OrtValue.ortvalue_from_numpy(block[first : first + rows])
                    found.bind_ortvalue_input(f"past_{layer}_{part}", value)
                    found.bind_ortvalue_output(f"present_{layer}_{part}", value)
            self._bindings[first, rows] = found
        return found
