"""What a lease promises, case by case. Cases named A.., B.., C.. are faults that users of other servers reported."""

from __future__ import annotations

import random

import pytest

from pagetrie.kv import CacheManager
from tests.kv.oracle import Harness

INDEXES = ("radix", "hash")
B = 16


@pytest.fixture(params=INDEXES)
def index(request: pytest.FixtureRequest) -> str:
    return request.param


def make(index: str, num_pages: int, page_size: int = B) -> Harness:
    return Harness(CacheManager(num_pages=num_pages, page_size=page_size, index=index))


def ids(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(count)]


def compute(harness: Harness, *leases: object, count: int | None = None) -> None:
    """One step that computes ``count`` tokens of each lease, by default all that are known."""
    shares = [(lease, count or len(lease.tokens) - lease.computed) for lease in leases]
    for lease, share in shares:
        assert harness.extend(lease, share)
    harness.compute(shares)
    for lease, share in shares:
        harness.commit(lease, share)
        harness.check()
    harness.poison_free_pages()


def store(harness: Harness, tokens: list[int], namespace: bytes = b"a") -> None:
    lease = harness.open(tokens, namespace)
    compute(harness, lease)
    harness.close(lease)
    harness.check()


# -- hits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1])
def test_all_but_the_last_token_is_hit_at_every_length(index: str, length: int) -> None:
    """A8: a prompt wholly in the cache still computes its last token, and a third one hits as deep."""
    harness = make(index, 8)
    prompt = ids(length)
    store(harness, prompt)
    for _ in range(2):
        lease = harness.open(prompt)
        assert lease.computed == length - 1
        compute(harness, lease)
        harness.close(lease)
        harness.check()
    longer = harness.open([*prompt, 7, 8])
    assert longer.computed == length


@pytest.mark.parametrize("length", [B - 1, B, B + 1, 2 * B, 3 * B - 1])
@pytest.mark.parametrize("stored", [B - 1, B, B + 1, 2 * B])
def test_a_hit_is_exact_to_the_token(index: str, stored: int, length: int) -> None:
    harness = make(index, 10)
    base = ids(4 * B)
    store(harness, base[:stored])
    for fork in range(min(stored, length)):
        lease = harness.open([*base[:fork], 60_000, *base[fork + 1 : length]])
        assert lease.computed == min(fork, length - 1)
        harness.close(lease)
        harness.check()


def test_one_token_more_or_less_in_front_shares_nothing(index: str) -> None:
    harness = make(index, 8)
    prompt = ids(2 * B)
    store(harness, prompt)
    assert harness.open(prompt[1:]).computed == 0
    assert harness.open([1, *prompt]).computed == 0


def test_namespaces_share_nothing_and_each_shares_with_itself(index: str) -> None:
    harness = make(index, 8)
    prompt = ids(2 * B + 3)
    store(harness, prompt, b"a")
    assert harness.open(prompt, b"b").computed == 0
    assert harness.open(prompt, b"").computed == 0
    assert harness.open(prompt, b"a").computed == 2 * B + 2


def test_a_chain_with_a_hole_is_hit_only_up_to_the_hole(index: str) -> None:
    harness = make(index, 12)
    prompt = ids(4 * B)
    store(harness, prompt)
    changed = [*prompt[:B], *ids(B, seed=1), *prompt[2 * B :]]
    assert harness.open([*changed, 1]).computed == B


def test_lookup_and_publish_can_be_switched_off(index: str) -> None:
    harness = make(index, 12)
    prompt = ids(2 * B + 1)
    silent = harness.open(prompt, publish=False)
    compute(harness, silent)
    harness.close(silent)
    assert harness.manager.stats().free_pages == 12
    store(harness, prompt)
    assert harness.open(prompt, lookup=False).computed == 0
    assert harness.open(prompt, publish=False).computed == 2 * B


def test_without_an_index_nothing_is_shared_or_kept() -> None:
    manager = CacheManager(num_pages=4, page_size=B, index="none")
    for _ in range(3):
        lease = manager.open(ids(B + 2))
        assert (lease.computed, lease.awaits) == (0, None)
        assert lease.extend(B + 2) == 0
        lease.commit(B + 2)
        lease.close()
        manager.check()
        assert manager.stats().free_pages == 4


def test_the_owner_still_runs_while_others_share_its_pages(index: str) -> None:
    harness = make(index, 12)
    prompt = ids(3 * B)
    owner = harness.open(prompt)
    compute(harness, owner, count=2 * B)
    other = harness.open([*prompt, 1])
    assert other.computed == 2 * B and other.lease.pages == owner.lease.pages[:2]
    compute(harness, owner)
    compute(harness, other)
    # Both computed the third page; it exists once.
    assert other.lease.pages[2] == owner.lease.pages[2]
    assert harness.manager.stats().active_pages == 4


def test_a6_an_opened_lease_keeps_what_it_matched(index: str) -> None:
    """A match that isn't admitted is closed and void; the next one sees what is really there."""
    harness = make(index, 6)
    prompt = ids(4 * B)
    store(harness, prompt)
    lease = harness.open([*prompt, 1])
    assert lease.computed == 4 * B
    other = harness.open(ids(6 * B, seed=1))
    assert not harness.extend(other, 6 * B)  # the four pages are pinned
    harness.close(lease)  # not admitted after all
    assert harness.extend(other, 4 * B)  # takes two of the four, the last ones
    harness.check()
    again = harness.open([*prompt, 1])
    assert again.computed == 2 * B
    assert not set(again.lease.pages) & set(other.lease.pages)


def test_a_cached_leaf_that_another_lease_extends_is_no_leaf_any_more(index: str) -> None:
    """Its twin computes the same two pages and one more: the second page is an inner one then, and may not go first."""
    harness = make(index, num_pages=8, page_size=4)
    first, twin = harness.open(ids(12), lookup=False), harness.open(ids(12), lookup=False)
    compute(harness, first, count=8)
    harness.close(first)
    compute(harness, twin)
    other = harness.open(ids(20, seed=1))
    compute(harness, other)
    harness.close(twin)
    harness.close(other)
    harness.check()
    compute(harness, harness.open(ids(24, seed=2)))


def test_a12_a_duplicate_is_remapped_before_its_own_pages_go(index: str) -> None:
    harness = make(index, 8)
    prompt = ids(2 * B)
    first, second = harness.open(prompt), harness.open(prompt)
    for lease in (first, second):
        assert harness.extend(lease, 2 * B)
    harness.compute([(first, 2 * B), (second, 2 * B)])
    duplicates = list(second.lease.pages)
    harness.commit(first, 2 * B)
    harness.commit(second, 2 * B)
    harness.poison_free_pages()
    assert second.lease.pages == first.lease.pages
    assert set(duplicates) <= harness.free()
    harness.check()  # the second still reads the right contents


def test_a12_a_duplicate_that_forks_hold_stays_theirs(index: str) -> None:
    harness = make(index, 12)
    prompt = ids(B + 4)
    first, second = harness.open(prompt), harness.open(prompt)
    compute(harness, second, count=B - 2)
    child = harness.fork(second)
    compute(harness, first)
    compute(harness, second)
    harness.check()
    compute(harness, child)
    harness.check()
    assert first.lease.pages[0] == second.lease.pages[0] == child.lease.pages[0]


# -- room ----------------------------------------------------------------------------------------------------------


def test_extend_is_all_or_nothing_and_says_how_many_pages_are_missing(index: str) -> None:
    harness = make(index, 5)
    busy = harness.open(ids(3 * B, seed=1))
    assert harness.extend(busy, 3 * B)
    lease = harness.open(ids(5 * B))
    assert lease.lease.extend(5 * B) == 3
    assert lease.lease.pages == [] and harness.manager.available_pages == 2
    assert lease.lease.extend(2 * B + 1) == 1
    assert lease.lease.extend(2 * B) == 0
    harness.check()


def test_a_failing_extend_keeps_a_partial_hit(index: str) -> None:
    harness = make(index, 3, page_size=4)
    store(harness, [1, 2, 3, 4])
    busy = harness.open([9] * 8)
    assert harness.extend(busy, 8)
    lease = harness.open([1, 2, 5, 5, 5])
    assert lease.computed == 2
    # Even without the partial hit, one of the two pages would be missing.
    assert lease.lease.extend(3) == 1
    assert lease.lease.computed == lease.lease.cached_tokens == 2
    harness.check()


def test_a_partial_hit_is_given_up_for_the_only_page_there_is(index: str) -> None:
    harness = make(index, 3, page_size=4)
    store(harness, [1, 2, 3, 4])
    busy = harness.open([9] * 8)
    assert harness.extend(busy, 8)
    lease = harness.open([1, 2, 5, 5])
    assert harness.extend(lease, 2)
    assert lease.lease.computed == lease.lease.cached_tokens == 0
    compute(harness, lease, count=4)


def test_a_partial_hit_holds_one_page_and_not_the_chat_behind_it(index: str) -> None:
    harness = make(index, 8, page_size=4)
    store(harness, ids(24))
    lease = harness.open([*ids(2), 60_000])
    assert lease.computed == 2
    assert harness.manager.available_pages == 7
    harness.check()


def test_c8_room_is_counted_in_pages(index: str) -> None:
    """15 sequences, each at a page's edge, need a page each for their next token; 5 are free."""
    harness = make(index, 20)
    leases = [harness.open(ids(B, seed=seed)) for seed in range(15)]
    compute(harness, *leases)
    missing = []
    for lease in leases:
        harness.append(lease, [1])
        missing.append(lease.lease.extend(1))
    assert missing == [0] * 5 + [1] * 10
    # One preempted sequence is one page.
    harness.manager.check()
    leases[0].lease.close()
    assert leases[5].lease.extend(1) == 0


def test_pages_for_counts_whole_pages(index: str) -> None:
    manager = CacheManager(num_pages=4, page_size=B, index=index)
    assert [manager.pages_for(n) for n in (0, 1, B - 1, B, B + 1, 2 * B)] == [0, 1, 1, 1, 2, 2]


def test_page_size_and_pool_must_be_positive() -> None:
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        CacheManager(num_pages=4, page_size=0)
    with pytest.raises(ValueError, match="at least 1 page, got 0"):
        CacheManager(num_pages=0, page_size=4)


def test_a_token_id_beyond_u32_is_refused_and_changes_nothing(index: str) -> None:
    manager = CacheManager(num_pages=4, page_size=B, index=index)
    for bad in (-1, 2**32):
        with pytest.raises(OverflowError):
            manager.open([1, bad])
    manager.check()
    assert manager.stats().free_pages == 4
    lease = manager.open([1])
    with pytest.raises(OverflowError):
        lease.append([2, 2**32])
    assert len(lease) == 1
    lease.append([2, 2**32 - 1])
    assert len(lease) == 3


def test_a_page_is_not_published_without_all_of_its_tokens_or_room(index: str) -> None:
    manager = CacheManager(num_pages=4, page_size=4, index=index)
    lease = manager.open([1, 2, 3])
    assert lease.extend(8) == 0
    with pytest.raises(ValueError, match="4 tokens are committed, but only 3 are known"):
        lease.commit(4)
    lease = manager.open([1, 2, 3, 4])
    with pytest.raises(ValueError, match="4 are known and 0 pages held"):
        lease.commit(4)
    manager.check()
    assert manager.stats().cached_pages == 0


# -- fork and close --------------------------------------------------------------------------------------------------


def test_b5_forking_with_little_room_shares_all_and_crashes_nothing(index: str) -> None:
    harness = make(index, 5)
    parent = harness.open(ids(B + 5))
    compute(harness, parent)
    children = [harness.fork(parent) for _ in range(7)]
    harness.check()
    assert harness.manager.stats().free_pages == 3
    assert all(child.lease.pages == parent.lease.pages for child in children)
    running = []
    for choice in [parent, *children]:
        harness.append(choice, [len(running)])
        if harness.extend(choice, 1):
            running.append(choice)
    # Three copies fit; the others wait, holding what they share.
    assert len(running) == 3
    harness.compute([(choice, 1) for choice in running])
    for choice in running:
        harness.commit(choice, 1)
    harness.check()
    waiting = [choice for choice in [parent, *children] if choice not in running]
    for choice in running:
        harness.close(choice)
        harness.check()
    for choice in waiting:
        compute(harness, choice)
        harness.close(choice)
    assert harness.manager.stats().active_pages == 0


def test_the_last_holder_of_a_shared_page_writes_it_in_place(index: str) -> None:
    harness = make(index, 4)
    parent = harness.open(ids(5))
    compute(harness, parent)
    child = harness.fork(parent)
    harness.close(parent)
    harness.append(child, [1])
    page = child.lease.pages[0]
    compute(harness, child)
    assert child.lease.pages == [page] and harness.manager.stats().copied_pages == 0


def test_forks_at_a_pages_edge_copy_nothing(index: str) -> None:
    harness = make(index, 8)
    parent = harness.open(ids(2 * B))
    compute(harness, parent)
    children = [harness.fork(parent) for _ in range(3)]
    for number, choice in enumerate([parent, *children]):
        harness.append(choice, [number])
    compute(harness, parent, *children)
    assert harness.manager.stats().copied_pages == 0
    assert harness.manager.stats().active_pages == 2 + 4


def test_a_fork_of_an_unresolved_partial_hit_copies_for_itself(index: str) -> None:
    harness = make(index, 6)
    prompt = ids(B)
    store(harness, prompt)
    parent = harness.open([*prompt[:10], 1, 2])
    child = harness.fork(parent)
    assert parent.computed == child.computed == 10
    compute(harness, parent)
    compute(harness, child)
    harness.close(parent)
    harness.close(child)
    harness.check()
    assert harness.manager.stats().active_pages == 0


def test_b5_closing_twice_frees_once(index: str) -> None:
    manager = CacheManager(num_pages=6, page_size=B, index=index)
    lease = manager.open(ids(2 * B + 3), publish=False)
    child = lease.fork()
    assert lease.extend(2 * B + 3) == 0
    for _ in range(2):
        lease.close()
        manager.check()
        assert manager.stats().free_pages == 6
    child.close()
    child.close()
    manager.check()
    assert manager.stats().free_pages == 6


@pytest.mark.parametrize("moment", ["opened", "extended", "copy pending", "computed", "forked"])
def test_close_is_safe_at_any_moment(index: str, moment: str) -> None:
    harness = make(index, 8)
    prompt = ids(B + 8)
    store(harness, prompt)
    lease = harness.open([*prompt[: B + 4], 1, 2, 3])
    assert lease.computed == B + 4
    if moment != "opened":
        assert harness.extend(lease, 1 if moment == "copy pending" else 3)
    if moment in ("computed", "forked"):
        harness.compute([(lease, 3)])
        harness.commit(lease, 3)
    if moment == "forked":
        harness.close(harness.fork(lease))
    harness.close(lease)
    harness.check()
    assert harness.manager.stats().active_pages == 0
    # What is stored is still right, whatever was written since.
    harness.compute([])
    harness.poison_free_pages()
    again = harness.open([*prompt, 1])
    assert again.computed == len(prompt)
    harness.check()


def test_a_page_in_doubt_is_not_published(index: str) -> None:
    harness = make(index, 4)
    prompt = ids(B + 8)
    lease = harness.open(prompt)
    compute(harness, lease)
    harness.close(lease, publish_tail=False)
    assert harness.open(prompt).computed == B


def test_a_longer_tail_replaces_the_shorter_one(index: str) -> None:
    harness = make(index, 8)
    prompt = ids(3 * B)
    for length in (3, 9, 7, B - 1, B + 2, B + 2):
        store(harness, prompt[:length])
    assert harness.manager.stats().cached_pages == 2
    assert harness.open(prompt).computed == B + 2


def test_preempt_and_resume_is_close_and_open(index: str) -> None:
    harness = make(index, 8)
    lease = harness.open(ids(B + 3))
    compute(harness, lease)
    harness.append(lease, [5])
    compute(harness, lease)
    harness.append(lease, [6])
    tokens = list(lease.tokens)
    harness.close(lease)
    assert harness.open(tokens).computed == B + 4  # all that was computed


# -- eviction and reset ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", range(1, 9))
def test_c9_after_evicting_any_number_of_pages_a_usable_prefix_is_left(index: str, taken: int) -> None:
    harness = make(index, 8)
    prompt = ids(8 * B)
    store(harness, prompt)
    other = harness.open(ids(8 * B, seed=1))
    assert harness.extend(other, taken * B)
    harness.check()
    assert harness.open([*prompt, 1]).computed == (8 - taken) * B


def test_c9_one_off_prompts_take_the_place_of_one_off_prompts(index: str) -> None:
    """A chat that comes back every 10 requests keeps its prefix through 200 one-off prompts."""
    harness = make(index, 40)
    chat = ids(20 * B)
    store(harness, chat)
    for number in range(200):
        store(harness, ids(B + 1, seed=number + 1))
        if number % 9 == 8:
            lease = harness.open([*chat, number])
            assert lease.computed == 20 * B
            harness.close(lease)


def test_a_page_that_others_stand_on_is_never_evicted(index: str) -> None:
    harness = make(index, 6)
    trunk = ids(2 * B)
    store(harness, [*trunk, *ids(B, seed=1)])
    store(harness, [*trunk, *ids(B, seed=2)])
    lease = harness.open([*trunk, *ids(B, seed=1), 5])
    other = harness.open(ids(4 * B, seed=3))
    assert harness.extend(other, 3 * B)  # two free pages and the branch of seed 2
    assert other.lease.extend(4 * B) == 1
    harness.check()
    assert lease.computed == 3 * B


def test_polling_a_partial_hit_for_ever_costs_no_memory(index: str) -> None:
    """A request at the queue's head is opened and closed in every step until it fits."""
    manager = CacheManager(num_pages=4, page_size=4, index=index)
    lease = manager.open([1, 2, 3, 4])
    lease.extend(4)
    lease.commit(4)
    lease.close()
    for _ in range(2000):
        manager.open([1, 2, 9]).close()
    manager.check()
    assert len(manager.pool.common.policy._queue._heap) < 100


def test_a_reset_forgets_everything_at_once_and_frees_the_rest_later(index: str) -> None:
    harness = make(index, 12)
    old, running = ids(2 * B), ids(3 * B, seed=1)
    store(harness, old)
    lease = harness.open(running)
    compute(harness, lease, count=B + 2)
    report = harness.manager.stats()
    assert (report.cached_pages, report.active_pages) == (2, 2)
    harness.reset()
    harness.check()
    assert harness.open(old).computed == 0 and harness.open(running).computed == 0
    compute(harness, lease)  # goes on undisturbed, and publishes nothing
    child = harness.fork(lease)
    harness.close(lease)
    harness.check()
    assert harness.open([*running, 1]).computed == 0
    harness.close(child)
    harness.check()
    for other in list(harness.leases):
        harness.close(other)
    assert harness.manager.stats().free_pages == 12


@pytest.mark.parametrize("index", INDEXES)
def test_a_copy_that_nobody_wants_any_more_is_not_made(index: str) -> None:
    """Whoever gets the page next, a load from a tier say, must not have it written over by a late copy."""
    cache = CacheManager(num_pages=8, page_size=4, index=index)
    tokens = ids(7)
    first = cache.open(tokens)
    assert first.extend(7) == 0
    first.commit(7)
    first.close()
    second = cache.open([*tokens[:6], 1, 2])
    assert second.computed == 6 and second.extend(2) == 0
    ((_, page),) = cache._copies
    other = second.fork()
    second.close(publish_tail=False)
    assert [target for _, target in cache._copies] == [page]
    other.close(publish_tail=False)
    assert cache.take_copies() == []
    cache.check()
