"""One load: pages on their way from tiers into the pool, filled by a background thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from threading import Lock
from typing import NamedTuple

from pagetrie.kv.tiers.interface import PageBytes, PageRef, Tier
from pagetrie.kv.tiers.workers import Course, Pace

log = logging.getLogger(__name__)


class Sample(NamedTuple):
    """What was read from a tier: bytes, seconds without rests, and how many of those the thread computed."""

    tier: str
    size: int
    seconds: float
    computed: float


class Load:
    """A run of consecutive pages and where each is to be found.

    The pool's pages are written under ``lock``, one at a time and only with verified bytes, and never once the load
    is cancelled; so whoever has cancelled it and then held the lock may free them, however long the tier hangs.

    Attributes:
        refs, sources, pages: names, tiers and physical pages, in order.
        began: when the thread came to it; None while it is busy with another. Written by that thread, as is the rest.
        ready: how many of the first pages are filled.
        finished: nothing more will come; ``ready < len(refs)`` then means that a tier failed.
        rested: seconds for which the thread has let others compute.
        samples: for measuring speed.
    """

    def __init__(self, refs: Sequence[PageRef], sources: Sequence[Tier], pages: list[int]) -> None:
        self.refs = refs
        self.sources = sources
        self.pages = pages
        self.lock = Lock()
        self.began: float | None = None
        self.ready = 0
        self.finished = False
        self.rested = 0.0
        self.samples: list[Sample] = []
        self._cancelled = False

    def run(self, memory: PageBytes, clock: Callable[[], float], on_progress: Callable[[], None], pace: Pace) -> None:
        """Fill the pages, as far as the tiers deliver. Runs on a background thread."""
        self.began = clock()
        course = Course(pace)

        def progress() -> None:
            on_progress()
            if self.ready < len(self.refs):
                course.rest()
                self.rested = course.rested

        try:
            for name, run in groupby(range(len(self.refs)), lambda i: self.sources[i].name):
                numbers = list(run)
                started, before, rested, computed = clock(), self.ready, course.rested, course.computed
                complete = self._run_tier(self.sources[numbers[0]], numbers, memory, progress)
                seconds = clock() - started - (course.rested - rested)
                course.note()
                size = (self.ready - before) * memory.bytes_per_page
                self.samples.append(Sample(name, size, seconds, course.computed - computed))
                if not complete:
                    break
        except Exception:
            log.exception("a tier failed while pages were read from it")
        finally:
            self.finished = True
            on_progress()

    def _run_tier(self, tier: Tier, numbers: Sequence[int], memory: PageBytes, on_progress: Callable[[], None]) -> bool:
        count = 0
        for data in tier.get([self.refs[number] for number in numbers]):
            with self.lock:
                if self._cancelled or data.nbytes != memory.bytes_per_page or count == len(numbers):
                    return False
                memory.write_page(self.pages[numbers[count]], data)
                self.ready += 1
            count += 1
            on_progress()
        return count == len(numbers)

    def cancel(self) -> bool:
        """Let no more page be written. True once none is being written either: the pages may be freed."""
        self._cancelled = True
        if not self.lock.acquire(blocking=False):
            return False
        self.lock.release()
        return True
