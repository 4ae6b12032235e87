"""A burst on a cold prefix computes it once: who waits for whom, and when the wait ends."""

from __future__ import annotations

import pytest

from pagetrie.kv import CacheManager, Lease

SIZE = 4
PROMPT = list(range(20))


@pytest.fixture(params=["radix", "hash"])
def manager(request: pytest.FixtureRequest) -> CacheManager:
    return CacheManager(num_pages=32, page_size=SIZE, index=request.param)


def compute(lease: Lease, count: int) -> None:
    assert lease.extend(count) == 0
    lease.commit(count)


def test_a_second_lease_waits_for_the_page_that_the_first_computes(manager: CacheManager) -> None:
    leader, follower = manager.open(PROMPT), manager.open([*PROMPT, 99])
    assert leader.awaits is None
    assert follower.awaits is not None and not follower.awaits.done


def test_it_wakes_when_the_page_is_published_and_waits_for_the_next(manager: CacheManager) -> None:
    leader = manager.open(PROMPT)
    for cached in range(0, len(PROMPT), SIZE):
        follower = manager.open([*PROMPT, 99])
        assert follower.cached_tokens == cached
        awaited = follower.awaits
        assert awaited is not None and not awaited.done
        follower.close()
        compute(leader, 1)
        assert not awaited.done  # the page isn't full yet
        compute(leader, SIZE - 1)
        assert awaited.done
        manager.check()
    last = manager.open([*PROMPT, 99])
    assert (last.cached_tokens, last.awaits) == (len(PROMPT), None)


@pytest.mark.parametrize("computed", [0, 1, SIZE + 1])
def test_when_the_leader_goes_a_follower_leads(manager: CacheManager, computed: int) -> None:
    leader = manager.open(PROMPT)
    if computed:
        compute(leader, computed)
    follower = manager.open(PROMPT)
    awaited = follower.awaits
    assert awaited is not None
    follower.close()
    assert not awaited.done
    leader.close(publish_tail=False)
    assert awaited.done
    heir, third = manager.open(PROMPT), manager.open(PROMPT)
    assert heir.awaits is None and heir.cached_tokens == computed // SIZE * SIZE
    assert third.awaits is not None and not third.awaits.done
    compute(heir, len(PROMPT) - heir.computed)
    assert third.awaits.done


def test_only_the_very_same_page_is_waited_for(manager: CacheManager) -> None:
    leader = manager.open(PROMPT)
    assert manager.open(PROMPT, b"other").awaits is None
    assert manager.open([0, 1, 2, 9, *PROMPT]).awaits is None  # parts inside the page
    assert manager.open(PROMPT[: SIZE - 1]).awaits is None  # ends inside the page
    assert manager.open(PROMPT[:SIZE]).awaits is not None  # ends with it
    assert manager.open(PROMPT, lookup=False).awaits is None
    compute(leader, SIZE)
    assert manager.open([9, 9, 9, 9]).awaits is None


def test_a_lease_that_publishes_nothing_leads_nobody(manager: CacheManager) -> None:
    manager.open(PROMPT, publish=False)
    assert manager.open(PROMPT).awaits is None


def test_a_page_still_to_be_generated_is_not_waited_for(manager: CacheManager) -> None:
    leader = manager.open(PROMPT[: SIZE + 1])
    compute(leader, SIZE + 1)
    assert manager.open(PROMPT).awaits is None


def test_after_a_reset_nobody_waits_for_what_was_before(manager: CacheManager) -> None:
    leader = manager.open(PROMPT)
    waiting = manager.open(PROMPT).awaits
    assert waiting is not None
    manager.reset()
    assert manager.open(PROMPT).awaits is None
    compute(leader, SIZE)
    assert waiting.done


def test_followers_of_a_follower_that_joined_wait_on(manager: CacheManager) -> None:
    """Prefixes that part later: each branch has its own leader."""
    trunk = manager.open(PROMPT[:8])
    compute(trunk, 8)
    left, right = manager.open([*PROMPT[:8], 50, 51, 52, 53]), manager.open([*PROMPT[:8], 60, 61, 62, 63])
    assert left.awaits is None and right.awaits is None
    follower = manager.open([*PROMPT[:8], 60, 61, 62, 63, 64])
    assert follower.awaits is not None
    left.close()
    assert not follower.awaits.done
    right.close()
    assert follower.awaits.done


def test_a_closed_fork_does_not_wake_the_followers_of_its_parent(manager: CacheManager) -> None:
    leader = manager.open(PROMPT)
    compute(leader, 2)
    awaited = manager.open(PROMPT).awaits
    leader.fork().close()
    assert awaited is not None and not awaited.done
