"""Radix index: a compressed tree of token prefixes (RadixAttention, Zheng et al. 2023, arXiv:2312.07104).

Edges hold many pages and are split at page boundaries only where prefixes part or a match ends. Inside the page where
a query parts from the tree, the match is still exact to the token; that page is then copied on write.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left

from xxhash import xxh3_128

from pagetrie.kv.eviction.policy import EvictionPolicy
from pagetrie.kv.page_tree import Match, Node, PageTree, is_active
from pagetrie.kv.pool import PagePool
from pagetrie.kv.tokens import TOKEN_BYTES, common_prefix


class RadixIndex(PageTree):
    """Work per match follows the number of edges, not of pages: an edge is compared by one memcmp."""

    def __init__(self, pool: PagePool, page_size: int, policy: EvictionPolicy) -> None:
        super().__init__(pool, page_size, policy)
        self._naming_seed = secrets.randbits(64)

    def namer(self, node: Node | None, namespace: bytes) -> _PathNamer:
        """See ``PageTree.namer``. The whole path is hashed: 10 GB/s, and only when pages are given up."""
        path = []
        while node is not None and node.parent is not None:
            path.append(node.tokens)
            node = node.parent
        return _PathNamer(self._naming_seed, namespace, path[::-1])

    def match(self, namespace: bytes, tokens: bytes, limit: int) -> Match:
        """Longest stored prefix of ``tokens`` (u32 LE), at most ``limit`` tokens of it.

        Splits the last edge where the match ends. The caller pins the path in the same act, so that it is touched when
        it is let go.
        """
        match = Match(self.root(namespace))
        node, position, page_bytes = match.node, 0, self.page_bytes
        limit *= TOKEN_BYTES
        full_limit = limit - limit % page_bytes
        while position < full_limit:
            keys = node.keys
            key = tokens[position : position + page_bytes]
            place = bisect_left(keys, key)
            if place == len(keys) or keys[place] != key:
                break
            child = node.children[place]
            edge = child.tokens
            if position + len(edge) <= full_limit and tokens.startswith(edge, position):
                position += len(edge)
            else:
                matched = common_prefix(edge, tokens, position, full_limit - position) // page_bytes
                child = self._split(node, place, matched)
                position += matched * page_bytes
            match.pages += child.pages
            node = child
        match.node = node
        self._match_partial(match, tokens[position : min(position + page_bytes, limit)])
        return match

    def stored_tokens(self, namespace: bytes, tokens: bytes) -> int:
        """Leading tokens of ``tokens`` (u32 LE) that whole stored pages hold. Changes nothing."""
        node, position, page_bytes = self._roots.get(namespace), 0, self.page_bytes
        while node is not None:
            key = tokens[position : position + page_bytes]
            place = bisect_left(node.keys, key)
            if len(key) < page_bytes or place == len(node.keys) or node.keys[place] != key:
                break
            node = node.children[place]
            shared = common_prefix(node.tokens, tokens, position, len(tokens))
            position += shared - shared % page_bytes
            if shared < len(node.tokens):
                break
        return position // TOKEN_BYTES

    def insert(self, node: Node, tokens: bytes, pages: list[int]) -> tuple[Node, list[int]]:
        """Publish full pages below ``node``, which the caller has pinned once.

        Where the tree has such a page already, the tree's page is kept and the caller's is left to it.

        Returns:
            The node at the end of the inserted tokens, and the tree's page for each of the caller's.
        """
        held, position, page_bytes = node, 0, self.page_bytes
        kept: list[int] = []
        while position < len(tokens):
            key = tokens[position : position + page_bytes]
            place = bisect_left(node.keys, key)
            if place < len(node.keys) and node.keys[place] == key:
                child = node.children[place]
                matched = common_prefix(child.tokens, tokens, position, len(tokens) - position) // page_bytes
                if matched < len(child.pages):
                    child = self._split(node, place, matched)
                kept += child.pages
                position += matched * page_bytes
                node = child
                continue
            new = pages[position // page_bytes :]
            kept += new
            # A leaf that nobody else stands on grows in place, so that one sequence stays one edge.
            if node.parent is not None and not node.children and node.pins == (node is held):
                self._grow(node, tokens[position:], new)
            else:
                node = self._add_child(node, tokens[position:], new)
            break
        return node, kept

    def _grow(self, node: Node, tokens: bytes, pages: list[int]) -> None:
        self.pool.give_to_index(pages, node.share)
        node.tokens += tokens
        node.pages += pages
        self.indexed_pages += len(pages)
        if is_active(node):
            self.active_pages += len(pages)
        else:
            node.share.cached += len(pages)

    def _first_page(self, parent: Node, place: int) -> Node:
        child = parent.children[place]
        return child if len(child.pages) == 1 else self._split(parent, place, 1)

    def _split(self, parent: Node, place: int, pages: int) -> Node:
        """Cut the child at ``place`` after ``pages`` pages. The lower part keeps its identity, so pins stay right."""
        lower = parent.children[place]
        cut = pages * self.page_bytes
        upper = Node(parent, lower.share, lower.tokens[:cut], lower.pages[:pages], lower.start, lower.key)
        del lower.tokens[:cut], lower.pages[:pages]
        lower.parent = upper
        lower.start += pages
        lower.key = bytes(lower.tokens[: self.page_bytes])
        upper.keys.append(lower.key)
        upper.children.append(lower)
        upper.active_children = int(is_active(lower))
        parent.children[place] = upper
        upper.share.policy.split(upper, lower)
        return upper


class _PathNamer:
    """XXH3-128 over a namespace and the tokens from its root on, under a seed of this process."""

    def __init__(self, seed: int, namespace: bytes, path: list[bytearray]) -> None:
        self._hash = xxh3_128(len(namespace).to_bytes(8, "little") + namespace, seed)
        for tokens in path:
            self._hash.update(tokens)

    def name(self, tokens: bytes) -> bytes:
        hashed = self._hash.copy()
        hashed.update(tokens)
        return hashed.digest()

    def go_on(self, tokens: bytes) -> None:
        self._hash.update(tokens)
