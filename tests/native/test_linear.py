"""Quantised matrices against numpy: integers exactly, fp32 by bounds, and the same bits whatever surrounds a row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize

from pagetrie import _native

GROUP = 32
Floats = npt.NDArray[np.float32]

ISAS = [
    isa
    for isa in ("portable", "avx2", "avx512")
    if ("portable", "avx2", "avx512").index(isa) <= ("portable", "avx2", "avx512").index(_native.best_isa())
]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa("auto")


@pytest.fixture(autouse=True)
def _default_threads() -> Iterator[None]:
    yield
    _native.set_threads(0)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def matrix_of(kind: str, n: int, k: int, seed: int = 1, bias: Floats | None = None) -> _native.QuantizedMatrix:
    weight = normal(n, k, seed=seed, scale=0.05)
    shift = None if bias is None else torch.from_numpy(bias)
    if kind == "floats":
        return _native.QuantizedMatrix.from_floats(torch.from_numpy(weight), shift)
    return _native.QuantizedMatrix.from_blocks(torch.from_numpy(blocks_of(kind, weight)), kind, shift)


def blocks_of(kind: str, weight: Floats) -> npt.NDArray[np.uint8]:
    n, k = weight.shape
    raw = gguf_quantize(weight, GGMLQuantizationType[kind.upper()])
    return np.ascontiguousarray(raw.reshape(n, k // GROUP, -1))


def weights_of(matrix: _native.QuantizedMatrix) -> Floats:
    out = torch.empty(matrix.out_features, matrix.in_features)
    matrix.dequantize(out)
    return out.numpy()


def multiply(matrix: _native.QuantizedMatrix, x: Floats) -> Floats:
    out = torch.full((len(x), matrix.out_features), torch.nan)
    matrix.multiply(torch.from_numpy(x), out)
    return out.numpy()


def quantize_rows(x: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    groups = -(-x.shape[1] // GROUP)
    values = torch.empty(len(x), groups * GROUP, dtype=torch.int8)
    scales = torch.empty(len(x), groups)
    _native.quantize_rows(torch.from_numpy(x), values, scales)
    return values.numpy(), scales.numpy()


def padded_groups(x: npt.NDArray) -> npt.NDArray:
    """[rows, k] as [rows, groups, 32], zeros at the end."""
    rows, k = x.shape
    return np.pad(x, ((0, 0), (0, -k % GROUP))).reshape(rows, -1, GROUP)


@pytest.mark.parametrize("k", [32, 70, 576])
def test_activations_are_rounded_to_the_nearest_step_of_their_group(isa: str, k: int) -> None:
    x = normal(9, k) * np.logspace(-3, 3, 9, dtype=np.float32)[:, None]
    values, scales = quantize_rows(x)
    grouped = padded_groups(x)
    np.testing.assert_array_equal(scales, np.abs(grouped).max(-1) / np.float32(127))
    error = np.abs(values.reshape(grouped.shape) * scales[..., None] - grouped)
    assert (error <= scales[..., None] * (0.5 + 1e-5)).all()
    assert (np.abs(values.reshape(grouped.shape)).max(-1) == 127).all()


@pytest.mark.parametrize("k", [32, 45, 576])
def test_weights_are_rounded_to_the_nearest_step_of_their_group(k: int) -> None:
    weight = normal(37, k) * np.logspace(-6, 3, 37, dtype=np.float32)[:, None]
    weight[5] = 0.0
    stored = weights_of(_native.QuantizedMatrix.from_floats(torch.from_numpy(weight)))
    largest = np.abs(padded_groups(weight)).max(-1, keepdims=True)
    # The scale is largest / 127, rounded up or down by fp16 (a multiple of 2^-24 at the least).
    step = largest / 127 * (1 + 2**-10) + 2**-24
    assert (np.abs(padded_groups(stored - weight)) <= step / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0"])
def test_blocks_of_a_file_are_kept_exactly(isa: str, kind: str) -> None:
    blocks = blocks_of(kind, normal(21, 96))
    matrix = _native.QuantizedMatrix.from_blocks(torch.from_numpy(blocks), kind)
    expected = gguf_dequantize(blocks.reshape(21, -1), GGMLQuantizationType[kind.upper()])
    np.testing.assert_allclose(weights_of(matrix), expected, rtol=1e-6, atol=1e-7)
    assert matrix.bits == (8 if kind == "q8_0" else 4)
    assert (matrix.out_features, matrix.in_features) == (21, 96)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 31, 70])
@pytest.mark.parametrize("kind", ["floats", "q8_0", "q4_0", "q4_1"])
def test_products_are_those_of_the_quantised_operands(isa: str, kind: str, rows: int) -> None:
    n, k = 83, 608  # neither whole panels nor whole chunks of groups
    bias = normal(n, seed=3)
    matrix = matrix_of(kind, n, k, bias=bias)
    x = normal(rows, k, seed=2)
    values, scales = quantize_rows(x)
    rounded = values.reshape(rows, -1, GROUP).astype(np.float64) * scales[..., None]
    weights = weights_of(matrix).astype(np.float64)
    expected = rounded.reshape(rows, k) @ weights.T + bias
    # fp32 sums over 19 groups, on magnitudes of the terms' absolute sum
    bound = np.abs(rounded.reshape(rows, k)) @ np.abs(weights).T + np.abs(bias)
    if kind.startswith("q4"):
        bound = bound * 4  # q and the minimum, which partly cancel
    assert (np.abs(multiply(matrix, x) - expected) <= 4e-6 * bound).all()


@pytest.mark.parametrize("kind", ["q8_0", "q4_1"])
def test_integer_sums_are_exact_at_the_extremes(isa: str, kind: str) -> None:
    """Largest weights times largest activations, all signs alike: what 16-bit sums could overflow on."""
    k = 544
    per_block = 34 if kind == "q8_0" else 20
    blocks = np.zeros((16, k // GROUP, per_block), np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(1.0).tobytes(), np.uint8)
    if kind == "q8_0":
        blocks[..., 2:] = np.where(np.arange(16) % 2, 127, 0x81).astype(np.uint8)[:, None, None]  # 127 and -127
        weight = np.where(np.arange(16) % 2, 127, -127)
    else:
        blocks[..., 4:] = 0xFF
        weight = np.full(16, 15)
    matrix = _native.QuantizedMatrix.from_blocks(torch.from_numpy(blocks), kind)
    x = np.full((6, k), 127.0, np.float32)  # scale 1
    x[1::2] = -127.0
    expected = np.where(np.arange(6) % 2, -1, 1)[:, None] * (127 * k * weight)[None]
    np.testing.assert_array_equal(multiply(matrix, x), expected.astype(np.float32))


@pytest.mark.parametrize("k", [33, 45, 100])
def test_inputs_need_not_be_whole_groups(isa: str, k: int) -> None:
    matrix = matrix_of("floats", 19, k)
    x = normal(5, k, seed=2)
    values, scales = quantize_rows(x)
    assert (values[:, k:] == 0).all()
    rounded = (values.reshape(5, -1, GROUP).astype(np.float64) * scales[..., None]).reshape(5, -1)[:, :k]
    np.testing.assert_allclose(multiply(matrix, x), rounded @ weights_of(matrix).T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["floats", "q4_1"])
def test_a_row_is_the_same_in_any_batch_and_with_any_threads(isa: str, kind: str) -> None:
    matrix = matrix_of(kind, 100, 576, bias=normal(100, seed=5))
    x = normal(70, 576, seed=4)
    _native.set_threads(1)
    alone = np.concatenate([multiply(matrix, row[None]) for row in x])
    for threads in (1, 2, 3):
        _native.set_threads(threads)
        for rows in (2, 3, 4, 5, 6, 7, 9, 64, 65, 70):
            np.testing.assert_array_equal(multiply(matrix, x[:rows]), alone[:rows])
            np.testing.assert_array_equal(multiply(matrix, x[-rows:]), alone[-rows:])


@pytest.mark.skipif(len(ISAS) < 2, reason="this machine has the portable kernels only")
@pytest.mark.parametrize("kind", ["floats", "q4_0", "q4_1"])
def test_instruction_sets_agree_to_the_last_bit(kind: str) -> None:
    x = normal(13, 608, seed=6)
    results = []
    for name in ISAS:
        _native.set_isa(name)
        results.append(multiply(matrix_of(kind, 50, 608), x))
    _native.set_isa("auto")
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("kind", ["floats", "q4_1"])
def test_extreme_activations(isa: str, kind: str) -> None:
    matrix = matrix_of(kind, 32, 64)
    weights = weights_of(matrix).astype(np.float64)
    x = np.zeros((5, 64), np.float32)
    x[1] = 1e4 * normal(64, seed=7)
    x[2] = 1e-42  # subnormal
    x[3] = np.float32(3e38)
    x[4, 3] = 1e-20
    out = multiply(matrix, x)
    assert (out[0] == 0).all()
    np.testing.assert_allclose(out[1], x[1] @ weights.T, atol=5e-3 * np.abs(x[1]).max())
    assert (np.abs(out[2]) <= 1e-30).all()
    assert np.isfinite(out[4]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["floats", "q4_1"])
def test_what_is_not_finite_shows_in_its_row_alone(isa: str, kind: str, value: float) -> None:
    matrix = matrix_of(kind, 40, 96)
    x = normal(7, 96, seed=8)
    clean = multiply(matrix, x)
    x[3, 50] = value
    out = multiply(matrix, x)
    assert np.isnan(out[3]).all()
    others = np.arange(7) != 3
    np.testing.assert_array_equal(out[others], clean[others])


def test_a_weight_that_fp16_scales_cannot_reach_is_refused() -> None:
    for value in (np.nan, np.inf, 1e6):
        weight = normal(40, 64)
        weight[33, 7] = value
        with pytest.raises(ValueError, match="row 33 has weights that aren't finite"):
            _native.QuantizedMatrix.from_floats(torch.from_numpy(weight))


def test_arguments_that_do_not_fit_are_refused() -> None:
    matrix = matrix_of("floats", 20, 64)
    good = torch.zeros(2, 64)
    with pytest.raises(ValueError, match=r"x must be \[rows, 64\], got float32 \[2, 63\]"):
        matrix.multiply(torch.zeros(2, 63), torch.zeros(2, 20))
    with pytest.raises(ValueError, match=r"out must be \[2, 20\]"):
        matrix.multiply(good, torch.zeros(2, 21))
    with pytest.raises(ValueError, match="x must be contiguous float32"):
        matrix.multiply(good.double(), torch.zeros(2, 20))
    with pytest.raises(ValueError, match="kind must be q4_0, q4_1 or q8_0, got q5_0"):
        _native.QuantizedMatrix.from_blocks(torch.zeros(2, 2, 22, dtype=torch.uint8), "q5_0")
    with pytest.raises(ValueError, match=r"blocks must be contiguous uint8 \[rows, blocks, 20\]"):
        _native.QuantizedMatrix.from_blocks(torch.zeros(2, 2, 18, dtype=torch.uint8), "q4_1")
    with pytest.raises(ValueError, match="bias must be of 20 values"):
        _native.QuantizedMatrix.from_floats(torch.zeros(20, 64), torch.zeros(19))
