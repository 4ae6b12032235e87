"""What a hold promises, case by case. Random histories with holds are in test_random_histories and test_stateful."""

from __future__ import annotations

import random

import pytest

from pagetrie.errors import HoldLimitError
from pagetrie.kv import CacheManager, ContiguousCacheManager
from tests.kv.oracle import Harness, Held

B = 16


@pytest.fixture(params=["radix", "hash"])
def index(request: pytest.FixtureRequest) -> str:
    return request.param


def make(index: str, num_pages: int, hold_limit: int | None = None) -> Harness:
    return Harness(CacheManager(num_pages=num_pages, page_size=B, index=index, hold_limit=hold_limit))


def ids(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(count)]


def compute(harness: Harness, lease: Held) -> None:
    count = len(lease.tokens) - lease.computed
    assert harness.extend(lease, count)
    harness.compute([(lease, count)])
    harness.commit(lease, count)
    harness.poison_free_pages()


def store(harness: Harness, tokens: list[int], namespace: bytes = b"a") -> None:
    lease = harness.open(tokens, namespace)
    compute(harness, lease)
    harness.close(lease)
    harness.check()


def test_a_held_prefix_outlives_any_pressure_to_its_last_token(index: str) -> None:
    harness = make(index, 6)
    prompt = ids(2 * B + 5)
    store(harness, prompt)
    pinned = harness.hold(prompt)
    assert pinned is not None and pinned.hold.tokens == 2 * B + 5
    for seed in range(1, 9):
        store(harness, ids(3 * B, seed))
    other = harness.open(ids(4 * B, 99))
    assert other.lease.extend(4 * B) == 1  # three pages are held, and no more are to be had
    assert harness.open([*prompt, 7]).computed == 2 * B + 5
    harness.release(pinned)
    assert harness.manager.stats().pinned_pages == 0
    harness.check()


def test_holding_what_is_not_stored_holds_what_there_is(index: str) -> None:
    harness = make(index, 6)
    nothing = harness.hold(ids(3))
    assert nothing is not None and (nothing.hold.tokens, nothing.hold.pages) == (0, [])
    store(harness, ids(B + 2))
    some = harness.hold([*ids(B + 2)[: B + 1], 60_000])
    assert some is not None and some.hold.tokens == B + 1
    elsewhere = harness.hold(ids(B + 2), b"b")
    assert elsewhere is not None and elsewhere.hold.tokens == 0
    harness.check()


def test_four_holds_on_one_trunk_pin_it_once(index: str) -> None:
    harness = make(index, 8)
    prompt = ids(4 * B)
    store(harness, prompt)
    trunk = harness.hold(prompt)
    assert trunk is not None
    forks = [harness.fork_hold(trunk) for _ in range(3)]
    assert harness.manager.stats().pinned_pages == 4
    for pinned in [trunk, *forks[:2]]:
        harness.release(pinned)
        harness.check()
        assert harness.manager.stats().pinned_pages == 4
    harness.release(forks[2])
    assert harness.manager.stats().pinned_pages == harness.manager.stats().active_pages == 0
    assert harness.open([*prompt, 1]).computed == 4 * B  # cached still


def test_a_limit_refuses_with_all_three_numbers_and_changes_nothing(index: str) -> None:
    harness = make(index, 8, hold_limit=3)
    for seed in (0, 1):
        store(harness, ids(2 * B, seed))
    assert harness.hold(ids(2 * B)) is not None
    with pytest.raises(HoldLimitError, match="may take 3 pages, 2 are taken and this one adds 2"):
        harness.manager.hold(ids(2 * B, 1), b"a")
    harness.check()
    assert harness.hold(ids(2 * B, 1)[:B]) is not None  # one more page does fit
    again = harness.hold(ids(2 * B))  # and pages that are held already cost nothing
    assert again is not None
    harness.check()


def test_the_least_recently_used_hold_is_given_up_first(index: str) -> None:
    harness = make(index, 8)
    for seed in range(3):
        store(harness, ids(2 * B, seed))
    holds = [harness.hold(ids(2 * B, seed)) for seed in range(3)]
    assert holds[0] is not None
    harness.touch_hold(holds[0])
    assert harness.give_up_hold()
    assert [pinned.hold.released for pinned in holds if pinned] == [False, True, False]
    harness.check()
    assert harness.give_up_hold() and harness.give_up_hold() and not harness.give_up_hold()
    harness.check()


def test_a_lease_and_a_hold_on_one_prefix_are_independent(index: str) -> None:
    harness = make(index, 8)
    prompt = ids(2 * B + 5)
    store(harness, prompt)
    pinned = harness.hold(prompt)
    assert pinned is not None
    lease = harness.open([*prompt, 1, 2, 3])
    compute(harness, lease)  # the held tail is copied, not written
    harness.close(lease)
    harness.check()
    assert harness.open([*prompt, 9]).computed == 2 * B + 5
    harness.release(pinned)
    harness.check()


def test_a_reset_lets_go_of_holds(index: str) -> None:
    harness = make(index, 8)
    store(harness, ids(2 * B))
    pinned = harness.hold(ids(2 * B))
    assert pinned is not None
    harness.reset()
    harness.check()
    assert pinned.hold.released and harness.manager.stats().free_pages == 8
    pinned.hold.release()
    pinned.hold.touch()
    harness.check()


@pytest.mark.parametrize(
    "manager",
    [
        ContiguousCacheManager(num_pages=4, page_size=B, max_tokens=B),
        CacheManager(num_pages=4, page_size=B, index="none"),
    ],
)
def test_where_nothing_is_shared_nothing_can_be_held(manager: CacheManager | ContiguousCacheManager) -> None:
    assert manager.hold_limit == 0
    assert not manager.give_up_hold()
    if isinstance(manager, ContiguousCacheManager):
        with pytest.raises(HoldLimitError, match="paged layout"):
            manager.hold([1, 2])
