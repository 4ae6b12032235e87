"""What a policy is measured against: Belady's optimum, and a plain store of pages that knows no tree."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from typing import Literal

from pagetrie.replay.trace import Trace

NEVER = 1 << 62


def belady_hits(trace: Trace, capacity: int, *, since: int = 0) -> int:
    """Hits of the offline optimum (Belady 1966): the page whose next use is farthest goes first.

    Counted from request number ``since`` on.

    A parent's next use is never later than its child's, so what stays is always a prefix. A request's own pages may be
    the first to go after it, in favour of what was stored before, which no real cache can do. So this is a bound.
    """
    following: list[list[int]] = []
    next_use: dict[int, int] = {}
    for number in range(len(trace.requests) - 1, -1, -1):
        pages = trace.requests[number].pages
        following.append([next_use.get(page, NEVER) for page in pages])
        for page in pages:
            next_use[page] = number
    following.reverse()
    stored: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for number, (request, uses) in enumerate(zip(trace.requests, following, strict=True)):
        pages = request.pages
        if len(pages) > capacity:
            continue
        depth = 0
        while depth < len(pages) and pages[depth] in stored:
            depth += 1
        hits += depth if number >= since else 0
        for place, (page, use) in enumerate(zip(pages, uses, strict=True)):
            stored[page] = use
            heappush(heap, (-use, -place, page))
        while len(stored) > capacity:
            use, _, page = heappop(heap)
            if stored.get(page) == -use:
                del stored[page]
    return hits


def flat_lru_hits(trace: Trace, capacity: int, *, touch: Literal["front", "back"] = "front") -> int:
    """Hits of LRU over single pages without a tree, touching a request's pages from the front or from the back.

    Touched from the front, first pages are the oldest of their request and go first, leaving tails that nothing can
    hit: the usual simulator of the literature. From the back it takes the tail first, as the tree does.
    """
    stored: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace.requests:
        pages = request.pages
        for page in pages:
            if page not in stored:
                break
            hits += 1
        for page in pages if touch == "front" else reversed(pages):
            stored[page] = None
            stored.move_to_end(page)
        while len(stored) > capacity:
            stored.popitem(last=False)
    return hits
