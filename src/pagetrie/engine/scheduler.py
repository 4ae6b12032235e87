"""Which sequences run in the next step, on which pages.

Continuous batching (Orca) with chunked prefill (Sarathi): decoding sequences first, then prompts in progress and
admissions by rank, under one token budget.

The rules, with their bounds (A is ``ageing_steps``, k is ``MAX_PREEMPTIONS``):

- *Order.* Who waits is served by level, which is priority aged by one per A steps (``waiting`` has the bound).
- *Bypass.* While a sequence doesn't fit, smaller ones behind it may start, until ``max_bypass`` of them have or until A
  steps have passed since it first didn't fit. From then on nothing of its rank or below starts before it: it starts
  once those that run have ended, at the latest.
- *Preemption.* When pages run short, the least valuable sequences (``victims.value``) lose their seats, never one whose
  pages aren't needed. A victim's pages go back; what it computed stays cached as long as it can, and it resumes by a
  prefix hit.
- *Resuming.* While a victim waits for room, only newcomers that are more urgent (lower in priority and in level) start.
- *Takeover.* A waiting sequence that is more urgent than running ones takes their seats and pages, if that is enough.
- *Watchdog.* When somebody waits, nothing runs and nothing is on its way from a tier, then something is wrong: every
  counter is derived anew and the step planned again, with a line in the log. If there is no room even so, the first in
  line ends with an error rather than that all wait for ever.
- *Tenants.* Everything above holds within a tenant. Among tenants, turns follow ``fair_queue``; in a step in which one
  tenant has had its turn, the others compute no more tokens each, in proportion to the weights, than the first did for
  its prompts. So with n equal tenants a prompt takes at most n times as many tokens' time as alone, after the step that
  runs when it comes. A tenant takes seats and pages from the one that has the largest *dominant share* (of seats or of
  pages, whichever is more, by weight: Ghodsi et al. 2011) if that one still has no less than the taker afterwards. Only
  a line that hasn't moved for A steps holds up the other tenants, until it does.
- *Floors.* Pages within a tenant's floor (``kv.shares``) are out of the others' reach, running or not; the door refuses
  what would never fit beside them. A tenant's pinned prefixes beyond its floor, and its own whole, give way to a
  sequence that couldn't run otherwise.
- *Guarantee.* Nobody is preempted more than k times: a sequence preempted k times is admitted only with a reservation
  of all pages that it may come to need, and then every other sequence is preempted before it, and held prefixes give
  way to it.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from pagetrie.engine.fair_queue import FairQueue, Line
from pagetrie.engine.sequence import Sequence
from pagetrie.engine.victims import choose_victims, is_guaranteed, value
from pagetrie.engine.waiting import more_urgent
from pagetrie.kv import CacheLease, KVCache

log = logging.getLogger(__name__)

_Key = TypeVar("_Key", int, str)

_LOOKS_PER_STEP = 8
"""Sequences per step whose prompt is matched against the tree only to find that they don't fit."""
_STEPS_BETWEEN_LOOKS = 8
_MAX_PASSED = 32


@dataclass(slots=True)
class Schedule:
    """The next step: tokens to compute per sequence, and what happened on the way to it.

    Attributes:
        shares: sequence -> how many tokens it computes.
        chunks: those of the shares that aren't just the next token after the last one made.
        tokens: sum of the shares.
        admitted: sequences that got a seat now.
        preempted: sequences that lost theirs.
        rejoined: running sequences that found more of their prompts, loaded meanwhile; and how many tokens more.
        parked: sequences set aside until a page that they need has been computed or loaded.
        outgrown: sequences that fill the whole pool on their own and can't go on.
        stranded: a waiting sequence that finds no room though nothing runs.
    """

    shares: dict[Sequence, int] = field(default_factory=dict)
    chunks: dict[Sequence, int] = field(default_factory=dict)
    tokens: int = 0
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    rejoined: dict[Sequence, int] = field(default_factory=dict)
    parked: list[Sequence] = field(default_factory=list)
    outgrown: list[Sequence] = field(default_factory=list)
    stranded: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence, count: int) -> None:
        self.shares[sequence] = self.chunks[sequence] = count
        self.tokens += count * sequence.rows

    def drop(self, sequence: Sequence) -> None:
        self.chunks.pop(sequence, None)
        self.tokens -= self.shares.pop(sequence, 0) * sequence.rows


class _Standing(NamedTuple):
    """What a tenant's running sequences have."""

    sequences: list[Sequence]
    seats: int
    pages: int
    weight: float


class Scheduler:
    """Owns the waiting and the running sequences and every decision about seats and pages.

    Args:
        cache: where leases come from.
        max_seats: sequences that may run at once.
        max_step_tokens: tokens computed per step, at least ``max_seats``.
        ageing_steps: steps of waiting that are worth one level of priority, at least 1.
        max_bypass: sequences that may start before one that doesn't fit yet.

    Attributes:
        step: number of the latest step.
        running: sequences with a seat, by rank.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        max_seats: int,
        max_step_tokens: int,
        ageing_steps: int = 256,
        max_bypass: int = 32,
    ) -> None:
        self._cache = cache
        self._max_seats = max_seats
        self._max_step_tokens = max_step_tokens
        self._ageing_steps = ageing_steps
        self._max_bypass = max_bypass
        self.step = 0
        # Tokens up to which the step may be filled in the present tenant's turn.
        self._step_limit = max_step_tokens
        self.waiting = FairQueue(cache)
        self.running: list[Sequence] = []
        # How many of those that run are of each tenant, and of each priority.
        self._tenants: Counter[str] = Counter()
        self._priorities: Counter[int] = Counter()
        self._known_standings: dict[str, _Standing] | None = None

    def level(self, priority: int) -> int:
        """Level of a request that arrives now."""
        return priority + self.step // self._ageing_steps

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.add(sequence)

    def start_fork(self, sequence: Sequence) -> None:
        """Give a sequence that was forked from a running one the seat reserved for it."""
        self._seat(sequence)

    def remove(self, sequence: Sequence, *, publish_tail: bool = True) -> None:
        """Take a sequence out, in whatever phase it is, and give its pages back at once."""
        if sequence.lease is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._known_standings = None
        _take_off(self._tenants, _tenant(sequence))
        _take_off(self._priorities, sequence.state.request.priority)
        sequence.lease.close(publish_tail=publish_tail)
        sequence.lease = None

    def schedule(self) -> Schedule:
        """Plan the next step. Pages for every share are held when this returns."""
        self.step += 1
        self._known_standings = None
        plan = Schedule()
        # Decodes go first, so that a long prompt never stalls others' tokens.
        prompts = []
        for sequence in self.running.copy():
            lease = sequence.lease
            if lease is None:  # preempted a moment ago
                continue
            if lease.rejoin and lease.computed >= lease.rejoin:
                lease = self._rejoin(sequence, lease, plan)
                if lease.awaits is not None:
                    continue
            remaining = len(sequence.ids) - lease.computed
            if remaining == 1:
                if not lease.extend(1) or self._make_room(sequence, lease, 1, plan):
                    if sequence.decode_step is not None:
                        plan.shares[sequence] = 1
                        plan.tokens += 1
                    else:
                        plan.add(sequence, 1)
            elif remaining:
                prompts.append(sequence)
        self.waiting.wake()
        self._take_turns(prompts, plan)
        self.waiting.charge(plan.shares, plan.tokens)
        if not (plan.shares or self.running or plan.preempted) and len(self.waiting) and not self._on_its_way():
            self._recover(plan)
        return plan

    def _take_turns(self, prompts: list[Sequence], plan: Schedule) -> None:
        """Prompts in progress and admissions, tenant by tenant."""
        lines = self.waiting.in_turn(self._tenants)
        stuck = self._longest_stuck(lines) if len(lines) > 1 else None
        if stuck is not None:
            lines.sort(key=lambda line: line is not stuck)
        of_first = 0.0
        for line in lines:
            self._step_limit = self._max_step_tokens
            if of_first:
                decodes = sum(
                    count * s.rows for s, count in plan.shares.items() if s.started and _tenant(s) == line.name
                )
                allowance = max(0, int(of_first * line.weight) - decodes)
                self._step_limit = min(self._max_step_tokens, plan.tokens + allowance)
            before = plan.tokens
            mine = prompts if len(lines) == 1 else [s for s in prompts if _tenant(s) == line.name]
            self._take_turn(line, mine, plan, admits=stuck is None or line is stuck)
            if not of_first and plan.tokens > before:
                of_first = (plan.tokens - before) / line.weight

    def _take_turn(self, line: Line, prompts: list[Sequence], plan: Schedule, *, admits: bool) -> None:
        for sequence in prompts:
            if admits and line.waiting.any_ready:
                self._admit(plan, line, before=sequence)
            lease = sequence.lease
            if lease is None:
                continue
            budget = (self._step_limit - plan.tokens) // sequence.rows
            count = min(_to_compute(sequence, lease), budget)
            if count > 0 and (not lease.extend(count) or self._make_room(sequence, lease, count, plan)):
                plan.add(sequence, count)
        if admits and line.waiting.any_ready:
            self._admit(plan, line)

    def _longest_stuck(self, lines: list[Line]) -> Line | None:
        """The line whose first sequence has been first for longest, if that is too long."""
        for line in lines:
            line.look(self.step)
        line = min(lines, key=lambda line: line.first_since)
        return line if self.step - line.first_since >= self._ageing_steps else None

    def _on_its_way(self) -> bool:
        """Something comes from a tier below the pool, which sequences may wait for."""
        transfers = self._cache.transfers
        return transfers is not None and (transfers.loading_pages > 0 or transfers.next_deadline() is not None)

    def _recover(self, plan: Schedule) -> None:
        """Nothing runs, yet somebody waits: believe no counter and plan again."""
        wrong = self._cache.recount()
        self.waiting.forget()
        self._take_turns([], plan)
        for name, (was, now) in wrong.items():
            log.error(
                "%d requests waited and none ran: the count of %s was %d, is %d", len(self.waiting), name, was, now
            )
        if plan.shares:
            log.error("the scheduler had come to a stop and goes on; %d requests wait", len(self.waiting))
        elif not self._on_its_way() and (first := self.waiting.first) is not None:
            log.error("a request finds no room, though nothing runs and %d pages are free", self._cache.available_pages)
            plan.stranded.append(first)

    # -- room for running sequences ----------------------------------------------------------------------------------

    def _make_room(self, sequence: Sequence, lease: CacheLease, count: int, plan: Schedule) -> bool:
        """Get pages for ``count`` more tokens by preempting less valuable sequences, or else the sequence itself."""
        while missing := lease.extend(count):
            lesser = self._lesser(sequence)
            victims = choose_victims(self._gains(sequence, lesser), missing)
            if victims is None and is_guaranteed(sequence) and lesser:
                # Pages shared by several of them come free with the last one.
                victims = [min(lesser, key=value)]
            if victims is None:
                if self._cache.transfers is not None and self._cache.transfers.give_way():
                    continue
                # Held prefixes give way only to what can't run otherwise.
                alone = len(self.running) == 1 and not self._loading()
                if (alone or is_guaranteed(sequence)) and self._cache.give_up_hold(sequence.state.namespace):
                    continue
                if alone:
                    plan.outgrown.append(sequence)
                else:
                    self._preempt(sequence, plan)
                return False
            # Rather a held prefix than one that must not be preempted once more.
            if any(map(is_guaranteed, victims)) and self._cache.give_up_hold(sequence.state.namespace):
                continue
            for victim in victims:
                self._preempt(victim, plan)
        return True

    def _lesser(self, sequence: Sequence) -> list[Sequence]:
        """Running sequences to preempt before this one: less valuable ones, and those of a tenant that has more."""
        own, name = value(sequence), _tenant(sequence)
        rivals = self._rivals(sequence, more=False)
        return [
            other
            for other in self.running
            if other is not sequence
            and (
                value(other) < own
                if _tenant(other) == name or is_guaranteed(sequence) or is_guaranteed(other)
                else other in rivals
            )
        ]

    def _rivals(self, sequence: Sequence, *, more: bool) -> list[Sequence]:
        """Sequences of the tenant with the largest dominant share, if without one it has no less than this tenant.

        Args:
            more: the sequence isn't running and would add to its tenant's share.
        """
        name, size = _tenant(sequence), self._cache.page_size
        if not self._tenants.keys() - {name}:
            return []
        standings = self._standings()

        def share(seats: int, pages: float, weight: float) -> float:
            return max(seats / self._max_seats, pages / self._cache.num_pages) / weight

        own, weight = standings.get(name), sequence.state.request.tenant.weight
        seats, pages = (own.seats, float(own.pages)) if own else (0, 0.0)
        if more:
            seats, pages = seats + sequence.seats, pages + (len(sequence.ids) + 1) / size
        mine = share(seats, pages, weight)
        shares = {other: share(at.seats, at.pages, at.weight) for other, at in standings.items()}
        top = max(standings.keys() - {name}, key=lambda other: (shares[other], other))
        weight = standings[top].weight
        return [
            other
            for other in standings[top].sequences
            if not is_guaranteed(other) and shares[top] - share(other.seats, _pages_of([other]), weight) >= mine
        ]

    def _standings(self) -> dict[str, _Standing]:
        """What each tenant has, looked at anew when somebody has got or lost a seat, and once per step."""
        if self._known_standings is None:
            held: dict[str, list[Sequence]] = {}
            for other in self.running:
                held.setdefault(_tenant(other), []).append(other)
            self._known_standings = {
                name: _Standing(
                    sequences,
                    sum(other.seats for other in sequences),
                    _pages_of(sequences),
                    sequences[0].state.request.tenant.weight,
                )
                for name, sequences in held.items()
            }
        return self._known_standings

    def _gains(
        self, sequence: Sequence, others: list[Sequence], *, missing: bool = False
    ) -> list[tuple[Sequence, int]]:
        """What preempting each of ``others`` brings a sequence, in pages.

        What another tenant has within its floor is kept for it all the same.

        Args:
            missing: count what they would still take, too.
        """
        gains: list[tuple[Sequence, int]] = []
        left: dict[str, int] = {}
        for other in sorted(others, key=value):
            if other.lease is None:
                continue
            gain = other.lease.sole_pages()
            name = _tenant(other)
            if name != _tenant(sequence):
                if name not in left:
                    left[name] = self._cache.pages_beyond_floor(other.state.namespace)
                gain = min(gain, left[name])
                left[name] -= gain
            gains.append((other, gain + self._missing_pages(other, other.lease) if missing else gain))
        return gains

    def _loading(self) -> bool:
        """Pages are held by a load: they'll be there once it has ended."""
        return self._cache.transfers is not None and self._cache.transfers.loading_pages > 0

    def _preempt(self, victim: Sequence, plan: Schedule) -> None:
        plan.drop(victim)
        self.remove(victim)
        plan.preempted.append(victim)
        victim.preemptions += 1
        if victim.beams is not None:
            victim.ids = victim.beams.fold()
        self.waiting.add(victim)

    # -- admission ---------------------------------------------------------------------------------------------------

    def _admit(self, plan: Schedule, line: Line, before: Sequence | None = None) -> None:
        """Admit who waits in a line, in order; with ``before``, only those more urgent than it.

        A sequence whose next page is being computed by a running one is set aside: it will hit that page soon.
        """
        waiting, passed = line.waiting, list[Sequence]()
        seats, looks = self._free_seats(), 0
        while plan.tokens < self._step_limit:
            sequence = waiting.next(passed)
            # A victim of this very step leaves its pages to those it was preempted for.
            if sequence is None or sequence in plan.preempted:
                return
            if before is not None and not more_urgent(sequence, before):
                return
            if sequence.seats > seats and not self._outranked(sequence):
                if seats <= 0:
                    return
                fits = False
            elif (
                self.running
                and self.step < sequence.look_again
                and self._cache.available_to(sequence.state.namespace) < sequence.pages_wanted
                and not self._outranked(sequence)
            ):
                fits = False
            elif looks == _LOOKS_PER_STEP:
                return
            else:
                lease = self._open(sequence)
                if lease.awaits is not None and not lease.awaits.done:
                    waiting.park(sequence, lease.awaits)
                    plan.parked.append(sequence)
                    lease.close()
                    continue
                fits = self._start(sequence, lease, line, plan)
                looks += not fits
            if fits:
                seats = self._free_seats()
                for other in passed:
                    other.bypasses += 1
                if any(other.bypasses >= self._max_bypass for other in passed):
                    return
            elif not waiting.any_victims and self._may_be_passed(sequence) and len(passed) < _MAX_PASSED:
                passed.append(sequence)
            else:
                return

    def _seat(self, sequence: Sequence) -> None:
        insort(self.running, sequence, key=_rank)
        self._known_standings = None
        self._tenants[_tenant(sequence)] += 1
        self._priorities[sequence.state.request.priority] += 1

    def _free_seats(self) -> int:
        return self._max_seats - len(self.running) - sum([sequence.forks for sequence in self.running])

    def _may_be_passed(self, sequence: Sequence) -> bool:
        """Note that a sequence didn't fit, and say whether others may go first."""
        if sequence.blocked_at is None:
            sequence.blocked_at = self.step
        return sequence.bypasses < self._max_bypass and self.step - sequence.blocked_at < self._ageing_steps

    def _start(self, sequence: Sequence, lease: CacheLease, line: Line, plan: Schedule) -> bool:
        """Give a sequence a seat on this lease, or close the lease."""
        needed = self._missing_pages(sequence, lease)
        count = min(_to_compute(sequence, lease), self._step_limit - plan.tokens)
        if self.running and not self._clear_the_way(sequence, needed, plan):
            fits = False
        else:
            fits = self._extend_first(sequence, lease, count)
        if not fits:
            lease.close()
            sequence.look_again, sequence.pages_wanted = self.step + _STEPS_BETWEEN_LOOKS, needed
            return False
        line.waiting.start(sequence)
        sequence.lease = lease
        self._seat(sequence)
        plan.admitted.append(sequence)
        plan.add(sequence, count)
        return True

    def _extend_first(self, sequence: Sequence, lease: CacheLease, count: int) -> bool:
        """Get a newcomer's first pages; held prefixes give way to it only if nothing else runs."""
        while lease.extend(count):
            if self.running or self._loading() or not self._cache.give_up_hold(sequence.state.namespace):
                return False
        return True

    def _clear_the_way(self, sequence: Sequence, needed: int, plan: Schedule) -> bool:
        """See that there are seats and pages for a sequence that needs so many, by takeover if it must be."""
        if is_guaranteed(sequence):
            reserved = sum(self._most_pages(other) for other in self.running if is_guaranteed(other))
            if reserved and reserved + self._most_pages(sequence) > self._cache.reach(sequence.state.namespace):
                return False
        # Those that run will take what they lack for the tokens they know.
        promised = sum(self._missing_pages(other, other.lease) for other in self.running if other.lease)
        pages = needed + promised - self._cache.available_to(sequence.state.namespace)
        seats = sequence.seats - self._free_seats()
        if pages <= 0 and seats <= 0:
            return True
        victims = choose_victims(self._gains(sequence, self._outranked(sequence), missing=True), pages, seats)
        for victim in victims or ():
            self._preempt(victim, plan)
        return victims is not None

    def _outranked(self, sequence: Sequence) -> list[Sequence]:
        """Running sequences whose seats and pages this one may take."""
        priority, name = sequence.state.request.priority, _tenant(sequence)
        own = [
            other
            for other in (self.running if max(self._priorities, default=priority) > priority else ())
            if _tenant(other) == name
            and other.state.request.priority > priority
            and more_urgent(sequence, other)
            and not is_guaranteed(other)
        ]
        return own + self._rivals(sequence, more=True)

    def _rejoin(self, sequence: Sequence, lease: CacheLease, plan: Schedule) -> CacheLease:
        """A sequence has computed up to pages that come from a tier: take them over, as far as they are there.

        Its new lease says what it still has to wait for.
        """
        if lease.awaits is None or lease.awaits.done:
            before = lease.computed
            lease = sequence.lease = lease.reopen()
            if lease.computed > before:
                plan.rejoined[sequence] = lease.computed - before
        return lease

    def _open(self, sequence: Sequence) -> CacheLease:
        state = sequence.state
        # Such a prompt is computed anew.
        if state.prompt_logprobs_due:
            state.prompt_logprobs.clear()
        lease = self._cache.open(
            sequence.ids, state.namespace, lookup=state.reads_cache, publish=state.request.params.use_prefix_cache
        )
        lease.holder = state.request.request_id
        lease.ttl = state.request.params.cache_ttl
        lease.kind = state.request.kind
        return lease

    def _most_pages(self, sequence: Sequence) -> int:
        """Pages that a sequence may come to hold."""
        # In a cache that shares no pages, each beam takes as many as a sequence.
        beams = sequence.seats * self._cache.pages_for(1) if sequence.beams else 0
        return max(beams, self._cache.pages_for(sequence.max_len))

    def _missing_pages(self, sequence: Sequence, lease: CacheLease) -> int:
        """Pages that a sequence lacks on this lease for all of its known tokens and one more."""
        missing = max(0, self._cache.pages_for(len(sequence.ids) + 1) - len(lease.pages) - lease.coming)
        return missing * sequence.rows + sequence.fork_pages


def _to_compute(sequence: Sequence, lease: CacheLease) -> int:
    """Known tokens to compute in one go: up to where what follows is being loaded; none while that is waited for."""
    return (lease.rejoin or len(sequence.ids)) - lease.computed


def _tenant(sequence: Sequence) -> str:
    return sequence.state.request.tenant.name


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank


def _pages_of(sequences: Iterable[Sequence]) -> int:
    """Pages that sequences hold together."""
    return len({page for sequence in sequences if sequence.lease for page in sequence.lease.pages})


def _take_off(counts: Counter[_Key], key: _Key) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
