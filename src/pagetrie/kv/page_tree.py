"""What both prefix indexes are made of: a tree of pages with pins, recency and leaf-tail eviction.

A node is an edge label (tokens) with the pages that hold it. Only the deepest node of a held prefix is pinned; its
ancestors are safe because eviction takes leaves only. A node is *active* while it or a descendant is pinned, *cached*
otherwise.

Eviction takes the last page of a leaf that no lease holds, so what remains is always a usable prefix. Which leaf goes
first is the policy's choice (``pagetrie.kv.eviction``); it is told of every use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from pagetrie.kv.eviction.policy import EvictionPolicy, Use
from pagetrie.kv.pool import INDEXED, PagePool
from pagetrie.kv.shares import Share, Shares
from pagetrie.kv.tokens import TOKEN_BYTES, common_prefix


class Node:
    """An edge of the tree with its pages.

    Attributes:
        tokens: the edge's token ids (u32 LE). Whole pages, or, for a *partial leaf*, less than one page. On a root:
            the namespace.
        pages: physical pages holding them.
        start: number of pages before them in the prefix.
        key: the tokens of its first page, by which its parent finds it.
        keys, children: parallel, sorted by key; a key is the child's first page of tokens. Sorting puts the longest
            common prefix with any query next to the query's place.
        share: the owner's part of the pool that its pages count for.
        pins: leases whose held prefix ends at this node's end, or that are about to copy one of its pages.
        active_children: children that are active.
        last_used: tick of the last operation that touched it.
        mark: whatever the eviction policy notes of it.
        chain_key: key of the last page (hash index only).
        dead: on a root: dropped by a reset, can't be matched any more.
    """

    __slots__ = (
        "active_children",
        "chain_key",
        "children",
        "dead",
        "key",
        "keys",
        "last_used",
        "mark",
        "pages",
        "parent",
        "pins",
        "share",
        "start",
        "tokens",
    )

    def __init__(
        self,
        parent: Node | None,
        share: Share,
        tokens: bytes | bytearray,
        pages: list[int],
        start: int = 0,
        key: bytes = b"",
    ) -> None:
        self.parent = parent
        self.share = share
        self.tokens = bytearray(tokens)
        self.pages = pages
        self.start = start
        self.key = key
        self.keys: list[bytes] = []
        self.children: list[Node] = []
        self.pins = 0
        self.active_children = 0
        self.last_used = 0
        self.mark: Any = None
        self.chain_key = b""
        self.dead = False


class Match:
    """A matched prefix: full ``pages`` from ``root`` to ``node``, then ``partial_tokens`` tokens of ``partial_page``.

    ``partial_owner`` is the node that owns that page, None without a partial match. The last three are for prompts
    that begin with a public prefix; see ``PublicPrefixes.match``.
    """

    __slots__ = (
        "node",
        "pages",
        "partial_owner",
        "partial_page",
        "partial_tokens",
        "private",
        "public_pages",
        "root",
        "trunk",
    )

    def __init__(self, root: Node) -> None:
        self.root = root
        self.node = root
        self.pages: list[int] = []
        self.partial_page = -1
        self.partial_tokens = 0
        self.partial_owner: Node | None = None
        self.trunk: Node | None = None
        self.public_pages = 0
        self.private = b""


class PageNamer(Protocol):
    """Names pages one after another; a name stands for a page's tokens and for all tokens before it."""

    def name(self, tokens: bytes) -> bytes:
        """The name that a page of ``tokens``, a whole one or part of one, has here."""
        ...

    def go_on(self, tokens: bytes) -> None:
        """Step over whole pages."""
        ...


class PageTree(ABC):
    """Pins, recency, eviction and page counts. The radix and the hash index add how to match and insert.

    Args:
        pool: the pages' owner of record; pages in the tree are in its ``indexed`` state.
        page_size: tokens per page.
        policy: decides which of an owner's pages are evicted first.

    Attributes:
        shares: the owners' parts of the pool.
    """

    def __init__(self, pool: PagePool, page_size: int, policy: EvictionPolicy) -> None:
        self.pool = pool
        self.shares = Shares(pool, policy)
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.indexed_pages = 0
        self.active_pages = 0
        self.evicted_pages = 0
        # Hears of pages before they are evicted: the node, and how many of its last pages.
        self.on_evict: Callable[[Node, int], None] | None = None
        self._roots: dict[bytes, Node] = {}
        self._dead_roots: list[Node] = []

    @property
    def cached_pages(self) -> int:
        """Pages that no lease holds. All can be evicted: under an inactive node everything is inactive."""
        return self.indexed_pages - self.active_pages

    def root(self, namespace: bytes) -> Node:
        """The root of a namespace, made when first asked for."""
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = self._make_root(namespace)
        return node

    def find_root(self, namespace: bytes) -> Node | None:
        """The root of a namespace; None if nothing of it is stored or held."""
        return self._roots.get(namespace)

    def roots(self) -> list[Node]:
        """The roots of namespaces that can be matched, and of those that a reset has left to their holders."""
        return [*self._roots.values(), *self._dead_roots]

    @abstractmethod
    def namer(self, node: Node | None, namespace: bytes) -> PageNamer:
        """Names the pages that follow ``node`` (of whole pages, or a root); of a namespace's first pages for None."""

    @abstractmethod
    def stored_tokens(self, namespace: bytes, tokens: bytes) -> int:
        """Leading tokens of ``tokens`` (u32 LE) that whole stored pages hold. Changes nothing."""

    def _make_root(self, namespace: bytes) -> Node:
        return Node(None, self.shares.of(namespace), namespace, [])

    # -- pins and recency ----------------------------------------------------------------------------------------

    def pin(self, node: Node) -> None:
        """Protect the prefix that ends at ``node`` from eviction."""
        node.pins += 1
        if node.pins > 1 or node.active_children:
            return
        share = node.share
        if not node.children:
            share.policy.remove(node)
        self.pool.changed[share] = None
        while True:
            self.active_pages += len(node.pages)
            share.cached -= len(node.pages)
            parent = node.parent
            if parent is None:
                return
            parent.active_children += 1
            if parent.active_children > 1 or parent.pins:
                return
            node = parent

    def unpin(self, node: Node) -> None:
        """Undo one ``pin``."""
        node.pins -= 1
        if node.pins or node.active_children:
            return
        share = node.share
        self.pool.changed[share] = None
        while not node.pins and not node.active_children:
            self.active_pages -= len(node.pages)
            share.cached += len(node.pages)
            parent = node.parent
            if parent is None:
                self._on_idle_root(node)
                return
            if not node.children:
                share.policy.add(node)
            parent.active_children -= 1
            node = parent

    def solely_pinned(self, node: Node, partial_owner: Node | None) -> int:
        """Pages that would turn from active to cached if one pin left ``node`` and one its child ``partial_owner``."""
        count = leaving = 0
        if partial_owner is not None and partial_owner.pins == 1 and not partial_owner.active_children:
            count, leaving = len(partial_owner.pages), 1
        pins = 1
        current: Node | None = node
        while current is not None and current.pins == pins and current.active_children == leaving:
            count += len(current.pages)
            current, pins, leaving = current.parent, 0, 1
        return count

    def touch(self, node: Node, use: Use | None) -> None:
        """Tell the policy that the path from the root to ``node`` was used, or just looked at (None)."""
        node.share.policy.touch(node, use)

    def _on_idle_root(self, root: Node) -> None:
        """No lease stands on this tree any more: a dropped one gives everything back, an empty one goes."""
        if root.dead:
            for node in list(walk(root)):
                node.share.policy.remove(node)
                self.pool.take_from_index(node.pages)
                self.indexed_pages -= len(node.pages)
                node.share.cached -= len(node.pages)
                self._forget(node)
                node.pages = []
            self._dead_roots.remove(root)
        elif not root.children:
            del self._roots[bytes(root.tokens)]

    # -- matching inside a page --------------------------------------------------------------------------------------

    def _match_partial(self, match: Match, query: bytes) -> None:
        """Extend ``match`` by the child whose first page shares the most leading tokens with ``query``."""
        keys = match.node.keys
        if not keys or not query:
            return
        place = bisect_left(keys, query)
        best, best_child = 0, -1
        for index in (place, place - 1):
            if 0 <= index < len(keys):
                shared = common_prefix(keys[index], query, 0, len(query)) // TOKEN_BYTES
                if shared > best:
                    best, best_child = shared, index
        if best:
            owner = self._first_page(match.node, best_child)
            match.partial_tokens, match.partial_owner, match.partial_page = best, owner, owner.pages[0]

    def _first_page(self, parent: Node, place: int) -> Node:
        """The node that holds only the first page of the child at ``place``, so that a pin on it keeps no more."""
        return parent.children[place]

    # -- growing and shrinking ---------------------------------------------------------------------------------------

    def insert_tail(self, node: Node, tokens: bytes, page: int) -> bool:
        """Add a partly filled page (less than a page of ``tokens``) below ``node``.

        The page must be private to one holder. Returns False, and leaves it so, if the tree already holds these
        tokens at this place; True if the tree took it.
        """
        place = bisect_left(node.keys, tokens)
        if place < len(node.keys) and node.keys[place].startswith(tokens):
            return False
        child = self._add_child(node, tokens, [page])
        child.share.policy.add(child)
        return True

    def _add_child(self, node: Node, tokens: bytes, pages: list[int]) -> Node:
        """Hang new pages below ``node``, replacing a partial leaf that they make superfluous."""
        share = node.share
        if node.parent is not None and not node.children and not is_active(node):
            share.policy.remove(node)  # stored by one who left: a leaf no more
        self.pool.give_to_index(pages, share)
        if not node.children and node.parent is not None:
            share.policy.remove(node)  # a leaf no more
        key = tokens[: self.page_bytes]
        child = Node(node, share, tokens, pages, node.start + len(node.pages), key)
        place = bisect_left(node.keys, key)
        while place and key.startswith(node.keys[place - 1]) and not node.children[place - 1].pins:
            place -= 1
            self._remove_leaf(node.children[place])
        node.keys.insert(place, key)
        node.children.insert(place, child)
        self.indexed_pages += len(pages)
        share.cached += len(pages)
        share.policy.created(child)
        return child

    def _remove_leaf(self, node: Node) -> None:
        """Take an unpinned leaf out of the tree and free its pages."""
        parent = node.parent
        assert parent is not None and not node.children and not node.pins
        node.share.policy.remove(node)
        self.pool.take_from_index(node.pages)
        self.indexed_pages -= len(node.pages)
        node.share.cached -= len(node.pages)
        self._unlink(node)

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        place = bisect_left(parent.keys, node.key)
        assert parent.children[place] is node
        del parent.keys[place], parent.children[place]
        node.pages = []
        self._forget(node)

    def _forget(self, node: Node) -> None:  # noqa: B027 - a hook that only one index needs
        """A node leaves the tree; the hash index drops its key."""

    # -- eviction ----------------------------------------------------------------------------------------------------

    def evict(self, wanted: int, taker: Share | None = None, *, only: Share | None = None) -> int:
        """Free up to ``wanted`` cached pages: who gives is up to the shares, which leaf its policy's; last pages first.

        Args:
            wanted: pages.
            taker: who gets them; what others' floors keep from it stays.
            only: take them from this share, whatever its floor.

        Returns how many were freed: fewer than wanted only if no more may go.
        """
        shares, freed = self.shares, 0
        only = only or shares.alone
        while freed < wanted and (share := only or shares.giver(taker)) is not None:
            node = share.policy.victim()
            if node is None:
                break
            most = share.cached if only is not None else shares.may_give(share, taker)
            count_here = min(wanted - freed, most, len(node.pages))
            if self.on_evict is not None:
                self.on_evict(node, count_here)
            share.policy.evicted(node, count_here)
            freed += count_here
            self.indexed_pages -= count_here
            share.cached -= count_here
            self.evicted_pages += count_here
            if count_here < len(node.pages):
                self.pool.take_from_index(node.pages[: -count_here - 1 : -1])
                del node.pages[-count_here:]
                del node.tokens[len(node.pages) * self.page_bytes :]
                continue
            self.pool.take_from_index(node.pages[::-1])
            parent = node.parent
            assert parent is not None
            self._unlink(node)
            if parent.children or parent.pins:
                continue
            if parent.parent is not None:
                share.policy.add(parent)
            elif not parent.dead:
                del self._roots[bytes(parent.tokens)]
        return freed

    def reset(self) -> tuple[int, int]:
        """Forget everything: free what is cached, make what is held unmatchable until its holders let go.

        Returns (pages freed now, pages still held).
        """
        freed = sum(self.evict(share.cached, only=share) for share in self.shares)
        for root in self._roots.values():
            root.dead = True
            self._dead_roots.append(root)
        self._roots.clear()
        return freed, self.active_pages

    def drop(self, share: Share) -> None:
        """Forget all of one share's, as ``reset`` does of all shares'."""
        self.evict(share.cached, only=share)
        for namespace, root in list(self._roots.items()):
            if root.share is share:
                root.dead = True
                self._dead_roots.append(root)
                del self._roots[namespace]

    # -- checks ------------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents before children."""
        for root in self.roots():
            yield from walk(root)

    def size(self) -> tuple[int, int, int, int]:
        """Namespaces, nodes, leaves and tokens that can be matched."""
        nodes = leaves = size = 0
        for root in self._roots.values():
            for node in walk(root):
                nodes += 1
                leaves += not node.children
                size += len(node.tokens)
        return sum(1 for root in self._roots.values() if root.children), nodes, leaves, size // TOKEN_BYTES

    def recount(self) -> dict[str, tuple[int, int]]:
        """Count the pages in the tree anew. See ``KVCache.recount``."""
        indexed = active = 0
        before = sum(share.cached for share in self.shares)
        for share in self.shares:
            share.cached = 0
        for node in self.nodes():
            indexed += len(node.pages)
            if is_active(node):
                active += len(node.pages)
            else:
                node.share.cached += len(node.pages)
        self.shares.recount()
        changes = {
            "indexed pages": (self.indexed_pages, indexed),
            "held pages": (self.active_pages, active),
            "cached pages": (before, indexed - active),
        }
        self.indexed_pages, self.active_pages = indexed, active
        return {name: (was, now) for name, (was, now) in changes.items() if was != now}

    def check(self) -> None:
        """Recount by brute force (for tests). Raises AssertionError on any disagreement."""
        pages: list[int] = []
        active_pages = 0
        evictable: set[Node] = set()
        cached = dict.fromkeys(self.shares, 0)
        for root in self.roots():
            assert root.children or root.pins, "an empty, unheld root was kept"
            assert root.active_children == sum(1 for child in root.children if is_active(child))
        for node in self.nodes():
            assert node.parent is not None and node.pages
            assert node.keys == sorted(node.keys) and len(set(node.keys)) == len(node.keys)
            assert node.keys == [bytes(child.tokens[: self.page_bytes]) for child in node.children]
            assert node.keys == [child.key for child in node.children]
            assert all(child.parent is node for child in node.children)
            assert node.start == node.parent.start + len(node.parent.pages)
            assert node.active_children == sum(1 for child in node.children if is_active(child))
            if len(node.tokens) % self.page_bytes:
                assert len(node.pages) == 1 and not node.children and len(node.tokens) < self.page_bytes
            else:
                assert len(node.tokens) == len(node.pages) * self.page_bytes
            assert node.share is node.parent.share
            if is_active(node):
                active_pages += len(node.pages)
            else:
                cached[node.share] += len(node.pages)
                if not node.children:
                    evictable.add(node)
            pages += node.pages
        assert len(pages) == len(set(pages)) == self.indexed_pages
        assert all(self.pool.state[page] == INDEXED for page in pages)
        assert self.pool.state.count(INDEXED) == len(pages)
        assert active_pages == self.active_pages
        queued = [(share, share.policy.queued()) for share in self.shares]
        assert all(node.share is share for share, nodes in queued for node in nodes)
        assert evictable == {node for _, nodes in queued for node in nodes}, "other leaves are queued than may go"
        assert cached == {share: share.cached for share in self.shares}
        self.shares.check()


def root_of(node: Node) -> Node:
    """The root above a node, or itself."""
    while node.parent is not None:
        node = node.parent
    return node


def walk(root: Node) -> Iterator[Node]:
    """The nodes below ``root``, parents first."""
    stack = list(root.children)
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children)


def is_active(node: Node) -> bool:
    return bool(node.pins or node.active_children)
