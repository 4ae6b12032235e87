"""The textbook policies, with a leaf of the tree in the place of a page."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from pagetrie.kv.eviction.policy import Clock, EvictionPolicy, Queue, RankPolicy, Use

if TYPE_CHECKING:
    from pagetrie.kv.page_tree import Node


class Lru(RankPolicy):
    """Least recently used first."""

    name = "lru"

    def rank(self, node: Node) -> int:
        return node.last_used


class Fifo(RankPolicy):
    """First stored, first out; an edge counts from when it was begun."""

    name = "fifo"

    def touch(self, node: Node, use: Use | None) -> None:
        """Use changes nothing."""

    def rank(self, node: Node) -> int:
        return node.last_used


class Lfu(RankPolicy):
    """Least frequently used first, with dynamic ageing (LFU-DA: Arlitt et al. 2000).

    A leaf's rank is its count of uses on top of the rank of the last leaf that went, so that what was popular once
    falls behind in time. ``mark`` is (uses, rank while queued).
    """

    name = "lfu"

    def __init__(self, num_pages: int, page_tokens: int, clock: Clock) -> None:
        super().__init__(num_pages, page_tokens, clock)
        self._age = 0.0

    def created(self, node: Node) -> None:
        super().created(node)
        node.mark = (0, 0.0)

    def touch(self, node: Node, use: Use | None) -> None:
        super().touch(node, use)
        if use is not None:
            _count_use(node)

    def rank(self, node: Node) -> tuple[float, int]:
        rank = self._age + self._worth(node, node.mark[0])
        node.mark = (node.mark[0], rank)
        return rank, node.last_used

    def evicted(self, node: Node, pages: int) -> None:
        super().evicted(node, pages)
        self._age = node.mark[1]

    def _worth(self, node: Node, uses: int) -> float:
        return float(uses)


class Gdsf(Lfu):
    """Greedy dual size frequency (Cherkasova 1998): uses times the cost of computing a page anew.

    Size and cost both grow with a leaf's pages, so what counts is the cost per page: attention makes later tokens
    dearer. Token number p costs about 1 + p / ``CROSSOVER`` times what the first one does.
    """

    name = "gdsf"

    CROSSOVER = 20_000
    """Tokens of context at which attention costs as much as all matrices (the order of magnitude of small models)."""

    def _worth(self, node: Node, uses: int) -> float:
        middle = (node.start + len(node.pages) / 2) * self._page_tokens
        return uses * (1 + middle / self.CROSSOVER)


class _TwoQueues(EvictionPolicy):
    """Leaves stand in one of two queues.

    The queues' shares are of the pages that are queued: what is behind other pages isn't, whichever queue it is for.
    """

    def __init__(self, num_pages: int, page_tokens: int, clock: Clock) -> None:
        super().__init__(num_pages, page_tokens, clock)
        self._small, self._main = Queue(), Queue()

    def remove(self, node: Node) -> None:
        self._small.discard(node)
        self._main.discard(node)

    def evicted(self, node: Node, pages: int) -> None:
        (self._small if node in self._small else self._main).shrink(node, pages)

    def queued(self) -> set[Node]:
        return {*self._small, *self._main}


class Ttl(_TwoQueues):
    """What clients asked to keep (``Use.ttl``) goes last while its time runs, and first once it is up; else LRU.

    ``mark`` is when a node's time is up, 0 without a hint. The main queue holds those whose time runs.
    """

    name = "ttl"

    def created(self, node: Node) -> None:
        super().created(node)
        node.mark = 0.0

    def touch(self, node: Node, use: Use | None) -> None:
        super().touch(node, use)
        if use is None or use.ttl is None:
            return
        until = self._clock() + use.ttl
        current: Node | None = node
        while current is not None and current.parent is not None:
            current.mark = max(current.mark, until)
            current = current.parent

    def add(self, node: Node) -> None:
        if node.mark > self._clock():
            self._main.push(node, node.mark)
        else:
            self._small.push(node, (not node.mark, node.mark or node.last_used))

    def victim(self) -> Node | None:
        now = self._clock()
        while (node := self._main.first()) is not None and node.mark <= now:
            self._main.discard(node)
            self.add(node)
        return self._small.first() or self._main.first()


class Slru(_TwoQueues):
    """Segmented LRU (Karedla et al. 1994): what was used once goes before what was used again.

    The protected leaves (main queue) hold at most ``PROTECTED`` of the pages; the least recently used of them fall back
    to the young end of the others. ``mark`` is (uses since it last fell back,).
    """

    name = "slru"

    PROTECTED = 0.8

    def created(self, node: Node) -> None:
        super().created(node)
        node.mark = (0,)

    def touch(self, node: Node, use: Use | None) -> None:
        super().touch(node, use)
        if use is not None:
            _count_use(node)

    def add(self, node: Node) -> None:
        (self._small if node.mark[0] < 2 else self._main).push(node, node.last_used)
        while self._main.pages > self.PROTECTED * (self._small.pages + self._main.pages):
            fallen = self._main.first()
            assert fallen is not None
            self._main.discard(fallen)
            fallen.mark = (1,)
            fallen.last_used = next(self._ticks)
            self._small.push(fallen, fallen.last_used)

    def victim(self) -> Node | None:
        return self._small.first() or self._main.first()


class S3Fifo(_TwoQueues):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue for newcomers, a main one for what was used again, and ghosts.

    What leaves the small queue unused is remembered for a while and goes to the main queue if it comes back.
    ``mark`` is (uses, at most 3; whether it belongs to the main queue; place in the queue).
    """

    name = "s3-fifo"

    SMALL = 0.1
    MOST_USES = 3

    def __init__(self, num_pages: int, page_tokens: int, clock: Clock) -> None:
        super().__init__(num_pages, page_tokens, clock)
        # Pages of edges that left the small queue, by the node they hung below and their first page of tokens.
        self._ghosts: OrderedDict[tuple[Node, bytes], int] = OrderedDict()
        self._ghost_pages = 0

    def created(self, node: Node) -> None:
        super().created(node)
        ghost = self._ghosts.pop(_name(node), 0)
        self._ghost_pages -= ghost
        # The request that stores a page isn't a use of it.
        node.mark = (-1, bool(ghost), node.last_used)

    def touch(self, node: Node, use: Use | None) -> None:
        current: Node | None = node if use is not None else None
        while current is not None and current.parent is not None:
            uses, main, place = current.mark
            current.mark = (min(uses + 1, self.MOST_USES), main, place)
            current = current.parent

    def add(self, node: Node) -> None:
        (self._main if node.mark[1] else self._small).push(node, node.mark[2])

    def victim(self) -> Node | None:
        small, main = self._small, self._main
        while True:
            node = small.first()
            if node is not None and (small.pages > self.SMALL * (small.pages + main.pages) or main.first() is None):
                if node.mark[0] <= 1:
                    return node
                small.discard(node)
                node.mark = (0, True, next(self._ticks))
            else:
                node = main.first()
                if node is None or node.mark[0] <= 0:
                    return node
                main.discard(node)
                node.mark = (node.mark[0] - 1, True, next(self._ticks))
            main.push(node, node.mark[2])

    def evicted(self, node: Node, pages: int) -> None:
        if node in self._small and pages == len(node.pages):
            self._ghosts[_name(node)] = pages
            self._ghost_pages += pages
            while self._ghost_pages > (1 - self.SMALL) * self._num_pages and self._ghosts:
                self._ghost_pages -= self._ghosts.popitem(last=False)[1]
        super().evicted(node, pages)


def _count_use(node: Node) -> None:
    """One more use of all nodes of a path. The count is the first field of their marks."""
    current: Node | None = node
    while current is not None and current.parent is not None:
        current.mark = (current.mark[0] + 1, *current.mark[1:])
        current = current.parent


def _name(node: Node) -> tuple[Node, bytes]:
    """What a node is recognised by when it comes back: where it hangs and its first page's tokens."""
    assert node.parent is not None
    return node.parent, node.key
