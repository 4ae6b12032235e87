"""A cache that lets itself be measured: who holds which pages, and how much of them is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pagetrie.kv import CacheHold, CacheLease, CacheStats, Diagnosis, KVCache, ResetReport
from pagetrie.kv.holding import Holding, measure
from pagetrie.kv.picture import EdgeText, Numbers, PageOwner, Picture
from pagetrie.kv.shares import Allowance, OwnedPages


class MeteredCache:
    """A ``KVCache`` around another one, which notes the leases it gives out (not those made by fork)."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.num_pages = cache.num_pages
        self.page_size = cache.page_size
        self.hold_limit = cache.hold_limit
        self.shares = cache.shares
        self.transfers = cache.transfers
        self._leases: list[CacheLease] = []

    def open(
        self, tokens: Sequence[int], namespace: bytes = b"", *, lookup: bool = True, publish: bool = True
    ) -> CacheLease:
        lease = self._cache.open(tokens, namespace, lookup=lookup, publish=publish)
        self._leases.append(lease)
        return lease

    def hold(self, tokens: Sequence[int], namespace: bytes = b"") -> CacheHold:
        return self._cache.hold(tokens, namespace)

    def give_up_hold(self, namespace: bytes = b"") -> bool:
        return self._cache.give_up_hold(namespace)

    def allow(self, allowances: Mapping[bytes, Allowance]) -> None:
        self._cache.allow(allowances)

    def drop_owner(self, owner: bytes) -> None:
        self._cache.drop_owner(owner)

    def available_to(self, namespace: bytes) -> int:
        return self._cache.available_to(namespace)

    def reach(self, namespace: bytes) -> int:
        return self._cache.reach(namespace)

    def pages_beyond_floor(self, namespace: bytes) -> int:
        return self._cache.pages_beyond_floor(namespace)

    def pin_limit(self, namespace: bytes) -> int:
        return self._cache.pin_limit(namespace)

    def stored_tokens(self, tokens: Sequence[int], namespace: bytes = b"") -> int:
        return self._cache.stored_tokens(tokens, namespace)

    def diagnose(
        self, tokens: Sequence[int], namespace: bytes = b"", others: Mapping[str, bytes] | None = None
    ) -> Diagnosis | None:
        return self._cache.diagnose(tokens, namespace, others)

    def tree_size(self) -> tuple[int, int, int, int]:
        return self._cache.tree_size()

    def owned_pages(self) -> dict[bytes, OwnedPages]:
        return self._cache.owned_pages()

    def declare_public(self, tokens: Sequence[int], namespace: bytes) -> int:
        return self._cache.declare_public(tokens, namespace)

    def withdraw_public(self, tokens: Sequence[int], namespace: bytes) -> None:
        self._cache.withdraw_public(tokens, namespace)

    def picture(
        self,
        leases: Sequence[tuple[CacheLease, bytes]],
        owner_of: Callable[[bytes], PageOwner],
        numbers: Numbers,
        limit: int,
    ) -> Picture:
        return self._cache.picture(leases, owner_of, numbers, limit)

    def texts(self, wanted: Callable[[bytes], bool], numbers: Numbers, budget: int) -> tuple[list[EdgeText], bool]:
        return self._cache.texts(wanted, numbers, budget)

    @property
    def available_pages(self) -> int:
        return self._cache.available_pages

    def pages_for(self, tokens: int) -> int:
        return self._cache.pages_for(tokens)

    def take_copies(self) -> list[tuple[int, int]]:
        return self._cache.take_copies()

    def stats(self) -> CacheStats:
        return self._cache.stats()

    def reset(self) -> ResetReport:
        return self._cache.reset()

    def recount(self) -> dict[str, tuple[int, int]]:
        return self._cache.recount()

    def check(self) -> None:
        self._cache.check()

    def measure(self) -> Holding:
        """Count what is held now."""
        self._leases = [lease for lease in self._leases if not lease.closed]
        return measure(self._leases, self.page_size)
