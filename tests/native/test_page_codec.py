"""Page codecs: equal to their description in numpy, to the bit, on every instruction set, and stable once rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagetrie import _native
from pagetrie.kv.tiers.codec import PageCodec, share_of_fp16
from pagetrie.runner.page_codec import make_page_codec
from pagetrie.runner.storage import PageStorage
from tests.native.helpers import available_isas, isa, make_config
from tests.native.reference_codec import DTYPES, Bytes, Reference

names = st.sampled_from(["int8", "k8v4"])
dtypes = st.sampled_from(["fp16", "fp32"])
shapes = st.tuples(
    st.integers(1, 2),
    st.integers(1, 3),
    st.sampled_from([2, 8, 16, 24, 40, 64, 80, 128]),
    st.sampled_from([1, 2, 4, 8, 16, 32]),
)
ISAS = available_isas()


def finite(values: NDArray[Any], dtype: str) -> Bytes:
    """Values as a page; zeros in place of those that a codec would refuse."""
    most = 65504 if dtype == "fp16" else 2.0**120
    with np.errstate(invalid="ignore"):
        wide = values.astype(np.float64)
    return np.where(np.abs(wide) <= most, wide, 0).astype(DTYPES[dtype]).view(np.uint8)


def any_bits(rng: np.random.Generator, reference: Reference) -> NDArray[Any]:
    """Every number of the type, subnormal ones too, is as likely as any other."""
    kind = np.dtype(DTYPES[reference.dtype])
    return rng.integers(0, 1 << 8 * kind.itemsize, size_of(reference), np.uint64).astype(f"u{kind.itemsize}").view(kind)


def magnitudes(rng: np.random.Generator, reference: Reference) -> NDArray[Any]:
    """Vectors normally distributed, each of another magnitude, down to zero and up to the largest number."""
    shape = (reference.n_layers, 2, reference.n_kv_heads, reference.page_size, reference.head_dim)
    exponents = rng.integers(-28, 16, (*shape[:4], 1))
    vectors = rng.standard_normal(shape) * 2.0**exponents * (rng.random((*shape[:4], 1)) < 0.9)
    vectors[rng.random(shape) < 0.02] *= 50
    vectors = np.clip(vectors, -65504, 65504)
    vectors[:, 0] = vectors[:, 0].swapaxes(-1, -2).reshape(vectors[:, 0].shape)  # keys lie by dimension
    return vectors.ravel()


def few_numbers(rng: np.random.Generator, reference: Reference) -> NDArray[Any]:
    """Extremes, ties of both signs, zeros, and multiples of the least number: where rounding is coarse."""
    numbers = (
        np.array([0, 1, 2, 3, 127, 128, 190, 191, 192, 254, 255, 381, 508, 509, 511, 762, 763, 1023, 2047]) * 2.0**-24
    )
    numbers = np.concatenate([numbers, rng.integers(0, 2048, 6) * 2.0**-24, [65504, 65472, 32768, 516, 1, 127, 127.5]])
    chosen = rng.choice(numbers, rng.integers(1, 4))
    return rng.choice(np.concatenate([chosen, -chosen]), size_of(reference))


def size_of(reference: Reference) -> int:
    return 2 * reference.n_layers * reference.n_kv_heads * reference.head_dim * reference.page_size


def native(reference: Reference) -> _native.PageCodec:
    return _native.PageCodec(
        reference.name,
        reference.dtype,
        reference.n_layers,
        reference.n_kv_heads,
        reference.head_dim,
        reference.page_size,
    )


def encode(codec: PageCodec, page: Bytes) -> Bytes:
    out = np.full(codec.encoded_bytes, 0xA5, np.uint8)
    assert codec.encode(page, out)
    return out


def decode(codec: PageCodec, data: Bytes) -> Bytes:
    out = np.full(codec.page_bytes, 0xA5, np.uint8)
    codec.decode(data, out)
    return out


kinds = st.sampled_from([any_bits, magnitudes, few_numbers])


@given(name=names, dtype=dtypes, shape=shapes, kind=kinds, seed=st.integers(0, 2**32 - 1))
def test_all_instruction_sets_do_what_is_described_and_what_was_decoded_encodes_to_the_same_bytes(
    name: str,
    dtype: str,
    shape: tuple[int, int, int, int],
    kind: Callable[[np.random.Generator, Reference], NDArray[Any]],
    seed: int,
) -> None:
    reference = Reference(name, dtype, *shape)
    codec = native(reference)
    page = finite(kind(np.random.default_rng(seed), reference), dtype)
    expected = reference.encode(page)
    assert expected is not None and codec.encoded_bytes == len(expected) and codec.page_bytes == len(page)
    rounded = reference.decode(expected)
    for choice in ISAS:
        with isa(choice):
            assert (encode(codec, page) == expected).all()
            assert (decode(codec, expected) == rounded).all()
            assert (encode(codec, rounded) == expected).all(), "a page would drift"


@given(
    name=names,
    dtype=dtypes,
    values=st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
)
@example(name="int8", dtype="fp16", values=[192 * 2.0**-24 * 127 / 128])
@example(name="k8v4", dtype="fp16", values=[65504, -65504])
@example(name="k8v4", dtype="fp16", values=[-65504, 65472, 0])
def test_no_vector_drifts(name: str, dtype: str, values: list[float]) -> None:
    reference = Reference(name, dtype, 1, 1, 40, 2)
    codec = native(reference)
    page = finite(np.resize(np.array(values), size_of(reference)), dtype)
    once = encode(codec, page)
    rounded = decode(codec, once)
    assert (once == reference.encode(page)).all()
    assert (encode(codec, rounded) == once).all()


def test_every_scale_is_found_again() -> None:
    """Vectors of one number and its rounded self, for all finite fp16 numbers: where scales could slip."""
    numbers = np.arange(0x7C00, dtype=np.uint16).view(np.float16)
    for name in ("int8", "k8v4"):
        reference = Reference(name, "fp16", 1, 1, 2, 256)
        codec = native(reference)
        for start in range(0, len(numbers), 256):
            some = np.resize(numbers[start : start + 256], 256)
            keys, values = np.stack([some, -some / 3]), np.stack([-some, some / 3], -1)
            page = finite(np.concatenate([keys.ravel(), values.ravel()]), "fp16")
            once = encode(codec, page)
            assert (encode(codec, decode(codec, once)) == once).all()


@pytest.mark.parametrize("name", ["int8", "k8v4"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_errors_are_bounded_and_zeros_stay(name: str, dtype: str) -> None:
    reference = Reference(name, dtype, 2, 2, 64, 16)
    codec = native(reference)
    page = finite(np.random.default_rng(0).standard_normal(size_of(reference)), dtype)
    page.view(DTYPES[dtype])[5::7] = 0
    keys, values = reference.vectors(page)
    keys_after, values_after = reference.vectors(decode(codec, encode(codec, page)))

    def worst(before: NDArray[Any], after: NDArray[Any], group: int) -> float:
        before, after = before.reshape(*before.shape[:3], -1, group), after.reshape(*before.shape[:3], -1, group)
        return float((np.abs(after - before) / np.abs(before).max(-1, keepdims=True)).max())

    assert worst(keys, keys_after, 64) < 0.501 / 127 + 2.0**-8
    assert worst(values, values_after, 64 if name == "int8" else 32) < (
        0.501 / 127 + 2.0**-8 if name == "int8" else 0.13
    )
    assert not keys_after[keys == 0].any() and not values_after[values == 0].any()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["int8", "k8v4"])
def test_what_is_no_number_is_refused_wherever_it_stands(name: str, bad: float) -> None:
    for dtype, choice in [(dtype, choice) for dtype in DTYPES for choice in ISAS]:
        reference = Reference(name, dtype, 1, 2, 24, 4)
        codec = native(reference)
        out = np.empty(codec.encoded_bytes, np.uint8)
        page = finite(np.ones(size_of(reference)), dtype)
        with isa(choice):
            assert codec.encode(page, out)
            for at in range(size_of(reference)):
                page.view(DTYPES[dtype])[at] = bad
                assert not codec.encode(page, out) and reference.encode(page) is None
                page.view(DTYPES[dtype])[at] = 1


def test_numbers_beyond_all_reason_are_refused() -> None:
    codec = native(Reference("int8", "fp32", 1, 1, 8, 1))
    out = np.empty(codec.encoded_bytes, np.uint8)
    page = np.full(16, 2.0**120, np.float32)
    assert codec.encode(page.view(np.uint8), out)
    page[3] = np.nextafter(page[3], np.float32(np.inf))
    assert not codec.encode(page.view(np.uint8), out)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_it_is_made_for_a_storages_pages(dtype: str) -> None:
    storage = PageStorage(2, 8, make_config(head_dim=24), dtype)  # type: ignore[arg-type]
    assert make_page_codec("none", storage) is None
    for name in ("int8", "k8v4"):
        codec = make_page_codec(name, storage)  # type: ignore[arg-type]
        assert codec is not None
        assert (codec.name, codec.page_bytes) == (name, storage.bytes_per_page)
        fp16 = storage.bytes_per_page // (1 if dtype == "fp16" else 2)
        assert codec.encoded_bytes == share_of_fp16(name, 24) * fp16  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused() -> None:
    codec = _native.PageCodec("int8", "fp16", 1, 1, 8, 2)
    page, out = np.zeros(64, np.uint8), np.zeros(codec.encoded_bytes, np.uint8)
    assert (codec.page_bytes, codec.encoded_bytes) == (64, 40)
    with pytest.raises(ValueError, match=r"src must be contiguous uint8 \[64\], got uint8 \[63\]"):
        codec.encode(page[:-1], out)
    with pytest.raises(ValueError, match=r"out must be contiguous uint8 \[64\], got uint8 \[40\]"):
        codec.decode(out, out)
    with pytest.raises(ValueError, match="src must be contiguous"):
        codec.encode(np.zeros(128, np.uint8)[::2], out)
    with pytest.raises(ValueError, match="src must be aligned to 2 bytes"):
        codec.encode(np.zeros(66, np.uint8)[1:65], out)
    with pytest.raises(ValueError, match="codec must be int8 or k8v4, got int7"):
        _native.PageCodec("int7", "fp16", 1, 1, 8, 2)
    with pytest.raises(ValueError, match="dtype must be"):
        _native.PageCodec("int8", "bf16", 1, 1, 8, 2)
    with pytest.raises(ValueError, match="sizes must be from 1 to 65536, got 0"):
        _native.PageCodec("int8", "fp16", 1, 0, 8, 2)
