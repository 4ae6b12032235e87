"""The tiers in order, with the threads and queues between them and the pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pagetrie.kv.shares import Allowance
from pagetrie.kv.tiers.interface import Bytes, PageBytes, PageRef, Tier
from pagetrie.kv.tiers.load import Load
from pagetrie.kv.tiers.workers import Pace, ThreadWorker, Worker, WriteQueue

QUEUE_BYTES = 256 << 20


class TierStack:
    """What stands below the pool.

    Args:
        tiers: fastest first; a page is read from the first that has it.
        memory: the pool's bytes.
        queue_bytes: bytes of pages that may wait to be written, per tier.
        clock: seconds.
        make_worker: makes a background thread of that name.
        pace: how fast loads may go, by the processor's time unless given.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        memory: PageBytes,
        *,
        queue_bytes: int = QUEUE_BYTES,
        clock: Callable[[], float] = time.monotonic,
        make_worker: Callable[[str], Worker] = ThreadWorker,
        pace: Pace | None = None,
    ) -> None:
        self.tiers = tuple(tiers)
        self.local = tuple(tier for tier in tiers if not tier.traits.remote)
        self.remote = next((tier for tier in tiers if tier.traits.remote), None)
        self.memory = memory
        self.clock = clock
        self.pace = pace or Pace()
        self._victims = tuple(tier for tier in tiers if tier.traits.victim)
        self._queues = [
            WriteQueue(tier, make_worker(f"{tier.name}-writer"), queue_bytes)
            for tier in tiers
            if not tier.traits.victim
        ]
        # One thread for each, so that a disk that hangs keeps nobody from memory.
        self._readers = {tier.name: make_worker(f"{tier.name}-reader") for tier in tiers}

    # -- out of the pool, on the step's thread -----------------------------------------------------------------------

    def write(self, ref: PageRef, page: int) -> int:
        """Queue a page for the tiers that lack it, with one copy for all. Returns the bytes copied."""
        lacking = [queue for queue in self._queues if queue.lacks(ref.key)]
        if not lacking:
            return 0
        data = self.memory.read_page(page).copy()
        for queue in lacking:
            queue.offer(ref, data)
        return data.nbytes

    def demote(self, ref: PageRef, page: int) -> int:
        """The pool evicts a page: keep it in memory, and queue it where it is missing. Returns the bytes copied."""
        copied = 0
        for tier in self._victims:
            if not tier.holds(ref.key):
                data: Bytes = self.memory.read_page(page)
                tier.put(((ref, data),))
                copied += data.nbytes
        return copied + self.write(ref, page)

    def name_namespace(self, key: bytes, namespace: bytes) -> None:
        """Pages of this namespace will come."""
        for queue in self._queues:
            queue.worker.submit(partial(queue.tier.name_namespace, key, namespace))

    def write_in_time(self, queue: WriteQueue, ref: PageRef, page: int, deadline: float) -> bool:
        """``write`` for one tier, but waits for room in its queue; False if time ran out."""
        if not queue.lacks(ref.key):
            return True
        if queue.is_full(self.memory.bytes_per_page) and not queue.wait(max(0.0, deadline - self.clock())):
            return False
        queue.offer(ref, self.memory.read_page(page).copy())
        return self.clock() < deadline

    def touch(self, key: bytes) -> None:
        """A page was used in the pool."""
        for tier in self.tiers:
            tier.touch(key)

    # -- into the pool -----------------------------------------------------------------------------------------------

    def locate(self, key: bytes) -> Tier | None:
        """The first local tier that seems to have a page."""
        for tier in self.local:
            if tier.holds(key):
                return tier
        return None

    def keep(self, refs: Sequence[PageRef], sources: Sequence[Tier]) -> None:
        """These pages will be read: what is evicted meanwhile must not push them out of memory."""
        for tier in self._victims:
            tier.contains([ref.key for ref, source in zip(refs, sources, strict=True) if source is tier])

    def reader_of(self, sources: Sequence[Tier]) -> str:
        """Whose thread reads from these: the last tier's of them."""
        return max(sources, key=self.tiers.index).name

    def start(self, load: Load, on_progress: Callable[[], None]) -> None:
        """Fill a load's pages in the background."""
        self._readers[self.reader_of(load.sources)].submit(
            lambda: load.run(self.memory, self.clock, on_progress, self.pace)
        )

    def ask_remote(self, keys: Sequence[bytes], answer: Callable[[int], None]) -> None:
        """Ask the shared store how many of the first keys it has; ``answer`` is called on its thread."""
        remote = self.remote
        assert remote is not None
        self._readers[remote.name].submit(lambda: answer(remote.contains(keys)))

    # -- the whole ---------------------------------------------------------------------------------------------------

    @property
    def queues(self) -> Sequence[WriteQueue]:
        return self._queues

    def flush(self, seconds: float) -> bool:
        """Wait until all that is queued was written; False if time ran out."""
        deadline = self.clock() + seconds
        done = [queue.wait(max(0.0, deadline - self.clock())) for queue in self._queues]
        return all(done)

    def allow(self, allowances: Mapping[bytes, Allowance]) -> None:
        """How much of the local tiers each owner may have, by tag."""
        for tier in self._victims:
            tier.allow(allowances)
        for queue in self._queues:
            queue.worker.submit(partial(queue.tier.allow, allowances))

    def drop_owner(self, tag: bytes) -> None:
        """Delete an owner's pages, and what of them waits to be written; in the background where it takes long."""
        for tier in self._victims:
            tier.drop_owner(tag)
        for queue in self._queues:
            queue.forget(tag)
            queue.worker.submit(partial(queue.tier.drop_owner, tag))

    def clear(self) -> None:
        """Forget every page in the local tiers, and what waits to be written."""
        for queue in self._queues:
            queue.forget()
        for tier in self.local:
            tier.clear()

    def close(self, seconds: float) -> None:
        """Write what is queued for up to ``seconds``, then end threads and tiers."""
        deadline = self.clock() + seconds
        for worker in (*(queue.worker for queue in self._queues), *self._readers.values()):
            worker.close(max(0.0, deadline - self.clock()))
        for tier in self.tiers:
            tier.close()
