"""What an eviction policy is told, and what it is asked.

The tree decides *what may go*: only the last pages of a leaf that no lease holds. The policy decides *which such leaf
goes first*. Both indexes and every policy share the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pagetrie.kv.page_tree import Node

Clock = Callable[[], float]


class RequestKind(IntEnum):
    """What a server knows of a request and its length doesn't tell; policies only tell the kinds apart.

    ``TOOL`` is a chat that goes on from a tool's result, ``CONTEXT`` one that starts from a kept context.
    """

    UNKNOWN = 0
    COMPLETION = 1
    CHAT = 2
    TOOL = 3
    CONTEXT = 4


@dataclass(slots=True)
class Use:
    """One request's use of the path it held, told when its lease ends.

    Attributes:
        prompt_tokens: length of the prompt.
        cached_tokens: how many of them were found in the cache.
        output_tokens: tokens generated.
        ttl: seconds for which the client asked to keep the prefix; None without such a hint.
        kind: of the request.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttl: float | None = None
    kind: RequestKind = RequestKind.UNKNOWN


class EvictionPolicy(ABC):
    """Orders the leaves that may be evicted. What it needs to know of a node it keeps in ``Node.mark``.

    Args:
        num_pages: pages in the pool.
        page_tokens: tokens that a page holds.
        clock: seconds; only policies that reckon with time ask it.
    """

    name: ClassVar[str]

    def __init__(self, num_pages: int, page_tokens: int, clock: Clock) -> None:
        self._num_pages = num_pages
        self._page_tokens = page_tokens
        self._clock = clock
        self._ticks = count(1)

    def anew(self) -> EvictionPolicy:
        """Another one like it, which knows nothing yet."""
        return type(self)(self._num_pages, self._page_tokens, self._clock)

    def created(self, node: Node) -> None:
        """A node with new pages hangs in the tree."""
        node.last_used = next(self._ticks)

    def touch(self, node: Node, use: Use | None) -> None:
        """A lease ended: the path from the root to ``node`` was used, and nothing of it was let go yet.

        ``use`` is None if nothing was computed: the lease was given up to wait. It counts as a touch, not as a use.
        All of the path gets one tick, so that a cached parent is never older than its children.
        """
        tick = next(self._ticks)
        current: Node | None = node
        while current is not None:
            current.last_used = tick
            current = current.parent

    def split(self, upper: Node, lower: Node) -> None:
        """``upper`` was cut off the front of ``lower``."""
        upper.last_used = lower.last_used
        upper.mark = lower.mark

    @abstractmethod
    def add(self, node: Node) -> None:
        """``node`` may be evicted from now on: it became a leaf that no lease holds."""

    @abstractmethod
    def remove(self, node: Node) -> None:
        """``node``, which was added, is pinned again or gone; its pages are still there."""

    @abstractmethod
    def victim(self) -> Node | None:
        """The leaf whose last page goes first; None if none may go. Asking changes no answer but with time."""

    @abstractmethod
    def evicted(self, node: Node, pages: int) -> None:
        """The last ``pages`` pages of the victim are about to go; if these are all, the node goes too."""

    @abstractmethod
    def queued(self) -> set[Node]:
        """The leaves that were added and not removed (for checks)."""


class Queue:
    """Evictable leaves in ascending order of a place that each keeps while it is queued.

    ``pages`` counts what they held when they were queued, less what was evicted since. Removal is lazy: an entry of
    the heap counts while its number is the one on record.
    """

    def __init__(self) -> None:
        self.pages = 0
        self._numbers = count()
        self._heap: list[tuple[Any, int, Node]] = []
        self._held: dict[Node, tuple[int, int]] = {}

    def __contains__(self, node: Node) -> bool:
        return node in self._held

    def __iter__(self) -> Iterator[Node]:
        return iter(self._held)

    def push(self, node: Node, place: Any) -> None:
        heap, held, number, pages = self._heap, self._held, next(self._numbers), len(node.pages)
        held[node] = (number, pages)
        self.pages += pages
        heappush(heap, (place, number, node))
        if len(heap) > 4 * len(held) + 64:
            heap[:] = [entry for entry in heap if entry[2] in held and held[entry[2]][0] == entry[1]]
            heapify(heap)

    def discard(self, node: Node) -> None:
        if node in self._held:
            self.pages -= self._held.pop(node)[1]

    def shrink(self, node: Node, pages: int) -> None:
        """The node loses its last pages; with all of them, its place."""
        if pages == len(node.pages):
            self.discard(node)
        else:
            number, counted = self._held[node]
            self._held[node] = (number, counted - pages)
            self.pages -= pages

    def first(self) -> Node | None:
        heap, held = self._heap, self._held
        while heap:
            _, number, node = heap[0]
            if node in held and held[node][0] == number:
                return node
            heappop(heap)
        return None


class RankPolicy(EvictionPolicy):
    """A policy whose leaves have a rank that holds while they may go: the lowest goes first, equals as they came."""

    def __init__(self, num_pages: int, page_tokens: int, clock: Clock) -> None:
        super().__init__(num_pages, page_tokens, clock)
        self._queue = Queue()

    @abstractmethod
    def rank(self, node: Node) -> Any:
        """Where an evictable leaf stands. Asked once, when it becomes evictable."""

    def add(self, node: Node) -> None:
        self._queue.push(node, self.rank(node))

    def remove(self, node: Node) -> None:
        self._queue.discard(node)

    def victim(self) -> Node | None:
        return self._queue.first()

    def evicted(self, node: Node, pages: int) -> None:
        self._queue.shrink(node, pages)

    def queued(self) -> set[Node]:
        return set(self._queue)
