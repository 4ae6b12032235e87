"""What a tier is: a shelf of pages below the pool, which takes and gives whole pages as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagetrie.kv.shares import Allowance

Bytes: TypeAlias = NDArray[np.uint8]
"""The bytes of one page, uint8 [bytes_per_page], contiguous."""


@dataclass(frozen=True, slots=True)
class PageRef:
    """The name of a page outside the pool, and all that must be equal for its bytes to be taken for it.

    Attributes:
        key: the page's key (``ChainKeys``), which depends on the three below and on everything before them.
        parent: key of the page before it; the namespace for a first page.
        namespace: key of the namespace (``ChainKeys.root``).
        tokens: the page's token ids (u32 LE); fewer than a page holds for a partly filled one.
    """

    key: bytes
    parent: bytes
    namespace: bytes
    tokens: bytes


class PageBytes(Protocol):
    """The pool's memory as bytes. One thread may write a page while others use other pages."""

    bytes_per_page: int

    def read_page(self, page: int) -> Bytes:
        """The bytes of a page: a view of it where that is possible, so valid only while the page is unchanged."""
        ...

    def write_page(self, page: int, data: Bytes) -> None:
        """Copy a page in."""
        ...


@dataclass(slots=True)
class TierStats:
    """A tier in numbers, since start.

    Attributes:
        capacity_bytes: most bytes it may take, overhead included; 0 where it is not ours to bound.
        used_bytes, pages: what it holds now (0 where it can't be known cheaply).
        hit_pages, hit_bytes: pages handed out, verified, and the bytes that they take here.
        failed_pages: pages that it seemed to have and didn't deliver: gone, short, corrupt, too late, an error.
        stored_pages, stored_bytes: pages taken in, likewise.
        evicted_pages: pages given up to stay within the capacity.
        refused_pages: pages not taken: no room, full disk, read-only, not to be encoded.
        dropped_pages: pages that didn't get into the queue to it; queued_bytes: what waits there now.
        get_seconds, put_seconds: time spent on the above.
        healthy: it takes and gives; False while it is read-only, full or unreachable.
        problem: why it isn't healthy, in words without paths or addresses; empty while it is.
    """

    capacity_bytes: int = 0
    used_bytes: int = 0
    pages: int = 0
    hit_pages: int = 0
    hit_bytes: int = 0
    failed_pages: int = 0
    stored_pages: int = 0
    stored_bytes: int = 0
    evicted_pages: int = 0
    refused_pages: int = 0
    dropped_pages: int = 0
    queued_bytes: int = 0
    get_seconds: float = 0.0
    put_seconds: float = 0.0
    healthy: bool = True
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Speed:
    """A first guess at a tier's speed, until it is measured.

    Attributes:
        latency: seconds before the first byte.
        bandwidth: bytes per second.
        computing: seconds per byte that the reading thread computes.
    """

    latency: float
    bandwidth: float
    computing: float = 5e-10


@dataclass(frozen=True, slots=True)
class TierTraits:
    """How the stack is to use a tier.

    Attributes:
        remote: it is asked on a background thread only, and ``holds`` knows only what this process has stored.
        victim: filled with what the pool evicts, at once and by the step's own thread (memory); others are written
            through in the background as pages become full.
        speed: a first guess.
    """

    remote: bool = False
    victim: bool = False
    speed: Speed = field(default_factory=lambda: Speed(1e-3, 500e6))


class Tier(Protocol):
    """A shelf of pages. Safe to use from several threads at once; no method raises for a fault of the medium.

    Attributes:
        name: ``ram``, ``disk`` or ``store``: what users read in usage and metrics.
        traits: how the stack is to use it.
        stats: counts; read by any thread, exact between operations.
    """

    name: str
    traits: TierTraits

    @property
    def stats(self) -> TierStats: ...

    def holds(self, key: bytes) -> bool:
        """Whether it seems to have a page, as far as that is known without asking anyone."""
        ...

    def contains(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys, without a gap, it seems to have. Only ``get`` can tell whether it does.

        What is asked for counts as about to be read. A remote tier makes a round trip for this.
        """
        ...

    def get(self, refs: Sequence[PageRef]) -> Iterator[Bytes]:
        """The pages, in order, verified; ends before the first that can't be had.

        What is yielded is only valid until the next one is asked for.
        """
        ...

    def put(self, pages: Sequence[tuple[PageRef, Bytes]]) -> int:
        """Store pages; those that are there already count as stored. Returns how many are there now."""
        ...

    def touch(self, key: bytes) -> None:
        """The page and all before it were used, though not read from here."""
        ...

    def name_namespace(self, key: bytes, namespace: bytes) -> None:
        """What a namespace's key stands for, for tiers that note it."""
        ...

    def allow(self, allowances: Mapping[bytes, Allowance]) -> None:
        """How much of it each owner of namespaces may have, by tag (``ChainKeys.tag``), where it is ours to bound."""
        ...

    def drop_owner(self, tag: bytes) -> None:
        """Delete an owner's pages, where they are ours alone. May take long."""
        ...

    def clear(self) -> None:
        """Forget every page."""
        ...

    def close(self) -> None:
        """Let go of files and connections; idempotent. What was stored stays where the medium lasts."""
        ...
