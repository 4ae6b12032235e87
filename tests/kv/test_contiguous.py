"""The contiguous baseline, with the same contents check: what a lease computed is what it reads."""

from __future__ import annotations

import random

import pytest

from pagetrie.kv import ContiguousCacheManager
from pagetrie.kv.contiguous import ContiguousLease

Sequence = tuple[ContiguousLease, list[int]]


def make(num_pages: int = 12, page_size: int = 4, max_tokens: int = 14) -> ContiguousCacheManager:
    return ContiguousCacheManager(num_pages=num_pages, page_size=page_size, max_tokens=max_tokens)


class Runner:
    """Page memory, written only as a runner would: copies in order, then the computed tokens."""

    def __init__(self, manager: ContiguousCacheManager) -> None:
        self.manager = manager
        self.memory = [[-1] * manager.page_size for _ in range(manager.num_pages)]

    def compute(self, lease: ContiguousLease, tokens: list[int]) -> bool:
        if lease.extend(len(tokens)):
            return False
        self.copy()
        for position, token in enumerate(tokens, lease.computed):
            self.memory[lease.pages[position // self.manager.page_size]][position % self.manager.page_size] = token
        lease.append(tokens)
        lease.commit(len(tokens))
        return True

    def copy(self) -> None:
        for source, destination in self.manager.take_copies():
            self.memory[destination] = self.memory[source].copy()

    def read(self, lease: ContiguousLease) -> list[int]:
        slots = [slot for page in lease.pages for slot in self.memory[page]]
        return slots[: lease.computed]


def test_every_lease_takes_a_whole_reservation_and_no_more_fit() -> None:
    manager = make()  # 3 reservations of 4 pages
    leases = [manager.open([1]) for _ in range(4)]
    assert [lease.extend(1) for lease in leases] == [0, 0, 0, 4]
    assert [len(lease.pages) for lease in leases] == [4, 4, 4, 0]
    assert sorted(page for lease in leases for page in lease.pages) == list(range(12))
    assert all(lease.pages == list(range(lease.pages[0], lease.pages[0] + 4)) for lease in leases[:3])
    assert (manager.available_pages, manager.stats().active_pages, manager.pages_for(1)) == (0, 12, 4)
    leases[1].close()
    assert leases[3].extend(1) == 0
    manager.check()


def test_nothing_is_shared_or_cached() -> None:
    manager = make()
    for _ in range(5):
        lease = manager.open([1, 2, 3, 4, 5])
        assert (lease.computed, lease.cached_tokens, lease.awaits) == (0, 0, None)
        assert lease.extend(5) == 0
        lease.commit(5)
        lease.close()
        lease.close()
        manager.check()
    stats = manager.stats()
    assert (stats.free_pages, stats.cached_pages, stats.evicted_pages) == (12, 0, 0)
    assert manager.reset().freed_pages == 0


def test_a_fork_copies_what_was_computed_when_it_gets_a_reservation() -> None:
    manager = make()
    runner = Runner(manager)
    parent = manager.open([1])
    assert runner.compute(parent, [1, 2, 3, 4, 5])
    child = parent.fork()
    assert runner.compute(parent, [6])
    assert runner.compute(child, [7, 8])
    assert runner.read(parent) == [1, 2, 3, 4, 5, 6]
    assert runner.read(child) == [1, 2, 3, 4, 5, 7, 8]
    assert manager.stats().copied_pages == 2


def test_a_fork_outlives_its_parent_and_may_fork_itself() -> None:
    manager = make()
    runner = Runner(manager)
    parent = manager.open([1])
    assert runner.compute(parent, [1, 2, 3])
    child = parent.fork()
    grandchild = child.fork()
    parent.close()
    manager.check()
    assert manager.stats().active_pages == 4
    assert runner.compute(child, [4]) and runner.compute(grandchild, [5])
    assert (runner.read(child), runner.read(grandchild)) == ([1, 2, 3, 4], [1, 2, 3, 5])
    child.close()
    grandchild.close()
    manager.check()
    assert manager.stats().free_pages == 12


def test_asking_for_more_than_a_reservation_takes_nothing() -> None:
    manager = make()
    lease = manager.open([1])
    assert lease.extend(17) == 1
    assert lease.pages == [] and manager.available_pages == 12
    assert lease.extend(16) == 0
    lease.commit(16)
    assert lease.extend(1) == 1


def test_the_last_fork_takes_over_the_reservation() -> None:
    """In a pool of one reservation, a fork goes on once the others have ended."""
    manager = make(num_pages=4)
    parent = manager.open([1])
    assert parent.extend(4) == 0
    parent.commit(4)
    first, second = parent.fork(), parent.fork()
    pages = parent.pages
    parent.close()
    assert first.extend(1) == 4
    second.close()
    assert first.extend(1) == 0
    assert first.pages == pages and manager.take_copies() == []
    first.close()
    manager.check()
    assert manager.stats().free_pages == 4


def test_a_pool_below_one_reservation_is_refused() -> None:
    with pytest.raises(ValueError, match="one reservation of 4 pages exceeds the pool's 3"):
        make(num_pages=3)


@pytest.mark.parametrize("seed", range(4))
def test_random_history_reads_what_was_computed(seed: int) -> None:
    rng = random.Random(seed)
    manager = make(num_pages=rng.choice((4, 9, 13, 21)), page_size=rng.choice((1, 4)), max_tokens=rng.choice((3, 9)))
    runner = Runner(manager)
    room = manager.pages_for(1) * manager.page_size
    live: list[Sequence] = []
    for _ in range(3000):
        choice = rng.random()
        if not live or (choice < 0.2 and len(live) < 8):
            live.append((manager.open([1]), []))
        elif choice < 0.35 and len(live) < 8:
            lease, tokens = rng.choice(live)
            live.append((lease.fork(), list(tokens)))
        elif choice < 0.5:
            lease, _ = live.pop(rng.randrange(len(live)))
            lease.close(publish_tail=rng.random() < 0.5)
            lease.close()
        elif choice < 0.6:
            rng.choice(live)[0].extend(1)  # copies may stay pending past later closes
        else:
            lease, tokens = rng.choice(live)
            new = rng.choices(range(100), k=rng.randrange(1, 4))
            free, had = manager.available_pages, bool(lease.pages or lease.sole_pages())
            fits = len(tokens) + len(new) <= room
            assert runner.compute(lease, new) == (fits and (had or free > 0))
            if fits and (had or free > 0):
                tokens += new
        manager.check()
        stats = manager.stats()
        assert stats.free_pages + stats.active_pages == stats.total_pages
        held = [page for lease, _ in live for page in lease.pages]
        assert len(set(held)) == len(held)
        runner.copy()
        for lease, tokens in live:
            assert lease.computed == len(tokens)
            if lease.pages:
                assert runner.read(lease) == tokens
    for lease, _ in live:
        lease.close()
    assert manager.stats().free_pages == manager.num_pages
