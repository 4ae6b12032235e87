"""A brute-force model of the paged cache, and a harness that drives the real one beside it.

The model knows no tree: it keeps every stored page as the whole token prefix that ends there, and every answer of the
manager is recomputed by going through all of them. Pages have contents: a slot holds the identity of a key/value pair
(namespace and all tokens up to there), written only as a runner would, so a page that is shared, copied, remapped or
evicted wrongly shows as a lease that no longer reads what it computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pagetrie.errors import HoldLimitError
from pagetrie.kv import CacheManager, Hold, Lease, PendingPage
from pagetrie.kv.pool import FREE, INDEXED, PRIVATE
from pagetrie.kv.tokens import TOKEN_BYTES, pack_tokens

Tree = tuple[bytes, int]
"""Namespace and generation: a reset starts a new generation."""

POISON = -1
GARBAGE = -2


@dataclass(eq=False)
class Stored:
    """A page in the index: ``tokens`` is everything from the start of the prompt to the page's last token."""

    tree: Tree
    tokens: tuple[int, ...]
    ids: list[int]
    page: int
    parent: Stored | None
    tick: int
    packed: bytes


@dataclass(eq=False)
class Held:
    """A lease and what the model knows of it.

    ``path``: stored pages it stands on. ``partial``: the page whose first tokens it is about to copy.
    """

    lease: Lease
    tree: Tree
    tokens: list[int]
    ids: list[int]
    publish: bool
    computed: int = 0
    path: list[Stored] = field(default_factory=list)
    partial: Stored | None = None
    copy_pending: bool = False
    leads: tuple[tuple[Tree, tuple[int, ...]], PendingPage] | None = None

    @property
    def private(self) -> list[int]:
        return self.lease.pages[len(self.path) :]


@dataclass(eq=False)
class Pinned:
    """A hold and the stored pages it keeps."""

    hold: Hold
    path: list[Stored]


def shared_length(a: Iterable[int], b: Iterable[int]) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


class Harness:
    """Drives a manager and the model through the same operations.

    ``trace`` is what happened, one entry per operation; call ``check`` after each.
    """

    def __init__(self, manager: CacheManager) -> None:
        self.manager = manager
        self.size = manager.page_size
        self.memory = [[POISON] * self.size for _ in range(manager.num_pages)]
        self.stored: dict[tuple[Tree, tuple[int, ...]], Stored] = {}
        self.leases: list[Held] = []
        self.holds: list[Pinned] = []  # least recently used first
        self.leaders: dict[tuple[Tree, tuple[int, ...]], Held] = {}
        self.given_up: list[PendingPage] = []
        self.generation = 0
        self.tick = 0
        self.evicted = 0
        self.copied = 0
        self.trace: list[tuple[str, int]] = []
        self._identities: dict[tuple[object, int], int] = {}

    # -- what is true ------------------------------------------------------------------------------------------------

    def identify(self, namespace: bytes, tokens: Iterable[int], known: list[int] | None = None) -> list[int]:
        """One number per position, equal only for equal namespaces and equal tokens up to and including it."""
        ids = list(known or ())
        for token in list(tokens)[len(ids) :]:
            parent = ids[-1] if ids else namespace
            ids.append(self._identities.setdefault((parent, token), len(self._identities)))
        return ids

    def pinned(self) -> set[Stored]:
        held = {stored for lease in self.leases for stored in lease.path}
        held |= {stored for pinned in self.holds for stored in pinned.path}
        return held | {lease.partial for lease in self.leases if lease.partial is not None}

    def references(self) -> Counter[int]:
        return Counter(page for lease in self.leases for page in lease.private)

    def free(self) -> set[int]:
        taken = {stored.page for stored in self.stored.values()} | set(self.references())
        return set(range(self.manager.num_pages)) - taken

    def longest(self, tree: Tree, tokens: list[int]) -> int:
        """Longest prefix of ``tokens`` that any stored page ends or passes."""
        return max((shared_length(s.tokens, tokens) for s in self.stored.values() if s.tree == tree), default=0)

    def is_dead(self, tree: Tree) -> bool:
        return tree[1] != self.generation

    def _touch(self, path: list[Stored]) -> None:
        self.tick += 1
        for stored in path:
            stored.tick = self.tick

    def _store(self, held: Held, tokens: list[int], page: int) -> Stored:
        """Add a page; partial pages that it makes superfluous go, unless someone is about to copy them."""
        parent = held.path[-1] if held.path else None
        start = len(held.path) * self.size
        siblings = sorted(
            (s.packed[start * TOKEN_BYTES :], s)
            for s in self.stored.values()
            if s.tree == held.tree and s.parent is parent
        )
        packed = pack_tokens(tokens)
        key = packed[start * TOKEN_BYTES :]
        pinned = self.pinned()
        for other_key, other in reversed([pair for pair in siblings if pair[0] < key]):
            if not key.startswith(other_key) or other in pinned:
                break
            del self.stored[other.tree, other.tokens]
        self.tick += 1
        stored = Stored(held.tree, tuple(tokens), held.ids[: len(tokens)], page, parent, self.tick, packed)
        self.stored[stored.tree, stored.tokens] = stored
        return stored

    def _evict(self, count: int) -> None:
        """Take the least recently used of the pages that no one holds and nothing continues, one by one.

        Of other policies it is only checked that what they took could go.
        """
        pinned = self.pinned()
        if self.manager.pool.common.policy.name != "lru":
            # Of dropped trees too: what nobody holds of them any more goes the same way.
            kept = {page for node in self.manager.index.nodes() for page in node.pages}
            gone = {s for s in self.stored.values() if s.page not in kept}
            assert len(gone) == count and not gone & pinned
            self.stored = {key: stored for key, stored in self.stored.items() if stored not in gone}
            assert not any(stored.parent in gone for stored in self.stored.values())
            self.evicted += count
            return
        for _ in range(count):
            inner = {stored.parent for stored in self.stored.values()}
            leaves = [s for s in self.stored.values() if s not in pinned and s not in inner]
            victim = min(leaves, key=lambda stored: stored.tick)
            del self.stored[victim.tree, victim.tokens]
            self.evicted += 1

    def _announce(self, held: Held) -> None:
        self._withdraw(held)
        end = (len(held.path) + 1) * self.size
        key = (held.tree, tuple(held.tokens[:end]))
        if held.publish and len(held.tokens) >= end and key not in self.leaders:
            announced = held.lease._announced
            assert announced is not None
            held.leads = (key, announced[1])
            self.leaders[key] = held

    def _withdraw(self, held: Held) -> None:
        if held.leads is not None:
            key, pending = held.leads
            del self.leaders[key]
            held.leads = None
            self.given_up.append(pending)

    def _forget_if_dead(self, held: Held) -> bool:
        if self.is_dead(held.tree):
            held.publish = False
            self._withdraw(held)
        return self.is_dead(held.tree)

    # -- the verbs ---------------------------------------------------------------------------------------------------

    def open(self, tokens: list[int], namespace: bytes = b"a", *, lookup: bool = True, publish: bool = True) -> Held:
        tree = (namespace, self.generation)
        stored = self.manager.stored_tokens(tokens, namespace)
        assert stored == (self.longest(tree, tokens) // self.size * self.size if self.manager.shares else 0)
        lease = self.manager.open(tokens, namespace, lookup=lookup, publish=publish)
        hit = self.longest(tree, tokens[:-1]) if lookup else 0
        assert lease.computed == lease.cached_tokens == hit
        held = Held(lease, tree, list(tokens), self.identify(namespace, tokens), publish, computed=hit)
        held.path = [
            self.stored[tree, tuple(tokens[:end])] for end in range(self.size, hit + 1, self.size)
        ]  # no KeyError: whatever is stored is contiguous from the root
        assert lease.pages == [stored.page for stored in held.path]
        if hit % self.size:
            assert lease._partial is not None
            (held.partial,) = (s for s in self.stored.values() if s.page == lease._partial[0])
            assert held.partial.tree == tree
            assert held.partial.tokens[:hit] == tuple(tokens[:hit])
            assert held.partial.parent is (held.path[-1] if held.path else None)
        else:
            assert lease._partial is None
        self._touch(held.path)
        end = (len(held.path) + 1) * self.size
        leader = self.leaders.get((tree, tuple(tokens[:end]))) if lookup and len(tokens) >= end else None
        assert lease.awaits is (leader.leads[1] if leader is not None and leader.leads is not None else None)
        self._announce(held)
        self.leases.append(held)
        self.trace.append(("open" if lease.awaits is None else "open and wait", hit))
        return held

    def extend(self, held: Held, count: int) -> bool:
        lease, before, end = held.lease, list(held.lease.pages), held.computed + count
        tail = held.computed // self.size
        copies_tail = tail < len(before) and self.references()[before[tail]] > 1
        needed = max(0, -(-end // self.size) - len(before)) + copies_tail
        free, pinned = self.free(), self.pinned()
        available = len(free) + sum(stored not in pinned for stored in self.stored.values())
        assert self.manager.available_pages == available
        gives_up = False
        if needed > available and held.partial is not None:
            source, held.partial = held.partial, None
            available += source not in self.pinned()
            gives_up = needed <= available
            if not gives_up:
                held.partial = source
        missing = lease.extend(count)
        self.trace.append(("extend", missing))
        assert missing == max(0, needed - available)
        if missing:
            assert lease.pages == before and lease.computed == held.computed
            return False
        if gives_up:
            held.computed = len(before) * self.size
        assert lease.computed == held.computed
        self._evict(max(0, needed - len(free)))
        new = set(lease.pages) - set(before)
        assert new <= self.free() | set(lease.pages) and not new & {s.page for s in self.stored.values()}
        kept = before[:tail] if copies_tail else before
        assert lease.pages[: len(kept)] == kept and len(new) == needed
        assert len(lease.pages) == max(len(before), -(-end // self.size))
        if copies_tail or (held.partial is not None and needed):
            held.partial = None
            held.copy_pending = True
            self.copied += 1
        return True

    def append(self, held: Held, tokens: list[int]) -> None:
        held.lease.append(tokens)
        self.trace.append(("append", len(tokens)))
        held.tokens += tokens
        held.ids = self.identify(held.tree[0], held.tokens, held.ids)

    def compute(self, shares: list[tuple[Held, int]]) -> None:
        """What a runner does in a step: the copies in order, then the writes. Nothing is committed yet."""
        for source, destination in self.manager.take_copies():
            self.memory[destination] = self.memory[source].copy()
        for held, count in shares:
            for position in range(held.computed, held.computed + count):
                self.write(held, position, held.ids[position])

    def write(self, held: Held, position: int, identity: int) -> None:
        page = held.lease.pages[position // self.size]
        assert page in held.private
        readers = [other for other in self.leases if page in other.lease.pages]
        assert readers == [held], "a page is written that another lease reads"
        assert page not in {s.page for s in self.stored.values()}, "a page is written that the index offers"
        self.memory[page][position % self.size] = identity

    def poison_free_pages(self) -> None:
        """Between a step and the next one no copy is pending, so what is free may hold anything."""
        assert not self.manager._copies
        for page in self.free():
            self.memory[page] = [POISON] * self.size

    def commit(self, held: Held, count: int) -> None:
        own = list(held.lease.pages)
        held.lease.commit(count)
        self.trace.append(("commit", count))
        held.computed += count
        held.copy_pending = False
        full = held.computed // self.size
        if held.publish and full > len(held.path) and not self._forget_if_dead(held):
            while len(held.path) < full:
                end = (len(held.path) + 1) * self.size
                stored = self.stored.get((held.tree, tuple(held.tokens[:end])))
                held.path.append(stored or self._store(held, held.tokens[:end], own[len(held.path)]))
            self._announce(held)
        assert held.lease.computed == held.computed
        assert held.lease.pages == [stored.page for stored in held.path] + own[len(held.path) :]

    def fork(self, held: Held) -> Held:
        free = self.manager.available_pages
        lease = held.lease.fork()
        assert self.manager.available_pages == free, "a fork takes no page"
        child = Held(lease, held.tree, list(held.tokens), list(held.ids), held.publish, held.computed)
        child.path, child.partial, child.copy_pending = list(held.path), held.partial, held.copy_pending
        assert lease.computed == held.computed and lease.cached_tokens == held.lease.cached_tokens
        assert lease.pages == held.lease.pages[: -(-held.computed // self.size)]
        self.leases.append(child)
        self.trace.append(("fork", len(lease.pages)))
        return child

    def close(self, held: Held, *, publish_tail: bool = True) -> None:
        private = list(held.private)
        alone = bool(private) and self.references()[private[0]] == 1
        before, sole = self.manager.available_pages, held.lease.sole_pages()
        held.lease.close(publish_tail=publish_tail)
        assert self.manager.available_pages - before == sole
        held.lease.close(publish_tail=publish_tail)
        self.trace.append(("close", publish_tail))
        assert held.lease.pages == [] and held.lease.closed
        self._withdraw(held)
        held.partial = None
        has_tail = len(held.path) * self.size < held.computed and alone and not held.copy_pending
        self.leases.remove(held)
        if publish_tail and has_tail and held.publish and not self._forget_if_dead(held):
            tail = held.tokens[: held.computed]
            parent = held.path[-1] if held.path else None
            if not any(
                s.tree == held.tree and s.parent is parent and s.tokens[: len(tail)] == tuple(tail)
                for s in self.stored.values()
            ):
                self._store(held, tail, private[0])
        self._touch(held.path)
        if self.is_dead(held.tree) and not any(other.tree == held.tree for other in self.leases):
            self.stored = {key: s for key, s in self.stored.items() if s.tree != held.tree}

    # -- holds -------------------------------------------------------------------------------------------------------

    def hold(self, tokens: list[int], namespace: bytes = b"a") -> Pinned | None:
        """None where the manager refused, which it may only do at its limit."""
        tree = (namespace, self.generation)
        length = self.longest(tree, tokens)
        full = length - length % self.size
        path = [self.stored[tree, tuple(tokens[:end])] for end in range(self.size, full + 1, self.size)]
        held = {stored for pinned in self.holds for stored in pinned.path}
        # Which of several pages that begin alike is taken is the index's choice, but one is taken.
        partials = {
            stored
            for stored in self.stored.values()
            if length % self.size
            and stored.tree == tree
            and stored.tokens[:length] == tuple(tokens[:length])
            and stored.parent is (path[-1] if path else None)
        }
        try:
            hold = self.manager.hold(tokens, namespace)
        except HoldLimitError as error:
            refusal = error
        else:
            refusal = None
        if refusal is not None:
            self.trace.append(("hold refused", length))
            assert (refusal.limit, refusal.pinned) == (self.manager.hold_limit, len(held))
            assert len(held) + refusal.adds > refusal.limit
            assert refusal.adds in {len({*path, *tail} - held) for tail in [[p] for p in partials] or [[]]}
            return None
        self.trace.append(("hold", length))
        assert hold.tokens == length and not hold.released
        path += [stored for stored in partials if stored.page in hold.pages]
        assert hold.pages == [stored.page for stored in path] and len(path) == -(-length // self.size)
        self.holds.append(Pinned(hold, path))
        return self.holds[-1]

    def fork_hold(self, pinned: Pinned) -> Pinned:
        before = self.manager.stats()
        fork = Pinned(pinned.hold.fork(), list(pinned.path))
        assert self.manager.stats() == before, "a fork takes no page"
        assert (fork.hold.pages, fork.hold.tokens) == (pinned.hold.pages, pinned.hold.tokens)
        self.holds.append(fork)
        self.trace.append(("fork hold", fork.hold.tokens))
        return fork

    def touch_hold(self, pinned: Pinned) -> None:
        pinned.hold.touch()
        self.holds.remove(pinned)
        self.holds.append(pinned)

    def release(self, pinned: Pinned) -> None:
        for _ in range(2):
            pinned.hold.release()
            assert pinned.hold.released and pinned.hold.pages == []
        assert pinned.hold.fork().released
        self.holds.remove(pinned)
        self.trace.append(("release", 0))

    def give_up_hold(self) -> bool:
        gave = self.manager.give_up_hold()
        assert gave == bool(self.holds)
        if gave:
            assert self.holds.pop(0).hold.released
        self.trace.append(("give up a hold", gave))
        return gave

    def reset(self) -> None:
        report = self.manager.reset()
        assert all(pinned.hold.released for pinned in self.holds)
        self.holds.clear()
        self.trace.append(("reset", report.freed_pages))
        pinned = self.pinned()
        kept = {key: stored for key, stored in self.stored.items() if stored in pinned}
        assert report.freed_pages == len(self.stored) - len(kept)
        self.evicted += report.freed_pages
        self.stored = kept
        self.generation += 1
        assert report.busy_pages == self.manager.num_pages - len(self.free())

    # -- what must hold after each of them ---------------------------------------------------------------------------

    def check(self) -> None:
        manager = self.manager
        manager.check()
        stored_pages = [stored.page for stored in self.stored.values()]
        references, free = self.references(), self.free()
        assert len(set(stored_pages)) == len(stored_pages) and not set(stored_pages) & set(references)
        for page, state in enumerate(manager.pool.state):
            assert state == (FREE if page in free else PRIVATE if page in references else INDEXED)
            assert manager.pool.references[page] == references[page]
        pinned = self.pinned()
        stats = manager.stats()
        assert stats.free_pages == len(free)
        assert stats.active_pages == len(references) + len(pinned)
        assert stats.cached_pages == len(stored_pages) - len(pinned)
        assert stats.pinned_pages == len({stored for held in self.holds for stored in held.path})
        assert stats.pinned_pages <= manager.hold_limit
        assert not any(held.hold.released for held in self.holds)
        assert stats.free_pages + stats.active_pages + stats.cached_pages == stats.total_pages
        assert stats.evicted_pages == self.evicted and stats.copied_pages == self.copied
        assert self.indexed() == {
            stored.page: (stored.tree[0], stored.packed)
            for stored in self.stored.values()
            if not self.is_dead(stored.tree)
        }
        self._check_contents(references)
        assert set(manager._computing.values()) == {(h.lease, h.leads[1]) for h in self.leaders.values() if h.leads}
        assert not any(pending.done for _, pending in manager._computing.values())
        assert all(pending.done for pending in self.given_up)
        self.given_up.clear()

    def indexed(self) -> dict[int, tuple[bytes, bytes]]:
        """What the real index offers: page -> (namespace, all tokens up to the page's end)."""
        found, index = {}, self.manager.index
        for namespace, root in index._roots.items():
            stack = [(child, b"") for child in root.children]
            while stack:
                node, prefix = stack.pop()
                for number, page in enumerate(node.pages, 1):
                    found[page] = (namespace, prefix + bytes(node.tokens[: number * index.page_bytes]))
                stack += [(child, prefix + bytes(node.tokens)) for child in node.children]
        return found

    def _check_contents(self, references: Counter[int]) -> None:
        """Every lease and every stored page reads what was computed for exactly its tokens."""
        memory = self.memory
        if self.manager._copies:
            memory = [*memory]
            for source, destination in self.manager._copies:
                memory[destination] = memory[source]
        for stored in self.stored.values():
            start = (len(stored.tokens) - 1) // self.size * self.size
            wanted = stored.ids[start:]
            assert self.memory[stored.page][: len(wanted)] == wanted, "the index offers a page with other contents"
            assert memory[stored.page] is self.memory[stored.page], "a copy is pending into a page of the index"
        for held in self.leases:
            lease = held.lease
            assert lease.computed == held.computed
            pages = lease.pages if held.partial is None else [*lease.pages, held.partial.page]
            assert len(set(pages)) == len(pages)
            for logical, start in enumerate(range(0, held.computed, self.size)):
                wanted = held.ids[start : min(start + self.size, held.computed)]
                assert memory[pages[logical]][: len(wanted)] == wanted, "a lease reads other contents than it computed"
