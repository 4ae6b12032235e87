"""Page codecs in plain numpy, from their description in ``native/src/page_codec.h``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

LEVELS = np.array([-111, -88, -69, -53, -39, -25, -13, 0, 12, 24, 36, 49, 64, 81, 101, 127])
LEAST = np.float32(2.0**-22)
DTYPES: dict[str, Any] = {"fp16": np.float16, "fp32": np.float32}


@dataclass(frozen=True)
class Reference:
    """A codec for pages [n_layers, 2, n_kv_heads, head_dim * page_size]."""

    name: str
    dtype: str
    n_layers: int
    n_kv_heads: int
    head_dim: int
    page_size: int

    def vectors(self, page: Bytes) -> tuple[Floats, Floats]:
        """Keys and values, each [n_layers, n_kv_heads, page_size, head_dim]."""
        parts = page.view(DTYPES[self.dtype]).astype(np.float32)
        parts = parts.reshape(self.n_layers, 2, self.n_kv_heads, self.head_dim * self.page_size)
        keys = parts[:, 0].reshape(self.n_layers, self.n_kv_heads, self.head_dim, self.page_size)
        values = parts[:, 1].reshape(self.n_layers, self.n_kv_heads, self.page_size, self.head_dim)
        return keys.swapaxes(-1, -2), values

    def page(self, keys: Floats, values: Floats) -> Bytes:
        """A page of keys and values."""
        flat = (self.n_layers, self.n_kv_heads, -1)
        parts = np.stack([keys.swapaxes(-1, -2).reshape(flat), values.reshape(flat)], axis=1)
        largest = float(np.finfo(DTYPES[self.dtype]).max)
        return np.ascontiguousarray(np.clip(parts, -largest, largest).astype(DTYPES[self.dtype])).view(np.uint8).ravel()

    def encode(self, page: Bytes) -> Bytes | None:
        """The encoded page; None if it can't be encoded."""
        keys, values = self.vectors(page)
        if not (np.abs(page.view(DTYPES[self.dtype]).astype(np.float32)) <= np.float32(2.0**120)).all():
            return None
        blocks = []
        for layer in range(self.n_layers):
            for head in range(self.n_kv_heads):
                codes, scales = quantize(keys[layer, head])
                blocks += [codes.T.astype(np.int8).tobytes(), stored(scales)]
            for head in range(self.n_kv_heads):
                if self.name == "int8":
                    codes, scales = quantize(values[layer, head])
                    blocks += [codes.astype(np.int8).tobytes(), stored(scales)]
                else:
                    numbers, scales = quantize4(self.groups(values[layer, head]))
                    numbers = numbers.astype(np.uint8)
                    blocks += [(numbers[..., :16] | numbers[..., 16:] << 4).tobytes(), stored(scales)]
        return np.frombuffer(b"".join(blocks), np.uint8).copy()

    def decode(self, data: Bytes) -> Bytes:
        """The page that an encoded one stands for."""
        shape = (self.n_layers, self.n_kv_heads, self.page_size, self.head_dim)
        keys, values = np.empty(shape, np.float32), np.empty(shape, np.float32)
        at = 0

        def take(count: int) -> Bytes:
            nonlocal at
            at += count
            return data[at - count : at]

        size, dims = self.page_size, self.head_dim
        n_groups = -(-dims // 32)
        for layer in range(self.n_layers):
            for head in range(self.n_kv_heads):
                codes = take(size * dims).view(np.int8).reshape(dims, size).T
                keys[layer, head] = codes.astype(np.float32) * loaded(take(2 * size))[:, None]
            for head in range(self.n_kv_heads):
                if self.name == "int8":
                    codes = take(size * dims).view(np.int8).reshape(size, dims)
                    values[layer, head] = codes.astype(np.float32) * loaded(take(2 * size))[:, None]
                else:
                    packed = take(size * n_groups * 16).reshape(size, n_groups, 16)
                    levels = LEVELS[np.concatenate([packed & 15, packed >> 4], -1)].astype(np.float32)
                    levels *= loaded(take(2 * size * n_groups)).reshape(size, n_groups, 1)
                    values[layer, head] = levels.reshape(size, -1)[:, :dims]
        assert at == len(data)
        return self.page(keys, values)

    def groups(self, vectors: Floats) -> Floats:
        """[n, head_dim] as [n, groups, 32], filled up with zeros."""
        filled = np.zeros((len(vectors), -(-self.head_dim // 32) * 32), np.float32)
        filled[:, : self.head_dim] = vectors
        return filled.reshape(len(vectors), -1, 32)


def scale_of(largest: Floats) -> Floats:
    """max|x| / 127 rounded to bfloat16, at least 2^-22."""
    bits = (largest / np.float32(127)).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.maximum(rounded, LEAST)


def quantize(vectors: Floats) -> tuple[Floats, Floats]:
    """Codes and scales of vectors along the last axis."""
    scales = scale_of(np.abs(vectors).max(-1))
    return np.rint(vectors * (np.float32(1) / scales)[..., None]), scales


def quantize4(groups: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Numbers of levels, and scales with their signs."""
    scales = scale_of(np.abs(groups).max(-1))
    negative = (scales > LEAST) & (-groups.min(-1) > groups.max(-1))
    scales = np.where(negative, -scales, scales)
    codes = np.rint(groups * (np.float32(1) / scales)[..., None])
    distances = np.abs(codes[..., None] - LEVELS)
    return distances.argmin(-1), scales  # the first of equals: the lower level


def stored(scales: Floats) -> bytes:
    return (np.ascontiguousarray(scales).view(np.uint32) >> 16).astype("<u2").tobytes()


def loaded(data: Bytes) -> Floats:
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
