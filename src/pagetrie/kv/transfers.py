"""Between the pool and the tiers: what goes down, what comes back up, and whether that is worth it.

All of this runs on the step's thread; threads of the tiers only fill pages of a load (``tiers.load``) and write copies.

Down: a page that becomes full is copied once and written through to disk and store in the background; a page that the
pool evicts goes to memory, and to the others if they lack it. What a tier hands out stays there: tiers below hold what
tiers above hold (inclusive), as far as their queues and capacities allow.

Up: when a prefix that is opened goes on in a tier, and loading is estimated to be faster than computing, pages are
allocated for it (the *loading* state: held by the load, seen by nobody) and filled in the background, while other
sequences go on. What has arrived is published between two steps, first pages first. The opener, and whoever comes
after it, waits on a ``PendingPage``, until a deadline: then the rest is computed into other pages, and what still
arrives is dropped. From a slow tier only the last pages are loaded, while the opener computes the first ones.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pagetrie.kv.estimates import PrefillSpeed, TierSpeed
from pagetrie.kv.flights import Ahead, Flight, Lookup, Recent
from pagetrie.kv.interface import PendingPage, TransferReport, TransferStats
from pagetrie.kv.keys import ChainKeys, tag_of
from pagetrie.kv.page_tree import Node, root_of
from pagetrie.kv.pool import PRIVATE
from pagetrie.kv.shares import Allowance
from pagetrie.kv.tiers.interface import PageRef, Tier
from pagetrie.kv.tiers.load import Load
from pagetrie.kv.tiers.stack import TierStack
from pagetrie.kv.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from pagetrie.kv.manager import CacheManager
    from pagetrie.kv.tiers.sealed import Keyring

PUBLISH_PAGES = 32
"""Those who wait are woken when so many more pages have arrived, or all."""

FLUSH_SECONDS = 10.0
"""At the end, time to write what the tiers lack."""

_MEET_GAIN = 0.75  # loading while computing must not take a larger part of the time that either takes
_SHORTEST_WAIT, _SPARE_WAIT, _PATIENCE = 0.05, 0.25, 4.0
_LOOKUP_WAIT = 0.25
_LOOK_AGAIN = 0.05
_NO_RETRY = 2.0  # seconds in which what failed, or was loaded and gone before anyone used it, isn't asked for again
_REMEMBERED = 8192


class Transfers:
    """Moves pages for one ``CacheManager``, which it is given to and which binds it.

    Args:
        stack: the tiers.
        keys: how pages are named.
        keyring: if tiers seal their pages, learns of their namespaces.
        attention: see ``PrefillSpeed``.

    Attributes:
        stats: counts.
        meeting_pages: the fewest pages of which a part is loaded while the others are computed.
    """

    meeting_pages = 8

    def __init__(
        self, stack: TierStack, keys: ChainKeys, keyring: Keyring | None = None, attention: float = 0.0
    ) -> None:
        self.stack = stack
        self._keyring = keyring
        self.stats = TransferStats()
        self._keys = keys
        self._clock = stack.clock
        self._waker: Callable[[], None] = lambda: None
        self._flights: list[Flight] = []
        self._cancelled: list[Flight] = []
        # Loads into pages that the coming step still has to copy from.
        self._held_back: list[Flight] = []
        self._lookups: list[Lookup] = []
        # Keys of pages on their way, and of questions asked.
        self._awaited: dict[bytes, Flight | Lookup] = {}
        self._remote_has = Recent()
        self._avoided = Recent()
        self._speeds = {tier.name: TierSpeed(tier.traits.speed) for tier in stack.tiers}
        self._prefill = PrefillSpeed(attention)
        # Tier that a page came from, until somebody has used it.
        self._origin: dict[int, str] = {}
        # Names of namespaces; an epoch parts what was stored before a reset from what comes after it.
        self._roots: dict[bytes, bytes] = {}
        self._epoch = b""
        self._closed = False

    def bind(self, manager: CacheManager) -> None:
        self._manager = manager
        self._page_bytes = manager.index.page_bytes
        # Key of the page that each physical page of the index holds.
        self._page_keys: list[bytes] = [b""] * manager.num_pages

    # -- names -------------------------------------------------------------------------------------------------------

    def _root_key(self, root: Node) -> bytes:
        namespace = bytes(root.tokens)
        key = self._roots.get(namespace)
        if key is None:
            if len(self._roots) >= _REMEMBERED:
                self._roots.clear()
            key = self._roots[namespace] = self._keys.root(namespace, self._epoch)
            self.stack.name_namespace(key, namespace + self._epoch)
            if self._keyring is not None:
                self._keyring.note(key, namespace)
        return key

    def _refs(self, namespace: bytes, parent: bytes, tokens: bytes) -> Iterator[PageRef]:
        """Names of the pages that hold ``tokens``; the last may be partly filled."""
        for start in range(0, len(tokens), self._page_bytes):
            page = tokens[start : start + self._page_bytes]
            key = self._keys.page(parent, page)
            yield PageRef(key, parent, namespace, page)
            parent = key

    def _edge(self, node: Node, first: int) -> Iterator[tuple[PageRef, int]]:
        """Names and numbers of a node's pages from ``first`` on; none if they were forgotten by a reset."""
        root = root_of(node)
        if root.dead:
            return
        namespace = self._root_key(root)
        if first:
            parent = self._page_keys[node.pages[first - 1]]
        else:
            assert node.parent is not None
            parent = self._page_keys[node.parent.pages[-1]] if node.parent.pages else namespace
        tokens = bytes(node.tokens[first * self._page_bytes :])
        yield from zip(self._refs(namespace, parent, tokens), node.pages[first:], strict=True)

    # -- down --------------------------------------------------------------------------------------------------------

    def published(self, root: Node, before: int | None, tokens: bytes, pages: Sequence[int]) -> None:
        """Full pages of the index that follow the page ``before``; what tiers lack of them is written through."""
        namespace = self._root_key(root)
        parent = self._page_keys[before] if before is not None else namespace
        for ref, page in zip(self._refs(namespace, parent, tokens), pages, strict=False):
            self._page_keys[page] = ref.key
            self.stats.copied_bytes += self.stack.write(ref, page)

    def evicting(self, node: Node, count: int) -> None:
        """The index gives up the last ``count`` pages of a node."""
        # Last page first: a prefix's first pages are then the last that memory gives up.
        for ref, page in reversed(list(self._edge(node, len(node.pages) - count))):
            self.stats.copied_bytes += self.stack.demote(ref, page)
            if page in self._origin:  # loaded for nothing
                self._avoided.note(ref.key, self._clock() + _NO_RETRY)

    def used(self, page: int) -> None:
        """A lease ends whose last page in the index was this one."""
        self.stack.touch(self._page_keys[page])

    # -- up ----------------------------------------------------------------------------------------------------------

    def consider(self, root: Node, node: Node, pages: Sequence[int], tokens: bytes) -> Ahead:
        """What of the tokens after the pool's match comes from a tier; starts a load if that is worth it.

        Args:
            root, node: of the match; pinned.
            pages: the match's full pages.
            tokens: all of the prompt. One token is always left to compute.
        """
        start, limit = len(pages) * self._page_bytes, len(tokens) - TOKEN_BYTES
        if self._closed or start >= limit:
            return Ahead()
        namespace = self._root_key(root)
        parent = self._page_keys[pages[-1]] if pages else namespace
        now = self._clock()
        rest = tokens[start:limit]
        refs: list[PageRef] = []
        sources: list[Tier] = []
        unknown: list[bytes] = []
        remote = self.stack.remote
        full = len(rest) - len(rest) % self._page_bytes
        there = Ahead()
        for ref in self._refs(namespace, parent, rest[:full]):
            awaited = self._awaited.get(ref.key)
            if awaited is not None:
                coming = len(awaited.load.refs) - awaited.published if isinstance(awaited, Flight) else 0
                if not refs and not unknown:
                    return Ahead(awaited.pending, coming=coming)
                if refs:
                    there = Ahead(None, (start + len(refs) * self._page_bytes) // TOKEN_BYTES, coming)
                break
            avoided = self._avoided.has(ref.key, now)
            source = self.stack.locate(ref.key) if not avoided else None
            if source is None and remote is not None and not avoided:
                if self._remote_has.has(ref.key, now):
                    source = remote
                elif not refs:
                    unknown.append(ref.key)
                    continue
            if source is None or unknown:
                break
            if (source is remote) != (sources[:1] == [remote]) and refs:
                break  # one load has one reader
            refs.append(ref)
            sources.append(source)
        if unknown:
            return Ahead(self._ask(unknown, now))
        if len(refs) * self._page_bytes == full:
            self._add_tail(refs, sources, namespace, refs[-1].key if refs else parent, rest[full:], now)
        if not refs:
            return there
        return self._begin(root, node, tokens[:start], refs, sources, now, meet=not there.rejoin) or there

    def _add_tail(
        self, refs: list[PageRef], sources: list[Tier], namespace: bytes, parent: bytes, tokens: bytes, now: float
    ) -> None:
        """The longest partly filled page that a local tier has for the last tokens, less than a page of them."""
        if sources and sources[-1] is self.stack.remote:
            return
        for end in range(len(tokens), 0, -TOKEN_BYTES):
            (ref,) = self._refs(namespace, parent, tokens[:end])
            if ref.key in self._awaited:
                return
            source = self.stack.locate(ref.key)
            if source is not None and not self._avoided.has(ref.key, now):
                refs.append(ref)
                sources.append(source)
                return

    def _begin(
        self,
        root: Node,
        node: Node,
        before: bytes,
        refs: list[PageRef],
        sources: list[Tier],
        now: float,
        *,
        meet: bool,
    ) -> Ahead | None:
        """Load what is worth it of the pages that follow ``node``, where the tokens ``before`` end.

        Args:
            meet: some may be computed meanwhile.
        """
        count = min(len(refs), self._room(root))
        del refs[count:], sources[count:]
        worth = self._worthwhile(len(before) // TOKEN_BYTES, refs, sources, now, meet=meet)
        if worth is None:
            return None
        first, expected, computing = worth
        path = before + b"".join(ref.tokens for ref in refs[:first]) if first else b""
        del refs[:first], sources[:first]
        manager = self._manager
        self.stack.keep(refs, sources)
        manager.index.pin(node)
        load = Load(refs, sources, manager._take(len(refs), root.share))
        latest = now + max(_SHORTEST_WAIT, computing)
        soon = now + _PATIENCE * expected + _SPARE_WAIT
        start = len(path or before) // TOKEN_BYTES
        reader = self.stack.reader_of(sources)
        flight = Flight(load, reader, root, node, start, path, started=now, deadline=soon, latest=latest)
        self._flights.append(flight)
        self._awaited.update((ref.key, flight) for ref in refs)
        self.stats.loads += 1
        self.stats.meeting_loads += bool(path)
        self._held_back.append(flight)
        self._start_loads()
        return Ahead(None, start, len(refs)) if path else Ahead(flight.pending, coming=len(refs))

    def _start_loads(self) -> None:
        """Start loads, but none that would overwrite what is yet to be copied."""
        for flight in self._held_back.copy():
            if not self._manager.copies_from(flight.load.pages):
                self._held_back.remove(flight)
                self.stack.start(flight.load, self._on_progress(flight))

    def _worthwhile(
        self, start: int, refs: Sequence[PageRef], sources: Sequence[Tier], now: float, *, meet: bool
    ) -> tuple[int, float, float] | None:
        """What to load of pages that follow ``start`` tokens.

        Where a tier is about as slow as computing, the first pages are computed while the others are loaded (Jin et al.
        2024, "Compute Or Load KV Cache? Why Not Both?").

        Returns:
            The first page to load; estimated seconds until all are there; estimated seconds to compute them all. None
            if that is the fastest.
        """
        if not refs:
            return None
        reader = self.stack.reader_of(sources)
        before = [flight.load for flight in self._flights if flight.reader == reader]
        queue = sum(self._loading(load.sources[load.ready :], now) for load in before)
        loading = queue + self._loading(sources, now)
        computing = self._prefill.seconds(start, sum(len(ref.tokens) for ref in refs) // TOKEN_BYTES)
        if meet and len(refs) >= self.meeting_pages and loading > computing / len(refs):
            page = self._page_bytes // TOKEN_BYTES

            def lead(count: int) -> float:
                """By how much the other pages are there before so many are computed; it grows with them."""
                others = queue + self._loading(sources[count:], now, beside=True)
                return self._prefill.seconds(start, count * page) - others

            first = bisect_left(range(len(refs) - 1), 0.0, key=lead)
            together = self._prefill.seconds(start, first * page)
            if first and together < _MEET_GAIN * min(loading, computing):
                return first, together, computing
        if loading > computing:
            self.stats.declined_loads += 1
            return None
        return 0, loading, computing

    def _loading(self, sources: Sequence[Tier], now: float, *, beside: bool = False) -> float:
        """Estimated seconds to read a page from each of these, as things are or beside steps."""
        size, pace = self.stack.memory.bytes_per_page, self.stack.pace
        rest = pace.rest if pace.slow or beside else 0.0
        counts = Counter(tier.name for tier in sources)
        return sum(self._speeds[name].seconds(count * size, now, rest) for name, count in counts.items())

    def _room(self, root: Node) -> int:
        """Pages that a load may take: while others run, never so many that they'd be short of pages soon."""
        manager = self._manager
        others = manager.stats().active_pages > 0
        return max(0, manager.index.shares.available(root.share) - (manager.num_pages // 8 if others else 0))

    def _on_progress(self, flight: Flight) -> Callable[[], None]:
        load = flight.load

        def on_progress() -> None:
            if load.finished or load.ready - flight.published >= PUBLISH_PAGES:
                self._waker()

        return on_progress

    def _ask(self, keys: list[bytes], now: float) -> PendingPage:
        lookup = Lookup(keys, now + _LOOKUP_WAIT)
        self._lookups.append(lookup)
        self._awaited[keys[0]] = lookup

        def answer(found: int) -> None:
            lookup.found = found
            self._waker()

        self.stack.ask_remote(keys, answer)
        return lookup.pending

    def kept_below(self, namespace: bytes, page: int | None, tokens: bytes) -> tuple[str, int]:
        """Of whole pages of ``tokens`` that follow ``page`` (None: a namespace's first ones), what local tiers hold.

        Returns:
            The tier that holds the first of them (empty for none), and how many tokens in a row are held.
        """
        first = self._keys.root(namespace, self._epoch)
        full = len(tokens) - len(tokens) % self._page_bytes
        name, held = "", 0
        for ref in self._refs(first, self._page_keys[page] if page is not None else first, tokens[:full]):
            tier = self.stack.locate(ref.key)
            if tier is None:
                break
            name = name or tier.name
            held += len(ref.tokens) // TOKEN_BYTES
        return name, held

    # -- between steps -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Publish what has arrived, end what is over or late. Called between two steps."""
        if not (self._flights or self._lookups or self._cancelled):
            return
        self._start_loads()
        now = self._clock()
        for flight in self._flights.copy():
            if flight.path:
                self._look_for_path(flight, now)
            finished = flight.load.finished  # read before the count: nothing comes after it
            arrived = flight.load.ready
            late = not finished and now >= flight.deadline and not self._goes_on(flight, arrived, now)
            if flight.path:
                self._settle_meeting(flight, finished, arrived, late, now)
                continue
            if finished or late or arrived - flight.published >= PUBLISH_PAGES:
                self._publish(flight, arrived)
            if finished:
                self._end(flight, now)
            elif late or flight.broken or flight.root.dead:
                self.stats.late_loads += late
                self._give_up(flight, now)
        self._cancelled = [flight for flight in self._cancelled if not self._try_free(flight)]
        for lookup in self._lookups.copy():
            if lookup.found is not None or now >= lookup.deadline:
                self._answered(lookup, now)

    def _goes_on(self, flight: Flight, arrived: int, now: float) -> bool:
        """Whether waiting for a load beyond its deadline is still faster than to compute the rest; if so, for a while.

        It is if what has arrived since it was last looked at says so, or if another load is before it.
        """
        load = flight.load
        if now >= flight.latest:
            return False
        if load.began is None:
            ahead = self._flights[: self._flights.index(flight)]
            queued = any(other.reader == flight.reader for other in ahead)
            if not queued and not flight.queued:  # the thread hangs in what was given up
                return False
            flight.queued = queued
        elif arrived > flight.seen:
            left, page = len(load.refs) - arrived, self._page_bytes // TOKEN_BYTES
            missing = (len(flight.path) - flight.grown) // TOKEN_BYTES
            computing = self._prefill.seconds(flight.start + arrived * page - missing, left * page + missing)
            if (now - load.began) / arrived * left > computing:
                return False
        elif now - load.began >= _SPARE_WAIT:
            return False
        flight.seen, flight.deadline = arrived, min(now + _SPARE_WAIT, flight.latest)
        return True

    def _settle_meeting(self, flight: Flight, finished: bool, arrived: int, late: bool, now: float) -> None:
        """The pages before a load's first one are still being computed: keep it, unless it isn't worth that."""
        if late or flight.root.dead or now >= flight.latest or (finished and not arrived):
            failed = finished and arrived < len(flight.load.refs)
            self.stats.failed_loads += failed
            self.stats.late_loads += not failed
            self._give_up(flight, now)
        elif finished:
            flight.deadline = flight.latest

    def _look_for_path(self, flight: Flight, now: float) -> None:
        """See how far the pages before a load's first one are computed, and where they end once all are."""
        index, namespace = self._manager.index, bytes(flight.root.tokens)
        if flight.root.dead:
            return
        grown = index.stored_tokens(namespace, flight.path) * TOKEN_BYTES
        if grown > flight.grown:
            flight.grown = grown
            flight.latest = max(flight.latest, now + flight.most)
        if grown == len(flight.path):
            node = index.match(namespace, flight.path, grown // TOKEN_BYTES).node
            index.pin(node)
            index.unpin(flight.node)
            flight.node, flight.path = node, b""
            # From here on somebody waits for it.
            flight.latest = min(flight.latest, now + max(_SHORTEST_WAIT, flight.most))

    def _publish(self, flight: Flight, arrived: int) -> None:
        manager, load = self._manager, flight.load
        index, first = manager.index, flight.published
        if arrived == first or flight.root.dead:
            return
        refs, mine = load.refs[first:arrived], load.pages[first:arrived]
        flight.published = arrived
        for ref in refs:
            self._awaited.pop(ref.key, None)
        tail = refs[-1] if len(refs[-1].tokens) < self._page_bytes else None
        tail_page = mine.pop() if tail is not None else None
        full = refs[: len(mine)]
        kept: list[int] = []
        if full:
            node, kept = index.insert(flight.node, b"".join(ref.tokens for ref in full), mine)
            if node is not flight.node:
                index.pin(node)
                index.unpin(flight.node)
                flight.node = node
        for number, (ref, page) in enumerate(zip(full, kept, strict=False)):
            self._page_keys[page] = ref.key
            if page == mine[number]:
                self._origin[page] = load.sources[first + number].name
        manager.pool.release([own for own, page in zip(mine, kept, strict=False) if own != page])
        if len(kept) < len(mine):  # another page has taken a key of the hash index
            manager.pool.release(mine[len(kept) :])
            flight.broken = True
        if tail is not None and tail_page is not None:
            if not flight.broken and index.insert_tail(flight.node, tail.tokens, tail_page):
                self._origin[tail_page] = load.sources[arrived - 1].name
            else:
                manager.pool.release((tail_page,))
        for ref in refs[len(kept) :]:  # not found as a whole page of the prefix: it would be asked for again
            self._avoided.note(ref.key, self._clock() + _NO_RETRY)
        self.stats.loaded_pages += arrived - first
        flight.pending.done = True
        flight.pending = PendingPage()

    def _end(self, flight: Flight, now: float) -> None:
        load = flight.load
        self._take_samples(load, now)
        if flight.published < len(load.refs):
            self.stats.failed_loads += 1
        self._manager.pool.release(load.pages[flight.published :])
        self._leave(flight, now)

    def _take_samples(self, load: Load, now: float) -> None:
        for sample in load.samples:
            # Nothing at all says no less than that the first page took so long.
            size = max(sample.size, self.stack.memory.bytes_per_page)
            self._speeds[sample.tier].take_sample(sample._replace(size=size), now)

    def _give_up(self, flight: Flight, now: float) -> None:
        load = flight.load
        if load.finished:
            self._take_samples(load, now)
        elif now >= flight.deadline and (arrived := load.ready) < len(load.refs):
            got = (arrived + 1) * self.stack.memory.bytes_per_page
            self._speeds[load.sources[arrived].name].take(got, now - flight.started - load.rested, now)
        self._leave(flight, now)
        if not self._try_free(flight):
            self._cancelled.append(flight)

    def give_way(self) -> bool:
        """See ``PageTransfers.give_way``."""
        now = self._clock()
        for flight in reversed(self._flights.copy()):
            self.stats.late_loads += 1
            self._give_up(flight, now)
            if flight not in self._cancelled:
                return True
        return False

    def _try_free(self, flight: Flight) -> bool:
        if not flight.load.cancel():
            return False
        self._manager.pool.release(flight.load.pages[flight.published :])
        return True

    def _leave(self, flight: Flight, now: float) -> None:
        """Nobody waits for this load any more, and nobody starts another one for what it didn't bring."""
        self._flights.remove(flight)
        if flight in self._held_back:
            self._held_back.remove(flight)
        for ref in flight.load.refs[flight.published :]:
            self._awaited.pop(ref.key, None)
            self._avoided.note(ref.key, now + _NO_RETRY)
        self._manager.index.touch(flight.node, None)
        self._manager.index.unpin(flight.node)
        self._manager._trim(flight.root.share)
        flight.pending.done = True

    def _answered(self, lookup: Lookup, now: float) -> None:
        self._lookups.remove(lookup)
        self._awaited.pop(lookup.keys[0], None)
        found = lookup.found or 0
        for key in lookup.keys[:found]:
            self._remote_has.note(key, now + _NO_RETRY)
        for key in lookup.keys[found : found + 1]:
            self._avoided.note(key, now + _NO_RETRY)
        lookup.pending.done = True

    # -- for the engine ----------------------------------------------------------------------------------------------

    def set_waker(self, waker: Callable[[], None]) -> None:
        """What to call, from any thread, when ``settle`` has something to do."""
        self._waker = waker

    def has_news(self) -> bool:
        """Whether ``settle`` has something to do now."""
        now = self._clock()
        return (
            bool(self._held_back)
            or not all(flight.load.lock.locked() for flight in self._cancelled)
            or any(
                now >= f.deadline or (not f.path and (f.load.finished or f.load.ready - f.published >= PUBLISH_PAGES))
                for f in self._flights
            )
            or any(lookup.found is not None or now >= lookup.deadline for lookup in self._lookups)
        )

    def next_deadline(self) -> float | None:
        """When ``settle`` will have something to do if nothing arrives before."""
        deadlines = [flight.deadline for flight in self._flights] + [lookup.deadline for lookup in self._lookups]
        if self._cancelled:  # a thread that hangs in a page may let go of it at any time
            deadlines.append(self._clock() + _LOOK_AGAIN)
        return min(deadlines, default=None)

    @property
    def loading_pages(self) -> int:
        """Pages held by loads."""
        return sum(len(f.load.pages) - f.published for f in (*self._flights, *self._cancelled))

    def report(self) -> TransferReport:
        """See ``PageTransfers.report``."""
        queues = {queue.tier.name: queue for queue in self.stack.queues}
        tiers = {tier.name: replace(tier.stats) for tier in self.stack.tiers}
        for name, queue in queues.items():
            tiers[name].dropped_pages, tiers[name].queued_bytes = queue.dropped_pages, queue.waiting_bytes
        return TransferReport(tiers, replace(self.stats))

    def pages_on_their_way(self) -> list[int]:
        """The pages themselves."""
        return [page for f in (*self._flights, *self._cancelled) for page in f.load.pages[f.published :]]

    def note_step(self, computes: bool) -> None:
        """A step begins that computes something, or one that only waits: then loads may have the cores."""
        self.stack.pace.slow = computes

    def note_prefill(self, tokens: int, attended: int, seconds: float) -> None:
        """See ``PageTransfers.note_prefill``."""
        self._prefill.note(tokens, attended, seconds)

    def claim(self, pages: Sequence[int]) -> dict[str, int]:
        """Of these pages, how many came from which tier and are used for the first time since."""
        counts: dict[str, int] = {}
        if self._origin:
            for page in pages:
                origin = self._origin.pop(page, None)
                if origin is not None:
                    counts[origin] = counts.get(origin, 0) + 1
        return counts

    def taken(self, pages: Sequence[int]) -> None:
        """Pages got a new holder: what was known of them is past."""
        if self._origin:
            for page in pages:
                self._origin.pop(page, None)

    def reset(self) -> None:
        """Every stored prefix is forgotten: in the local tiers for good, in a shared one for this process.

        Called after the index was reset.
        """
        self._epoch = secrets.token_bytes(16)
        self._roots.clear()
        self.stack.clear()
        self.settle()

    def allow(self, allowances: Mapping[bytes, Allowance]) -> None:
        """How much of the local tiers each owner may have."""
        self.stack.allow({self._keys.tag(owner): allowance for owner, allowance in allowances.items()})

    def drop_owner(self, owner: bytes) -> None:
        """Forget an owner: nothing of its pages stays in local tiers, and nothing that arrives is taken in.

        Called after the index has dropped its trees.
        """
        tag = self._keys.tag(owner)
        now = self._clock()
        for flight in [flight for flight in self._flights if flight.root.share.owner == owner]:
            self._give_up(flight, now)
        self._roots = {namespace: root for namespace, root in self._roots.items() if tag_of(root) != tag}
        if self._keyring is not None:
            self._keyring.forget(tag)
        self.stack.drop_owner(tag)

    def flush(self, seconds: float) -> bool:
        """Write what the pool holds and tiers lack, partly filled pages too; False if time ran out."""
        deadline = self._clock() + seconds
        # Tier by tier, the disk first: a store that hangs keeps nothing from it.
        offered = all(
            self.stack.write_in_time(queue, ref, page, deadline)
            for queue in self.stack.queues
            for node in self._manager.index.nodes()
            for ref, page in self._edge(node, 0)
        )
        return self.stack.flush(max(0.0, deadline - self._clock())) and offered

    def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Flush, then end the tiers' threads, in so many seconds. Nothing is loaded or written after. Idempotent."""
        if self._closed:
            return
        self._closed = True
        deadline = self._clock() + seconds
        self.flush(seconds)
        now = self._clock()
        for flight in self._flights.copy():
            self._give_up(flight, now)
        for lookup in self._lookups.copy():
            self._answered(lookup, now)
        self.stack.close(max(0.0, deadline - now))

    def check(self) -> None:
        """Recount by brute force (for tests). Raises AssertionError on any disagreement."""
        pool = self._manager.pool
        held = self.pages_on_their_way()
        assert len(held) == len(set(held)) == self.loading_pages
        assert all(pool.state[page] == PRIVATE and pool.references[page] == 1 for page in held)
        copied = [flight for flight in self._flights if self._manager.copies_from(flight.load.pages)]
        assert not [flight for flight in copied if flight not in self._held_back], "a load overwrites what is copied"
        for flight in self._flights:
            assert flight.node.pins > 0 and not flight.pending.done
            for ref in flight.load.refs[flight.published :]:
                assert self._awaited[ref.key] is flight
