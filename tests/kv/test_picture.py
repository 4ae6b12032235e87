"""Pictures of the cache against counts made otherwise, over random histories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from pagetrie.kv import CacheManager, ContiguousCacheManager
from pagetrie.kv.picture import ACTIVE, CACHED, FREE, LOADING, NOBODY, Numbers, PageOwner, Picture
from pagetrie.kv.tokens import unpack_tokens
from tests.budget import first
from tests.kv.driver import NAMESPACES, RandomDriver
from tests.kv.oracle import Harness
from tests.kv.test_leases import store

SIZE = 4


def owner_of(namespace: bytes) -> PageOwner:
    return PageOwner(namespace)


def wanted(name: bytes) -> Callable[[bytes], bool]:
    return lambda namespace: namespace == name


def draw(manager: CacheManager, harness: Harness, numbers: Numbers, limit: int = 1000) -> Picture:
    leases = [(held.lease, bytes(held.lease._root.tokens)) for held in harness.leases]
    return manager.picture(leases, owner_of, numbers, limit)


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("seed", first(2, range(6)))
def test_every_page_and_every_edge_is_in_the_picture(index: str, seed: int) -> None:
    manager = CacheManager(num_pages=20, page_size=SIZE, index=index, hold_limit=10)
    harness = Harness(manager)
    driver, numbers = RandomDriver(harness, seed), Numbers()
    for _ in range(150):
        driver.operate()
        stats, picture = manager.stats(), draw(manager, harness, numbers)
        states = Counter(picture.states)
        assert (states[FREE], states[ACTIVE], states[CACHED]) == (
            stats.free_pages,
            stats.active_pages,
            stats.cached_pages,
        )
        shares = Counter(page for held in harness.leases for page in held.lease.pages)
        assert list(picture.shares) == [shares[page] for page in range(20)]
        for page in range(20):
            owner = picture.owner[page]
            assert owner == NOBODY or picture.owners[owner].tenant in NAMESPACES
            assert (owner == NOBODY) <= (picture.states[page] in (FREE, ACTIVE))
        edges, nodes = picture.edges, list(manager.index.nodes())
        assert picture.size == manager.tree_size()
        assert picture.edges_in_all == len(edges) <= len(nodes)
        assert sum(edge.tokens for edge in edges) == sum(len(node.tokens) for node in nodes) // 4
        assert sum(edge.pages for edge in edges) == sum(len(node.pages) for node in nodes)
        for place, edge in enumerate(edges):
            children = [child for child in edges if child.parent == place]
            assert edge.parent < place
            assert edge.below == edge.tokens + sum(child.below for child in children)
            assert edge.leaves == (sum(child.leaves for child in children) or 1)
            assert all(child.start == edge.start + edge.tokens for child in children)
            assert edge.active or not edge.pins
        again = draw(manager, harness, numbers)
        assert [edge.number for edge in again.edges] == [edge.number for edge in edges]
        few = draw(manager, harness, numbers, limit=3)
        assert len(few.edges) == min(3, len(edges)) and few.edges_in_all == len(edges)
        assert all(edge.parent < place for place, edge in enumerate(few.edges))
        hidden = [edge for edge in edges if edge.parent >= 0 and edge.number not in {e.number for e in few.edges}]
        parents = Counter(edges[edge.parent].number for edge in hidden)
        assert {edge.number: edge.hidden for edge in few.edges} == {e.number: parents[e.number] for e in few.edges}


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_one_trunk_and_its_branches(index: str) -> None:
    manager = CacheManager(num_pages=40, page_size=SIZE, index=index)
    harness, numbers = Harness(manager), Numbers()
    trunk = list(range(16))
    for name in range(3):
        store(harness, [*trunk, 100 + name, *range(200, 210)])
    picture = draw(manager, harness, numbers)
    top = picture.edges[0]
    assert (top.tokens, top.leaves, [edge.parent for edge in picture.edges]) == (16, 3, [-1, 0, 0, 0])
    assert unpack_tokens(top.head) == tuple(trunk)
    texts, whole = manager.texts(wanted(b"a"), numbers, 1000)
    assert whole
    assert [unpack_tokens(text.tokens) for text in texts] == [
        tuple(trunk),
        *((100 + name, *range(200, 210)) for name in range(3)),
    ]
    assert [text.path for text in texts] == [[top.number], *([top.number, edge.number] for edge in picture.edges[1:])]
    assert [(text.start, len(text.before)) for text in texts] == [(0, 0), *[(16, 64)] * 3]
    some, whole = manager.texts(wanted(b"a"), numbers, 30)
    assert len(some) == 2 and not whole
    assert manager.texts(wanted(b"b"), numbers, 1000) == ([], True)


def test_owners_beyond_what_a_byte_can_tell_are_nobody() -> None:
    manager = CacheManager(num_pages=300, page_size=SIZE)
    harness = Harness(manager)
    for name in range(260):
        store(harness, [1, 2, 3, 4], str(name).encode())
    picture = draw(manager, harness, Numbers())
    assert len(picture.owners) == NOBODY and Counter(picture.owner)[NOBODY] == 300 - NOBODY
    assert [edge.owner for edge in picture.edges].count(NOBODY) == 5


def test_a_pool_of_reservations() -> None:
    cache = ContiguousCacheManager(num_pages=8, page_size=4, max_tokens=12)
    lease = cache.open([1, 2, 3])
    assert lease.extend(3) == 0
    picture = cache.picture([(lease, b"")], owner_of, Numbers(), 10)
    assert Counter(picture.states) == {ACTIVE: 3, FREE: 5}
    assert LOADING not in picture.states and picture.edges == []
    assert cache.texts(wanted(b""), Numbers(), 10) == ([], True)
