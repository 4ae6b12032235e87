"""Whose bytes a tier holds, and who gives when room is needed: ``kv.shares`` for bytes, by the owners' tags.

Nothing in a tier is in use for longer than it takes to read it, so floors and caps need no account of running requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from pagetrie.kv.shares import Allowance

_ANYBODY = Allowance()


class Owners:
    """Bytes by owner.

    Args:
        capacity: bytes that floors and caps are parts of.
        promised: how much of the capacity all floors together may keep, at most.
    """

    def __init__(self, capacity: int, promised: float = 1.0) -> None:
        self._capacity = capacity
        self._promised = promised
        self.used: dict[bytes, int] = {}
        self._allowances: Mapping[bytes, Allowance] = {}
        # (excess with its sign turned, owner), at least what it is now for each owner.
        self._heap: list[tuple[float, bytes]] = []

    def allow(self, allowances: Mapping[bytes, Allowance]) -> None:
        """Who may have what, by tag."""
        self._allowances = allowances
        self._sort()

    def floor(self, owner: bytes) -> float:
        """Bytes that nobody else's pages push out."""
        return self._allowances.get(owner, _ANYBODY).floor * self._capacity * self._promised

    def above_cap(self, owner: bytes, more: int = 0) -> bool:
        """Whether an owner would have more than it may with so many bytes more."""
        cap = self._allowances.get(owner, _ANYBODY).cap
        return cap < 1 and self.used.get(owner, 0) + more > cap * self._capacity

    def add(self, owner: bytes, size: int) -> None:
        self.used[owner] = self.used.get(owner, 0) + size
        heappush(self._heap, (-self._excess(owner), owner))
        if len(self._heap) > 4 * len(self.used) + 64:
            self._sort()

    def remove(self, owner: bytes, size: int) -> None:
        left = self.used[owner] - size
        if left:
            self.used[owner] = left
        else:
            del self.used[owner]

    def clear(self) -> None:
        self.used.clear()
        self._heap.clear()

    def may_lose(self, owner: bytes, size: int) -> bool:
        """Whether others may push out so many bytes of an owner's."""
        return self.used.get(owner, 0) - size >= self.floor(owner)

    def giver(self, taker: bytes) -> bytes | None:
        """Who gives next when ``taker`` needs room: who is furthest above its floor, by weight; None if nobody may."""
        heap = self._heap
        while heap:
            noted, owner = heap[0]
            now = -self._excess(owner) if owner in self.used else None
            if now == noted:
                if now < 0:
                    return owner
                break
            heappop(heap)
            if now is not None:
                heappush(heap, (now, owner))
        return taker if taker in self.used else None

    def _excess(self, owner: bytes) -> float:
        return (self.used[owner] - self.floor(owner)) / self._allowances.get(owner, _ANYBODY).weight

    def _sort(self) -> None:
        self._heap = [(-self._excess(owner), owner) for owner in self.used]
        heapify(self._heap)
