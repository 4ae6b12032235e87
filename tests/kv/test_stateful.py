"""The same harness under hypothesis, which shrinks a failing history to its core."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagetrie.kv import CacheManager
from pagetrie.kv.eviction import POLICIES, make_policy
from tests.kv.oracle import Harness, Held

tokens = st.lists(st.sampled_from([65, 321]), min_size=1, max_size=9)
which = st.integers(0, 9)


class CacheMachine(RuleBasedStateMachine):
    harness: Harness

    @initialize(
        index=st.sampled_from(["radix", "hash"]),
        page_size=st.sampled_from([1, 2, 3]),
        num_pages=st.integers(2, 9),
        hold_limit=st.integers(0, 9),
        policy=st.sampled_from(["lru", "lru", "lru", *POLICIES]),
    )
    def start(self, index: str, page_size: int, num_pages: int, hold_limit: int, policy: str) -> None:
        eviction = make_policy(policy, num_pages, page_size, clock=itertools.count().__next__)
        self.harness = Harness(
            CacheManager(num_pages=num_pages, page_size=page_size, index=index, hold_limit=hold_limit, policy=eviction)
        )

    def lease(self, which: int) -> Held:
        return self.harness.leases[which % len(self.harness.leases)]

    @rule(tokens=tokens, namespace=st.sampled_from([b"a", b"b"]), lookup=st.booleans(), publish=st.booleans())
    def open(self, tokens: list[int], namespace: bytes, lookup: bool, publish: bool) -> None:
        if len(self.harness.leases) < 5:
            self.harness.open(tokens, namespace, lookup=lookup, publish=publish)

    @rule(tokens=tokens)
    def open_as_usual(self, tokens: list[int]) -> None:
        if len(self.harness.leases) < 5:
            self.harness.open(tokens)

    @precondition(lambda self: self.harness.leases)
    @rule(which=which, count=st.integers(1, 6))
    def extend(self, which: int, count: int) -> None:
        self.harness.extend(self.lease(which), count)

    @precondition(lambda self: self.harness.leases)
    @rule(which=which, more=tokens)
    def append(self, which: int, more: list[int]) -> None:
        if len(self.lease(which).tokens) < 20:
            self.harness.append(self.lease(which), more)

    @precondition(lambda self: self.harness.leases)
    @rule(chosen=st.sets(which, min_size=1, max_size=3), count=st.integers(1, 6))
    def step(self, chosen: set[int], count: int) -> None:
        shares = []
        for held in {id(held): held for held in map(self.lease, sorted(chosen))}.values():
            share = min(count, len(held.tokens) - held.computed)
            if share and self.harness.extend(held, share):
                shares.append((held, share))
        self.harness.compute(shares)
        for held, share in shares:
            self.harness.commit(held, share)
        self.harness.poison_free_pages()

    @precondition(lambda self: self.harness.leases)
    @rule(which=which)
    def fork(self, which: int) -> None:
        if len(self.harness.leases) < 5:
            self.harness.fork(self.lease(which))

    @precondition(lambda self: self.harness.leases)
    @rule(which=which, publish_tail=st.booleans())
    def close(self, which: int, publish_tail: bool) -> None:
        self.harness.close(self.lease(which), publish_tail=publish_tail)

    @rule(tokens=tokens, namespace=st.sampled_from([b"a", b"b"]))
    def hold(self, tokens: list[int], namespace: bytes) -> None:
        if len(self.harness.holds) < 4:
            self.harness.hold(tokens, namespace)

    @precondition(lambda self: self.harness.leases)
    @rule(which=which)
    def hold_what_runs(self, which: int) -> None:
        held = self.lease(which)
        if len(self.harness.holds) < 4:
            self.harness.hold(held.tokens, held.tree[0])

    @precondition(lambda self: self.harness.holds)
    @rule(which=which, what=st.sampled_from(["fork_hold", "touch_hold", "release", "release"]))
    def use_hold(self, which: int, what: str) -> None:
        if what != "fork_hold" or len(self.harness.holds) < 4:
            getattr(self.harness, what)(self.harness.holds[which % len(self.harness.holds)])

    @rule()
    def give_up_hold(self) -> None:
        self.harness.give_up_hold()

    @rule()
    def reset(self) -> None:
        self.harness.reset()

    @invariant()
    def agrees_with_the_model(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
