"""Holds the scheduler to the bounds that ``engine/scheduler.py`` and ``engine/waiting.py`` state.

Levels, bypasses and preemptions are counted anew here; of the scheduler's own books only who waits, who runs and who
waits for a page is read.
"""

from __future__ import annotations

from collections import Counter

from pagetrie.engine.scheduler import Schedule, Scheduler
from pagetrie.engine.sequence import Sequence
from pagetrie.engine.victims import MAX_PREEMPTIONS
from pagetrie.kv import CacheLease, CacheManager, KVCache
from pagetrie.kv.interface import PendingPage


class Fairness:
    """Watches one scheduler. Call ``arrived`` for each request, ``before`` and ``after`` around each ``schedule``.

    Attributes:
        preemptions: times each sequence was preempted.
    """

    def __init__(
        self, scheduler: Scheduler, cache: KVCache, *, budget: int, ageing_steps: int, max_bypass: int
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._budget = budget
        self._ageing_steps = ageing_steps
        self._max_bypass = max_bypass
        self._steps = 0
        self._levels: dict[str, int] = {}
        self._bypassed: Counter[Sequence] = Counter()
        self._first_bypassed: dict[Sequence, int] = {}
        self._decoding: list[Sequence] = []
        self._ran: list[Sequence] = []
        # Those preempted in this step for the pages that another lacks, with what each running one would have brought.
        self._evicted: list[tuple[Sequence, dict[Sequence, int]]] = []
        self._making_room_for: Sequence | None = None
        self.preemptions: Counter[Sequence] = Counter()
        self._watch()

    def arrived(self, name: str, priority: int) -> None:
        self._levels[name] = priority + self._steps // self._ageing_steps

    def before(self) -> None:
        """A step is about to be planned."""
        self._steps += 1
        self._ran = self._scheduler.running.copy()
        self._decoding = [s for s in self._ran if len(s.ids) - _lease(s).computed == 1]
        self._evicted.clear()

    def after(self, plan: Schedule) -> None:
        """A step has been planned."""
        scheduler, shares = self._scheduler, plan.shares
        tokens = sum(count * sequence.rows for sequence, count in shares.items())
        assert plan.tokens == tokens <= self._budget, "over the token budget"
        # With deadlines, the last to wait may have gone; pages may be on their way.
        waits = bool(len(scheduler.waiting)) and not self._is_loading()
        # Who has computed up to pages that are being loaded waits for them in its seat, or for one that does.
        seated = [(s, s.lease.awaits) for s in scheduler.running if s.lease and s.lease.awaits]
        # A load that has given way to another in this very step lets it go on in the next.
        meeting = [s for s, page in seated if page.done or self._is_loading(page) or self._is_announced(page)]
        loading = any(page.done or self._is_loading(page) for _, page in seated)
        stands = len(meeting) < len(scheduler.running) or bool(meeting and not loading) or waits
        assert plan.tokens or plan.outgrown or not stands, "a step without progress"
        # Beams may need more than the whole pool.
        assert all(s.beams is not None for s in plan.outgrown), "a sequence within the limits outgrew the pool"
        for sequence in self._decoding:
            assert sequence in shares or sequence in (*plan.preempted, *plan.outgrown), (
                "a decoding sequence was left out of a step"
            )
        for sequence in scheduler.running:
            left_out = sequence not in shares and sequence not in (*plan.outgrown, *meeting)
            assert not left_out or sequence.rows > self._budget - plan.tokens, "a prompt was left out of a step"
        waiting = [sequence for sequence in scheduler.waiting if sequence not in plan.preempted]
        for sequence in scheduler.waiting:
            awaits = sequence.awaits
            assert awaits is None or awaits.done or self._is_computed(sequence) or self._is_loading(awaits), (
                "waits for nobody"
            )
        ready = [sequence for sequence in waiting if sequence.awaits is None]
        newcomers = [sequence for sequence in plan.admitted if not self.preemptions[sequence]]
        self._check_victims_first(newcomers, [s for s in ready if self.preemptions[s]])
        self._check_bypass(newcomers, [s for s in ready if not self.preemptions[s]])
        self.preemptions.update(plan.preempted)
        for sequence in plan.preempted:
            # Pages of a thread that hangs in them can't be had back.
            assert self.preemptions[sequence] <= MAX_PREEMPTIONS or self._hangs(), "preempted once too often"
        self._check_choice_of_victims()

    def _check_victims_first(self, newcomers: list[Sequence], victims: list[Sequence]) -> None:
        """Nothing that isn't more urgent starts while a victim waits for room."""
        for newcomer in newcomers:
            for victim in victims:
                assert _priority(newcomer) < _priority(victim) and self._level(newcomer) < self._level(victim), (
                    "a newcomer started before a victim"
                )

    def _check_bypass(self, newcomers: list[Sequence], passed: list[Sequence]) -> None:
        """Requests of later levels start before one that doesn't fit only so often, and only for so long."""
        for sequence in passed:
            ahead = sum(1 for newcomer in newcomers if self._level(newcomer) > self._level(sequence))
            if ahead:
                self._bypassed[sequence] += ahead
                first = self._first_bypassed.setdefault(sequence, self._steps)
                assert self._bypassed[sequence] <= self._max_bypass, "passed too often"
                assert self._steps - first < self._ageing_steps, "passed for too long"

    def _check_choice_of_victims(self) -> None:
        """Nobody lost its seat for another's want of pages while a less important one kept its own and had as many."""
        for victim, gains in self._evicted:
            for other, gain in gains.items():
                if other.lease is not None and self.preemptions[other] < MAX_PREEMPTIONS and other in self._ran:
                    assert _priority(other) <= _priority(victim) or gain < gains[victim], (
                        "a more important sequence was preempted"
                    )

    def _is_computed(self, sequence: Sequence) -> bool:
        """Somebody who runs computes the page that this sequence waits for."""
        assert isinstance(self._cache, CacheManager)
        running = [other.lease for other in self._scheduler.running]
        return any(
            pending is sequence.awaits and lease in running for lease, pending in self._cache._computing.values()
        )

    def _is_loading(self, pending: PendingPage | None = None) -> bool:
        """Something comes from a tier: this, or anything."""
        transfers = self._cache.transfers
        if transfers is None:
            return False
        coming = [waited.pending for waited in (*transfers._flights, *transfers._lookups)]
        return pending in coming if pending is not None else bool(coming or transfers._cancelled)

    def _is_announced(self, page: PendingPage) -> bool:
        """Some lease computes it next."""
        return any(page is pending for _, pending in self._cache._computing.values())

    def _hangs(self) -> bool:
        transfers = self._cache.transfers
        return transfers is not None and bool(transfers._cancelled)

    def _level(self, sequence: Sequence) -> int:
        return self._levels[sequence.state.request.request_id]

    def _watch(self) -> None:
        scheduler = self._scheduler
        make_room, preempt = scheduler._make_room, scheduler._preempt

        def watched_make_room(sequence: Sequence, lease: CacheLease, count: int, plan: Schedule) -> bool:
            self._making_room_for = sequence
            try:
                return make_room(sequence, lease, count, plan)
            finally:
                self._making_room_for = None

        def watched_preempt(victim: Sequence, plan: Schedule) -> None:
            if self._making_room_for not in (None, victim):
                self._evicted.append((victim, {other: _lease(other).sole_pages() for other in scheduler.running}))
            preempt(victim, plan)

        def recover(plan: Schedule) -> None:
            raise AssertionError("the scheduler came to a standstill")

        scheduler._recover = recover  # type: ignore[method-assign]
        scheduler._make_room = watched_make_room  # type: ignore[method-assign]
        scheduler._preempt = watched_preempt  # type: ignore[method-assign]


def _priority(sequence: Sequence) -> int:
    return sequence.state.request.priority


def _lease(sequence: Sequence) -> CacheLease:
    assert sequence.lease is not None
    return sequence.lease
