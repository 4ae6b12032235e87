"""Made-up pages with names as the cache gives them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pagetrie.kv.keys import ChainKeys
from pagetrie.kv.tiers.interface import Bytes, PageRef, Tier
from pagetrie.kv.tokens import pack_tokens

SECRET = bytes(range(32))
KEYS = ChainKeys(SECRET)
PAGE_BYTES = 1000


def chain(count: int, *, name: bytes = b"a", size: int = 4, first: int = 0) -> list[PageRef]:
    """A prefix of ``count`` pages of ``size`` tokens; equal arguments give equal names."""
    namespace = parent = KEYS.root(name)
    refs = []
    for number in range(count):
        tokens = pack_tokens(range(first + number * size, first + (number + 1) * size))
        key = KEYS.page(parent, tokens)
        refs.append(PageRef(key, parent, namespace, tokens))
        parent = key
    return refs


def content(ref: PageRef, size: int = PAGE_BYTES) -> Bytes:
    """What a page of this name holds: bytes that no other page has."""
    return np.frombuffer((ref.key * (size // 32 + 1))[:size], np.uint8).copy()


class Halves:
    """A codec (``PageCodec``) that keeps the high half of each byte; a page that begins with 255 can't be encoded."""

    name = "halves"
    page_bytes = PAGE_BYTES
    encoded_bytes = PAGE_BYTES // 2

    def encode(self, src: Bytes, out: Bytes) -> bool:
        np.bitwise_or(src[::2] & 0xF0, src[1::2] >> 4, out=out)
        return bool(src[0] != 255)

    def decode(self, src: Bytes, out: Bytes) -> None:
        out[::2] = src & 0xF0
        out[1::2] = src << 4


def read(tier: Tier, refs: list[PageRef], mask: int = 0xFF) -> list[PageRef]:
    """Those of the first pages that the tier hands out, each checked to be the right one in the bits of the mask."""
    got = []
    for ref, data in zip(refs, tier.get(refs), strict=False):
        assert (data == content(ref, data.nbytes) & mask).all(), "wrong bytes were handed out"
        got.append(ref)
    return got


class Clock:
    """Time that stands still unless told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ManualWorker:
    """A background thread that runs when told, or (``eager``) at once."""

    def __init__(self, name: str = "") -> None:
        self.jobs: list[Callable[[], None]] = []
        self.eager = False

    def submit(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)
        if self.eager:
            self.run()

    def close(self, seconds: float) -> None:
        self.run()

    def run(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()
