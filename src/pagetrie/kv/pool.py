"""The page pool: which physical page belongs to whom.

Every page is in exactly one state:

- free: on the free list;
- private: held by one or more leases, by reference count, and known to no index;
- indexed: owned by the prefix index, whose pins decide whether it is active or merely cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagetrie.kv.shares import Share

FREE, PRIVATE, INDEXED = 0, 1, 2


class PageStateError(AssertionError):
    """A page was asked to make a transition that its state doesn't allow. Always a bug in the cache manager."""


class PagePool:
    """Fixed set of physical pages, numbered from 0.

    Args:
        num_pages: how many pages exist.

    Attributes:
        owner: per page, whose it is if it isn't free; shares count their pages.
        common: the share of whoever is told apart from nobody.
        changed: shares whose counts have changed since somebody emptied this.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least 1 page, got {num_pages}")
        self.num_pages = num_pages
        # Taken from the end: low page numbers first, and the most recently freed (warm) page first.
        self._free = list(range(num_pages - 1, -1, -1))
        self.state = bytearray(num_pages)
        self.references = [0] * num_pages
        self.private_pages = 0
        self.common = Share()
        self.owner = [self.common] * num_pages
        self.changed: dict[Share, None] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def allocate(self, count: int, share: Share | None = None) -> list[int]:
        """Take ``count`` free pages as private with one reference each. The caller has made sure they exist."""
        free, state, references, owner = self._free, self.state, self.references, self.owner
        share = share or self.common
        if count > len(free):
            raise PageStateError(f"{count} pages asked for, {len(free)} free")
        keep = len(free) - count
        pages = free[keep:]
        pages.reverse()
        del free[keep:]
        for page in pages:
            state[page] = PRIVATE
            references[page] = 1
            owner[page] = share
        self.private_pages += count
        share.pages += count
        self.changed[share] = None
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each private page."""
        for page in pages:
            if self.state[page] != PRIVATE:
                raise PageStateError(f"page {page} is not private")
            self.references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference from each private page; those without any become free."""
        for page in pages:
            if self.state[page] != PRIVATE:
                raise PageStateError(f"page {page} is not private")
            self.references[page] -= 1
            if not self.references[page]:
                self.state[page] = FREE
                self.private_pages -= 1
                self._free.append(page)
                share = self.owner[page]
                share.pages -= 1
                self.changed[share] = None

    def give_to_index(self, pages: Sequence[int], share: Share | None = None) -> None:
        """Hand private pages with exactly one holder over to the index; from then on they are the share's."""
        state, references, owner = self.state, self.references, self.owner
        share = share or self.common
        for page in pages:
            if state[page] != PRIVATE or references[page] != 1:
                raise PageStateError(f"page {page} is not private to one holder")
            state[page] = INDEXED
            references[page] = 0
            if (before := owner[page]) is not share:
                owner[page] = share
                before.pages -= 1
                share.pages += 1
                self.changed[before] = None
        self.private_pages -= len(pages)
        self.changed[share] = None

    def take_from_index(self, pages: Sequence[int]) -> None:
        """The index lets go of pages, all of one share; they become free."""
        state = self.state
        for page in pages:
            if state[page] != INDEXED:
                raise PageStateError(f"page {page} is not indexed")
            state[page] = FREE
        self._free += pages
        if pages:
            share = self.owner[pages[0]]
            share.pages -= len(pages)
            self.changed[share] = None

    def recount(self) -> dict[str, tuple[int, int]]:
        """Derive the free list and the count of private pages anew from the pages' states. See ``KVCache.recount``."""
        free = [page for page, state in enumerate(self.state) if state == FREE]
        private = self.state.count(PRIVATE)
        changes = {"free pages": (len(self._free), len(free)), "private pages": (self.private_pages, private)}
        if sorted(self._free) != free:
            self._free = free[::-1]
        self.private_pages = private
        for share in {*self.owner}:
            share.pages = 0
        for page, state in enumerate(self.state):
            self.owner[page].pages += state != FREE
        return {name: (was, now) for name, (was, now) in changes.items() if was != now}

    def check(self) -> None:
        """Recount everything by brute force. Raises PageStateError on any disagreement (for tests)."""
        if len(set(self._free)) != len(self._free):
            raise PageStateError("a page is on the free list twice")
        if any(self.state[page] != FREE for page in self._free):
            raise PageStateError("a page on the free list is not free")
        if self.state.count(FREE) != len(self._free):
            raise PageStateError("a free page is missing from the free list")
        if self.state.count(PRIVATE) != self.private_pages:
            raise PageStateError("the count of private pages is off")
        for page, references in enumerate(self.references):
            if (references > 0) != (self.state[page] == PRIVATE):
                raise PageStateError(f"page {page} has {references} references in state {self.state[page]}")
