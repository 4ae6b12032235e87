"""Codecs: how the memory tier may keep pages in fewer bytes than the pool has for them."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

from pagetrie.kv.tiers.interface import Bytes

CodecName: TypeAlias = Literal["none", "int8", "k8v4"]

VERSION = 1
"""Changes with what a codec makes of a page: pages that went through an earlier one are not read any more."""

GROUP = 32
"""Values with one scale in ``k8v4``, and how many a head's are filled up to a multiple of."""


class PageCodec(Protocol):
    """Encodes whole pages, with loss. Safe to use from several threads at once; lets go of the interpreter's lock.

    What was decoded encodes to the same bytes again, so a page that goes to and fro changes once.

    Attributes:
        name: ``int8`` or ``k8v4``.
        page_bytes, encoded_bytes: of a page in the pool, and of an encoded one.
    """

    @property
    def name(self) -> str: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def encoded_bytes(self) -> int: ...

    def encode(self, src: Bytes, out: Bytes) -> bool:
        """Encode a page into ``out``, uint8 [encoded_bytes].

        False, ``out`` then being of no use, if it holds what can't be encoded: NaN, infinity, more than 2^120.
        """
        ...

    def decode(self, src: Bytes, out: Bytes) -> None:
        """Decode into ``out``, uint8 [page_bytes]."""
        ...


def namespace_suffix(name: CodecName) -> str:
    """What a codec adds to the name of pages' format: pages that may have gone through it are no others' pages."""
    return "" if name == "none" else f":ram-{name}.{VERSION}"


def share_of_fp16(name: CodecName, head_dim: int) -> float:
    """Bytes that an encoded page takes, as a share of the same page in fp16."""
    if name == "none":
        return 1.0
    eight_bits = head_dim + 2
    values = eight_bits if name == "int8" else -(-head_dim // GROUP) * (GROUP // 2 + 2)
    return (eight_bits + values) / (4 * head_dim)
