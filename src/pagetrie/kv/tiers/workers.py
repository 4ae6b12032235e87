"""Background threads of the tiers, which give way to the thread that computes."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from pagetrie.kv.keys import tag_of
from pagetrie.kv.tiers.interface import Bytes, PageRef, Tier

log = logging.getLogger(__name__)

NICENESS = 10
BATCH_PAGES = 16

SLICE = 0.001
REST = 10.0
"""Loads rest so many times as long as they computed, after each slice of so many seconds."""


class Pace:
    """Keeps a thread to a share of a core while steps compute, which have none to spare.

    Args:
        cpu_clock: seconds that the calling thread has computed.
        sleep: lets it rest.
        rest: seconds of rest per second of computing, beside steps.

    Attributes:
        slow: steps compute. Set by the thread that runs them.
    """

    def __init__(
        self,
        cpu_clock: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
        rest: float = REST,
    ) -> None:
        self.cpu_clock = cpu_clock
        self.sleep = sleep
        self.rest = rest
        self.slow = False

    @classmethod
    def free(cls) -> Pace:
        """Never rests: where time is virtual, the processor's says nothing."""
        return cls(cpu_clock=lambda: 0.0, rest=0.0)


class Course:
    """A piece of work, on the thread that makes this.

    Attributes:
        computed: seconds that it has computed.
        rested: seconds that it was made to rest.
    """

    def __init__(self, pace: Pace) -> None:
        self.computed = 0.0
        self.rested = 0.0
        self._pace = pace
        self._mark = pace.cpu_clock()
        self._owed = 0.0

    def note(self) -> None:
        """Bring ``computed`` up to date."""
        now = self._pace.cpu_clock()
        self.computed += now - self._mark
        self._owed += now - self._mark
        self._mark = now

    def rest(self) -> None:
        """To be called often: rests if it is time to."""
        self.note()
        if self._owed >= SLICE:
            seconds, self._owed = self._owed * self._pace.rest, 0.0
            if self._pace.slow and seconds:
                self._pace.sleep(seconds)
                self.rested += seconds


class Worker(Protocol):
    """Runs jobs one after another, later."""

    def submit(self, job: Callable[[], None]) -> None: ...

    def close(self, seconds: float) -> None:
        """Run what was submitted, for up to ``seconds``, then nothing more."""
        ...


class ThreadWorker:
    """A daemon thread: one that hangs in a dead file system or network keeps nobody from exiting."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"pagetrie-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self, seconds: float) -> None:
        self._jobs.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # on Linux a thread has a niceness and a policy of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            # When it wakes, a batch thread doesn't push one that computes off its core. (An idle one would also keep
            # the interpreter's lock for long on a busy machine.)
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("a background job of the cache tiers failed")


class WriteQueue:
    """Pages on their way to a tier, bounded in bytes. What doesn't fit is dropped, never waited for.

    Owners take turns, and where there is no room, whoever has most waiting loses its last page to one that has less.

    Args:
        tier: where they go.
        worker: who brings them.
        capacity: bytes of pages that may wait.

    Attributes:
        dropped_pages: pages not taken because the queue was full.
    """

    def __init__(self, tier: Tier, worker: Worker, capacity: int) -> None:
        self.tier = tier
        self.worker = worker
        self.dropped_pages = 0
        self.waiting_bytes = 0
        self._capacity = capacity
        # Per owner what waits, and its bytes; whose turn it is first.
        self._lines: OrderedDict[bytes, deque[tuple[PageRef, Bytes]]] = OrderedDict()
        self._bytes: dict[bytes, int] = {}
        self._keys: set[bytes] = set()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._draining = False

    def lacks(self, key: bytes) -> bool:
        """Whether the page is neither there nor on its way, as far as is known here."""
        return key not in self._keys and not self.tier.holds(key)

    def is_full(self, count: int) -> bool:
        """Whether ``count`` more bytes don't fit now."""
        return self.waiting_bytes + count > self._capacity

    def offer(self, ref: PageRef, data: Bytes) -> bool:
        """Queue a page, whose bytes must not change any more. False if there is no room."""
        owner = tag_of(ref.namespace)
        with self._lock:
            if self.waiting_bytes + data.nbytes > self._capacity:
                self.dropped_pages += 1
                if not self._displace(owner, data.nbytes):
                    return False
            self._lines.setdefault(owner, deque()).append((ref, data))
            self._bytes[owner] = self._bytes.get(owner, 0) + data.nbytes
            self._keys.add(ref.key)
            self.waiting_bytes += data.nbytes
            start, self._draining = not self._draining, True
        if start:
            self.worker.submit(self._drain)
        return True

    def forget(self, tag: bytes = b"") -> None:
        """Drop what still waits, of namespaces whose names begin so."""
        with self._lock:
            for owner in [owner for owner in self._lines if owner.startswith(tag)]:
                for ref, data in self._lines.pop(owner):
                    self._keys.discard(ref.key)
                    self.waiting_bytes -= data.nbytes
                del self._bytes[owner]

    def _displace(self, owner: bytes, size: int) -> bool:
        """Drop the last page of whoever has most waiting, if that makes room for one that has less."""
        most = max(self._bytes, key=lambda other: self._bytes[other], default=owner)
        if self._bytes.get(most, 0) <= self._bytes.get(owner, 0) + size:
            return False
        ref, data = self._lines[most].pop()
        self._keys.discard(ref.key)
        self.waiting_bytes -= data.nbytes
        self._took(most, data.nbytes)
        return self.waiting_bytes + size <= self._capacity

    def _took(self, owner: bytes, size: int) -> None:
        self._bytes[owner] -= size
        if not self._lines[owner]:
            del self._lines[owner], self._bytes[owner]

    def wait(self, seconds: float) -> bool:
        """Wait until all is written; False if time ran out."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._draining, seconds)

    def _drain(self) -> None:
        """Write one batch. The next is a job of its own, so that what else the worker was given gets its turn."""
        with self._lock:
            if not self._lines:
                self._draining = False
                self._idle.notify_all()
                return
            owner, line = next(iter(self._lines.items()))
            batch = [line.popleft() for _ in range(min(BATCH_PAGES, len(line)))]
            self._lines.move_to_end(owner)
            self._took(owner, sum(data.nbytes for _, data in batch))
        try:
            self.tier.put(batch)
        finally:
            with self._lock:
                for ref, data in batch:
                    self._keys.discard(ref.key)
                    self.waiting_bytes -= data.nbytes
            self.worker.submit(self._drain)
