"""The project's own policy: evict what is least likely to be asked for again, per second of holding it.

Every leaf is worth the Gittins index of the turn that ends in it (``reuse_model``), and, where requests that continue
no turn have branched off, the rate of these. What is left of a superseded turn (its last, partly filled page) is worth
next to nothing and goes first.

To learn from what it evicted too, the policy remembers evicted edges for a while as *ghosts*, by their first page's
tokens at the node they hung below, so that a conversation that comes back is recognised. Nothing is set per workload.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from pagetrie.kv.eviction.policy import Clock, EvictionPolicy, Use
from pagetrie.kv.eviction.reuse_model import HORIZON, ReuseModel, Turn

if TYPE_CHECKING:
    from pagetrie.kv.page_tree import Node

BRANCH_MEMORY = 300.0
"""Seconds over which branches are averaged."""
CROWD = 8
"""A node with so many children is a shared prefix, not somebody's last turn."""
GHOST_PAGES = 32
"""Evicted pages remembered at most, per page of the pool."""
STALE = 10.0
"""Seconds after which all leaves are weighed anew in any case."""
WEIGHINGS = 3
"""Leaves weighed per page evicted, on average: all leaves are weighed anew when so many pages went."""


class Ghost:
    """An evicted edge: how long it was, what ended in it, and the ghosts below it by their first pages' tokens."""

    __slots__ = ("below", "pages", "past", "turn")

    def __init__(self, pages: int, mark: Mark) -> None:
        self.pages = pages
        self.turn = mark.turn
        self.past = mark.past
        self.below = mark.ghosts


class Mark:
    """What the policy knows of a node.

    Attributes:
        turn: ended here and wasn't continued yet.
        past: ended here and was.
        heir: the likeliest turn to be continued of those that ended below and were evicted.
        ghosts: evicted edges below, by the tokens of their first page.
        branches, branched: requests that went on from here without continuing a turn: how many of late, and when the
            last one did.
    """

    __slots__ = ("branched", "branches", "ghosts", "heir", "past", "turn")

    def __init__(self) -> None:
        self.turn: Turn | None = None
        self.past: Turn | None = None
        self.heir: Turn | None = None
        self.ghosts: dict[bytes, Ghost] = {}
        self.branches = 0.0
        self.branched = 0.0


class Adaptive(EvictionPolicy):
    """See the module. Between two weighings of all leaves, each keeps the rank that it had."""

    name = "adaptive"

    def __init__(self, num_pages: int, page_tokens: int, clock: Clock) -> None:
        super().__init__(num_pages, page_tokens, clock)
        self._model = ReuseModel()
        self._held: dict[Node, int] = {}
        self._heap: list[tuple[float, int, Node]] = []
        self._numbers = count()
        self._weighed = -math.inf
        self._gone = 0
        # Ghosts in the order they came: (when, where, under which key, which).
        self._ghosts: deque[tuple[float, dict[bytes, Ghost], bytes, Ghost]] = deque()
        self._ghost_pages = 0

    # -- what happens ------------------------------------------------------------------------------------------------

    def created(self, node: Node) -> None:
        super().created(node)
        node.mark = Mark()
        above = node.parent
        if above is not None and above.mark is not None and above.mark.ghosts:
            self._revive(node, above.mark.ghosts)

    def _revive(self, node: Node, ghosts: dict[bytes, Ghost]) -> None:
        """An edge comes back: follow its ghosts, and take up the last turn that ended within its tokens."""
        mark, tokens, page_bytes = node.mark, node.tokens, len(node.key)
        place = 0
        while place < len(tokens):
            ghost = ghosts.pop(bytes(tokens[place : place + page_bytes]), None)
            if ghost is None:
                return
            if ghost.turn is not None:
                last = (ghost.turn.pages - node.start - 1) * page_bytes
                if last >= 0 and tokens[last : last + page_bytes] == ghost.turn.last_page:
                    mark.turn = ghost.turn
            mark.past = ghost.past or mark.past
            ghosts = ghost.below
            place += ghost.pages * page_bytes
        mark.ghosts = ghosts

    def touch(self, node: Node, use: Use | None) -> None:
        super().touch(node, use)
        if use is None:
            return
        now = self._clock()
        before, continues = self._turn_before(node, now)
        if not continues:
            self._count_branch(node, use.cached_tokens, now)
        turn = Turn(now, use.prompt_tokens, use.cached_tokens, use.output_tokens, before, use.kind)
        turn.pages = use.prompt_tokens // self._page_tokens
        home: Node | None = node
        while home is not None and turn.pages <= home.start:
            home = home.parent
        if home is not None and home.parent is not None and len(home.children) < CROWD:
            home.mark.turn = turn
            page_bytes = len(home.key)
            last = (turn.pages - home.start - 1) * page_bytes
            turn.last_page = bytes(home.tokens[last : last + page_bytes])
        if self._model.observe(turn):
            self._weighed = -math.inf
        self._forget_ghosts(now)

    def _turn_before(self, node: Node, now: float) -> tuple[Turn | None, bool]:
        """The last turn on the path, and whether this is its first continuation."""
        current: Node | None = node
        while current is not None and current.parent is not None:
            mark = current.mark
            if len(current.children) < CROWD:
                if mark.turn is not None:
                    turn = mark.past = mark.turn
                    turn.continued = min(turn.continued, now)
                    mark.turn = None
                    return turn, True
                if mark.past is not None:
                    return mark.past, False
            current = current.parent
        return None, False

    def _count_branch(self, node: Node, cached_tokens: int, now: float) -> None:
        current: Node | None = node
        while current is not None and current.parent is not None:
            if (current.start + len(current.pages)) * self._page_tokens <= cached_tokens:
                mark = current.mark
                mark.branches = mark.branches * math.exp((mark.branched - now) / BRANCH_MEMORY) + 1
                mark.branched = now
            current = current.parent

    def split(self, upper: Node, lower: Node) -> None:
        upper.last_used = lower.last_used
        mark = lower.mark
        above = upper.mark = Mark()
        above.branches, above.branched = mark.branches, mark.branched
        if mark.turn is not None and mark.turn.pages <= upper.start + len(upper.pages):
            # The turn ended above; what is below is its last, partly filled page.
            above.turn, mark.turn = mark.turn, None
            above.past, mark.past = mark.past, None
            if lower in self._held:
                self.add(lower)

    def evicted(self, node: Node, pages: int) -> None:
        self._gone += pages
        if pages < len(node.pages):
            return
        del self._held[node]
        parent, mark = node.parent, node.mark
        assert parent is not None
        if parent.mark is None:  # a root
            parent.mark = Mark()
        above = parent.mark
        if mark.turn is not None or mark.past is not None or mark.ghosts:
            ghost = above.ghosts[node.key] = Ghost(pages, mark)
            self._ghosts.append((self._clock(), above.ghosts, node.key, ghost))
            self._ghost_pages += pages
        heir = mark.turn or mark.heir
        if heir is None or heir.continued < math.inf:
            return
        if above.heir is None or above.heir.continued < math.inf or above.heir.level < heir.level:
            above.heir = heir

    def _forget_ghosts(self, now: float) -> None:
        """Those too old to matter, and those beyond what may be kept."""
        ghosts, most = self._ghosts, GHOST_PAGES * self._num_pages
        while ghosts and (self._ghost_pages > most or ghosts[0][0] + HORIZON < now):
            _, where, key, ghost = ghosts.popleft()
            self._ghost_pages -= ghost.pages
            if where.get(key) is ghost:
                del where[key]

    # -- the order ---------------------------------------------------------------------------------------------------

    def worth(self, node: Node, now: float) -> float:
        """Expected reuses per second of holding the leaf's pages; equals in order of their last use."""
        mark = node.mark
        turn, worth = mark.turn, 0.0
        if turn is None and mark.heir is not None and mark.heir.continued == math.inf:
            turn = mark.heir
        if turn is not None:
            worth = self._model.worth(turn, now)
        if mark.branches:
            worth += mark.branches * math.exp((mark.branched - now) / BRANCH_MEMORY) / BRANCH_MEMORY
        return worth

    def add(self, node: Node) -> None:
        number = self._held[node] = next(self._numbers)
        heappush(self._heap, (self.worth(node, self._clock()), number, node))

    def remove(self, node: Node) -> None:
        self._held.pop(node, None)

    def victim(self) -> Node | None:
        now, held = self._clock(), self._held
        if self._gone * WEIGHINGS >= len(held) or now - self._weighed > STALE:
            self._weighed, self._gone = now, 0
            self._heap = [(self.worth(node, now), number, node) for node, number in held.items()]
            heapify(self._heap)
        heap = self._heap
        while heap:
            _, number, node = heap[0]
            if held.get(node) == number:
                return node
            heappop(heap)
        return None

    def queued(self) -> set[Node]:
        return set(self._held)
