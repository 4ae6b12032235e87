"""Tiers without bytes: what they hold and how long they take, under the real transfers between pool and tiers.

When to load, when to recompute, what is written and what waits is decided by ``kv.transfers`` itself. A simulated tier
only stands for the medium: pages of one size, the least recently used one goes first, with its speed both ways. (The
real disk tier gives up whole segments and writes used pages anew, which comes close to that.)
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagetrie.errors import ConfigError
from pagetrie.kv.keys import SECRET_BYTES, ChainKeys
from pagetrie.kv.shares import Allowance
from pagetrie.kv.tiers.interface import Bytes, PageRef, Speed, TierStats, TierTraits
from pagetrie.kv.tiers.stack import TierStack
from pagetrie.kv.tiers.workers import Pace
from pagetrie.kv.transfers import Transfers
from pagetrie.sim.clock import VirtualClock
from pagetrie.sim.threads import VirtualThreads


@dataclass(frozen=True, slots=True)
class SimTierOptions:
    """A tier to simulate.

    Attributes:
        name: ``ram``, which takes what the pool evicts, or ``disk``, to which all full pages are written.
        capacity: bytes.
        speed: latency in seconds and bytes per second, in both directions.
        share: of the bytes of a page in the pool, what one takes here.
    """

    name: str
    capacity: int
    speed: Speed
    share: float = 1.0

    def pages(self, page_bytes: int) -> int:
        """How many pages of so many bytes in the pool it holds.

        Raises:
            ConfigError: none.
        """
        taken = math.ceil(page_bytes * self.share)
        if self.capacity < taken:
            raise ConfigError(f"{self.name}: {self.capacity} bytes hold no page: one takes {taken} bytes")
        return self.capacity // taken


class _Weightless(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes of a page that are all the same one; a copy costs nothing."""

    def copy(self, order: Any = "C") -> _Weightless:
        return self


class SimPages:
    """The bytes of a pool's pages (``kv.tiers.PageBytes``), which take no memory.

    Args:
        bytes_per_page: what a page would take.
    """

    def __init__(self, bytes_per_page: int) -> None:
        self.bytes_per_page = bytes_per_page
        self.blank: Bytes = np.broadcast_to(np.zeros(1, np.uint8).view(_Weightless), (bytes_per_page,), subok=True)

    def read_page(self, page: int) -> Bytes:
        return self.blank

    def write_page(self, page: int, data: Bytes) -> None:
        pass


class SimTier:
    """Pages in a tier (``kv.tiers.Tier``), by their keys alone.

    Args:
        options: which tier.
        pages: their size.
        threads: whose time passes.

    Raises:
        ConfigError: the capacity doesn't hold one page.
    """

    def __init__(self, options: SimTierOptions, pages: SimPages, threads: VirtualThreads) -> None:
        self._slots = options.pages(pages.bytes_per_page)
        self.name = options.name
        self.traits = TierTraits(victim=options.name == "ram", speed=options.speed)
        self.stats = TierStats(capacity_bytes=options.capacity)
        self._pages = pages
        self._threads = threads
        self._seconds = pages.bytes_per_page / options.speed.bandwidth
        # Key -> key of the page before it; the least recently used first.
        self._held: OrderedDict[bytes, bytes] = OrderedDict()

    def holds(self, key: bytes) -> bool:
        return key in self._held

    def contains(self, keys: Sequence[bytes]) -> int:
        count = 0
        while count < len(keys) and keys[count] in self._held:
            count += 1
        for key in reversed(keys[:count]):
            self._held.move_to_end(key)
        return count

    def get(self, refs: Sequence[PageRef]) -> Iterator[Bytes]:
        self._threads.sleep(self.traits.speed.latency)
        for ref in refs:
            self._threads.sleep(self._seconds)
            if ref.key not in self._held:
                self.stats.failed_pages += 1
                return
            self.stats.hit_pages += 1
            yield self._pages.blank

    def put(self, pages: Sequence[tuple[PageRef, Bytes]]) -> int:
        for ref, _ in pages:
            if ref.key not in self._held:
                self._threads.sleep(self._seconds)
                self.stats.stored_pages += 1
                while len(self._held) >= self._slots:
                    self._held.popitem(last=False)
                    self.stats.evicted_pages += 1
            self._held[ref.key] = ref.parent
            self._held.move_to_end(ref.key)
        self.stats.pages = len(self._held)
        return len(pages)

    def touch(self, key: bytes) -> None:
        if self.traits.victim:
            return
        # The first page is the last to be given up.
        while key in self._held:
            self._held.move_to_end(key)
            key = self._held[key]

    def name_namespace(self, key: bytes, namespace: bytes) -> None:
        """Nothing: there is one."""

    def allow(self, allowances: Mapping[bytes, Allowance]) -> None:
        """Nothing: there are no tenants."""

    def drop_owner(self, tag: bytes) -> None:
        """Nothing: there are no tenants."""

    def clear(self) -> None:
        self._held.clear()

    def close(self) -> None:
        """Nothing to let go of."""


def sim_transfers(
    tiers: Sequence[SimTierOptions], bytes_per_page: int, clock: VirtualClock
) -> tuple[Transfers, VirtualThreads]:
    """What moves pages between a pool and simulated tiers, and the threads that do.

    Args:
        tiers: fastest first.
        bytes_per_page: of the pool's pages.
        clock: the replica's.

    Raises:
        ConfigError: a tier holds no page.
    """
    threads, pages = VirtualThreads(clock), SimPages(bytes_per_page)
    stack = TierStack(
        [SimTier(options, pages, threads) for options in tiers],
        pages,
        clock=threads.now,
        make_worker=threads.make_worker,
        pace=Pace.free(),
    )
    return Transfers(stack, ChainKeys(bytes(SECRET_BYTES))), threads
