"""Which sequences run in the next step, on which pages.

Continuous batching (Orca) with chunked prefill (Sarathi): decoding sequences first, then prompts in progress, then
admissions, under one token budget. First come, first served. When the pool runs short the youngest running sequence
is preempted: its pages go back, what was computed stays cached as long as it can, and it resumes by a prefix hit.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from pagetrie.engine.sequence import Sequence
from pagetrie.kv import CacheLease, KVCache


@dataclass(slots=True)
class Schedule:
    """The next step: tokens to compute per sequence, and what happened on the way to it.

    Attributes:
        shares: sequence -> how many tokens it computes.
        tokens: sum of the shares.
        admitted: sequences that got a seat now.
        preempted: sequences that lost theirs.
        outgrown: sequences that fill the whole pool on their own and can't go on.
    """

    shares: dict[Sequence, int] = field(default_factory=dict)
    tokens: int = 0
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    outgrown: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence, count: int) -> None:
        self.shares[sequence] = count
        self.tokens += count

    def drop(self, sequence: Sequence) -> None:
        self.tokens -= self.shares.pop(sequence, 0)


class Scheduler:
    """Owns the two lists of sequences and every decision about seats and pages.

    Args:
        cache: where leases come from.
        max_seats: sequences that may run at once.
        max_step_tokens: tokens computed per step, at least ``max_seats``.
    """

    def __init__(self, cache: KVCache, *, max_seats: int, max_step_tokens: int) -> None:
        self._cache = cache
        self._max_seats = max_seats
        self._max_step_tokens = max_step_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, in order of age."""
        insort(self.waiting, sequence, key=_age)

    def start_fork(self, sequence: Sequence) -> None:
        """Give a sequence that was forked from a running one the seat reserved for it."""
        insort(self.running, sequence, key=_age)

    def remove(self, sequence: Sequence, *, publish_tail: bool = True) -> None:
        """Take a sequence out, in whatever phase it is, and give its pages back at once."""
        if sequence.lease is not None:
            self.running.remove(sequence)
            sequence.lease.close(publish_tail=publish_tail)
            sequence.lease = None
        else:
            self.waiting.remove(sequence)

    def schedule(self) -> Schedule:
        """Plan the next step. Pages for every share are held when this returns."""
        plan = Schedule()
        # Decodes go first, so that a long prompt never stalls others' tokens.
        for decoding in (True, False):
            for sequence in self.running.copy():
                lease = sequence.lease
                if lease is None:  # preempted a moment ago
                    continue
                remaining = len(sequence.ids) - lease.computed
                if (remaining == 1) != decoding:
                    continue
                count = min(remaining, self._max_step_tokens - plan.tokens)
                if count > 0 and self._reserve(sequence, lease, count, plan):
                    plan.add(sequence, count)
        if not plan.preempted:
            self._admit(plan)
        return plan

    def _reserve(self, sequence: Sequence, lease: CacheLease, count: int, plan: Schedule) -> bool:
        """Get pages for ``count`` more tokens, preempting younger sequences one by one while they are missing."""
        while lease.extend(count):
            victim = self.running[-1]
            if victim is sequence and len(self.running) == 1:
                if self._cache.give_up_hold():
                    continue
                plan.outgrown.append(sequence)
                return False
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence, plan: Schedule) -> None:
        self.remove(victim)
        plan.drop(victim)
        plan.preempted.append(victim)
        victim.awaits = None
        self.add(victim)

    def _admit(self, plan: Schedule) -> None:
        """Admit waiting sequences, oldest first; the first that doesn't fit holds up all behind it.

        A sequence whose next page is being computed by a running one is passed over: it will hit that page soon.
        """
        seats = self._max_seats - sum(sequence.seats for sequence in self.running)
        promised = sum(self._missing_pages(sequence) for sequence in self.running)
        for sequence in self._ready():
            budget = self._max_step_tokens - plan.tokens
            if budget <= 0 or sequence.seats > seats:
                return
            lease = self._open(sequence)
            if lease.awaits is not None and not lease.awaits.done:
                sequence.awaits = lease.awaits
                lease.close()
                continue
            sequence.lease = lease
            needed = self._missing_pages(sequence)
            end = min(len(sequence.ids), lease.computed + budget)
            fits = needed + promised <= self._cache.available_pages or not self.running
            if not fits or not self._extend_first(lease, end - lease.computed):
                sequence.lease = None
                lease.close()
                return
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_age)
            promised += self._missing_pages(sequence)
            plan.admitted.append(sequence)
            # A partial hit may have been given up for room, which leaves more to compute than planned.
            plan.add(sequence, min(end - lease.computed, budget))
            seats -= sequence.seats

    def _extend_first(self, lease: CacheLease, count: int) -> bool:
        """Get a newcomer's first pages; held prefixes give way to it only if nothing else runs."""
        while lease.extend(count):
            if self.running or not self._cache.give_up_hold():
                return False
        return True

    def _ready(self) -> Iterator[Sequence]:
        for sequence in self.waiting.copy():
            if sequence.awaits is None or sequence.awaits.done:
                sequence.awaits = None
                yield sequence

    def _open(self, sequence: Sequence) -> CacheLease:
        state = sequence.state
        use_cache = state.request.params.use_prefix_cache
        # Prompt logprobs need the logits of every prompt position, so such a prompt is computed anew.
        if state.prompt_logprobs_due:
            state.prompt_logprobs.clear()
        return self._cache.open(
            sequence.ids, state.namespace, lookup=use_cache and not state.prompt_logprobs_due, publish=use_cache
        )

    def _missing_pages(self, sequence: Sequence) -> int:
        """Pages that a sequence lacks for all of its known tokens and one more."""
        assert sequence.lease is not None
        return max(0, self._cache.pages_for(len(sequence.ids) + 1) - len(sequence.lease.pages))


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
