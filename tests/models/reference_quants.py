"""What a quantised block stands for, value by value, as ggml-common.h and ggml-quants.c define it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from gguf.constants import GGMLQuantizationType as Q


@dataclass(frozen=True)
class Reference:
    """``scale_offsets``: where in a block a float16 scale lies; ``values``: the block's values in order."""

    scale_offsets: tuple[int, ...]
    values: Callable[[bytes], list[float]]


def _half(data: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", data, at)[0])


def _nibbles(data: bytes) -> list[int]:
    """All low nibbles, then all high ones."""
    return [byte & 15 for byte in data] + [byte >> 4 for byte in data]


def _fifth_bits(data: bytes) -> list[int]:
    bits = struct.unpack("<I", data)[0]
    return [(bits >> i & 1) << 4 for i in range(32)]


def _q8_0(data: bytes) -> list[float]:
    return [_half(data, 0) * q for q in struct.unpack("<32b", data[2:])]


def _q4_0(data: bytes) -> list[float]:
    return [_half(data, 0) * (q - 8) for q in _nibbles(data[2:])]


def _q4_1(data: bytes) -> list[float]:
    return [_half(data, 0) * q + _half(data, 2) for q in _nibbles(data[4:])]


def _q5_0(data: bytes) -> list[float]:
    pairs = zip(_nibbles(data[6:]), _fifth_bits(data[2:6]), strict=True)
    return [_half(data, 0) * ((low | high) - 16) for low, high in pairs]


def _q5_1(data: bytes) -> list[float]:
    pairs = zip(_nibbles(data[8:]), _fifth_bits(data[4:8]), strict=True)
    return [_half(data, 0) * (low | high) + _half(data, 2) for low, high in pairs]


def _q4_k(data: bytes) -> list[float]:
    d, d_min, packed, quants = _half(data, 0), _half(data, 2), data[4:16], data[16:]
    values = []
    for group in range(8):  # of 32 values
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6 << 4)
            minimum = (packed[group + 4] >> 4) | (packed[group] >> 6 << 4)
        for byte in quants[group // 2 * 32 : group // 2 * 32 + 32]:
            quant = byte >> 4 if group % 2 else byte & 15
            values.append(d * scale * quant - d_min * minimum)
    return values


def _q6_k(data: bytes) -> list[float]:
    low, high, scales, d = data[:128], data[128:192], struct.unpack("<16b", data[192:208]), _half(data, 208)
    values = []
    for index in range(256):
        half, within = divmod(index, 128)
        quarter, column = divmod(within, 32)
        byte = low[half * 64 + (quarter % 2) * 32 + column]
        quant = (byte >> 4 if quarter >= 2 else byte & 15) | (high[half * 32 + column] >> 2 * quarter & 3) << 4
        values.append(d * scales[index // 16] * (quant - 32))
    return values


REFERENCE = {
    Q.Q8_0: Reference((0,), _q8_0),
    Q.Q4_0: Reference((0,), _q4_0),
    Q.Q4_1: Reference((0, 2), _q4_1),
    Q.Q5_0: Reference((0,), _q5_0),
    Q.Q5_1: Reference((0, 2), _q5_1),
    Q.Q4_K: Reference((0, 2), _q4_k),
    Q.Q6_K: Reference((208,), _q6_k),
}
