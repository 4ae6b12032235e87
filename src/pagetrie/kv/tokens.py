"""Token ids as bytes: u32 little-endian, so that comparing a thousand tokens is one memcmp."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

TOKEN_BYTES = 4

_LITTLE = sys.byteorder == "little"


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids (0 to 2**32 - 1) as u32 little-endian bytes. Raises OverflowError for ids outside that range."""
    packed = array("I", tokens)
    if not _LITTLE:
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """The token ids of u32 little-endian bytes."""
    return tuple(token_array(packed))


def token_array(packed: bytes) -> array[int]:
    """The token ids of u32 little-endian bytes, in a form that grows cheaply and ``pack_tokens`` takes."""
    ids = array("I", packed)
    if not _LITTLE:
        ids.byteswap()
    return ids


def common_prefix(a: bytes | bytearray, b: bytes | bytearray, offset: int, limit: int) -> int:
    """Length in bytes of the longest common prefix of ``a`` and ``b[offset:]``, at most ``limit``.

    Halving with memcmp: O(n) bytes compared, O(log n) Python steps.
    """
    high = min(len(a), len(b) - offset, limit)
    if high <= 0:
        return 0
    view = memoryview(a)
    if b.startswith(view[:high], offset):
        return high
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        if b.startswith(view[low:middle], offset + low):
            low = middle
        else:
            high = middle
    return low
