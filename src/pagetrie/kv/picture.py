"""The cache as a picture: the state of every page, and the prefix tree cut down to what a screen can show.

Drawn between two steps, so it is made of few passes and bulk operations; what is made of it is made elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count

import numpy as np

from pagetrie.kv.interface import CacheLease
from pagetrie.kv.page_tree import Node, PageTree, is_active
from pagetrie.kv.pool import INDEXED, PRIVATE, PagePool
from pagetrie.kv.tokens import TOKEN_BYTES

FREE, ACTIVE, CACHED, LOADING = range(4)
"""States of a page in a picture."""

NOBODY = 255
"""Owner of a page that nothing is known of, or one too many to be told apart."""
HEAD_TOKENS = 24
"""Tokens of an edge that are kept to show what it says."""


@dataclass(frozen=True, slots=True)
class PageOwner:
    """Whose pages: what namespaces are grouped by.

    Attributes:
        tenant: what its tenant puts into a namespace.
        salted: only requests with a salt of their own share it.
        public: everybody shares it.
    """

    tenant: bytes = b""
    salted: bool = False
    public: bool = False


@dataclass(slots=True)
class Edge:
    """An edge of the tree; edges that follow each other without a branch, and that nobody stands between, are one.

    Attributes:
        number: names it as long as it lives.
        parent: place of its parent in the picture; -1 for a root's child.
        owner: place of its owner, or ``NOBODY``.
        start: tokens before it.
        tokens, pages: its own.
        below: tokens of it and everything under it.
        leaves: ends under it, itself if it is one.
        pins: leases and holds that stand on its end.
        active: it or something under it is in use.
        last_used: larger is later.
        head: its first tokens (u32 LE, up to ``HEAD_TOKENS``).
        hidden: edges directly under it that are not in the picture.
    """

    number: int
    parent: int
    owner: int
    start: int
    tokens: int
    pages: int
    below: int
    leaves: int
    pins: int
    active: bool
    last_used: int
    head: bytes
    hidden: int = 0


@dataclass(slots=True)
class Picture:
    """One moment.

    Attributes:
        states: a byte per page, ``FREE`` to ``LOADING``.
        shares: a byte per page: page tables of running sequences that hold it, at most 255.
        owner: a byte per page: place of its owner, or ``NOBODY``.
        owners: those that appear, at most 255.
        edges: parents before children.
        edges_in_all: how many there are, shown or not.
        size: what ``KVCache.tree_size`` says.
    """

    states: bytes
    shares: bytes
    owner: bytes
    owners: list[PageOwner] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    edges_in_all: int = 0
    size: tuple[int, int, int, int] = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class EdgeText:
    """What an edge says.

    Attributes:
        path: numbers of the edges that lead to it, itself last.
        start: tokens before it.
        before: the last of these (u32 LE, up to ``HEAD_TOKENS``).
        tokens: its own (u32 LE).
    """

    path: list[int]
    start: int
    before: bytes
    tokens: bytes


class Numbers:
    """Gives each node a number for as long as it is shown in every picture."""

    def __init__(self) -> None:
        self._known: dict[Node, int] = {}
        self._next = count(1)

    def of(self, node: Node) -> int:
        """The number of a node in the latest picture; 0 if it wasn't shown."""
        return self._known.get(node, 0)

    def renew(self, nodes: Sequence[Node]) -> list[int]:
        """The numbers of the nodes of a picture."""
        known, self._known = self._known, {}
        for node in nodes:
            self._known[node] = known.get(node) or next(self._next)
        return list(self._known.values())


def draw_reserved(num_pages: int, taken: Sequence[int]) -> Picture:
    """A pool of reservations: a page is taken or free."""
    states = np.full(num_pages, FREE, np.uint8)
    states[list(taken)] = ACTIVE
    shares = (states == ACTIVE).astype(np.uint8)
    return Picture(states.tobytes(), shares.tobytes(), np.full(num_pages, NOBODY, np.uint8).tobytes())


def draw(
    pool: PagePool,
    tree: PageTree,
    leases: Sequence[tuple[CacheLease, bytes]],
    loading: Sequence[int],
    owner_of: Callable[[bytes], PageOwner],
    numbers: Numbers,
    limit: int,
) -> Picture:
    """Draw a pool and its tree.

    Args:
        pool, tree: what to draw.
        leases: of running sequences, with their namespaces.
        loading: pages that a load fills.
        owner_of: whose pages are in a namespace.
        numbers: from picture to picture.
        limit: most edges to show: those with most tokens under them.
    """
    places: dict[PageOwner, int] = {}

    def place(namespace: bytes) -> int:
        owner = owner_of(namespace)
        if owner not in places and len(places) == NOBODY:
            return NOBODY
        return places.setdefault(owner, len(places))

    states = _STATES[np.frombuffer(pool.state, np.uint8)]
    owner = np.full(pool.num_pages, NOBODY, np.uint8)
    tables = [lease.pages for lease, _ in leases]
    held = _flat(tables)
    lengths = np.array([len(table) for table in tables], np.intp)
    owner[held] = np.repeat(np.array([place(namespace) for _, namespace in leases], np.uint8), lengths)
    states[np.asarray(loading, np.intp)] = LOADING
    walked = _Walk(tree)
    indexed = _flat(walked.tables)
    lengths = np.array([len(table) for table in walked.tables], np.intp)
    spans = [last - first for _, _, (first, last) in walked.roots]
    places_of_roots = [place(bytes(root.tokens)) for root, _, _ in walked.roots]
    places_of_nodes = np.repeat(np.array(places_of_roots, np.uint8), spans)
    owner[indexed] = np.repeat(places_of_nodes, lengths)
    states[indexed[np.repeat(np.array(walked.active, np.bool_), lengths)]] = ACTIVE
    shares = np.bincount(held, minlength=pool.num_pages).clip(max=NOBODY).astype(np.uint8)
    return Picture(
        states=states.tobytes(),
        shares=shares.tobytes(),
        owner=owner.tobytes(),
        owners=list(places),
        edges=walked.edges(numbers, limit, places_of_roots),
        edges_in_all=len(walked.tops),
        size=walked.size(),
    )


_STATES = np.array([FREE, ACTIVE, CACHED], np.uint8)
assert (PRIVATE, INDEXED) == (1, 2)


def _flat(tables: Sequence[Sequence[int]]) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    return np.fromiter(chain.from_iterable(tables), np.intp)


class _Walk:
    """All edges of a tree, parents before children. An edge is a run of nodes, from its top to its end.

    Attributes:
        tops, ends: first and last node of each edge.
        tokens, pages: of each edge.
        parents: place of each edge's parent, or -1.
        tables, active: each node's pages, and whether it is in use, edge by edge.
        roots: root, where its edges begin and end, where its nodes do.
    """

    def __init__(self, tree: PageTree) -> None:
        self.tops: list[Node] = []
        self.ends: list[Node] = []
        self.tokens: list[int] = []
        self.pages: list[int] = []
        self.parents: list[int] = []
        self.tables: list[list[int]] = []
        self.active: list[bool] = []
        self.roots: list[tuple[Node, tuple[int, int], tuple[int, int]]] = []
        self._page_size = tree.page_bytes // TOKEN_BYTES
        # The engine waits while this runs: one pass, and each node is looked at once.
        tables, active = self.tables, self.active
        for root in tree.roots():
            first_edge, first_node = len(self.tops), len(tables)
            stack = [(child, -1) for child in reversed(root.children)]
            while stack:
                node, parent = stack.pop()
                self.tops.append(node)
                self.parents.append(parent)
                size = pages = 0
                while True:
                    table, children = node.pages, node.children
                    tables.append(table)
                    active.append(is_active(node))
                    size += len(node.tokens)
                    pages += len(table)
                    if node.pins or len(children) != 1:
                        break
                    node = children[0]
                place = len(self.ends)
                self.ends.append(node)
                self.tokens.append(size // TOKEN_BYTES)
                self.pages.append(pages)
                for child in reversed(children):
                    stack.append((child, place))  # noqa: PERF401 - most edges have no children
            self.roots.append((root, (first_edge, len(self.tops)), (first_node, len(tables))))

    def size(self) -> tuple[int, int, int, int]:
        """Namespaces, nodes, leaves and tokens that can be matched."""
        namespaces = nodes = leaves = tokens = 0
        for root, (first, end), (first_node, end_node) in self.roots:
            if not root.dead:
                namespaces += first < end
                nodes += end_node - first_node
                leaves += sum([not node.children for node in self.ends[first:end]])
                tokens += sum(self.tokens[first:end])
        return namespaces, nodes, leaves, tokens

    def run(self, place: int) -> Iterator[Node]:
        """The nodes of an edge."""
        node, end = self.tops[place], self.ends[place]
        yield node
        while node is not end:
            node = node.children[0]
            yield node

    def edges(self, numbers: Numbers, limit: int, places_of_roots: Sequence[int]) -> list[Edge]:
        """The ``limit`` edges with most tokens below them. With an edge its parent is chosen: that has no fewer."""
        count, parents = len(self.tops), self.parents
        below, leaves = self.tokens.copy(), [0] * count
        for index in range(count - 1, -1, -1):
            leaves[index] = leaves[index] or 1
            if parents[index] >= 0:
                below[parents[index]] += below[index]
                leaves[parents[index]] += leaves[index]
        # Of equals the first ones, so parents before their children.
        chosen = sorted(np.argsort(-np.array(below, np.int64), kind="stable")[:limit].tolist())
        names = numbers.renew([self.ends[index] for index in chosen])
        shown = {index: position for position, index in enumerate(chosen)}
        owners = [NOBODY] * count
        for owner, (_, (first, end), _) in zip(places_of_roots, self.roots, strict=True):
            owners[first:end] = [owner] * (end - first)
        edges = [
            Edge(
                number=number,
                parent=shown[parents[index]] if parents[index] >= 0 else -1,
                owner=owners[index],
                start=self.tops[index].start * self._page_size,
                tokens=self.tokens[index],
                pages=self.pages[index],
                below=below[index],
                leaves=leaves[index],
                pins=self.ends[index].pins,
                active=is_active(self.tops[index]),
                last_used=self.tops[index].last_used,
                head=_head(self.run(index)),
            )
            for number, index in zip(names, chosen, strict=True)
        ]
        if len(chosen) < count:
            for index, parent in enumerate(parents):
                if parent >= 0 and index not in shown and parent in shown:
                    edges[shown[parent]].hidden += 1
        return edges


def read_texts(
    tree: PageTree, wanted: Callable[[bytes], bool], numbers: Numbers, budget: int
) -> tuple[list[EdgeText], bool]:
    """The edges of all wanted namespaces, parents first, up to ``budget`` tokens; and whether these are all."""
    walked, found = _Walk(tree), list[EdgeText]()
    for root, (first, end), _ in walked.roots:
        if root.dead or not wanted(bytes(root.tokens)):
            continue
        before = len(found) - first
        for place in range(first, end):
            parent = walked.parents[place]
            above = found[parent + before] if parent >= 0 else EdgeText([], 0, b"", b"")
            text = EdgeText(
                path=[*above.path, numbers.of(walked.ends[place])],
                start=walked.tops[place].start * tree.page_bytes // TOKEN_BYTES,
                before=(above.before + above.tokens)[-HEAD_TOKENS * TOKEN_BYTES :],
                tokens=b"".join(bytes(node.tokens) for node in walked.run(place)),
            )
            budget -= len(text.tokens) // TOKEN_BYTES
            if budget < 0:
                return found, False
            found.append(text)
    return found, True


def _head(run: Iterable[Node]) -> bytes:
    head = b""
    for node in run:
        head += bytes(node.tokens[: HEAD_TOKENS * TOKEN_BYTES - len(head)])
        if len(head) >= HEAD_TOKENS * TOKEN_BYTES:
            break
    return head
