"""The cache manager: page tables over the pool, shared through the index, copied on write.

The tables themselves are in ``lease``, and so is who owns which page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pagetrie.kv.diagnosis import Diagnosis, diagnose, lost_names
from pagetrie.kv.eviction import EvictionPolicy, make_policy
from pagetrie.kv.eviction_log import Eviction, EvictionLog
from pagetrie.kv.hashchain import HashIndex
from pagetrie.kv.holds import Hold, HoldBook
from pagetrie.kv.interface import CacheLease, CacheStats, PendingPage, ResetReport
from pagetrie.kv.keys import ChainKeys
from pagetrie.kv.lease import Lease
from pagetrie.kv.page_tree import Node, root_of
from pagetrie.kv.picture import EdgeText, Numbers, PageOwner, Picture, draw, read_texts
from pagetrie.kv.pool import PagePool
from pagetrie.kv.public import PublicPrefixes
from pagetrie.kv.radix import RadixIndex
from pagetrie.kv.shares import Allowance, OwnedPages, Share
from pagetrie.kv.tokens import TOKEN_BYTES, pack_tokens, token_array

if TYPE_CHECKING:
    from pagetrie.kv.transfers import Transfers

IndexKind = Literal["radix", "hash", "none"]

_NO_SECRET = bytes(32)


class CacheManager:
    """Paged KV cache with prefix sharing (``KVCache``).

    Args:
        num_pages: pages in the pool.
        page_size: tokens per page.
        index: ``radix``, ``hash``, or ``none`` to share nothing between requests.
        secret: 32 bytes keying the hash index's keys.
        hold_limit: most pages that holds may pin; None for all.
        transfers: what moves pages to and from tiers below the pool, if there are any.
        evictions: remembers what was given up, for ``diagnose``; None to remember nothing.
        policy: decides what is evicted first; made for this pool, used by no other. LRU if None. Each owner of
            namespaces gets one like it.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        index: IndexKind = "radix",
        secret: bytes = _NO_SECRET,
        hold_limit: int | None = None,
        transfers: Transfers | None = None,
        evictions: EvictionLog | None = None,
        policy: EvictionPolicy | None = None,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        policy = policy or make_policy("lru", num_pages, page_size)
        self.index: RadixIndex | HashIndex = (
            HashIndex(self.pool, page_size, policy, ChainKeys(secret))
            if index == "hash"
            else RadixIndex(self.pool, page_size, policy)
        )
        self.shares = index != "none"
        self.hold_limit = (num_pages if hold_limit is None else hold_limit) if self.shares else 0
        self._public = PublicPrefixes(self.index)
        self._holds = HoldBook(self.index, self.hold_limit, self._public, self._trim)
        self._copies: list[tuple[int, int]] = []
        self._copied_pages = 0
        # The next page of every lease that is computing known tokens: (node it follows, its tokens).
        self._computing: dict[tuple[Node, bytes], tuple[Lease, PendingPage]] = {}
        self.transfers = transfers
        if transfers is not None:
            transfers.bind(self)
        self.evictions = evictions
        # The lease that pages are being taken for.
        self._taker: Lease | None = None
        self.index.on_evict = self._evicting

    def open(
        self, tokens: Sequence[int], namespace: bytes = b"", *, lookup: bool = True, publish: bool = True
    ) -> Lease:
        """See ``KVCache.open``. ``tokens`` holds at least one id."""
        packed = pack_tokens(tokens)
        lookup = lookup and self.shares
        limit = len(packed) // TOKEN_BYTES - 1 if lookup else 0
        match = self._public.match(namespace, packed, limit)
        self.index.pin(match.node)
        share = self.index.shares.of(namespace)
        lease = Lease(self, share, token_array(packed), match.root, match.node, publish=publish and self.shares)
        lease._namespace = namespace
        lease._stand_on(match)
        lease.pages = match.pages
        lease._indexed = len(match.pages)
        lease.computed = len(match.pages) * self.page_size
        if match.partial_owner is not None:
            self.index.pin(match.partial_owner)
            lease._partial = (match.partial_page, match.partial_owner)
            lease.computed += match.partial_tokens
        lease.cached_tokens = lease.computed
        if lookup:
            leader = self._computing.get((match.node, lease._next_page()))
            lease.awaits = leader[1] if leader else None
            if leader is None and self.transfers is not None:
                known, rest = lease._beyond_trunk(match.pages, packed)
                ahead = self.transfers.consider(match.root, match.node, known, rest)
                lease.awaits, lease.coming = ahead.awaits, ahead.coming
                begins = match.public_pages * self.page_size
                if not ahead.rejoin and ahead.awaits is None and match.trunk is None and lease.computed < begins:
                    lease.rejoin = begins  # past the public pages it goes on in a namespace of its own
                if ahead.rejoin:
                    lease.rejoin = ahead.rejoin + (len(match.pages) - len(known)) * self.page_size
        self._announce(lease)
        return lease

    def hold(self, tokens: Sequence[int], namespace: bytes = b"") -> Hold:
        """See ``KVCache.hold``."""
        return self._holds.take(namespace, pack_tokens(tokens))

    def give_up_hold(self, namespace: bytes = b"") -> bool:
        return self._holds.give_up(self.index.shares.of(namespace))

    def allow(self, allowances: Mapping[bytes, Allowance]) -> None:
        """See ``KVCache.allow``."""
        self.index.shares.allow(allowances)
        if self.transfers is not None:
            self.transfers.allow(allowances)
        for share in self.index.shares:
            self._trim(share)

    def stored_tokens(self, tokens: Sequence[int], namespace: bytes = b"") -> int:
        return self._public.stored_tokens(namespace, pack_tokens(tokens)) if self.shares else 0

    def declare_public(self, tokens: Sequence[int], namespace: bytes) -> int:
        """See ``KVCache.declare_public``."""
        return self._public.declare(pack_tokens(tokens), namespace) if self.shares else 0

    def withdraw_public(self, tokens: Sequence[int], namespace: bytes) -> None:
        self._public.withdraw(pack_tokens(tokens), namespace)

    def diagnose(
        self, tokens: Sequence[int], namespace: bytes = b"", others: Mapping[str, bytes] | None = None
    ) -> Diagnosis | None:
        """See ``KVCache.diagnose``."""
        if not self.shares:
            return None
        place = self._public.place(pack_tokens(tokens), len(tokens))
        shared = len(place.shared) // TOKEN_BYTES
        if shared and self.index.stored_tokens(place.namespace, place.shared) < shared:
            return diagnose(self.index, self.evictions, tokens[: shared + 1], place.namespace, {}, self.transfers)
        where = {name: place.private(other) for name, other in (others or {}).items()}
        found = diagnose(self.index, self.evictions, tokens[shared:], place.private(namespace), where, self.transfers)
        return found.after(shared)

    def tree_size(self) -> tuple[int, int, int, int]:
        return self.index.size()

    def owned_pages(self) -> dict[bytes, OwnedPages]:
        return {share.owner: OwnedPages(share.active, share.cached, share.floor) for share in self.index.shares}

    def picture(
        self,
        leases: Sequence[tuple[CacheLease, bytes]],
        owner_of: Callable[[bytes], PageOwner],
        numbers: Numbers,
        limit: int,
    ) -> Picture:
        loading = [] if self.transfers is None else self.transfers.pages_on_their_way()
        return draw(self.pool, self.index, leases, loading, owner_of, numbers, limit)

    def texts(self, wanted: Callable[[bytes], bool], numbers: Numbers, budget: int) -> tuple[list[EdgeText], bool]:
        return read_texts(self.index, wanted, numbers, budget)

    @property
    def available_pages(self) -> int:
        return self.pool.free_pages + self.index.cached_pages

    def drop_owner(self, owner: bytes) -> None:
        """See ``KVCache.drop_owner``."""
        share = self.index.shares.owned_by(owner)
        self._holds.release_of(share)
        self.index.on_evict = self._forgetting
        self.index.drop(share)
        self.index.on_evict = self._evicting
        if self.transfers is not None:
            self.transfers.drop_owner(owner)
        self.index.shares.forget(owner)

    def available_to(self, namespace: bytes) -> int:
        return self.index.shares.available(self.index.shares.of(namespace))

    def reach(self, namespace: bytes) -> int:
        return self.index.shares.reach(namespace)

    def pages_beyond_floor(self, namespace: bytes) -> int:
        share = self.index.shares.of(namespace)
        return max(0, share.active - share.floor)

    def pin_limit(self, namespace: bytes) -> int:
        return self._holds.limit_of(self.index.shares.of(namespace))

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take_copies(self) -> list[tuple[int, int]]:
        copies, self._copies = self._copies, []
        return copies

    def stats(self) -> CacheStats:
        loading = 0 if self.transfers is None else self.transfers.loading_pages
        return CacheStats(
            total_pages=self.num_pages,
            free_pages=self.pool.free_pages,
            active_pages=self.pool.private_pages - loading + self.index.active_pages,
            cached_pages=self.index.cached_pages,
            evicted_pages=self.index.evicted_pages,
            copied_pages=self._copied_pages,
            loading_pages=loading,
            pinned_pages=self._holds.pages,
        )

    def reset(self) -> ResetReport:
        """Forget every stored prefix, held ones too. Running leases keep their pages but publish nothing more."""
        self._holds.release_all()
        self.index.on_evict = self._forgetting
        freed, _ = self.index.reset()
        self.index.on_evict = self._evicting
        if self.transfers is not None:
            self.transfers.reset()
        return ResetReport(freed_pages=freed, busy_pages=self.num_pages - self.pool.free_pages)

    def recount(self) -> dict[str, tuple[int, int]]:
        return self.pool.recount() | self.index.recount()

    def check(self) -> None:
        self.pool.check()
        self.index.check()
        self._holds.check()
        stats = self.stats()
        assert stats.free_pages + stats.active_pages + stats.cached_pages + stats.loading_pages == stats.total_pages
        if self.transfers is not None:
            self.transfers.check()

    def copies_from(self, pages: Sequence[int]) -> bool:
        """Whether a copy that was asked for and not handed out yet reads one of these pages."""
        return bool(self._copies) and any(source in pages for source, _ in self._copies)

    # -- for leases --------------------------------------------------------------------------------------------------

    def _take(self, count: int, share: Share, lease: Lease | None = None) -> list[int]:
        """``count`` pages for a share, evicting what is needed; the caller has made sure they are available to it."""
        self._taker = lease
        if share.cap is not None and (over := min(share.pages + count - share.cap, share.cached)) > 0:
            self.index.evict(over, only=share)
        short = count - self.pool.free_pages
        if short > 0:
            self.index.evict(short, share)
        pages = self.pool.allocate(count, share)
        if self.transfers is not None:
            self.transfers.taken(pages)
        return pages

    def _trim(self, share: Share) -> None:
        """Give up what an owner keeps cached beyond its cap."""
        if share.cap is not None and share.beyond_cap:
            self._taker = None
            self.index.evict(share.beyond_cap, only=share)

    def _sole_pages(self, leases: list[Lease]) -> int:
        """Pages that are held by these leases together and by nobody else."""
        private = Counter(page for lease in leases for page in lease.pages[lease._indexed :])
        sole = sum(self.pool.references[page] == count for page, count in private.items())
        index, roots = self.index, {root_of(node) for node in (leases[0]._root, leases[0]._trunk) if node}
        held = ((lease._node, lease._trunk, lease._partial and lease._partial[1]) for lease in leases)
        pinned = [node for nodes in held for node in nodes if node]
        for root in roots:  # no tree must be taken down meanwhile
            index.pin(root)
        before = index.cached_pages
        for node in pinned:
            index.unpin(node)
        sole += index.cached_pages - before
        for node in pinned:
            index.pin(node)
        for root in roots:
            index.unpin(root)
        return sole

    def _evicting(self, node: Node, count: int) -> None:
        """The index is about to give up the last ``count`` pages of a node."""
        if self.transfers is not None:
            self.transfers.evicting(node, count)
        if self.evictions is not None:
            taker, now = self._taker, self.evictions.now()
            eviction = (
                Eviction(now, "room", taker.holder, bytes(taker._root.tokens)) if taker else Eviction(now, "room")
            )
            self.evictions.note(lost_names(self.index, node, count), eviction)

    def _forgetting(self, node: Node, count: int) -> None:
        """The same, because everything is forgotten."""
        if self.evictions is not None:
            names = lost_names(self.index, node, count)
            self.evictions.note(names, Eviction(self.evictions.now(), "reset"))

    def _copy(self, source: int, destination: int) -> None:
        self._copies.append((source, destination))
        self._copied_pages += 1

    def _forget_copies(self, pages: Sequence[int]) -> None:
        """These are given back: what their only holder wanted in them must not come over who gets them next."""
        references = self.pool.references
        self._copies = [(source, page) for source, page in self._copies if page not in pages or references[page] > 1]

    def _announce(self, lease: Lease) -> None:
        """Let others know which page this lease computes next, so that they can wait for it."""
        if lease._announced is not None:
            key, pending = lease._announced
            pending.done = True
            del self._computing[key]
            lease._announced = None
        page = lease._next_page()
        if lease._publish and not lease.closed and len(page) == self.index.page_bytes:
            key = (lease._node, page)
            if key not in self._computing:
                pending = PendingPage()
                lease._announced = (key, pending)
                self._computing[key] = (lease, pending)
