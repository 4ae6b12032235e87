"""Contexts: kept prefixes that requests start from, over the toy model."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagetrie.engine.contexts import MAX_FORKS, OWNERS, Context, Contexts
from pagetrie.engine.request import ContextUse
from pagetrie.engine.tenant import Owner, Tenant
from pagetrie.errors import HoldLimitError, InvalidRequestError
from pagetrie.kv import CacheManager, ContiguousCacheManager
from tests.engine.toy import EOS, World, expected

ME, ALICE, BOB = (Owner(Tenant(name)) for name in ("me", "alice", "bob"))


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 200) for _ in range(length)]


class Branches(World):
    """A world with a clock that stands still, and contexts by their owner's name."""

    def __init__(self, **options: object) -> None:
        self.now = 0.0
        self.numbers = count(1)
        super().__init__(clock=lambda: self.now, **options)  # type: ignore[arg-type]

    def create(self, ids: Sequence[int], owner: Owner = ME, ttl: float = math.inf) -> Context:
        """A context, computed and held."""
        context = self.engine.contexts.create(owner, list(ids), ttl=ttl)
        self.generate(context, (), max_tokens=0)
        self.engine.contexts.secure(context)
        self.check()
        return context

    def generate(self, context: Context, more: Sequence[int] = (), *, append: bool = False, **params: object) -> str:
        """Start a request on a context and run the world until it's idle; returns the request's id."""
        name = self.start(context, more, append=append, **params)
        self.run()
        return name

    def start(self, context: Context, more: Sequence[int] = (), *, append: bool = False, **params: object) -> str:
        name = f"r{next(self.numbers)}"
        use = ContextUse(context.id, context.owner, append, context.version, note=lambda text: f"wrote {text}")
        self.add(name, [*context.ids, *more], context=use, **params)
        return name

    def cached(self, name: str) -> int:
        last = self.seen[name].last
        assert last is not None
        return last.cached_tokens


def test_a_context_is_computed_once_and_kept_for_its_requests() -> None:
    world = Branches(num_pages=24)
    trunk = prompt(1, 42)
    context = world.create(trunk)
    assert (context.held_tokens, context.pages) == (42, 11)
    for seed in range(2, 8):  # load that would evict it
        world.add(f"load{seed}", prompt(seed, 30), max_tokens=8)
    world.run()
    name = world.generate(context, [7, 8, 9], max_tokens=6)
    assert world.cached(name) == 42
    assert world.seen[name].tokens[0] == expected([*trunk, 7, 8, 9], 6)
    again = world.generate(context, max_tokens=5)  # straight on from the trunk: its last token is computed again
    assert world.cached(again) == 41
    assert world.seen[again].tokens[0] == expected(trunk, 5)
    assert context.ids == trunk


def test_four_forks_hold_the_trunk_once_and_write_what_they_would_alone() -> None:
    world = Branches(num_pages=64)
    trunk = prompt(1, 40)
    root = world.create(trunk)
    before = world.runner.computed_tokens
    forks = world.engine.contexts.fork(ME, root.id, 4)
    assert world.cache.stats().pinned_pages == 10  # of the 50 that five contexts stand on
    assert world.runner.computed_tokens == before
    assert [fork.pages for fork in forks] == [10] * 4
    names = [world.start(fork, [number], append=True, max_tokens=6) for number, fork in enumerate(forks, 1)]
    world.run()
    assert world.runner.computed_tokens - before == 4 * 6
    for number, (name, fork) in enumerate(zip(names, forks, strict=True), 1):
        assert world.seen[name].tokens[0] == expected([*trunk, number], 6)
        assert fork.ids == [*trunk, number, *expected([*trunk, number], 6)]
    assert root.ids == trunk
    assert world.cache.stats().pinned_pages == 10 + 4 * 2
    for context in [root, *forks]:
        world.engine.contexts.delete(ME, context.id)
    world.check()
    assert world.idle_pages() == 0


def test_an_appended_answer_is_part_of_the_context_and_its_tail_is_held() -> None:
    world = Branches()
    context = world.create(prompt(1, 10))
    world.generate(context, [5], append=True, max_tokens=4)
    grown = [*prompt(1, 10), 5, *expected([*prompt(1, 10), 5], 4)]
    assert context.ids == grown
    assert context.held_tokens == 14  # the last token has not been computed
    assert context.note == "wrote " + world.seen["r2"].text[0]
    name = world.generate(context, [6, 7], max_tokens=3)
    assert world.cached(name) == 14
    assert world.seen[name].tokens[0] == expected([*grown, 6, 7], 3)
    world.generate(context, [9, 9, 9], append=True, max_tokens=0)
    assert context.ids == [*grown, 9, 9, 9] and context.held_tokens == 18


def test_an_end_of_sequence_is_not_appended() -> None:
    world = Branches(next_token=lambda context, spec: EOS if len(spec.output_ids) == 2 else 9)
    context = world.create([1, 2, 3])
    world.generate(context, append=True, max_tokens=9)
    assert context.ids == [1, 2, 3, 9, 9]


def test_one_request_appends_at_a_time_and_others_read_meanwhile() -> None:
    world = Branches()
    context = world.create(prompt(1, 10))
    name = world.start(context, [5], append=True, max_tokens=4)
    with pytest.raises(InvalidRequestError, match="Another request is appending") as refused:
        world.start(context, [6], append=True, max_tokens=4)
    assert (refused.value.status, refused.value.code) == (409, "context_busy")
    other = world.start(context, [6], max_tokens=4)
    world.run()
    late = ContextUse(context.id, ME, append=True, version=0)
    with pytest.raises(InvalidRequestError, match="has meanwhile appended"):
        world.add("late", [*prompt(1, 10), 6], context=late)
    assert world.seen[other].tokens[0] == expected([*prompt(1, 10), 6], 4)
    assert world.seen[name].tokens[0] == context.ids[11:]
    world.generate(context, [6], append=True, max_tokens=1)


@pytest.mark.parametrize("ending", ["abort", "failure"])
def test_a_request_that_does_not_end_well_appends_nothing(ending: str) -> None:
    world = Branches()
    context = world.create(prompt(1, 10))
    name = world.start(context, [5], append=True, max_tokens=9)
    world.step()
    if ending == "abort":
        world.abort(name)
    else:
        world.runner.fail_on = lambda plan: True
        world.step()
        world.runner.fail_on = lambda plan: False
    assert context.ids == prompt(1, 10) and context.held_tokens == 10
    assert not context.growing and context.users == 0
    world.generate(context, [5], append=True, max_tokens=2)
    assert context.ids == [*prompt(1, 10), 5, *expected([*prompt(1, 10), 5], 2)]


def test_only_one_choice_without_stop_strings_can_be_appended() -> None:
    world = Branches()
    context = world.create([1, 2, 3])
    for params in ({"n": 2}, {"stop": ("x",)}):
        with pytest.raises(InvalidRequestError, match="can be appended"):
            world.start(context, [4], append=True, **params)
    assert context.users == 0


def test_a_context_whose_pages_had_to_go_is_its_tokens_and_gets_its_hold_back() -> None:
    world = Branches(num_pages=16)
    trunk = prompt(1, 24)
    context = world.create(trunk)
    world.add("big", prompt(2, 50), max_tokens=14)  # needs all 16 pages
    world.run()
    assert world.seen["big"].tokens[0] == expected(prompt(2, 50), 14)
    assert context.held_tokens == 0
    (fork,) = world.engine.contexts.fork(ME, context.id, 1)
    assert fork.held_tokens == 0
    name = world.generate(fork, [7], max_tokens=3)
    assert world.cached(name) == 0
    assert world.seen[name].tokens[0] == expected([*trunk, 7], 3)
    assert fork.held_tokens == 24
    assert world.cached(world.generate(context, [8], max_tokens=1)) == 24
    assert context.held_tokens == 24


def test_contexts_end_after_their_time_unless_used_and_not_under_a_request() -> None:
    world = Branches()
    short, long = world.create(prompt(1, 20), ttl=10), world.create(prompt(2, 20), ttl=100)
    assert world.engine.contexts.seconds_to_expiry() == 10
    world.now = 9
    world.engine.contexts.get(ME, short.id)
    world.now = 18.9
    world.step()
    assert len(world.engine.contexts) == 2
    world.start(short, [1], append=True, max_tokens=5)
    world.now = 60
    world.step()
    assert not short.closed
    world.run()
    world.now = 69.9
    world.step()
    assert not short.closed  # it lives for 10 seconds after the request's end
    world.now = 70
    world.step()
    assert short.closed and world.cache.stats().pinned_pages == 5
    with pytest.raises(InvalidRequestError, match="no context") as refused:
        world.engine.contexts.get(ME, short.id)
    assert refused.value.status == 404
    assert world.engine.contexts.seconds_to_expiry() == pytest.approx(30)
    world.now = 1000
    world.engine.contexts.expire()
    world.check()
    assert long.closed and world.idle_pages() == 0
    assert world.engine.contexts.seconds_to_expiry() is None


def test_deleting_a_context_under_a_request_leaves_the_request_be() -> None:
    world = Branches()
    context = world.create(prompt(1, 20))
    name = world.start(context, [1], append=True, max_tokens=5)
    world.step()
    world.engine.contexts.delete(ME, context.id)
    world.run()
    assert world.seen[name].tokens[0] == expected([*prompt(1, 20), 1], 5)
    assert world.idle_pages() == 0


def test_others_contexts_look_like_none_at_all() -> None:
    world = Branches()
    context = world.create(prompt(1, 20), owner=ALICE)
    errors = []
    for owner, context_id in ((BOB, context.id), (ALICE, "c99")):
        for verb in ("get", "delete"):
            with pytest.raises(InvalidRequestError) as refused:
                getattr(world.engine.contexts, verb)(owner, context_id)
            errors.append((refused.value.message.replace(context_id, "?"), refused.value.status, refused.value.code))
    assert len(set(errors)) == 1
    assert world.engine.contexts.of(BOB) == [] and world.engine.contexts.of(ALICE) == [context]


def test_limits_per_owner_and_for_all_are_told() -> None:
    world = Branches(max_contexts=2)
    first = world.create([1, 2, 3])
    with pytest.raises(InvalidRequestError, match="At most 2 contexts may be kept and you have 1, so 2 more") as full:
        world.engine.contexts.fork(ME, first.id, 2)
    assert full.value.status == 429
    world.engine.contexts.fork(ME, first.id, 1)
    for number in range(2 * OWNERS - 2):
        world.engine.contexts.create(Owner(ME.tenant, f"owner {number // 2}"), [1])
    with pytest.raises(InvalidRequestError, match="all salts together have 16 times as many"):
        world.engine.contexts.create(Owner(ME.tenant, "new"), [1])
    for bad in (0, MAX_FORKS + 1):
        with pytest.raises(InvalidRequestError, match="n must be between 1 and 128"):
            world.engine.contexts.fork(ME, first.id, bad)


def test_pinned_pages_are_limited_and_an_answer_beyond_the_limit_is_kept_as_tokens() -> None:
    world = Branches(num_pages=32, hold_limit=6)
    with pytest.raises(InvalidRequestError, match="takes 7 pages, but all pinned prefixes together may take 6"):
        world.engine.contexts.create(ME, prompt(1, 28))
    context = world.create(prompt(1, 16))
    other = world.engine.contexts.create(ME, prompt(2, 16))
    world.generate(other, max_tokens=0)
    assert other.held_tokens == 0
    with pytest.raises(HoldLimitError, match="4 are taken and this one adds 4"):
        world.engine.contexts.secure(other)
    world.generate(context, [1], append=True, max_tokens=20)
    assert len(context.ids) == 37 and context.held_tokens == 16
    name = world.generate(context, [2], max_tokens=2)
    assert world.seen[name].tokens[0] == expected([*context.ids, 2], 2)


@pytest.mark.parametrize(
    "cache",
    [
        ContiguousCacheManager(num_pages=4, page_size=4, max_tokens=8),
        CacheManager(num_pages=4, page_size=4, index="none"),
    ],
)
def test_where_nothing_can_be_held_contexts_are_refused(cache: CacheManager | ContiguousCacheManager) -> None:
    contexts = Contexts(
        cache, namespace=lambda salt, tenant: salt.encode(), clock=lambda: 0.0, new_id=lambda: "c", max_per_owner=3
    )
    with pytest.raises(InvalidRequestError, match="paged layout"):
        contexts.create(ME, [1, 2])


class ContextMachine(RuleBasedStateMachine):
    """The store against a plain list that is searched from end to end."""

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        numbers = count(1)
        self.cache = CacheManager(num_pages=40, page_size=4)
        self.contexts = Contexts(
            self.cache,
            namespace=lambda salt, tenant: salt.encode(),
            clock=lambda: self.now,
            new_id=lambda: f"c{next(numbers)}",
            max_per_owner=3,
        )
        self.known: list[Context] = []
        self.ends: dict[str, float] = {}
        self.ids: dict[str, list[int]] = {}
        self.busy: list[tuple[Context, bool]] = []

    def compute(self, ids: list[int]) -> None:
        lease = self.cache.open(ids)
        assert lease.extend(len(ids) - lease.computed) == 0
        self.cache.take_copies()
        lease.commit(len(ids) - lease.computed)
        lease.close()

    def used(self, context: Context) -> None:
        self.ends[context.id] = self.now + context.ttl

    def alive(self) -> list[Context]:
        users = [context for context, _ in self.busy]
        self.known = [c for c in self.known if self.ends[c.id] > self.now or c in users]
        return self.known

    def some(self, which: int) -> Context | None:
        alive = self.alive()
        return alive[which % len(alive)] if alive else None

    @rule(
        owner=st.sampled_from([ALICE, BOB]),
        ids=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        ttl=st.integers(1, 5),
    )
    def create(self, owner: Owner, ids: list[int], ttl: int) -> None:
        if sum(c.owner == owner for c in self.alive()) >= 3:
            with pytest.raises(InvalidRequestError):
                self.contexts.create(owner, ids, ttl=ttl)
            return
        self.compute(ids)
        context = self.contexts.create(owner, ids, ttl=ttl)
        self.contexts.secure(context)
        assert context.held_tokens == len(ids)
        self.known.append(context)
        self.ids[context.id] = ids
        self.used(context)

    @rule(which=st.integers(0, 9), n=st.integers(1, 3))
    def fork(self, which: int, n: int) -> None:
        parent = self.some(which)
        if parent is None:
            return
        pinned = self.cache.stats().pinned_pages
        self.used(parent)
        if sum(c.owner == parent.owner for c in self.alive()) + n > 3:
            with pytest.raises(InvalidRequestError):
                self.contexts.fork(parent.owner, parent.id, n)
            return
        for child in self.contexts.fork(parent.owner, parent.id, n):
            assert child.held_tokens == parent.held_tokens
            self.known.append(child)
            self.ids[child.id] = self.ids[parent.id]
            self.used(child)
        assert self.cache.stats().pinned_pages == pinned

    @rule(which=st.integers(0, 9))
    def delete(self, which: int) -> None:
        context = self.some(which)
        if context is not None:
            self.contexts.delete(context.owner, context.id)
            self.known.remove(context)

    @rule(which=st.integers(0, 9), append=st.booleans())
    def begin(self, which: int, append: bool) -> None:
        context = self.some(which)
        if context is None:
            return
        self.used(context)
        if append and (context, True) in self.busy:
            with pytest.raises(InvalidRequestError):
                self.contexts.begin(ContextUse(context.id, context.owner, True, context.version))
        else:
            assert self.contexts.begin(ContextUse(context.id, context.owner, append, context.version)) is context
            self.busy.append((context, append))

    @precondition(lambda self: self.busy)
    @rule(which=st.integers(0, 9), well=st.booleans(), more=st.lists(st.integers(0, 1), max_size=4))
    def end(self, which: int, well: bool, more: list[int]) -> None:
        context, append = self.busy.pop(which % len(self.busy))
        ids = [*context.ids, *more] if append and well else None
        if ids is not None:
            self.compute(ids)
        self.contexts.end(context, append=append, ids=ids)
        if context in self.known:
            self.used(context)
            self.ids[context.id] = ids or self.ids[context.id]
            assert context.held_tokens >= (len(ids) - 1 if ids else 0)

    @rule(seconds=st.sampled_from([0.5, 1, 3]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(owner=st.sampled_from([ALICE, BOB]), number=st.integers(1, 12))
    def look_up(self, owner: Owner, number: int) -> None:
        context = next((c for c in self.alive() if (c.owner, c.id) == (owner, f"c{number}")), None)
        if context is None:
            with pytest.raises(InvalidRequestError):
                self.contexts.get(owner, f"c{number}")
        else:
            assert self.contexts.get(owner, f"c{number}") is context
            self.used(context)

    @rule()
    def lose_a_hold(self) -> None:
        self.cache.give_up_hold()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "contexts"):
            return
        self.contexts.expire()
        alive = self.alive()
        assert {id(c) for c in self.contexts} == {id(c) for c in alive} and len(self.contexts) == len(alive)
        for context in alive:
            assert context.ids == self.ids[context.id]
            assert not context.closed
        free = [self.ends[c.id] for c in alive if not c.users]
        seconds = self.contexts.seconds_to_expiry()
        assert seconds is not None or not free
        assert not free or (seconds is not None and seconds <= min(free) - self.now)
        pinned = {page for c in alive if c.hold is not None for page in c.hold.pages}
        assert self.cache.stats().pinned_pages == len(pinned) == self.cache.stats().active_pages
        self.cache.check()


TestContextMachine = ContextMachine.TestCase
TestContextMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
