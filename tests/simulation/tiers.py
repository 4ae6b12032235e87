"""The tiers of a world: real ones, on media that lie, stall, cut short, flip bits, fill up and die.

Their threads are real too, but run one at a time and only when the world lets them, from one stop to the next: at the
start of a job, at each call to a store, and in the middle of each page's copy into the pool. Time passes between stops,
seconds of it where a medium stalls, so that steps, deadlines, resets and evictions fall into every gap.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pagetrie.kv import CacheManager
from pagetrie.kv.estimates import TierSpeed
from pagetrie.kv.keys import ChainKeys
from pagetrie.kv.tiers.disk import DiskTier, segment_paths
from pagetrie.kv.tiers.folder import CacheFolder
from pagetrie.kv.tiers.interface import Bytes, Speed, Tier
from pagetrie.kv.tiers.load import Load
from pagetrie.kv.tiers.ram import ENTRY_BYTES, RamTier
from pagetrie.kv.tiers.sealed import SEALED_BYTES, Keyring, SealedTier
from pagetrie.kv.tiers.stack import TierStack
from pagetrie.kv.tiers.store import StoreTier
from pagetrie.kv.tiers.workers import Pace
from pagetrie.kv.transfers import Transfers
from pagetrie.sim import PageMemory, VirtualClock
from tests.kv.tiers.faults import FaultyBackend, Turns, harm
from tests.simulation.spec import TierSpec

SECRET = bytes(32)
FAULTS = ("lie", "flip", "flip", "flip", "truncate", "swap", "lose", "die")


class SimBytes:
    """Simulated pages as bytes (``PageBytes``): how many identities a page holds, then these."""

    def __init__(self, memory: PageMemory, turns: Turns) -> None:
        self._memory = memory
        self._turns = turns
        self._given: set[bytes] = set()
        self.bytes_per_page = 8 * (memory.page_size + 2)

    def read_page(self, page: int) -> Bytes:
        content = self._memory._pages[page]
        words = np.zeros(self._memory.page_size + 2, np.uint64)
        words[: len(content) + 1] = [len(content), *content]
        self._given.add(words.tobytes())
        return words.view(np.uint8)

    def write_page(self, page: int, data: Bytes) -> None:
        self._turns.stop()
        if data.tobytes() not in self._given:
            self._turns.fault = AssertionError("a tier hands out what it was never given")
        count, *content = data.view(np.uint64).tolist()
        self._memory._pages[page] = content[:count]


class SlowSpeed(TierSpeed):
    """Whatever a tier does, reading a page is thought to take as long as computing it: prompts meet their loads."""

    def __init__(self, transfers: Transfers, bytes_per_page: int, page_size: int) -> None:
        super().__init__(Speed(0.0, 1.0))
        self._transfers = transfers
        self._tokens = page_size / bytes_per_page

    def seconds(self, size: int, now: float, rest: float) -> float:
        return self._transfers._prefill.seconds(0, round(size * self._tokens))


class SimTiers:
    """Tiers as a spec asks for them, and what goes wrong with them.

    Attributes:
        transfers: for the cache.
        turns: their threads.
    """

    def __init__(self, spec: TierSpec, memory: PageMemory, clock: VirtualClock, rng: random.Random) -> None:
        self._spec = spec
        self._rng = rng
        self._clock = clock
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._backend: FaultyBackend | None = None
        self.turns = Turns(clock, self._when)
        pages = SimBytes(memory, self.turns)
        size = pages.bytes_per_page
        keyring = Keyring() if spec.sealed else None
        tiers: list[Tier] = []
        if spec.ram_pages:
            tiers.append(RamTier(spec.ram_pages * (size + ENTRY_BYTES), size, clock))
        if spec.disk_bytes:
            self._folder = tempfile.TemporaryDirectory()
            folder = CacheFolder(Path(self._folder.name), SECRET, sealed=spec.sealed)
            tiers.append(DiskTier(folder, spec.disk_bytes, clock))
        if spec.store_pages:
            self._backend = FaultyBackend(self._fault, rng, spec.store_pages)
            size += SEALED_BYTES if spec.sealed else 0
            tiers.append(StoreTier(self._backend, secret=SECRET, bytes_per_page=size, title="world", clock=clock))
        if keyring is not None:
            tiers = [tier if tier.traits.victim else SealedTier(tier, keyring) for tier in tiers]
        stack = TierStack(
            tiers,
            pages,
            queue_bytes=spec.queue_pages * size,
            clock=clock,
            make_worker=self.turns.make_worker,
            pace=Pace.free(),
        )
        self.transfers = Transfers(stack, ChainKeys(SECRET), keyring)
        self.transfers.note_prefill(1, 0, 0.05)  # so slow at first that most loads are worth it
        if spec.meets:
            speed = SlowSpeed(self.transfers, pages.bytes_per_page, memory.page_size)
            self.transfers.meeting_pages = 2
            self.transfers._speeds = dict.fromkeys(self.transfers._speeds, speed)
        self._loads: list[Load] = []
        start = stack.start

        def watched(load: Load, on_progress: Callable[[], None]) -> None:
            assert load.refs and len(load.refs) == len(load.pages) == len(load.sources)
            self._loads.append(load)
            start(load, on_progress)

        stack.start = watched  # type: ignore[method-assign]

    def go_on(self, cache: CacheManager) -> None:
        """A step is about to be taken: let the threads run; now and then empty the pool or harm the disk."""
        self.turns.run()
        if self._rng.random() < self._spec.evict_rate:
            cache.index.evict(cache.index.cached_pages)
        if self._folder is not None and self._rng.random() < self._spec.fault_rate / 4:
            self._harm(Path(self._folder.name))

    def _when(self) -> float:
        """When a thread that stops now goes on."""
        rng = self._rng
        if rng.random() < self._spec.stall_rate:
            return self._clock.now + rng.choice((0.3, 3.0, 60.0))
        return self._clock.now + rng.choice((0.0, 0.0, 0.0, 0.001, 0.02))

    def _fault(self, call: str) -> str:
        """What goes wrong in a call to the store."""
        self.turns.stop()
        return self._rng.choice(FAULTS) if self._rng.random() < self._spec.fault_rate else ""

    def _harm(self, folder: Path) -> None:
        paths = segment_paths(folder)
        if not paths:
            return
        path, how = self._rng.choice(paths), self._rng.choice(("flip", "flip", "truncate", "delete"))
        harm(path, how, self._rng)

    def wait(self, pause: float) -> None:
        """Everybody waits for pages: let time pass until something comes, or ``pause`` is over."""
        due = self.turns.next_due()
        until = self._clock.now + pause
        self._clock.advance(max(0.0, (until if due is None else min(due, until)) - self._clock.now))

    def finish(self, cache: CacheManager, *, exact: bool) -> None:
        """The world has ended: let the threads, too, and check what was counted.

        Args:
            exact: there was no reset, and no page of a load was found to be in the pool already.
        """
        self.turns.finish()
        self.transfers.settle()
        while any(flight.path for flight in self.transfers._flights):
            # Whoever was to compute up to a load has gone: it is kept for a while.
            until = self.transfers.next_deadline()
            assert until is not None
            self._clock.advance(max(0.0, until - self._clock.now))
            self.transfers.settle()
        cache.check()
        assert self.transfers.loading_pages == 0, "a load still holds pages"
        assert self.transfers.next_deadline() is None, "a load or a question has no end"
        report = self.transfers.report()
        stats = report.transfers
        assert stats.loads == len(self._loads)
        assert stats.loaded_pages <= sum(load.ready for load in self._loads)
        if exact:
            short = sum(load.ready < len(load.refs) for load in self._loads)
            assert stats.failed_loads + stats.late_loads >= short, "a load that failed wasn't counted"
        if self._backend is not None:
            # Of a load that is given up nobody looks at what else was read.
            unseen = sum(load._cancelled and load.ready < len(load.refs) for load in self._loads)
            counted = report.tiers["store"].failed_pages
            assert counted + unseen >= self._backend.failed_reads, "a wrong page wasn't counted"
        for name, tier in report.tiers.items():
            assert tier.capacity_bytes >= tier.used_bytes or name == "store", f"{name} holds more than it may"
            assert tier.queued_bytes == 0
        if self._folder is not None:
            there = sum(path.stat().st_size for path in Path(self._folder.name).iterdir())
            assert there <= self._spec.disk_bytes, "the disk tier takes more than it may"

    def close(self) -> None:
        """End threads and files. Idempotent."""
        self.turns.end()
        for tier in self.transfers.stack.tiers:
            tier.close()
        if self._folder is not None:
            self._folder.cleanup()
