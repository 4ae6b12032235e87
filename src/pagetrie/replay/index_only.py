"""Replay against the prefix index alone: what would have been a hit, in a pool of so many pages?

One pseudo token stands for a page of the trace, so the tree sees one key per page and a request costs a few
operations on edges. Requests are served one at a time, in order, at the trace's own times: each matches its longest
stored prefix, evicts what it lacks, stores its pages and lets go. No page of it is computed.

Tiers below the pool are plain LRU stores of pages here (``PageStores``), and whatever they hold counts as a hit; the
full replay has the real transfers, which may find a load not worth its time.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagetrie.kv.eviction import EvictionPolicy, Use, make_policy
from pagetrie.kv.hashchain import HashIndex
from pagetrie.kv.keys import ChainKeys
from pagetrie.kv.page_tree import Node
from pagetrie.kv.pool import PagePool
from pagetrie.kv.radix import RadixIndex
from pagetrie.kv.tokens import TOKEN_BYTES
from pagetrie.replay.routing import Router, Routing
from pagetrie.replay.trace import Trace, TraceRequest


@dataclass(slots=True)
class HitCount:
    """Pages asked for and pages found, over a number of requests; ``below``: those of them found in which tier."""

    requests: int = 0
    pages: int = 0
    hits: int = 0
    below: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        return self.hits / self.pages if self.pages else 0.0


class PageStores:
    """The tiers below a pool, fastest first: ``ram`` takes what the pool evicts, ``disk`` all that it stores.

    What they hand out stays. The least recently used page goes first, of a prefix the last one.

    Args:
        capacities: pages, by tier.
    """

    def __init__(self, capacities: Mapping[str, int]) -> None:
        self._capacities = capacities
        self._held: dict[str, OrderedDict[int, None]] = {name: OrderedDict() for name in capacities}

    def find(self, pages: Sequence[int]) -> list[str]:
        """The first tier that has each of the pages, up to the first that none has."""
        found = []
        for page in pages:
            name = next((name for name, held in self._held.items() if page in held), None)
            if name is None:
                break
            found.append(name)
        for page, name in zip(reversed(pages[: len(found)]), reversed(found), strict=True):
            self._held[name].move_to_end(page)
        return found

    def put(self, name: str, pages: Sequence[int]) -> None:
        """Store pages of one prefix in a tier, if there is such a tier."""
        held = self._held.get(name)
        if held is None:
            return
        for page in reversed(pages):
            held[page] = None
            held.move_to_end(page)
        while len(held) > self._capacities[name]:
            held.popitem(last=False)


class IndexReplay:
    """A pool and its index, fed with a trace's requests.

    Args:
        capacity: pages in the pool.
        page_tokens: tokens per page, as the trace has them.
        eviction: name of the policy.
        index: ``radix`` or ``hash``.
        tiers: capacities of the tiers below, in pages, fastest first.

    Attributes:
        below: hits by tier below the pool.
    """

    def __init__(
        self,
        capacity: int,
        page_tokens: int,
        eviction: str = "lru",
        index: str = "radix",
        tiers: Mapping[str, int] | None = None,
    ) -> None:
        self.now = 0.0
        self.policy: EvictionPolicy = make_policy(eviction, capacity, page_tokens, self._clock)
        self.pool = PagePool(capacity)
        self.index: RadixIndex | HashIndex = (
            RadixIndex(self.pool, 1, self.policy)
            if index == "radix"
            else HashIndex(self.pool, 1, self.policy, ChainKeys(bytes(32)))
        )
        self.page_tokens = page_tokens
        self.below: Counter[str] = Counter()
        self._stores = PageStores(tiers) if tiers else None
        if self._stores is not None:
            self.index.on_evict = self._demote

    def _demote(self, node: Node, count: int) -> None:
        assert self._stores is not None
        self._stores.put("ram", array("I", bytes(node.tokens[-TOKEN_BYTES * count :])))

    def _clock(self) -> float:
        return self.now

    def serve(self, request: TraceRequest) -> int:
        """Run one request and return how many of its pages were hits."""
        self.now = request.time
        index, pool = self.index, self.pool
        ids = request.pages
        if len(ids) > pool.num_pages:  # it could never be served; nothing of it is stored
            return 0
        tokens = array("I", ids).tobytes()
        match = index.match(b"", tokens, len(ids))
        node = match.node
        hits = stored = len(match.pages)
        index.pin(node)
        new = len(ids) - stored
        if self._stores is not None:
            found = self._stores.find(ids[stored:])
            self.below.update(found)
            hits += len(found)
            self._stores.put("disk", ids)
        if new:
            short = new - pool.free_pages
            if short > 0:
                index.evict(short)
            pages = pool.allocate(new)
            # As in the server, a partly filled last page is a leaf of its own.
            full = max(request.prompt_tokens // self.page_tokens - stored, 0)
            if full:
                node = self._store(node, tokens[4 * stored : 4 * (stored + full)], pages[:full])
            if full < new:
                index.pin(node)
                end = self._store(node, tokens[4 * (stored + full) :], pages[full:])
                index.unpin(node)
                node = end
        cached = min(hits * self.page_tokens, request.prompt_tokens)
        use = Use(request.prompt_tokens, cached, request.output_tokens, kind=request.kind)
        index.touch(node, use)
        index.unpin(node)
        return hits

    def _store(self, node: Node, tokens: bytes, pages: list[int]) -> Node:
        """Insert below a node and move the pin to where they end."""
        end, _ = self.index.insert(node, tokens, pages)
        if end is not node:
            self.index.pin(end)
            self.index.unpin(node)
        return end


def replay_index(
    trace: Trace,
    capacity: int,
    eviction: str = "lru",
    *,
    index: str = "radix",
    parts: Sequence[float] = (1.0,),
    replicas: int = 1,
    routing: Routing = "prefix",
    tiers: Mapping[str, int] | None = None,
) -> list[HitCount]:
    """Hits of a trace from a cold start.

    Args:
        trace: what to replay.
        capacity: pages in the pool of each replica.
        eviction: name of the policy.
        index: ``radix`` or ``hash``.
        parts: shares of the requests at which to cut, ascending, the last one 1.
        replicas, routing: how many, and which gets a request; a replica's load is the pages that it computed.
        tiers: capacities of each replica's tiers below the pool, in pages, fastest first.

    Returns:
        One count per part.
    """
    fleet = [IndexReplay(capacity, trace.page_tokens, eviction, index, tiers) for _ in range(replicas)]
    serve = fleet[0].serve if replicas == 1 else _Fleet(fleet, Router(routing, replicas)).serve
    counts, begin = [], 0
    for part in parts:
        end = round(part * len(trace.requests))
        chosen = trace.requests[begin:end]
        count = HitCount(len(chosen))
        before = sum((replica.below for replica in fleet), Counter[str]())
        count.hits = sum(map(serve, chosen))
        count.below = sum((replica.below for replica in fleet), Counter[str]()) - before
        count.pages = sum(len(request.pages) for request in chosen)
        counts.append(count)
        begin = end
    return counts


class _Fleet:
    def __init__(self, replicas: list[IndexReplay], router: Router) -> None:
        self._replicas = replicas
        self._router = router
        self._computed = [0.0] * len(replicas)

    def serve(self, request: TraceRequest) -> int:
        tokens = array("I", request.pages).tobytes()
        chosen = self._router.choose(
            len(request.pages),
            lambda replica: self._replicas[replica].index.stored_tokens(b"", tokens),
            self._computed,
        )
        hits = self._replicas[chosen].serve(request)
        self._computed[chosen] += len(request.pages) - hits
        return hits
