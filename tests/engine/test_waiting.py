"""The waiting line and the choice of victims against brute force."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import Request
from pagetrie.engine.sequence import RequestState, Sequence
from pagetrie.engine.text_stream import TextStream
from pagetrie.engine.victims import choose_victims, value
from pagetrie.engine.waiting import WaitingQueue, more_urgent
from pagetrie.kv import PendingPage
from tests.engine.toy import ToyVocabulary

PAGE_SIZE = 2


class Store:
    """Stands for a cache: what it has stored is what it was told."""

    shares = True
    page_size = PAGE_SIZE

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    def stored_tokens(self, tokens: list[int], namespace: bytes) -> int:
        return max((common(tokens, prompt) for prompt in self.prompts), default=0) // PAGE_SIZE * PAGE_SIZE


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def sequence(order: int, level: int, priority: int, tokens: list[int], preemptions: int = 0) -> Sequence:
    request = Request(str(order), tokens, SamplingParams(), priority=priority)
    state = RequestState(request=request, order=order, namespace=b"name", arrival=0.0, max_tokens=4, level=level)
    text = TextStream(ToyVocabulary(), (), skip_special=True)
    made = Sequence(state=state, index=0, seed=0, ids=list(tokens), text=text)
    made.preemptions = preemptions
    return made


prompts = st.lists(st.integers(1, 2), min_size=1, max_size=8)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 2), st.integers(-1, 1), prompts, st.integers(0, 3)),
        st.tuples(st.just("start"), st.integers(0, 9)),
        st.tuples(st.just("remove"), st.integers(0, 9)),
        st.tuples(st.just("park"), st.integers(0, 9), st.integers(0, 2)),
        st.tuples(st.just("done"), st.integers(0, 2)),
        st.tuples(st.just("store"), prompts),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(actions, st.sets(st.integers(0, 9), max_size=3))
def test_the_line_against_a_list(history: list[tuple[Any, ...]], skipped: set[int]) -> None:
    store = Store()
    queue = WaitingQueue(store)  # type: ignore[arg-type]
    ready: list[Sequence] = []
    parked: list[Sequence] = []
    pages = [PendingPage() for _ in range(3)]
    stored_at: dict[Sequence, int] = {}
    latest: list[int] | None = None
    for order, (kind, *given_) in enumerate(history):
        everyone = ready + parked
        match kind:
            case "add":
                level, priority, tokens, preemptions = given_
                new = sequence(order, level, priority, tokens, max(0, preemptions - 2))
                stored_at[new] = store.stored_tokens(tokens, b"")
                queue.add(new)
                ready.append(new)
            case "start" if ready:
                one = queue.next()
                assert one is not None
                latest = None if one.preemptions else one.ids
                queue.start(one)
                ready.remove(one)
            case "remove" if everyone:
                one = everyone[given_[0] % len(everyone)]
                queue.remove(one)
                (ready if one in ready else parked).remove(one)
            case "park" if ready:
                one = ready[given_[0] % len(ready)]
                page = pages[given_[1]]
                if not page.done:
                    queue.park(one, page)
                    ready.remove(one)
                    parked.append(one)
            case "done":
                pages[given_[0]].done = True
                woken = [one for one in parked if one.awaits is pages[given_[0]]]
                queue.wake()
                pages[given_[0]] = PendingPage()
                ready += woken
                parked = [one for one in parked if one not in woken]
            case "store":
                store.prompts.append(given_[0])
        assert len(queue) == len(ready) + len(parked)
        assert set(queue) == set(ready + parked)
        assert queue.any_ready == bool(ready)
        assert queue.any_victims == any(one.preemptions for one in ready)
        check_next(queue, ready, stored_at, latest)
        fresh = [one for one in ready if not one.preemptions]
        passed = {one for place, one in enumerate(fresh) if place in skipped}
        check_skipping(queue, ready, passed)


def check_next(
    queue: WaitingQueue, ready: list[Sequence], stored_at: dict[Sequence, int], latest: list[int] | None
) -> None:
    victims = [one for one in ready if one.preemptions]
    fresh = [one for one in ready if not one.preemptions]
    chosen = queue.next()
    if chosen is None:
        assert not ready
        return
    if victims:
        oldest = min(victims, key=lambda one: one.rank)
        if chosen.preemptions:
            assert chosen is oldest
        else:
            assert more_urgent(chosen, oldest)
    if chosen.preemptions:
        return
    level = min(one.state.level for one in fresh)
    assert chosen.state.level == level
    peers = [one for one in fresh if one.state.level == level]
    first = min(peers, key=lambda one: (-stored_at[one], one.state.order))
    most_shared = max(common(one.ids, latest) for one in peers) if latest else 0
    if latest and most_shared > max(stored_at[first], PAGE_SIZE - 1):
        assert common(chosen.ids, latest) == most_shared
    else:
        assert chosen is first


def check_skipping(queue: WaitingQueue, ready: list[Sequence], passed: set[Sequence]) -> None:
    left = [one for one in ready if one not in passed]
    chosen = queue.next(passed)
    assert (chosen is None) == (not left)
    if chosen is not None:
        assert chosen in left
        if not chosen.preemptions:
            assert chosen.state.level == min(one.state.level for one in left if not one.preemptions)


running = st.lists(
    st.tuples(st.integers(-1, 1), st.integers(0, 4), st.integers(0, 6), st.integers(0, 5), st.integers(1, 3)),
    max_size=7,
)


@given(running, st.integers(-1, 12), st.integers(-1, 5))
def test_victims_are_the_least_valuable_and_none_is_in_vain(
    drawn: list[tuple[int, int, int, int, int]], pages: int, seats: int
) -> None:
    gains = []
    for order, (priority, preemptions, progress, gain, taken) in enumerate(drawn):
        one = sequence(order, 0, priority, [1], preemptions)
        one.forks = taken - 1
        one.lease = SimpleNamespace(computed=progress, cached_tokens=0)  # type: ignore[assignment]
        gains.append((one, gain))

    def enough(chosen: list[tuple[Sequence, int]]) -> bool:
        return sum(gain for _, gain in chosen) >= pages and sum(one.seats for one, _ in chosen) >= seats

    victims = choose_victims(gains, pages, seats)
    if victims is None:
        assert not enough(gains)
        return
    chosen = [pair for pair in gains if pair[0] in victims]
    assert enough(chosen)
    for fewer in combinations(chosen, len(chosen) - 1) if chosen else ():
        assert not enough(list(fewer))
    # Nobody more valuable than needed: those below the most valuable victim would not be enough without it.
    if victims:
        dearest = max(value(one) for one in victims)
        assert not enough([pair for pair in gains if value(pair[0]) < dearest])
