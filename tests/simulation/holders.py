"""Who holds what, counted from the holders' side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pagetrie.kv import CacheLease, CacheManager, Lease
from pagetrie.kv.pool import PRIVATE


def check_holders(cache: CacheManager, leases: Iterable[CacheLease]) -> None:
    """References and pins are exactly those of these leases, which are all, of the cache's holds and of loads."""
    pool = cache.pool
    references: Counter[int] = Counter()
    pins: Counter[int] = Counter()
    for lease in leases:
        assert isinstance(lease, Lease)
        references.update(lease.pages[lease._indexed :])
        pins[id(lease._node)] += 1
        if lease._partial is not None:
            pins[id(lease._partial[1])] += 1
    for hold in cache._holds._holds:
        pins.update(map(id, hold._nodes))
    if (transfers := cache.transfers) is not None:
        pins.update(id(flight.node) for flight in transfers._flights)
        for flight in (*transfers._flights, *transfers._cancelled):
            references.update(flight.load.pages[flight.published :])
    held = [page for page, state in enumerate(pool.state) if state == PRIVATE]
    assert len(held) == len(references), "a page is held by nobody, or nobody's page is held"
    for page, holders in references.items():
        assert pool.references[page] == holders, f"page {page}: {pool.references[page]} references, {holders} holders"
    index = cache.index
    for node in (*index._roots.values(), *index._dead_roots, *index.nodes()):
        assert node.pins == pins[id(node)], f"{node.pins} pins for {pins[id(node)]} holders"
