"""Sequences without a seat, and who comes next.

Victims (preempted sequences) and newcomers stand in two lines. Each is sorted by *level*: ``priority + arrival step //
ageing_steps``, fixed on arrival. So a step that is ``ageing_steps`` later is worth one level of priority, and a request
of priority p that arrives at step t stands behind nobody of priority q who comes after step
``(t // ageing_steps + p - q + 1) * ageing_steps``: ageing without ever sorting anew.

Within a level, newcomers whose prompts share a prefix go together: after a request, the one whose prompt has most in
common with it (its neighbour in the order of prompts, so the walk over a level is depth-first over the tree of
prompts, which SGLang shows to be optimal for hits: Zheng et al. 2023, arXiv:2312.07104, theorem 3.1); where nothing is
in common, the one that had most cached when it arrived; then the oldest. Nobody is passed for a prefix's sake by a
request of a later level.

A victim goes before all newcomers but those *more urgent*: lower in priority and in level.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from typing import Any

from pagetrie.engine.sequence import Sequence
from pagetrie.kv import KVCache, PendingPage
from pagetrie.kv.tokens import TOKEN_BYTES, common_prefix, pack_tokens


def more_urgent(one: Sequence, other: Sequence) -> bool:
    """Whether ``one`` may go before ``other`` though ``other`` was preempted, or take its seat and pages."""
    a, b = one.state, other.state
    return a.request.priority < b.request.priority and a.level < b.level


class WaitingQueue:
    """Iterating gives every waiting sequence: victims, newcomers, then those that wait for a page.

    Args:
        cache: says how much of a prompt is stored.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._victims: list[Sequence] = []
        self._fresh: list[Sequence] = []
        # Level -> its newcomers that may share pages, by prompt.
        self._by_prompt: dict[int, list[Sequence]] = {}
        self._latest_prompt = b""
        self._parked: dict[PendingPage, list[Sequence]] = {}
        self._parked_count = 0

    def __len__(self) -> int:
        return len(self._victims) + len(self._fresh) + self._parked_count

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._victims
        yield from self._fresh
        for parked in self._parked.values():
            yield from parked

    @property
    def num_parked(self) -> int:
        """Those that wait for a page."""
        return self._parked_count

    @property
    def any_ready(self) -> bool:
        """Somebody waits for nothing but room."""
        return bool(self._victims or self._fresh)

    @property
    def any_victims(self) -> bool:
        """A victim waits for room (not for a page that someone computes)."""
        return bool(self._victims)

    @property
    def first(self) -> Sequence | None:
        """Who is first by the order alone, whatever runs; None if nobody is ready."""
        return next(iter(self._victims or self._fresh), None)

    def add(self, sequence: Sequence) -> None:
        """Take in a newcomer or a victim."""
        if sequence.preemptions:
            insort(self._victims, sequence, key=_rank)
            return
        if self._cache.shares and sequence.state.reads_cache:
            namespace = sequence.state.namespace
            sequence.prompt_key = namespace + pack_tokens(sequence.ids)
            sequence.stored_tokens = self._cache.stored_tokens(sequence.ids, namespace)
        self._put(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands. Raises ValueError if it doesn't wait."""
        if sequence.awaits is not None:
            parked = self._parked[sequence.awaits]
            parked.remove(sequence)
            if not parked:
                del self._parked[sequence.awaits]
            self._parked_count -= 1
            sequence.awaits = None
        elif sequence.preemptions:
            _take(self._victims, sequence, _rank)
        else:
            _take(self._fresh, sequence, _place)
            if sequence.prompt_key:
                level = self._by_prompt[sequence.state.level]
                _take(level, sequence, _prompt)
                if not level:
                    del self._by_prompt[sequence.state.level]

    def start(self, sequence: Sequence) -> None:
        """Take out a sequence that gets a seat; those that share its prompt's prefix come next."""
        self.remove(sequence)
        self._latest_prompt = sequence.prompt_key
        sequence.prompt_key = b""

    def park(self, sequence: Sequence, page: PendingPage) -> None:
        """Set a sequence aside until ``page`` is done: it will be hit then."""
        self.remove(sequence)
        sequence.awaits = page
        self._parked.setdefault(page, []).append(sequence)
        self._parked_count += 1

    def wake(self, *, everyone: bool = False) -> None:
        """Put those whose page is done (or everyone) back in line."""
        if not self._parked:
            return
        for page in [page for page in self._parked if page.done or everyone]:
            for sequence in self._parked.pop(page):
                self._parked_count -= 1
                sequence.awaits = None
                if sequence.preemptions:
                    insort(self._victims, sequence, key=_rank)
                else:
                    self._put(sequence)

    def forget(self) -> None:
        """Put everyone in line as on arrival: nobody waits for a page, nobody is known not to fit."""
        self.wake(everyone=True)
        for sequence in (*self._victims, *self._fresh):
            sequence.look_again = 0

    def next(self, passed: Collection[Sequence] = ()) -> Sequence | None:
        """Who is next in line, leaving out ``passed`` (newcomers only); None if nobody is ready."""
        fresh = self._next_fresh(passed)
        if not self._victims:
            return fresh
        if fresh is not None and all(more_urgent(fresh, victim) for victim in self._victims):
            return fresh
        return self._victims[0]

    def _next_fresh(self, passed: Collection[Sequence]) -> Sequence | None:
        first = next((sequence for sequence in self._fresh if sequence not in passed), None)
        if first is None or not self._latest_prompt:
            return first
        # A common namespace alone is no reason to follow.
        shared = max(first.stored_tokens, self._cache.page_size - 1) * TOKEN_BYTES + len(first.state.namespace)
        level = self._by_prompt.get(first.state.level, [])
        place = bisect_left(level, self._latest_prompt, key=_prompt)
        for neighbour in level[max(0, place - 1) : place + 1]:
            if neighbour not in passed:
                common = common_prefix(neighbour.prompt_key, self._latest_prompt, 0, len(self._latest_prompt))
                if common > shared:
                    first, shared = neighbour, common
        return first

    def _put(self, sequence: Sequence) -> None:
        insort(self._fresh, sequence, key=_place)
        if sequence.prompt_key:
            insort(self._by_prompt.setdefault(sequence.state.level, []), sequence, key=_prompt)


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank


def _place(sequence: Sequence) -> tuple[int, int, int, int]:
    level, order, index = sequence.rank
    return level, -sequence.stored_tokens, order, index


def _prompt(sequence: Sequence) -> bytes:
    return sequence.prompt_key


def _take(line: list[Sequence], sequence: Sequence, key: Callable[[Sequence], Any]) -> None:
    place = bisect_left(line, key(sequence), key=key)
    del line[line.index(sequence, place)]
