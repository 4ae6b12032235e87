"""Public prefixes against a brute-force model: who hits what, that what is private stays so, and that nothing leaks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from pagetrie.kv import CacheManager, Lease
from pagetrie.kv.namespace import encode_namespace
from pagetrie.kv.tokens import pack_tokens
from tests.budget import first
from tests.kv.oracle import shared_length

PUBLIC = encode_namespace({"public": b""})
NAMESPACES = tuple(encode_namespace({"tenant": name}) for name in (b"a", b"b", b"c"))
INDEXES = ("radix", "hash")


def run(manager: CacheManager, tokens: list[int], namespace: bytes, output: int = 0) -> int:
    """One request from start to end; returns what was cached."""
    lease = manager.open(tokens, namespace)
    cached = lease.cached_tokens
    lease.append(range(1000, 1000 + output)) if output else None
    assert lease.extend(len(tokens) + output - lease.computed) == 0
    lease.commit(len(tokens) + output - lease.computed)
    manager.take_copies()
    lease.close()
    manager.check()
    return cached


@pytest.mark.parametrize("index", INDEXES)
def test_all_share_what_is_public_and_nothing_else(index: str) -> None:
    manager = CacheManager(num_pages=60, page_size=4, index=index)
    trunk = list(range(10))
    assert manager.declare_public(trunk, PUBLIC) == 2
    a, b, c = NAMESPACES
    assert run(manager, [*trunk, 50, 51, 52, 53, 54], a) == 0
    assert run(manager, [*trunk, 50, 51, 52, 53, 54], b) == 8  # not 9: the page with both is private
    assert run(manager, [*trunk, 50, 51, 52, 53, 54], a) == 14
    assert run(manager, trunk, c) == 8
    assert manager.stored_tokens([*trunk, 50, 51, 52], a) == 12
    assert manager.stored_tokens([*trunk, 50, 51, 52], c) == 8
    # A prompt that leaves the prefix before its end is private as a whole.
    assert run(manager, [*trunk[:6], 60, 61, 62], a) == 0
    assert run(manager, [*trunk[:6], 60, 61, 62], b) == 0
    assert run(manager, [*trunk[:6], 60, 61, 62], a) == 8


@pytest.mark.parametrize("index", INDEXES)
def test_a_prompt_no_longer_than_the_prefix_still_uses_it(index: str) -> None:
    manager = CacheManager(num_pages=60, page_size=4, index=index)
    trunk = list(range(12))
    manager.declare_public(trunk, PUBLIC)
    assert run(manager, trunk, NAMESPACES[0]) == 0
    assert run(manager, trunk, NAMESPACES[1]) == 8
    assert run(manager, [*trunk, 99], NAMESPACES[1]) == 8  # the third page was computed as a private one
    assert run(manager, [*trunk, 99], NAMESPACES[2]) == 12


@pytest.mark.parametrize("index", INDEXES)
def test_a_burst_of_tenants_computes_a_cold_public_prefix_once(index: str) -> None:
    manager = CacheManager(num_pages=60, page_size=4, index=index)
    trunk = list(range(8))
    manager.declare_public(trunk, PUBLIC)
    leader, follower = (manager.open([*trunk, 50 + i], NAMESPACES[i]) for i in range(2))
    assert leader.awaits is None and follower.awaits is not None
    leader.extend(9)
    leader.commit(9)
    assert follower.awaits.done
    follower.close()
    again = manager.open([*trunk, 51], NAMESPACES[1])
    assert again.cached_tokens == 8 and again.awaits is None
    assert again.pages == leader.pages[:2]
    leader.close()
    again.close()
    manager.check()


@pytest.mark.parametrize("index", INDEXES)
def test_held_public_pages_outlast_a_flood_and_come_back_after_a_reset(index: str) -> None:
    manager = CacheManager(num_pages=12, page_size=4, index=index)
    trunk = list(range(8))
    manager.declare_public(trunk, PUBLIC)
    run(manager, [*trunk, 8], NAMESPACES[0])
    hold = manager.hold(trunk, PUBLIC)
    assert (hold.tokens, len(hold.pages), manager.stats().pinned_pages) == (8, 2, 2)
    for number in range(20):
        run(manager, [1000 + number] * 30, NAMESPACES[1])
    assert run(manager, [*trunk, 8], NAMESPACES[2]) == 8
    manager.reset()
    assert hold.released
    assert run(manager, [*trunk, 8], NAMESPACES[2]) == 0
    assert run(manager, [*trunk, 8], NAMESPACES[0]) == 8


@pytest.mark.parametrize("index", INDEXES)
def test_what_is_withdrawn_is_private_again(index: str) -> None:
    manager = CacheManager(num_pages=60, page_size=4, index=index)
    trunk = list(range(8))
    manager.declare_public(trunk, PUBLIC)
    run(manager, [*trunk, 8], NAMESPACES[0])
    manager.withdraw_public(trunk, PUBLIC)
    assert run(manager, [*trunk, 8], NAMESPACES[0]) == 0
    assert run(manager, [*trunk, 8], NAMESPACES[1]) == 0


def test_the_longest_prefix_counts_and_shorter_ones_share_its_pages() -> None:
    manager = CacheManager(num_pages=60, page_size=4)
    trunk = list(range(16))
    for length in (4, 12, 8):
        assert manager.declare_public(trunk[:length], PUBLIC) == length // 4
    assert manager.declare_public([1, 2, 3], PUBLIC) == 0
    assert run(manager, trunk, NAMESPACES[0]) == 0
    assert run(manager, trunk, NAMESPACES[1]) == 12
    assert run(manager, [*trunk[:9], 70, 71], NAMESPACES[1]) == 8


@dataclass
class World:
    """A manager, what it should have stored (as long as nothing is evicted), and whose tokens each page holds."""

    manager: CacheManager
    seed: int
    declared: list[list[int]] = field(default_factory=list)
    stored: set[tuple[object, tuple[int, ...]]] = field(default_factory=set)
    open: list[tuple[Lease, list[int], bytes, int]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.memory: dict[int, list[tuple[tuple[int, ...], object]]] = {}
        self.hits = 0

    def public_pages(self, tokens: list[int]) -> int:
        size, most = self.manager.page_size, len(tokens) - 1
        best = 0
        for prefix in self.declared:
            pages = min(len(prefix), most) // size
            if pages > best and tokens[: pages * size] == prefix[: pages * size]:
                best = pages
        return best

    def space(self, namespace: bytes, trunk: tuple[int, ...], end: int) -> object:
        """Whose page ends at this token."""
        return "public" if end <= len(trunk) else (namespace, trunk)

    def expected(self, tokens: list[int], namespace: bytes) -> int:
        size, shared = self.manager.page_size, self.public_pages(tokens)
        trunk = tuple(tokens[: shared * size])
        known = [t for space, t in self.stored if space == "public"]
        hit = max((shared_length(t, trunk) for t in known), default=0)
        if hit < len(trunk):
            return hit
        own = [t for space, t in self.stored if space == (namespace, trunk)]
        return max([hit, *(shared_length(t, tokens[:-1]) for t in own)])

    def prompt(self) -> list[int]:
        base = self.rng.choice([*self.declared, *self.declared, *self.prompts, []])
        cut = self.rng.choice((len(base), len(base), self.rng.randrange(len(base) + 1)))
        tokens = base[:cut] + self.rng.choices((1, 1, 1, 2), k=self.rng.randrange(0, 12))
        self.prompts = [*self.prompts[-5:], tokens[:30] or [1]]
        return self.prompts[-1]

    def begin(self, *, exact: bool) -> None:
        tokens, namespace = list(self.prompt()), self.rng.choice(NAMESPACES[:2])
        lease = self.manager.open(tokens, namespace)
        if exact:
            assert lease.cached_tokens == self.expected(tokens, namespace)
        shared = self.public_pages(tokens)
        self.open.append((lease, tokens, namespace, shared))
        self.hits += lease.cached_tokens > shared * self.manager.page_size > 0
        self.read(lease, tokens, namespace, shared)

    def read(self, lease: Lease, tokens: list[int], namespace: bytes, shared: int) -> None:
        """All that a lease holds was computed for its tokens, by its own namespace or as public."""
        size = self.manager.page_size
        trunk = tuple(tokens[: shared * size])
        pages = lease.pages if lease._partial is None else [*lease.pages, lease._partial[0]]
        for position in range(lease.computed):
            prefix, space = self.memory[pages[position // size]][position % size]
            assert prefix == tuple(tokens[: position + 1])
            end = (position // size + 1) * size
            assert space == self.space(namespace, trunk, end)

    def advance(self) -> None:
        lease, tokens, namespace, shared = entry = self.rng.choice(self.open)
        size = self.manager.page_size
        if lease.computed == len(tokens):
            more = self.rng.choices((1, 2), k=1)
            lease.append(more)
            tokens += more
        count = self.rng.choice((self.rng.randrange(1, len(tokens) - lease.computed + 1), len(tokens) - lease.computed))
        if lease.extend(count):
            self.finish(entry)
            return
        for source, target in self.manager.take_copies():
            self.memory[target] = list(self.memory[source])
        trunk = tuple(tokens[: shared * size])
        for position in range(lease.computed, lease.computed + count):
            page = self.memory.setdefault(lease.pages[position // size], [((), None)] * size)
            space = self.space(namespace, trunk, (position // size + 1) * size)
            page[position % size] = tuple(tokens[: position + 1]), space
            # A copied page is its new owner's.
            page[: position % size] = [(prefix, space) for prefix, _ in page[: position % size]]
        lease.commit(count)
        for end in range(size, lease.computed + 1, size):
            self.stored.add((self.space(namespace, trunk, end), tuple(tokens[:end])))
        self.read(lease, tokens, namespace, shared)

    def finish(self, entry: tuple[Lease, list[int], bytes, int]) -> None:
        lease, tokens, namespace, shared = entry
        self.open.remove(entry)
        before, sole = self.manager.available_pages, lease.sole_pages()
        computed, size = lease.computed, self.manager.page_size
        tail = lease._publish and computed % size
        lease.close()
        assert self.manager.available_pages - before == sole
        if tail:
            end = (computed // size + 1) * size
            self.stored.add((self.space(namespace, tuple(tokens[: shared * size]), end), tuple(tokens[:computed])))

    def fork(self) -> None:
        lease, tokens, namespace, shared = self.rng.choice(self.open)
        self.open.append((lease.fork(), list(tokens), namespace, shared))

    def run(self, steps: int, *, exact: bool) -> None:
        for _ in range(steps):
            choice = self.rng.random()
            if len(self.open) < 4 and (choice < 0.3 or not self.open):
                self.begin(exact=exact)
            elif choice < 0.33 and len(self.declared) < 2:
                prefix = self.rng.choices((1, 2), k=self.rng.randrange(4, 20))
                self.declared.append(prefix)
                self.manager.declare_public(prefix, PUBLIC)
            elif choice < 0.38 and self.open and len(self.open) < 6:
                self.fork()
            elif choice < 0.6 and self.open:
                self.finish(self.rng.choice(self.open))
            elif choice < 0.605 and not exact:
                self.manager.reset()
            elif self.open:
                self.advance()
            self.manager.check()
        for entry in list(self.open):
            self.finish(entry)
        self.manager.check()
        self.manager.reset()
        assert self.manager.stats().free_pages == self.manager.num_pages


@pytest.mark.parametrize("seeds", first(1, [range(4), range(4, 30)]))
@pytest.mark.parametrize("index", INDEXES)
def test_every_hit_is_the_models_and_reads_its_own_or_public_pages(index: str, seeds: range) -> None:
    worlds = [World(CacheManager(num_pages=1000, page_size=4, index=index), seed) for seed in seeds]
    for world in worlds:
        world.run(300, exact=True)
    # The histories would prove little if nobody went on from what is public.
    assert sum(world.hits for world in worlds) > 5


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("seed", range(8))
def test_in_a_short_pool_nobody_reads_anothers_pages(index: str, seed: int) -> None:
    World(CacheManager(num_pages=24, page_size=4, index=index), seed).run(800, exact=False)


def test_private_roots_after_unlike_prefixes_differ() -> None:
    """The same tokens after two public prefixes, or after none, are other pages."""
    manager = CacheManager(num_pages=60, page_size=4)
    one, two, rest = [1] * 4, [2] * 4, [7] * 9
    manager.declare_public(one, PUBLIC)
    manager.declare_public(two, PUBLIC)
    for tokens in ([*one, *rest], [*two, *rest], rest):
        assert run(manager, tokens, NAMESPACES[0]) == 0
        assert run(manager, tokens, NAMESPACES[0]) == len(tokens) - 1
    roots = {bytes(root) for root in manager.index._roots}
    assert len(roots) == 1 + 3 and not any(pack_tokens(one) in root for root in roots)
