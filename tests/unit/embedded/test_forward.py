"""Two forward passes, one model: ONNX Runtime and NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from toprope.servers.model.engines.embedded.forward import NumpyForward, new_cache
from toprope.servers.model.engines.embedded.onnx_forward import OnnxForward
from toprope.servers.model.engines.embedded.weights import Weights

IDS = np.random.default_rng(7).integers(17, 49152, (1, 48))


class Pair:
    """Both backends, each with a cache of its own."""

    def __init__(self, weights: Weights, threads: int = 1) -> None:
        self.cache = new_cache(weights.shape, 4, 128)
        self.onnx = OnnxForward(weights, self.cache, threads)
        self.numpy = NumpyForward(weights, new_cache(weights.shape, 4, 128))


@pytest.fixture(scope="module")
def pair(weights: Weights) -> Pair:
    return Pair(weights)


def test_the_backends_agree_on_a_prompt_and_on_ragged_steps(pair: Pair) -> None:
    seen = [[fwd(row, IDS[:, : 20 + row], [0], 8) for row in range(3)] for fwd in (pair.onnx, pair.numpy)]
    for theirs, ours in zip(*seen, strict=True):
        assert theirs.shape == ours.shape == (1, 8, 49152)
        assert np.abs(theirs - ours).max() < 1e-3
    steps = [fwd(0, np.array([[50], [60], [70]]), [20, 21, 22], 1) for fwd in (pair.onnx, pair.numpy)]
    assert np.abs(steps[0] - steps[1]).max() < 1e-3


def test_a_cache_that_is_off_by_one_token_shows_in_the_logits(pair: Pair) -> None:
    right = pair.onnx(0, IDS[:, :20], [0], 1)
    pair.onnx(1, IDS[:, 1:19], [0], 1)
    assert np.abs(pair.onnx(1, IDS[:, 18:20], [17], 1) - right).max() > 0.1


@pytest.mark.parametrize("cut", [2, 3, 17, 33, 46])
def test_a_prompt_in_two_pieces_is_the_same_bits_as_in_one(pair: Pair, cut: int) -> None:
    whole = pair.onnx(0, IDS, [0], 1)
    pair.onnx(1, IDS[:, :cut], [0], 1)
    pieces = pair.onnx(1, IDS[:, cut:], [cut], 1)
    assert np.array_equal(pieces, whole)
    assert np.array_equal(pair.cache[:, :, 0, :, :48], pair.cache[:, :, 1, :, :48])


def test_a_step_is_the_same_bits_alone_and_beside_others(pair: Pair) -> None:
    for row in range(4):
        pair.onnx(row, IDS[:, : 10 + 9 * row], [0], 1)
    lengths = [10 + 9 * row for row in range(4)]
    alone = [pair.onnx(row, np.array([[100 + row]]), [lengths[row]], 1)[0].copy() for row in range(4)]
    together = pair.onnx(0, np.array([[100], [101], [102], [103]]), lengths, 1)
    assert all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True))
