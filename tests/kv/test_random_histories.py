"""The cache manager against the brute-force model, over long random histories."""

from __future__ import annotations

import itertools

import pytest

from pagetrie.kv import CacheManager
from pagetrie.kv.eviction import POLICIES, make_policy
from tests.budget import first
from tests.kv.driver import RandomDriver
from tests.kv.oracle import Harness

INDEXES = ("radix", "hash")
POOLS = {1: 30, 2: 20, 3: 14, 16: 8}


def drive(index: str, page_size: int, num_pages: int, seed: int, operations: int, policy: str = "lru") -> Harness:
    eviction = make_policy(policy, num_pages, page_size, clock=itertools.count().__next__)
    manager = CacheManager(
        num_pages=num_pages, page_size=page_size, index=index, hold_limit=num_pages // 2, policy=eviction
    )
    harness = Harness(manager)
    driver = RandomDriver(harness, seed)
    done = driver.run(operations)
    # The history would prove little if it didn't get to what is hard.
    assert (
        min(done[name] for name in ("open", "open and wait", "close", "fork", "append", "reset", "hold", "fork hold"))
        > 0
    )
    hits = sum(1 for name, tokens in harness.trace if name.startswith("open") and tokens)
    failures = sum(1 for name, missing in harness.trace if name == "extend" and missing)
    assert min(hits, failures, harness.evicted) > operations // 100
    driver.finish()
    return harness


@pytest.mark.parametrize("operations", first(1, [2000, 10_000]))
@pytest.mark.parametrize("page_size", POOLS)
@pytest.mark.parametrize("index", INDEXES)
def test_every_answer_and_every_page_equals_the_models(index: str, page_size: int, operations: int) -> None:
    drive(index, page_size, POOLS[page_size], seed=page_size, operations=operations)


@pytest.mark.parametrize("operations", first(1, [1000, 10_000]))
@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"lru"}))
@pytest.mark.parametrize("index", INDEXES)
def test_no_policy_takes_what_must_stay(index: str, policy: str, operations: int) -> None:
    drive(index, 2, POOLS[2], seed=8, operations=operations, policy=policy)


@pytest.mark.parametrize("num_pages", [1, 2, 3, 5, 60])
@pytest.mark.parametrize("index", INDEXES)
def test_pools_too_small_and_roomy(index: str, num_pages: int) -> None:
    harness = Harness(CacheManager(num_pages=num_pages, page_size=4, index=index))
    driver = RandomDriver(harness, seed=num_pages, max_leases=10)
    driver.run(600)
    driver.finish()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("index", INDEXES)
def test_a_hundred_thousand_operations(index: str, page_size: int) -> None:
    drive(index, page_size, POOLS[page_size], seed=2026 + page_size, operations=100_000)


@pytest.mark.parametrize("operations", first(1, [2000, 10_000]))
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_both_indexes_give_the_same_hits_on_the_same_history(page_size: int, operations: int) -> None:
    """Hits, waits, missing pages and evictions, in order, also under pressure."""
    radix, chained = (drive(index, page_size, POOLS[page_size], seed=7, operations=operations) for index in INDEXES)
    assert radix.trace == chained.trace
    assert radix.evicted == chained.evicted
    assert radix.copied == chained.copied
    assert chained.manager.index.refused_hits == 0
