"""Index-only replay and Belady's optimum, against brute force on small traces."""

from __future__ import annotations

import random
from functools import cache

import pytest

from pagetrie.kv.eviction import POLICIES
from pagetrie.replay.index_only import IndexReplay, replay_index
from pagetrie.replay.reference import belady_hits, flat_lru_hits
from pagetrie.replay.trace import Trace, TraceRequest
from tests.budget import first


def random_trace(seed: int, requests: int, branching: int = 2, depth: int = 4) -> Trace:
    """Prompts through a random tree: a page's id stands for its whole prefix."""
    rng = random.Random(seed)
    ids: dict[tuple[int, ...], int] = {}
    made = []
    for number in range(requests):
        path = [rng.randrange(branching) for _ in range(rng.randrange(1, depth + 1))]
        pages = [ids.setdefault(tuple(path[: end + 1]), len(ids)) for end in range(len(path))]
        made.append(TraceRequest(float(number), 16 * len(path) - rng.randrange(16), rng.randrange(50), pages))
    return Trace("random", 16, made)


def best_by_trying_everything(trace: Trace, capacity: int) -> int:
    requests = [tuple(request.pages) for request in trace.requests]

    @cache
    def best(number: int, stored: frozenset[int]) -> int:
        if number == len(requests):
            return 0
        pages = requests[number]
        hits = next((depth for depth, page in enumerate(pages) if page not in stored), len(pages))
        return hits + max(best(number + 1, kept) for kept in choices(stored | set(pages)))

    @cache
    def choices(stored: frozenset[int]) -> frozenset[frozenset[int]]:
        if len(stored) <= capacity:
            return frozenset([stored])
        return frozenset(kept for page in stored for kept in choices(stored - {page}))

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
def test_belady_is_the_best_there_is(seed: int) -> None:
    trace = random_trace(seed, requests=7, depth=3)
    for capacity in (3, 4, 5):
        assert belady_hits(trace, capacity) == best_by_trying_everything(trace, capacity)


@pytest.mark.parametrize("requests", first(1, [500, 3000]))
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("index", ["radix", "hash"])
def test_no_policy_beats_belady_and_the_index_stays_sound(index: str, name: str, requests: int) -> None:
    trace = random_trace(3, requests=requests, branching=4, depth=6)
    capacity = 60
    replay = IndexReplay(capacity, trace.page_tokens, name, index)
    hits = 0
    for number, request in enumerate(trace.requests):
        hits += replay.serve(request)
        if number % 100 == 0:
            replay.pool.check()
            replay.index.check()
    assert 0 < hits < belady_hits(trace, capacity)
    assert replay_index(trace, capacity, name, index=index)[0].hits == hits


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_lru_on_the_tree_is_lru_on_single_pages(index: str) -> None:
    trace = random_trace(4, requests=2000, branching=4, depth=6)
    for capacity in (10, 50, 200, 2000):
        assert replay_index(trace, capacity, index=index)[0].hits == flat_lru_hits(trace, capacity, touch="back")


def test_parts_add_up_to_the_whole() -> None:
    trace = random_trace(5, requests=101)
    whole = replay_index(trace, 20)[0]
    parts = replay_index(trace, 20, parts=(0.5, 0.8, 1.0))
    assert [part.requests for part in parts] == [50, 31, 20]
    assert sum(part.hits for part in parts) == whole.hits
    assert sum(part.pages for part in parts) == whole.pages == trace.pages


def test_what_can_never_fit_is_passed_over() -> None:
    big = TraceRequest(0.0, 160, 1, list(range(10)))
    small = TraceRequest(1.0, 32, 1, [100, 101])
    trace = Trace("mixed", 16, [small, big, small])
    count = replay_index(trace, 5)[0]
    assert count.hits == 2 and count.pages == 14
