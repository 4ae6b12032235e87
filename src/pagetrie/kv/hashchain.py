"""Chained-hash index: one entry per full page, found by a keyed hash of everything up to it.

The form that vLLM's prefix cache has, behind the same interface as the radix tree and with the same hits; each checks
the other. The hash only proposes: an entry counts as a hit if its parent and its tokens are equal too.
"""

from __future__ import annotations

from pagetrie.kv.eviction.policy import EvictionPolicy
from pagetrie.kv.keys import ChainKeys
from pagetrie.kv.page_tree import Match, Node, PageTree
from pagetrie.kv.pool import PagePool
from pagetrie.kv.tokens import TOKEN_BYTES


class HashIndex(PageTree):
    """Work per match follows the number of pages.

    Args:
        pool: owner of the pages.
        page_size: tokens per page.
        policy: decides what is evicted first.
        keys: how pages are hashed.
    """

    def __init__(self, pool: PagePool, page_size: int, policy: EvictionPolicy, keys: ChainKeys) -> None:
        super().__init__(pool, page_size, policy)
        self._keys = keys
        self._entries: dict[bytes, Node] = {}
        self.refused_hits = 0

    def _make_root(self, namespace: bytes) -> Node:
        root = super()._make_root(namespace)
        root.chain_key = self._keys.root(namespace)
        return root

    def namer(self, node: Node | None, namespace: bytes) -> _ChainNamer:
        """See ``PageTree.namer``."""
        start = self._keys.root(namespace) if node is None else node.chain_key
        return _ChainNamer(self._keys, start, self.page_bytes)

    def match(self, namespace: bytes, tokens: bytes, limit: int) -> Match:
        """See ``RadixIndex.match``."""
        match = Match(self.root(namespace))
        node, pages, page_bytes = match.root, match.pages, self.page_bytes
        entries, key_of = self._entries, self._keys.page
        limit *= TOKEN_BYTES
        position = 0
        while (end := position + page_bytes) <= limit:
            page = tokens[position:end]
            entry = entries.get(key_of(node.chain_key, page))
            if entry is None:
                break
            if entry.parent is not node or entry.tokens != page:
                self.refused_hits += 1
                break
            pages += entry.pages
            node = entry
            position = end
        match.node = node
        self._match_partial(match, tokens[position : min(position + page_bytes, limit)])
        return match

    def stored_tokens(self, namespace: bytes, tokens: bytes) -> int:
        """See ``RadixIndex.stored_tokens``."""
        node, position, page_bytes = self._roots.get(namespace), 0, self.page_bytes
        while node is not None and position + page_bytes <= len(tokens):
            page = tokens[position : position + page_bytes]
            entry = self._entries.get(self._keys.page(node.chain_key, page))
            if entry is None or entry.parent is not node or entry.tokens != page:
                break
            node = entry
            position += page_bytes
        return position // TOKEN_BYTES

    def insert(self, node: Node, tokens: bytes, pages: list[int]) -> tuple[Node, list[int]]:
        """See ``RadixIndex.insert``. Stops early, keeping fewer pages, where another page has taken the key."""
        kept: list[int] = []
        for index, page in enumerate(pages):
            page_tokens = tokens[index * self.page_bytes : (index + 1) * self.page_bytes]
            key = self._keys.page(node.chain_key, page_tokens)
            entry = self._entries.get(key)
            if entry is None:
                entry = self._add_child(node, page_tokens, [page])
                entry.chain_key = key
                self._entries[key] = entry
            elif entry.parent is not node or entry.tokens != page_tokens:
                self.refused_hits += 1
                break
            kept += entry.pages
            node = entry
        return node, kept

    def reset(self) -> tuple[int, int]:
        result = super().reset()
        self._entries.clear()
        return result

    def _forget(self, node: Node) -> None:
        if self._entries.get(node.chain_key) is node:
            del self._entries[node.chain_key]


class _ChainNamer:
    """A page's name is its key."""

    def __init__(self, keys: ChainKeys, parent: bytes, page_bytes: int) -> None:
        self._keys = keys
        self._parent = parent
        self._page_bytes = page_bytes

    def name(self, tokens: bytes) -> bytes:
        return self._keys.page(self._parent, tokens)

    def go_on(self, tokens: bytes) -> None:
        for start in range(0, len(tokens), self._page_bytes):
            self._parent = self.name(tokens[start : start + self._page_bytes])
