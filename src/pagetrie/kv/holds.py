"""Holds: stored prefixes that nobody computes on now and that eviction must leave alone.

A hold pins what a lease would have matched, to the token, and costs no page of its own. Holds on one trunk share its
pages as leases do, so pages are counted once however many holds stand on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from pagetrie.errors import HoldLimitError
from pagetrie.kv.hashchain import HashIndex
from pagetrie.kv.page_tree import Node
from pagetrie.kv.public import PublicPrefixes
from pagetrie.kv.radix import RadixIndex
from pagetrie.kv.shares import Share
from pagetrie.kv.tokens import TOKEN_BYTES


class Hold:
    """A pinned prefix (``CacheHold``). Made by ``CacheManager.hold`` and ``fork``.

    Attributes:
        tokens: length of the prefix; 0 if nothing of it was stored.
        pages: the pages it stands on, the last one perhaps filled in part; empty once released.
        released: given back, by its owner or by the cache (``give_up_hold``, ``reset``).
    """

    __slots__ = ("_book", "_nodes", "pages", "released", "tokens")

    def __init__(self, book: HoldBook, nodes: list[Node], pages: list[int], tokens: int) -> None:
        self._book = book
        self._nodes = nodes
        self.pages = pages
        self.tokens = tokens
        self.released = False

    def fork(self) -> Hold:
        """A second hold on the same prefix. Takes no page. A fork of a released hold is released too."""
        if self.released:
            fork = Hold(self._book, [], [], 0)
            fork.released = True
            return fork
        return self._book.add(self._nodes, list(self.pages), self.tokens)

    def touch(self) -> None:
        """Mark as used now: ``give_up_hold`` takes the least recently used one."""
        self._book.touch(self)

    def release(self) -> None:
        """Give the prefix back; it stays cached while its pages aren't needed. Idempotent."""
        self._book.release(self)


class HoldBook:
    """All holds of a cache, least recently used first.

    Args:
        index: the tree they stand on.
        limit: most pages that holds may pin together.
        public: finds prefixes in the index.
        trim: called with an owner's share after a hold of its pages was released.
    """

    def __init__(
        self, index: RadixIndex | HashIndex, limit: int, public: PublicPrefixes, trim: Callable[[Share], None]
    ) -> None:
        self.limit = limit
        self._index = index
        self._public = public
        self._trim = trim
        self._holds: dict[Hold, None] = {}
        # Page -> holds that stand on it. A pinned page keeps its number.
        self._holders: Counter[int] = Counter()

    @property
    def pages(self) -> int:
        """Pages that at least one hold stands on."""
        return len(self._holders)

    def take(self, namespace: bytes, tokens: bytes) -> Hold:
        """Hold the longest stored prefix of ``tokens`` (u32 LE).

        Raises:
            HoldLimitError: more pages would be pinned than ``limit``, than the owner may pin, or than others' floors
                leave; nothing has changed.
        """
        match = self._public.match(namespace, tokens, len(tokens) // TOKEN_BYTES)
        pages = match.pages
        length = len(pages) * self._index.page_size + match.partial_tokens
        nodes = [match.node] if match.trunk is None else [match.node, match.trunk]
        if match.partial_owner is not None:
            nodes.append(match.partial_owner)
            pages = [*pages, match.partial_page]
        shares = self._index.shares
        share = shares.of(namespace)
        hold = self.add(nodes, pages, length)
        limit = self.limit_of(share)
        if self.pages > self.limit or share.pinned > limit or shares.available(share) < 0:
            pinned = share.pinned
            hold.release()
            # Where others' floors or public prefixes leave no room, all that it has is all that it may have now.
            limit = limit if pinned > limit else share.pinned
            raise HoldLimitError(adds=pinned - share.pinned, pinned=share.pinned, limit=limit)
        return hold

    def limit_of(self, share: Share) -> int:
        """Most pages that an owner may pin."""
        return int(share.pin_part * self.limit)

    def add(self, nodes: list[Node], pages: list[int], tokens: int) -> Hold:
        """Pin a prefix that is matched or pinned already."""
        hold = Hold(self, nodes, pages, tokens)
        for node in nodes:
            self._index.pin(node)
        owner = self._index.pool.owner
        for page in pages:
            owner[page].pinned += not self._holders[page]
            self._holders[page] += 1
        self._holds[hold] = None
        return hold

    def touch(self, hold: Hold) -> None:
        if not hold.released:
            del self._holds[hold]
            self._holds[hold] = None

    def release(self, hold: Hold) -> None:
        if hold.released:
            return
        hold.released = True
        del self._holds[hold]
        for page in hold.pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self._index.pool.owner[page].pinned -= 1
        shares = {node.share: None for node in hold._nodes}
        for node in hold._nodes:
            self._index.unpin(node)
        for share in shares:
            self._trim(share)
        hold.pages, hold._nodes = [], []

    def give_up(self, share: Share) -> bool:
        """Release a hold that keeps pages from an owner: the least recently used of its own, else of those that stand
        on more than their owners' floors. False if there is none."""
        rest: Hold | None = None
        for hold in self._holds:
            if any(node.share is share for node in hold._nodes):
                self.release(hold)
                return True
            # Behind a public prefix it stands on pages of two owners.
            above = [node.share.active > node.share.floor for node in hold._nodes if node.parent is not None]
            if rest is None and all(above):
                rest = hold
        if rest is not None:
            self.release(rest)
        return rest is not None

    def release_all(self) -> None:
        for hold in list(self._holds):
            self.release(hold)

    def release_of(self, share: Share) -> None:
        """Release what stands on an owner's pages."""
        for hold in [hold for hold in self._holds if any(node.share is share for node in hold._nodes)]:
            self.release(hold)

    def check(self) -> None:
        """Recount by brute force (for tests)."""
        assert self._holders == Counter(page for hold in self._holds for page in hold.pages)
        pool = self._index.pool
        pinned = Counter(pool.owner[page] for page in self._holders)
        assert all(share.pinned == pinned[share] for share in self._index.shares)
        if not self._holds:
            return
        assert self.pages <= self.limit
        indexed = {page for node in self._index.nodes() if node.pins or node.active_children for page in node.pages}
        assert set(self._holders) <= indexed, "a held page is not an active page of the index"
