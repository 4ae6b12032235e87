"""Owners' floors and caps against a plain model of them, and what one owner can learn of another by its hits."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetrie.errors import HoldLimitError
from pagetrie.kv import Allowance, CacheManager, Hold, Lease, encode_namespace, owner_id
from pagetrie.kv.eviction import POLICIES, make_policy
from pagetrie.kv.namespace import extend_namespace, owner_of
from pagetrie.kv.page_tree import Node, root_of
from pagetrie.kv.pool import FREE, INDEXED
from tests.budget import first

SIZE = 4
INDEXES = ("radix", "hash")
OWNERS = {name: owner_id("tenant", name.encode()) for name in "abc"}
PUBLIC = encode_namespace({"public": b"salt"})


def space(name: str, salt: str | None = None) -> bytes:
    return encode_namespace({"tenant": name.encode(), "salt": salt})


def manager_of(num_pages: int, index: str = "radix", policy: str = "lru", **allowances: Allowance) -> CacheManager:
    manager = CacheManager(
        num_pages=num_pages,
        page_size=SIZE,
        index=index,
        policy=make_policy(policy, num_pages, SIZE, clock=lambda: 0.0),
    )
    manager.allow({OWNERS[name]: allowance for name, allowance in allowances.items()})
    return manager


def run(manager: CacheManager, tokens: list[int], namespace: bytes) -> int:
    """One request from start to end; what was cached, or -1 if there is no room."""
    lease = manager.open(tokens, namespace)
    cached, count = lease.cached_tokens, len(tokens) - lease.computed
    if lease.extend(count):
        lease.close()
        return -1
    lease.commit(len(tokens) - lease.computed)
    manager.take_copies()
    lease.close()
    return cached


def test_an_owner_is_its_tenant_or_the_public_whatever_salt_and_whatever_follows() -> None:
    assert owner_of(space("a")) == owner_of(space("a", "salt")) == OWNERS["a"] != OWNERS["b"]
    assert owner_of(extend_namespace(space("a"), "~after public", b"x")) == OWNERS["a"]
    assert owner_of(PUBLIC) == owner_id("public", b"salt") != owner_id("tenant", b"salt")
    assert owner_of(encode_namespace({"tenant": None, "salt": "s"})) == owner_of(b"anything") == b""


@given(st.binary(max_size=80), st.binary(max_size=40))
def test_whatever_bytes_come_have_one_owner_or_none(tail: bytes, tenant: bytes) -> None:
    """What isn't a namespace belongs to nobody; what follows a tenant's part makes nobody another one's."""
    start = encode_namespace({})
    assert owner_of(tail) == b"" or tail.startswith(start)
    named = encode_namespace({"tenant": tenant})
    assert owner_of(named) == owner_id("tenant", tenant)
    assert owner_of(named + tail) in (owner_of(named), b"") or b"tenant" in tail or b"public" in tail


# -- against a model -------------------------------------------------------------------------------------------------


@dataclass
class World:
    """A manager driven at random, and the rules recounted from its leases, holds and index after every step."""

    manager: CacheManager
    seed: int
    allowed: dict[str, Allowance]
    leases: list[tuple[str, Lease, list[int]]] = field(default_factory=list)
    holds: list[tuple[str, Hold]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=lambda: [[1]])
    taken: int = 0
    taker: str = ""
    seen: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        forward: Any = self.manager.index.on_evict

        def watch(node: Node, count: int) -> None:
            self._may_go(node, count)
            forward(node, count)

        self.manager.index.on_evict = watch

    # -- the model -----------------------------------------------------------------------------------------------------

    def owner(self, namespace: bytes) -> str:
        return next((name for name, owner in OWNERS.items() if owner == owner_of(namespace)), "public")

    def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Pages, and those of them in use, by owner; from page tables and the tree alone."""
        held = {page: name for name, lease, _ in self.leases for page in lease.pages}
        held |= {lease._partial[0]: name for name, lease, _ in self.leases if lease._partial}
        held |= {page: name for name, hold in self.holds for page in hold.pages}
        whose = dict(held)
        for node in self.manager.index.nodes():
            name = self.owner(bytes(root_of(node).tokens))
            whose |= dict.fromkeys(node.pages, name)
        pages, active = dict.fromkeys("abc", 0) | {"public": 0}, dict.fromkeys("abc", 0) | {"public": 0}
        for page, name in whose.items():
            pages[name] += 1
            active[name] += page in held
        return pages, active

    def floor(self, name: str) -> int:
        return int(self.allowed[name].floor * self.manager.num_pages) if name in self.allowed else 0

    def available(self, name: str, active: dict[str, int]) -> int:
        others = sum(max(active[other], self.floor(other)) for other in active if other != name)
        return self.manager.num_pages - others - active[name]

    def _may_go(self, node: Node, count: int) -> None:
        """Called before pages are evicted for ``taker``."""
        giver = self.owner(bytes(root_of(node).tokens))
        shares = self.manager.index.shares
        counts = {share.owner: share for share in shares}
        pages = {name: counts[owner].pages for name, owner in OWNERS.items() if owner in counts}
        self.seen["evicted"] = self.seen.get("evicted", 0) + count
        if giver != self.taker:
            assert pages.get(giver, 10**6) - count >= self.floor(giver), f"{giver} loses what is its own"
            self.seen["taken from others"] = self.seen.get("taken from others", 0) + count
        mine = self.allowed.get(self.taker)
        if mine is not None and mine.cap < 1:
            return  # it may have been told to give first
        excess = {
            name: (counts[owner].pages - self.floor(name)) / self.allowed[name].weight
            for name, owner in OWNERS.items()
            if owner in counts
            and counts[owner].cached
            and (name == self.taker or counts[owner].pages > self.floor(name))
        }
        if giver in excess and (giver != self.taker or excess[giver] > 0):
            assert excess[giver] == max(excess.values()), "another one is further above its floor"

    def check(self) -> None:
        manager = self.manager
        manager.check()
        pages, active = self.counts()
        assert sum(pages.values()) == manager.num_pages - manager.stats().free_pages
        for name, owner in OWNERS.items():
            share = manager.index.shares.owned_by(owner)
            assert (share.pages, share.active) == (pages[name], active[name])
            assert manager.available_to(space(name)) == self.available(name, active)
            cap = int(self.allowed[name].cap * manager.num_pages)
            assert pages[name] <= cap or pages[name] == active[name], "more stays cached than the cap"

    # -- histories -----------------------------------------------------------------------------------------------------

    def prompt(self) -> list[int]:
        base = self.rng.choice(self.prompts)
        tokens = base[: self.rng.randrange(len(base) + 1)] + self.rng.choices([1, 2, 3], k=self.rng.randrange(1, 14))
        tokens = tokens[: 6 * SIZE]
        self.prompts = [*self.prompts[-10:], tokens]
        return tokens

    def step(self) -> None:
        rng, manager = self.rng, self.manager
        choice = rng.random()
        if choice < 0.35 and len(self.leases) < 5:
            name, tokens = rng.choice("abc"), self.prompt()
            self.taker = name
            lease = manager.open(tokens, space(name, rng.choice((None, None, "salt"))))
            self.leases.append((name, lease, tokens))
        elif choice < 0.7 and self.leases:
            name, lease, tokens = rng.choice(self.leases)
            self.taker = name
            if lease.computed >= len(tokens):
                more = rng.choices([1, 2, 3], k=rng.randrange(1, 5))
                lease.append(more)
                tokens += more
            count = min(rng.choice((1, SIZE, 20)), len(tokens) - lease.computed)
            _, active = self.counts()
            before, partial = self.available(name, active), lease._partial
            missing = lease.extend(count)
            if missing:
                assert before < missing + 20 and partial is lease._partial
            else:
                lease.commit(count if lease.computed + count <= len(tokens) else len(tokens) - lease.computed)
            self.seen["refused" if missing else "extended"] = self.seen.get("refused" if missing else "extended", 0) + 1
            manager.take_copies()
        elif choice < 0.75 and self.leases and len(self.leases) < 5:
            name, lease, tokens = rng.choice(self.leases)
            self.leases.append((name, lease.fork(), list(tokens)))
        elif choice < 0.9 and self.leases:
            name, lease, _ = entry = rng.choice(self.leases)
            self.taker = name
            self.leases.remove(entry)
            lease.close()
        elif choice < 0.94:
            name = self.taker = rng.choice("abc")
            try:
                self.holds.append((name, manager.hold(self.prompt(), space(name))))
            except HoldLimitError:
                self.seen["hold refused"] = self.seen.get("hold refused", 0) + 1
        elif choice < 0.97 and self.holds:
            entry = rng.choice(self.holds)
            self.taker = entry[0]
            self.holds.remove(entry)
            entry[1].release()
        elif choice < 0.98:
            self.taker = rng.choice("abc")
            manager.give_up_hold(space(self.taker))
            self.holds = [entry for entry in self.holds if not entry[1].released]
        elif choice < 0.985:
            name = self.taker = rng.choice("abc")
            self.allowed = {**self.allowed, name: Allowance(rng.choice((0, 0.2, 0.3)), rng.choice((0.4, 1)), 1, 0.3)}
            manager.allow({OWNERS[name]: allowance for name, allowance in self.allowed.items()})


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("policy", POLICIES)
def test_random_histories_keep_every_floor_and_cap(index: str, policy: str) -> None:
    allowed = {"a": Allowance(0.3, 1, 1, 0.5), "b": Allowance(0.2, 0.4, 2, 0.3), "c": Allowance(0, 1, 1, 0.2)}
    world = World(manager_of(20, index, policy, **allowed), hash_of(index, policy), allowed)
    world.manager.declare_public([1, 2, 3, 1, 2, 3, 1, 2], PUBLIC)
    for _ in range(400):
        world.step()
        world.check()
    assert world.seen["evicted"] > 30 and world.seen["taken from others"] > 5 and world.seen["refused"] > 5


def hash_of(*words: str) -> int:
    return sum(ord(letter) for word in words for letter in word)


# -- what that means -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_flood_leaves_anothers_floor_alone(index: str, policy: str) -> None:
    manager = manager_of(40, index, policy, b=Allowance(floor=0.25))
    mine = [[100 * number + token for token in range(2 * SIZE)] for number in range(1, 5)]
    for prompt in mine:
        assert run(manager, prompt, space("b")) == 0
    for number in range(60):
        run(manager, [1000 + number] * (SIZE * (1 + number % 20)), space("a"))
    for prompt in mine:
        assert run(manager, [*prompt, 7], space("b")) == len(prompt)
    manager.check()
    # Without the floor, the same flood flushes them.
    manager = manager_of(40, index, policy)
    for prompt in mine:
        run(manager, prompt, space("b"))
    for number in range(60):
        run(manager, [1000 + number] * 40 * SIZE, space("a"))
    assert all(run(manager, prompt, space("b")) == 0 for prompt in mine)


def test_who_floods_flushes_itself() -> None:
    """Without any floor: the one that has most for its weight gives first."""
    manager = manager_of(40, a=Allowance(weight=3.0), b=Allowance(), c=Allowance())
    for name in "bc":
        run(manager, [ord(name)] * 7 * SIZE, space(name))
    for number in range(50):
        run(manager, [1000 + number] * 2 * SIZE, space("a"))
    shares = {name: manager.index.shares.owned_by(owner).pages for name, owner in OWNERS.items()}
    assert shares == {"a": 26, "b": 7, "c": 7}
    assert run(manager, [ord("b")] * 7 * SIZE, space("b")) == 7 * SIZE - 1


def test_a_running_sequence_gets_others_caches_but_never_their_floors() -> None:
    manager = manager_of(20, a=Allowance(floor=0.25), b=Allowance(floor=0.25))
    run(manager, list(range(12 * SIZE)), space("b"))
    assert manager.available_to(space("a")) == manager.reach(space("a")) == 15
    lease = manager.open(list(range(100, 100 + 16 * SIZE)), space("a"))
    assert lease.extend(16 * SIZE) == 1
    assert lease.extend(15 * SIZE) == 0
    assert manager.index.shares.owned_by(OWNERS["b"]).cached == 5
    assert manager.available_to(space("a")) == 0 and manager.available_to(space("b")) == 5
    # The first pages are what stays.
    assert run(manager, list(range(5 * SIZE)), space("b")) == 5 * SIZE - 1
    manager.check()


def test_an_unused_floor_is_lent_to_caches_only() -> None:
    manager = manager_of(20, b=Allowance(floor=0.5))
    for number in range(10):
        run(manager, [number] * 2 * SIZE, space("a"))
    assert manager.stats().free_pages == 0  # a's cache has all of it
    assert manager.available_to(space("a")) == 10
    assert run(manager, [99] * 10 * SIZE, space("b")) == 0
    assert manager.index.shares.owned_by(OWNERS["a"]).pages == 10


def test_a_cap_bounds_what_stays_and_not_what_runs() -> None:
    manager = manager_of(20, a=Allowance(cap=0.25))
    lease = manager.open(list(range(12 * SIZE)), space("a"))
    assert lease.extend(12 * SIZE) == 0
    lease.commit(12 * SIZE)
    lease.close()
    assert manager.stats().cached_pages == 5 and manager.stats().free_pages == 15
    # At the cap its own pages make room, though others are free.
    assert run(manager, [500] * 2 * SIZE, space("a")) == 0
    assert manager.stats().cached_pages == 5
    manager.allow({OWNERS["a"]: Allowance(cap=0.1)})
    assert manager.stats().cached_pages == 2
    manager.check()


def test_more_than_there_is_cant_be_promised() -> None:
    with pytest.raises(ValueError, match=r"floors add up to 1\.1"):
        manager_of(20, a=Allowance(floor=0.6), b=Allowance(floor=0.5))


# -- what an attacker sees -------------------------------------------------------------------------------------------


def observed(policy: str, index: str, seed: int, victim: float, *, within_floor: bool) -> list[int]:
    """What an attacker is told to be cached, prompt after prompt, beside a victim that is so active."""
    split = {name: Allowance(0.25, 0.25, pinned=0.25) for name in "abc"}
    loose = {"a": Allowance(floor=0.25), "b": Allowance(), "c": Allowance(floor=0.5)}
    manager = manager_of(40, index, policy, **(loose if within_floor else split))
    attacker, noise = random.Random(seed), random.Random(seed + 1)
    known, told, running = [[1]], [], list[Lease]()
    for number in range(120):
        while noise.random() < victim:
            tokens = [noise.randrange(1000) for _ in range(noise.randrange(1, 40))]
            lease = manager.open(tokens, space(noise.choice("bc")))
            if lease.extend(len(tokens) - lease.computed):
                lease.close()
            else:
                lease.commit(len(tokens) - lease.computed)
                running.append(lease)
            if len(running) > 3 or noise.random() < 0.2:
                running.pop(noise.randrange(len(running))).close() if running else None
        if within_floor:  # four prompts of two pages each, and one more to go on
            prompt = [10 * (number % 4) + token for token in range(2 * SIZE)]
        else:
            base = attacker.choice(known)
            prompt = base[: attacker.randrange(len(base) + 1)] + attacker.choices([1, 2, 3], k=9)
            prompt = prompt[: 6 * SIZE]
            known = [*known[-8:], prompt]
        told.append(run(manager, prompt, space("a")))
    manager.check()
    return told


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("policy", POLICIES)
def test_hits_within_ones_floor_say_nothing_of_others(index: str, policy: str) -> None:
    alone = observed(policy, index, 1, 0.0, within_floor=True)
    assert alone[4:] == [2 * SIZE - 1] * 116
    assert observed(policy, index, 1, 0.8, within_floor=True) == alone


@pytest.mark.parametrize("seed", first(1, range(1, 6)))
@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("policy", POLICIES)
def test_where_floors_are_caps_hits_say_nothing_of_others_at_all(index: str, policy: str, seed: int) -> None:
    alone = observed(policy, index, seed, 0.0, within_floor=False)
    assert 0 in alone and max(alone) > SIZE and -1 not in alone
    assert observed(policy, index, seed, 0.8, within_floor=False) == alone


def test_beyond_its_floor_a_tenant_does_see_pressure() -> None:
    """What remains: so that nobody takes the statement above for more than it says."""
    manager = manager_of(20, a=Allowance(floor=0.2), b=Allowance(floor=0.2))
    prompt = list(range(15 * SIZE))
    run(manager, prompt, space("a"))
    assert run(manager, prompt, space("a")) == 15 * SIZE - 1
    run(manager, [999] * 14 * SIZE, space("b"))
    assert 4 * SIZE <= run(manager, prompt, space("a")) < 15 * SIZE - 1


# -- pins ------------------------------------------------------------------------------------------------------------


def test_each_owner_pins_its_own_part_and_is_told_its_own_numbers() -> None:
    manager = CacheManager(num_pages=40, page_size=SIZE, hold_limit=20)
    manager.allow({OWNERS["a"]: Allowance(pinned=0.5), OWNERS["b"]: Allowance(pinned=0.2)})
    assert (manager.pin_limit(space("a")), manager.pin_limit(space("b", "x"))) == (10, 4)
    long, short = list(range(9 * SIZE)), list(range(500, 500 + 3 * SIZE))
    for name in "ab":
        run(manager, [*long, 1], space(name))
        run(manager, [*short, 1], space(name))
    manager.hold(long, space("a"))
    with pytest.raises(HoldLimitError, match="may take 4 pages, 0 are taken and this one adds 9"):
        manager.hold(long, space("b"))
    manager.hold(short, space("b"))
    with pytest.raises(HoldLimitError, match="may take 10 pages, 9 are taken and this one adds 3"):
        manager.hold(short, space("a"))
    manager.check()


def test_pins_never_stand_on_anothers_floor() -> None:
    manager = manager_of(20, b=Allowance(floor=0.5))
    prompts = [[number] * 4 * SIZE for number in range(5)]
    for prompt in prompts:
        run(manager, prompt, space("a"))
    assert manager.stats().cached_pages == 20
    for prompt in prompts[:2]:
        manager.hold(prompt, space("a"))
    with pytest.raises(HoldLimitError, match="may take 8 pages, 8 are taken and this one adds 4"):
        manager.hold(prompts[2], space("a"))
    assert manager.hold(prompts[2][: 2 * SIZE], space("a")).tokens == 2 * SIZE
    assert run(manager, [99] * 10 * SIZE, space("b")) == 0
    manager.check()


def test_holds_give_way_to_their_owner_first_and_never_within_anothers_floor() -> None:
    manager = manager_of(20, a=Allowance(floor=0.25), b=Allowance(floor=0.25))
    holds = {}
    for name, pages in (("b", 4), ("a", 3), ("c", 2)):
        run(manager, [*range(pages * SIZE), 1], space(name))
        holds[name] = manager.hold(list(range(pages * SIZE)), space(name))
    assert manager.give_up_hold(space("a")) and holds["a"].released
    assert manager.give_up_hold(space("a")) and holds["c"].released and not holds["b"].released
    assert not manager.give_up_hold(space("a")), "b's pins stand within its floor"
    assert manager.give_up_hold(space("b")) and holds["b"].released
    manager.check()


# -- the pool's own counts -------------------------------------------------------------------------------------------


def test_a_reset_passes_over_floors_and_an_account_can_be_closed() -> None:
    manager = manager_of(20, a=Allowance(floor=0.5))
    run(manager, [1] * 9 * SIZE, space("a"))
    manager.reset()
    assert manager.stats().free_pages == 20
    shares = manager.index.shares
    shares.forget(OWNERS["a"])
    assert OWNERS["a"] not in {share.owner for share in shares}
    manager.check()
    assert manager.available_to(space("b")) == 20


def test_counters_that_are_off_are_derived_anew() -> None:
    manager = manager_of(20, a=Allowance(floor=0.25))
    run(manager, [1] * 6 * SIZE, space("a"))
    run(manager, [2] * 3 * SIZE, space("b"))
    share = manager.index.shares.owned_by(OWNERS["a"])
    share.pages, share.cached = 9, 0
    manager.pool.changed[share] = None
    assert manager.available_to(space("b")) != 15
    assert manager.recount()["cached pages"] == (3, 9)
    assert manager.available_to(space("b")) == 15
    manager.check()


def test_pages_change_hands_where_the_public_begins() -> None:
    manager = manager_of(20, a=Allowance(floor=0.25))
    manager.declare_public(list(range(3 * SIZE)), PUBLIC)
    run(manager, [*range(3 * SIZE), *range(100, 100 + 2 * SIZE)], space("a"))
    shares = {share.owner: share.pages for share in manager.index.shares}
    assert (shares[owner_of(PUBLIC)], shares[OWNERS["a"]]) == (3, 2)
    states = manager.pool.state
    assert states.count(INDEXED) == 5 and states.count(FREE) == 15
    manager.check()
