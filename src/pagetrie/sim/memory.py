"""Page contents without keys and values: a slot holds the identity of what a model would have stored there.

A key or value depends on its token and all before it, so its identity is a hash of that prefix. A page remembers the
prefix that it continues and the prefix after each of its slots; a reader follows its page table and finds out whether
the pages are one unbroken prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MASK = 2**64 - 1
EMPTY_PREFIX = 0x9E3779B97F4A7C15
"""Identity of the prefix of no tokens."""


class PageContentError(AssertionError):
    """A step read what isn't there: a page never written, overwritten, stale or copied wrongly."""


def extend_prefix(prefix: int, token: int) -> int:
    """Identity (64 bits) of the prefix that ends in ``token`` after ``prefix``. Mixes like splitmix64; no secret."""
    mixed = (prefix ^ (token + 1) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = (mixed ^ mixed >> 29) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 32


class PageMemory:
    """What the pages of a pool hold.

    Args:
        num_pages: pages in the pool.
        page_size: tokens per page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        # Per page: the prefix before its first slot, then the prefix after each written slot. Empty: never written.
        self._pages: list[list[int]] = [[] for _ in range(num_pages)]

    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy whole pages, (source, destination), in order."""
        for source, destination in copies:
            self._pages[destination] = self._pages[source].copy()

    def clear(self, pages: Iterable[int]) -> None:
        """Make pages as if never written."""
        for page in pages:
            self._pages[page] = []

    def write(self, table: Sequence[int], start: int, token_ids: Sequence[int], root: int = EMPTY_PREFIX) -> None:
        """Store ``token_ids`` at positions ``start`` and on, continuing what the page before holds.

        Whatever the page held in later slots is gone.

        Raises:
            PageContentError: the position before ``start`` was never written, or the table has no page for one.
        """
        size = self.page_size
        last = (start + len(token_ids) - 1) // size
        if last >= len(table):
            raise PageContentError(f"position {start + len(token_ids) - 1} has no page: the table has {len(table)}")
        prefix = root if start == 0 else self._at(table, start - 1)
        number, slot = divmod(start, size)
        content = self._pages[table[number]]
        if slot:
            if len(content) <= slot:
                raise PageContentError(f"position {start - 1} was never written in page {table[number]}")
            del content[slot + 1 :]
        else:
            content = self._pages[table[number]] = [prefix]
        for token in token_ids:
            if slot == size:
                number, slot = number + 1, 0
                content = self._pages[table[number]] = [prefix]
            prefix = extend_prefix(prefix, token)
            content.append(prefix)
            slot += 1

    def read(self, table: Sequence[int], end: int, root: int = EMPTY_PREFIX) -> int:
        """Follow positions ``0..end-1`` through a page table and return the identity of the prefix they hold.

        Raises:
            PageContentError: a position was never written, or a page doesn't continue the one before it.
        """
        pages, size, prefix = self._pages, self.page_size, root
        full, rest = divmod(end, size)
        for number in range(full):
            content = pages[table[number]]
            if len(content) <= size or content[0] != prefix:
                raise self._broken(table, number, size, prefix)
            prefix = content[size]
        if rest:
            content = pages[table[full]]
            if len(content) <= rest or content[0] != prefix:
                raise self._broken(table, full, rest, prefix)
            prefix = content[rest]
        return prefix

    def prefixes(self, table: Sequence[int], start: int, end: int) -> list[int]:
        """Identities of the prefixes that end at positions ``start..end-1``, which a ``read`` has found in order."""
        return [self._at(table, position) for position in range(start, end)]

    def _at(self, table: Sequence[int], position: int) -> int:
        number, slot = divmod(position, self.page_size)
        content = self._pages[table[number]]
        if len(content) <= slot + 1:
            raise PageContentError(f"position {position} was never written in page {table[number]}")
        return content[slot + 1]

    def _broken(self, table: Sequence[int], number: int, needed: int, prefix: int) -> PageContentError:
        content = self._pages[table[number]]
        if len(content) <= needed:
            what = f"holds {max(0, len(content) - 1)} of the {needed} tokens to read"
        else:
            what = f"continues another prefix ({content[0]:x}) than the pages before it hold ({prefix:x})"
        return PageContentError(f"logical page {number} of {len(table)}, physical page {table[number]}, {what}")
