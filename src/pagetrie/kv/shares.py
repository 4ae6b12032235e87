"""How much of a cache each owner of namespaces keeps: what others can't take from it, and what it may leave behind.

An owner is a tenant, or the public. Each has its own eviction policy, which hears of its own pages only, so what an
owner loses to itself depends on nothing that others do. Between owners:

- *Floor.* So many pages are an owner's own: others' caches may fill them while it doesn't, and give them back at once;
  others' running requests and pins never stand on them. Cached pages of an owner that has no more than its floor are
  not evicted for others, whatever these need. So with ``active`` for pages that leases, holds and loads have, an owner
  can get ``total - sum of max(active, floor) of the others - its own active``.
- *Cap.* What an owner leaves cached beyond its cap goes at once, and at its cap it gives before anybody else does, free
  pages or not. Its running requests may go beyond: they are bounded by the others' floors and by the scheduler.
- *In between*, whoever is furthest above its floor, by weight, gives first (max-min fairness). So who floods the cache
  flushes itself.

Counts change with every page; sums and order are brought up to date when somebody asks: O(log owners) per change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from pagetrie.kv.namespace import owner_of

if TYPE_CHECKING:
    from pagetrie.kv.eviction.policy import EvictionPolicy
    from pagetrie.kv.pool import PagePool

_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one owner may have of the pool, and of each tier below it.

    Attributes:
        floor, cap: parts of the whole, 0 to 1; see above. No cap at 1.
        weight: against the others' weights; more than 0.
        pinned: part of the pages that may be pinned at all, 0 to 1.
    """

    floor: float = 0.0
    cap: float = 1.0
    weight: float = 1.0
    pinned: float = 1.0


def check_floors(allowances: Mapping[bytes, Allowance]) -> None:
    """Raises ValueError if more is promised than there is."""
    floors = sum(allowance.floor for allowance in allowances.values())
    if floors > 1 + 1e-9:
        raise ValueError(f"the floors add up to {floors:g} of the cache, more than all of it")


@dataclass(frozen=True, slots=True)
class OwnedPages:
    """What an owner has at one moment: pages in use (of leases, holds and loads), cached ones, and its floor."""

    active: int
    cached: int
    floor: int


class Share:
    """One owner's part of the pool.

    Attributes:
        owner: see ``namespace.owner_of``.
        floor, cap, weight: as allowed, in pages; a cap of None is none.
        pin_part: part of the pages that may be pinned.
        pages: all that it has: in the index, of leases, of loads.
        cached: those of the index that nobody holds.
        pinned: those that holds stand on.
        policy: orders its cached pages.
    """

    __slots__ = (
        "cached",
        "cap",
        "excess",
        "floor",
        "owner",
        "pages",
        "pin_part",
        "pinned",
        "policy",
        "reserved",
        "weight",
    )

    policy: EvictionPolicy

    def __init__(self, owner: bytes = b"") -> None:
        self.owner = owner
        self.floor, self.cap, self.weight, self.pin_part = 0, None, 1.0, 1.0
        self.pages = self.cached = self.pinned = 0
        # As of the last look: pages that others can't have, and what it stands at in the order of those who give.
        self.reserved = 0
        self.excess: float | None = None

    cap: int | None

    @property
    def active(self) -> int:
        """Pages that leases, holds and loads have."""
        return self.pages - self.cached

    @property
    def beyond_cap(self) -> int:
        """Cached pages that have to go."""
        return 0 if self.cap is None else max(0, min(self.pages - self.cap, self.cached))


class Shares:
    """All owners' parts of a pool.

    Args:
        pool: counts its pages for the shares that it is told.
        policy: the policy of the first owner; others get their own of the same kind.

    Attributes:
        alone: the one share, while there is no other: then nobody has to be asked who gives.
    """

    def __init__(self, pool: PagePool, policy: EvictionPolicy) -> None:
        self._pool = pool
        self._policy = policy
        pool.common.policy = policy
        self._shares = {b"": pool.common}
        self.alone: Share | None = pool.common
        self._allowances: Mapping[bytes, Allowance] = {}
        self._by_namespace: dict[bytes, Share] = {}
        # Sum of max(active, floor) over all.
        self._reserved = 0
        # Who has something cached: (excess with its sign turned, tie, share), counting while that is its excess.
        self._heap: list[tuple[float, int, Share]] = []
        self._ties = count()

    def __iter__(self) -> Iterator[Share]:
        return iter(self._shares.values())

    def of(self, namespace: bytes) -> Share:
        """The part of a namespace's owner."""
        share = self._by_namespace.get(namespace)
        if share is None:
            if len(self._by_namespace) >= _REMEMBERED:
                self._by_namespace.clear()
            share = self._by_namespace[namespace] = self.owned_by(owner_of(namespace))
        return share

    def owned_by(self, owner: bytes) -> Share:
        """An owner's part."""
        share = self._shares.get(owner)
        if share is None:
            share = self._shares[owner] = Share(owner)
            self.alone = None
            share.policy = self._policy.anew()
            self._allow(share)
        return share

    def allow(self, allowances: Mapping[bytes, Allowance]) -> None:
        """Who may have what, from now on; those not named are promised and forbidden nothing.

        Raises:
            ValueError: floors are more than the whole together.
        """
        check_floors(allowances)
        self._allowances = allowances
        for owner in allowances:
            self.owned_by(owner)
        for share in self:
            self._allow(share)

    def _allow(self, share: Share) -> None:
        allowance = self._allowances.get(share.owner, Allowance())
        total = self._pool.num_pages
        share.floor, share.weight, share.pin_part = int(allowance.floor * total), allowance.weight, allowance.pinned
        share.cap = None if allowance.cap >= 1 else int(allowance.cap * total)
        self._pool.changed[share] = None

    def forget(self, owner: bytes) -> None:
        """Drop the account of an owner that has nothing and won't come back."""
        share = self._shares.get(owner)
        if share is not None and not share.pages and owner:
            self._settle()
            self._reserved -= share.reserved
            share.excess = None
            del self._shares[owner]
            self._by_namespace.clear()
            self.alone = self._pool.common if len(self._shares) == 1 else None

    def reach(self, namespace: bytes) -> int:
        """Pages that a namespace's owner can have when nobody else runs anything. Changes nothing."""
        owner = owner_of(namespace)
        return self._pool.num_pages - sum(share.floor for share in list(self._shares.values()) if share.owner != owner)

    def available(self, share: Share) -> int:
        """Pages that an owner could get now; less than 0 where it stands on others' floors."""
        if self.alone is not None:
            return self._pool.free_pages + share.cached
        self._settle()
        return self._pool.num_pages - self._reserved + max(0, share.floor - share.active)

    def giver(self, taker: Share | None) -> Share | None:
        """Whose cached page goes next for ``taker``; None if none may."""
        self._settle()
        heap = self._heap
        while heap:
            excess, _, share = heap[0]
            if share.excess == -excess:
                if excess < 0:
                    return share
                break
            heappop(heap)
        return taker if taker is not None and taker.cached else None

    def may_give(self, share: Share, taker: Share | None) -> int:
        """How many cached pages, for this taker."""
        return share.cached if share is taker else min(share.cached, share.pages - share.floor)

    def _settle(self) -> None:
        """Bring sums and order up to date."""
        changed, heap = self._pool.changed, self._heap
        for share in changed:
            reserved = max(share.pages - share.cached, share.floor)
            self._reserved += reserved - share.reserved
            share.reserved = reserved
            excess = (share.pages - share.floor) / share.weight if share.cached else None
            if excess != share.excess:
                share.excess = excess
                if excess is not None:
                    heappush(heap, (-excess, next(self._ties), share))
        changed.clear()
        if len(heap) > 4 * len(self._shares) + 64:
            heap[:] = [(-s.excess, next(self._ties), s) for s in self if s.excess is not None]
            heapify(heap)

    def recount(self) -> None:
        """Derive the sums anew from the shares' own counts."""
        self._pool.changed.update(dict.fromkeys(self))
        self._reserved = 0
        for share in self:
            share.reserved, share.excess = 0, None

    def check(self) -> None:
        """Recount by brute force (for tests). Raises AssertionError on any disagreement."""
        pool = self._pool
        for share in self:
            mine = [page for page, owner in enumerate(pool.owner) if owner is share and pool.state[page]]
            assert share.pages == len(mine) and 0 <= share.cached <= share.pages
            assert not share.beyond_cap, "an owner keeps more than its cap"
        if len(self._shares) > 1:
            self._settle()
            assert self._reserved == sum(max(share.active, share.floor) for share in self)
