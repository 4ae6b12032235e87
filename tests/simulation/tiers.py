"""The tiers of a world: real ones, on media that lie, stall, cut short, flip bits, fill up and die.

Their threads are real too, but run one at a time and only when the world lets them, from one stop to the next: at the
start of a job, at each call to a store, and in the middle of each page's copy into the pool. Time passes between stops,
seconds of it where a medium stalls, so that steps, deadlines, resets and evictions fall into every gap.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pagetrie.kv import CacheManager
from pagetrie.kv.keys import ChainKeys
from pagetrie.kv.tiers.disk import DiskTier, segment_paths
from pagetrie.kv.tiers.folder import CacheFolder
from pagetrie.kv.tiers.interface import Bytes, Tier
from pagetrie.kv.tiers.load import Load
from pagetrie.kv.tiers.ram import ENTRY_BYTES, RamTier
from pagetrie.kv.tiers.sealed import SEALED_BYTES, Keyring, SealedTier
from pagetrie.kv.tiers.stack import TierStack
from pagetrie.kv.tiers.store import StoreFullError, StoreTier
from pagetrie.kv.tiers.workers import Pace
from pagetrie.kv.transfers import Transfers
from pagetrie.sim import PageMemory, VirtualClock
from pagetrie.sim.threads import ThreadInTurns
from tests.simulation.spec import TierSpec

SECRET = bytes(32)
FAULTS = ("lie", "flip", "flip", "flip", "truncate", "swap", "lose", "die")


class Turns:
    """Says which thread runs when. Deterministic, as never two run at once.

    Attributes:
        fault: what was found wrong on one of them, for ``run`` to raise.
    """

    def __init__(self, clock: VirtualClock, rng: random.Random, stall_rate: float) -> None:
        self._clock = clock
        self._rng = rng
        self._stall_rate = stall_rate
        self._threads: list[ThreadInTurns] = []
        self.fault: Exception | None = None

    def make_worker(self, name: str) -> ThreadInTurns:
        self._threads.append(ThreadInTurns(self.when))
        return self._threads[-1]

    def when(self) -> float:
        """When somebody who stops now goes on."""
        rng = self._rng
        if rng.random() < self._stall_rate:
            return self._clock.now + rng.choice((0.3, 3.0, 60.0))
        return self._clock.now + rng.choice((0.0, 0.0, 0.0, 0.001, 0.02))

    def stop(self) -> None:
        """A place where a thread stops; nothing on the engine's."""
        for thread in self._threads:
            if thread.is_current():
                thread.stop(self.when())

    def run(self) -> None:
        """Let all go on whose time has come."""
        while (due := self.next_due()) is not None and due <= self._clock.now:
            next(thread for thread in self._threads if thread.due == due).turn()
        if self.fault is not None:
            raise self.fault

    def next_due(self) -> float | None:
        return min((thread.due for thread in self._threads if thread.due is not None), default=None)

    def finish(self) -> None:
        """Let time pass until nobody has anything to do."""
        while (due := self.next_due()) is not None:
            self._clock.advance(max(0.0, due - self._clock.now))
            self.run()

    def end(self) -> None:
        for thread in self._threads:
            thread.close(0.0)


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


class FaultyBackend:
    """A store in a dictionary (``tiers.store.Backend``).

    Attributes:
        failed_reads: reads that gave something wrong.
    """

    def __init__(self, turns: Turns, rng: random.Random, fault_rate: float, capacity: int) -> None:
        self._turns = turns
        self._rng = rng
        self._fault_rate = fault_rate
        self._capacity = capacity
        self._values: dict[str, bytes] = {}
        self.failed_reads = 0

    def _fault(self) -> str:
        self._turns.stop()
        return self._rng.choice(FAULTS) if self._rng.random() < self._fault_rate else ""

    def exists(self, names: Sequence[str]) -> list[bool]:
        fault = self._fault()
        if fault == "die":
            raise OSError("planted")
        return [name in self._values or fault == "lie" for name in names]

    def get(self, names: Sequence[str], limit: int) -> list[bytes | memoryview | None]:
        fault = self._fault()
        values: list[bytes | memoryview | None] = [self._values.get(name) for name in names]
        wrong = self._rng.randrange(len(names))
        good = values[wrong]
        if isinstance(good, bytes):
            flipped = bytearray(good)
            flipped[-self._rng.randrange(1, len(good) // 4)] ^= 1 << self._rng.randrange(8)
            other = self._rng.choice([value for value in self._values.values() if value != good] or [b""])
            values[wrong] = {"flip": bytes(flipped), "truncate": good[:-8], "swap": other, "lose": None}.get(
                fault, good
            )
        self.failed_reads += fault == "die" or values[wrong] is not good
        if fault == "die":
            raise OSError("planted")
        return values

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        fault = self._fault()
        for name, value in items if fault != "die" else items[: len(items) // 2]:
            self._values[name] = value
        while len(self._values) > self._capacity:
            del self._values[next(iter(self._values))]
        if fault == "die":
            raise OSError("planted")
        if fault == "lose":
            raise StoreFullError("planted")

    def close(self) -> None:
        pass


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
        self.turns = Turns(clock, rng, spec.stall_rate)
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
            self._backend = FaultyBackend(self.turns, rng, spec.fault_rate, spec.store_pages)
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

    def _harm(self, folder: Path) -> None:
        paths = segment_paths(folder)
        if not paths:
            return
        path, how = self._rng.choice(paths), self._rng.choice(("flip", "flip", "truncate", "delete"))
        if how == "delete":
            path.unlink()
            return
        with path.open("r+b") as file:
            size = file.seek(0, 2)
            if how == "truncate":
                file.truncate(self._rng.randrange(size + 1))
                return
            for _ in range(min(size, self._rng.choice((1, 200)))):
                at = self._rng.randrange(size)
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes((byte ^ 1 << self._rng.randrange(8),)))

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
            assert report.tiers["store"].failed_pages >= self._backend.failed_reads, "a wrong page wasn't counted"
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
