"""Public prefixes: what everybody may share, though all else is private to a namespace.

A prompt that begins with a public prefix stands on pages of a namespace that all share, up to the last page that lies
whole inside the prefix. All that follows is stored in the prompt's own namespace, narrowed by the prefix. So the page
in which public and private meet is private, and who asked for what after a public prefix shows nowhere.

Whoever comes first computes the public pages; that gives nothing away, since everybody knows what they hold.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blake3 import blake3

from pagetrie.kv.namespace import extend_namespace
from pagetrie.kv.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from pagetrie.kv.hashchain import HashIndex
    from pagetrie.kv.page_tree import Match
    from pagetrie.kv.radix import RadixIndex

_KIND = "~after public"
"""The part of a namespace that says what comes before its first page; it sorts after all others."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a prompt belongs.

    Attributes:
        shared: its leading whole pages that are public (u32 LE); empty if there are none.
        namespace: of these.
    """

    shared: bytes = b""
    namespace: bytes = b""

    def private(self, namespace: bytes) -> bytes:
        """The namespace of what follows, for a prompt of this one."""
        return extend_namespace(namespace, _KIND, blake3(self.shared).digest()) if self.shared else namespace


class PublicPrefixes:
    """The declared prefixes of a cache, and matching with them in mind.

    Args:
        index: where all pages are, public ones too.
    """

    def __init__(self, index: RadixIndex | HashIndex) -> None:
        self._index = index
        # (whole pages of the prefix, its namespace), longest first.
        self._declared: list[tuple[bytes, bytes]] = []

    def declare(self, tokens: bytes, namespace: bytes) -> int:
        """Make a prefix (u32 LE) public, from the next lookup on. Returns how many whole pages it has."""
        pages = len(tokens) // self._index.page_bytes
        entry = tokens[: pages * self._index.page_bytes], namespace
        if pages and entry not in self._declared:
            insort(self._declared, entry, key=lambda declared: -len(declared[0]))
        return pages

    def withdraw(self, tokens: bytes, namespace: bytes) -> None:
        """Undo ``declare``; pages of it that are stored are then only found by what is still public."""
        pages = len(tokens) // self._index.page_bytes
        entry = tokens[: pages * self._index.page_bytes], namespace
        if entry in self._declared:
            self._declared.remove(entry)

    def match(self, namespace: bytes, tokens: bytes, limit: int) -> Match:
        """The longest stored prefix of ``tokens``, at most ``limit`` tokens of it: see ``RadixIndex.match``.

        If all public pages are stored, ``trunk`` is the node at their end, and ``root`` and ``node`` are private.
        """
        place = self.place(tokens, limit)
        if not place.shared:
            return self._index.match(namespace, tokens, limit)
        size = len(place.shared)
        match = self._index.match(place.namespace, place.shared, size // TOKEN_BYTES)
        private = place.private(namespace)
        if len(match.pages) * self._index.page_bytes == size:
            trunk, pages = match.node, match.pages
            match = self._index.match(private, tokens[size:], limit - size // TOKEN_BYTES)
            match.trunk = trunk
            match.pages = pages + match.pages
        match.public_pages = size // self._index.page_bytes
        match.private = private
        return match

    def stored_tokens(self, namespace: bytes, tokens: bytes) -> int:
        """Leading tokens that whole stored pages hold. Changes nothing."""
        place = self.place(tokens, len(tokens) // TOKEN_BYTES)
        if not place.shared:
            return self._index.stored_tokens(namespace, tokens)
        stored = self._index.stored_tokens(place.namespace, place.shared)
        if stored * TOKEN_BYTES < len(place.shared):
            return stored
        return stored + self._index.stored_tokens(place.private(namespace), tokens[len(place.shared) :])

    def place(self, tokens: bytes, limit: int) -> Place:
        """The longest public part of ``tokens``, of at most ``limit`` tokens."""
        best = Place()
        page_bytes = self._index.page_bytes
        most = limit * TOKEN_BYTES // page_bytes * page_bytes
        for prefix, namespace in self._declared:
            if len(prefix) <= len(best.shared):
                break  # those that follow are no longer
            part = prefix[:most]
            if len(part) > len(best.shared) and tokens.startswith(part):
                best = Place(part, namespace)
        return best
