"""The baseline the field came from: one contiguous reservation per request, as long as a request may ever get.

Kept so that waste and concurrency can be compared in one run. It shares nothing and copies whole reservations on fork.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from pagetrie.errors import HoldLimitError
from pagetrie.kv.diagnosis import Diagnosis
from pagetrie.kv.eviction.policy import RequestKind
from pagetrie.kv.interface import CacheHold, CacheLease, CacheStats, PageTransfers, PendingPage, ResetReport
from pagetrie.kv.picture import EdgeText, Numbers, PageOwner, Picture, draw_reserved
from pagetrie.kv.shares import Allowance, OwnedPages


class ContiguousCacheManager:
    """Contiguous reservations over the same page storage (``KVCache``).

    Args:
        num_pages: pages in the pool.
        page_size: tokens per page.
        max_tokens: length reserved for every request.
    """

    def __init__(self, *, num_pages: int, page_size: int, max_tokens: int) -> None:
        self.num_pages = num_pages
        self.hold_limit = 0
        self.shares = False
        self.page_size = page_size
        self.transfers: PageTransfers | None = None
        self._reservation = -(-max_tokens // page_size)
        if self._reservation > num_pages:
            raise ValueError(f"one reservation of {self._reservation} pages exceeds the pool's {num_pages}")
        # All reservations have one length, so the free ranges are simply a stack of slots.
        self._slots = list(range(num_pages // self._reservation - 1, -1, -1))
        # Slot -> leases that hold it: its owner, and forks that have yet to copy it.
        self._held: dict[int, int] = {}
        self._copies: list[tuple[int, int]] = []
        self._copied_pages = 0

    def open(
        self, tokens: Sequence[int], namespace: bytes = b"", *, lookup: bool = True, publish: bool = True
    ) -> ContiguousLease:
        return ContiguousLease(self)

    def hold(self, tokens: Sequence[int], namespace: bytes = b"") -> CacheHold:
        """Refused: a reservation ends with its request, so there is nothing to keep."""
        raise HoldLimitError(adds=0, pinned=0, limit=0)

    def give_up_hold(self, namespace: bytes = b"") -> bool:
        return False

    def allow(self, allowances: Mapping[bytes, Allowance]) -> None:
        """Nothing: nothing is kept."""

    def drop_owner(self, owner: bytes) -> None:
        """Nothing: nothing is kept."""

    def available_to(self, namespace: bytes) -> int:
        return self.available_pages

    def reach(self, namespace: bytes) -> int:
        return self.num_pages

    def pages_beyond_floor(self, namespace: bytes) -> int:
        return self.num_pages

    def pin_limit(self, namespace: bytes) -> int:
        return 0

    def stored_tokens(self, tokens: Sequence[int], namespace: bytes = b"") -> int:
        return 0

    def diagnose(
        self, tokens: Sequence[int], namespace: bytes = b"", others: Mapping[str, bytes] | None = None
    ) -> Diagnosis | None:
        return None

    def tree_size(self) -> tuple[int, int, int, int]:
        return 0, 0, 0, 0

    def owned_pages(self) -> dict[bytes, OwnedPages]:
        return {}

    def declare_public(self, tokens: Sequence[int], namespace: bytes) -> int:
        return 0

    def withdraw_public(self, tokens: Sequence[int], namespace: bytes) -> None:
        """Nothing: nothing is shared."""

    def picture(
        self,
        leases: Sequence[tuple[CacheLease, bytes]],
        owner_of: Callable[[bytes], PageOwner],
        numbers: Numbers,
        limit: int,
    ) -> Picture:
        return draw_reserved(self.num_pages, [page for slot in self._held for page in self._pages(slot)])

    def texts(self, wanted: Callable[[bytes], bool], numbers: Numbers, budget: int) -> tuple[list[EdgeText], bool]:
        return [], True

    @property
    def available_pages(self) -> int:
        return len(self._slots) * self._reservation

    def pages_for(self, tokens: int) -> int:
        return self._reservation

    def take_copies(self) -> list[tuple[int, int]]:
        copies, self._copies = self._copies, []
        return copies

    def stats(self) -> CacheStats:
        active = len(self._held) * self._reservation
        return CacheStats(self.num_pages, self.num_pages - active, active, 0, 0, self._copied_pages)

    def reset(self) -> ResetReport:
        return ResetReport(0, len(self._held) * self._reservation)

    def recount(self) -> dict[str, tuple[int, int]]:
        return {}

    def check(self) -> None:
        slots = self.num_pages // self._reservation
        assert len(self._slots) + len(self._held) == slots and not set(self._held) & set(self._slots)
        assert len(set(self._slots)) == len(self._slots)

    def _reserve(self) -> int | None:
        if not self._slots:
            return None
        slot = self._slots.pop()
        self._held[slot] = 1
        return slot

    def _share(self, slot: int) -> int:
        self._held[slot] += 1
        return slot

    def _give_back(self, slot: int) -> None:
        self._held[slot] -= 1
        if not self._held[slot]:
            del self._held[slot]
            self._slots.append(slot)

    def _pages(self, slot: int) -> list[int]:
        return list(range(slot * self._reservation, (slot + 1) * self._reservation))


class ContiguousLease:
    """A hold on one reservation (``CacheLease``), taken whole by the first ``extend``.

    A fork holds on to its parent's reservation until it has one of its own to copy it to, or until it is the last
    that holds it.
    """

    def __init__(self, manager: ContiguousCacheManager) -> None:
        self._manager = manager
        self._slot: int | None = None
        self._source: int | None = None
        self.computed = 0
        self.cached_tokens = 0
        self.pages: list[int] = []
        self.awaits: PendingPage | None = None
        self.rejoin = self.coming = 0
        self.closed = False
        self.holder = ""
        self.ttl: float | None = None
        self.kind = RequestKind.UNKNOWN

    def extend(self, count: int) -> int:
        manager = self._manager
        missing = -(-(self.computed + count) // manager.page_size) - manager._reservation
        if missing > 0:
            return missing
        if self._slot is None and self._source is not None and manager._held[self._source] == 1:
            # Nobody else needs it any more.
            self._slot, self._source = self._source, None
            self.pages = manager._pages(self._slot)
        if self._slot is None:
            self._slot = manager._reserve()
            if self._slot is None:
                return manager._reservation
            self.pages = manager._pages(self._slot)
            if self._source is not None:
                used = -(-self.computed // manager.page_size)
                copies = list(zip(manager._pages(self._source)[:used], self.pages, strict=False))
                manager._copies += copies
                manager._copied_pages += len(copies)
                manager._give_back(self._source)
                self._source = None
        return 0

    def append(self, tokens: Sequence[int]) -> None:
        pass

    def commit(self, count: int) -> None:
        self.computed += count

    def advance(self, token: int) -> None:
        self.computed += 1

    def sole_pages(self, siblings: Sequence[CacheLease] = ()) -> int:
        leases = [self, *(lease for lease in siblings if isinstance(lease, ContiguousLease))]
        held = Counter(slot for lease in leases for slot in (lease._slot, lease._source) if slot is not None)
        return sum(self._manager._held[slot] == count for slot, count in held.items()) * self._manager._reservation

    def reopen(self) -> ContiguousLease:
        """Nothing is ever on its way."""
        return self

    def fork(self) -> ContiguousLease:
        child = ContiguousLease(self._manager)
        child.computed = self.computed
        origin = self._slot if self._slot is not None else self._source
        child._source = None if origin is None else self._manager._share(origin)
        return child

    def close(self, *, publish_tail: bool = True) -> None:
        if self.closed:
            return
        self.closed = True
        for slot in (self._slot, self._source):
            if slot is not None:
                self._manager._give_back(slot)
        self._slot = self._source = None
        self.pages = []
