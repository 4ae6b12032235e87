"""Background threads of the tiers, which give way to the thread that computes."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from pagetrie.kv.tiers.interface import Bytes, PageRef, Tier

log = logging.getLogger(__name__)

NICENESS = 10
BATCH_PAGES = 16


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
        with contextlib.suppress(OSError):  # on Linux a thread has a niceness of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("a background job of the cache tiers failed")


class WriteQueue:
    """Pages on their way to a tier, bounded in bytes. What doesn't fit is dropped, never waited for.

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
        self._pages: deque[tuple[PageRef, Bytes]] = deque()
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
        with self._lock:
            if self.waiting_bytes + data.nbytes > self._capacity:
                self.dropped_pages += 1
                return False
            self._pages.append((ref, data))
            self._keys.add(ref.key)
            self.waiting_bytes += data.nbytes
            start, self._draining = not self._draining, True
        if start:
            self.worker.submit(self._drain)
        return True

    def forget(self, tag: bytes = b"") -> None:
        """Drop what still waits, of namespaces whose names begin so."""
        with self._lock:
            waiting = list(self._pages)
            self._pages.clear()
            for ref, data in waiting:
                if ref.namespace.startswith(tag):
                    self._keys.discard(ref.key)
                    self.waiting_bytes -= data.nbytes
                else:
                    self._pages.append((ref, data))

    def wait(self, seconds: float) -> bool:
        """Wait until all is written; False if time ran out."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._draining, seconds)

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._pages:
                    self._draining = False
                    self._idle.notify_all()
                    return
                batch = [self._pages.popleft() for _ in range(min(BATCH_PAGES, len(self._pages)))]
            try:
                self.tier.put(batch)
            finally:
                with self._lock:
                    for ref, data in batch:
                        self._keys.discard(ref.key)
                        self.waiting_bytes -= data.nbytes
