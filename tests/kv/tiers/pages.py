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


def read(tier: Tier, refs: list[PageRef]) -> list[PageRef]:
    """Those of the first pages that the tier hands out, each checked to be the right one."""
    got = []
    for ref, data in zip(refs, tier.get(refs), strict=False):
        assert (data == content(ref, data.nbytes)).all(), "wrong bytes were handed out"
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
