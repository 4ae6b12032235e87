"""Prompts whose first pages are computed while their last ones are loaded, from a tier about as slow as computing."""

from __future__ import annotations

import pytest

from pagetrie.engine.scheduler import Schedule
from pagetrie.engine.tenant import LOCAL, Tenant
from pagetrie.kv.eviction import Use
from tests.engine.tiers import LONG, TieredWorld, ToldTier, right
from tests.engine.toy import ToyMemory


class Meeting:
    """A prompt of 48 pages in a tier that takes a second for them, on a machine that takes as long to compute them.

    A step computes 16 tokens, the tier delivers a page at a time, and both take their time on the world's clock.

    Attributes:
        rate: pages that the tier delivers per second.
    """

    def __init__(self, *, num_pages: int = 200, tenant: Tenant = LOCAL, **options: object) -> None:
        self.rate = 48.0
        self.tier = ToldTier(bandwidth=48 * ToyMemory(1, 4).bytes_per_page)
        self.world = world = TieredWorld(self.tier, num_pages=num_pages, seats=options.pop("seats", 8), **options)
        if tenant is not LOCAL:
            world.engine.set_tenants([tenant])
        world.add("first", LONG, max_tokens=1, tenant=tenant)
        world.finish()
        world.forget_pool()
        world.transfers.note_prefill(192, 0, 1)
        world.runner.computed_tokens = 0
        execute = world.runner.execute

        def slow(plan):  # type: ignore[no-untyped-def]
            world.clock.now += sum(len(s.token_ids) for s in plan.sequences) / 192
            return execute(plan)

        world.runner.execute = slow  # type: ignore[method-assign]

    def deliver(self) -> None:
        """The tier's thread gets on as far as the clock says."""
        for flight in self.world.transfers._flights:
            load = flight.load
            due = int((self.world.clock.now - flight.started) * self.rate)
            pages = self.tier.pages
            load.began = flight.started
            while load.ready < min(due, len(load.refs)):
                self.world.memory.write_page(load.pages[load.ready], pages[load.refs[load.ready].key])
                load.ready += 1
            load.finished = load.ready == len(load.refs)

    def run(self, *names: str) -> float:
        """Until these have ended. Returns the seconds that it took."""
        world, began = self.world, self.world.clock.now
        for _ in range(200):
            if all(name in world.seen and world.seen[name].reasons for name in names):
                return world.clock.now - began
            self.deliver()
            pause = world.engine.pause()
            world.clock.now += min(pause, 1 / 48) if pause else 0.0
            if not pause:
                world.step()
        raise AssertionError("it doesn't end")


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_first_pages_are_computed_while_the_last_are_loaded(index: str) -> None:
    """A tier as slow as computing: both together take half the time, and usage says what came from where."""
    meeting = Meeting(index=index)
    world = meeting.world
    world.add("again", LONG, max_tokens=1)
    assert meeting.run("again") == pytest.approx(0.5, abs=0.1)
    right(world, "again", LONG, 1)
    last = world.seen["again"].last
    assert last is not None and last.cached_by_tier == {"disk": last.cached_tokens}
    assert 80 <= last.cached_tokens <= 112
    assert last.cached_tokens + world.runner.computed_tokens == 193
    assert world.transfers.stats.meeting_loads == 1
    assert world.transfers.stats.late_loads == 0 and world.cache.stats().loading_pages == 0
    world.check()


def test_who_asks_for_the_same_meanwhile_joins() -> None:
    """D8: others with the prompt start no load of their own, and compute none of it."""
    meeting = Meeting()
    world = meeting.world
    for name in ("one", "two", "three"):
        world.add(name, LONG, max_tokens=1)
    meeting.run("one", "two", "three")
    for name in ("one", "two", "three"):
        right(world, name, LONG, 1)
    assert world.transfers.stats.loads == 1 and world.runner.computed_tokens <= 112 + 3
    tiers = [last.cached_by_tier for name in ("one", "two", "three") if (last := world.seen[name].last)]
    assert tiers == [{"disk": 4 * world.transfers.stats.loaded_pages}, {}, {}]
    world.check()


@pytest.mark.parametrize("stops", [0, 10])
def test_what_never_comes_to_a_meeting_is_computed(stops: int) -> None:
    """D7: the load hangs, from the beginning or half-way: no page is awaited for long, none is lost."""
    meeting = Meeting()
    world = meeting.world
    deliver = meeting.deliver

    def hang() -> None:
        if all(flight.load.ready < stops for flight in world.transfers._flights):
            deliver()

    meeting.deliver = hang  # type: ignore[method-assign]
    world.add("again", LONG, max_tokens=1)
    assert meeting.run("again") < 2.0
    right(world, "again", LONG, 1)
    assert world.transfers.stats.late_loads == 1
    assert world.cache.stats().loading_pages == 0
    world.check()


def test_what_comes_for_a_meeting_is_room_that_the_prompt_does_not_need() -> None:
    """A pool that holds the prompt once, and others: it starts at once, and nobody is preempted for its pages."""
    meeting = Meeting(num_pages=64)
    world = meeting.world
    world.add("busy", [7, 7, 7], max_tokens=40, ignore_eos=True, priority=5)
    world.step()
    world.transfers.note_prefill(192, 0, 1)
    world.add("again", LONG, max_tokens=1)
    assert meeting.run("again") < 0.8
    right(world, "again", LONG, 1)
    assert world.transfers.stats.meeting_loads == 1 and world.transfers.stats.late_loads == 0
    assert all(not sequence.preemptions for sequence in world.engine._scheduler.running)
    meeting.run("busy")


@pytest.mark.parametrize("pages", [40, 10])
def test_a_tenants_cap_takes_nothing_from_who_meets_a_load(pages: int) -> None:
    """What it has computed stays its own while it looks for what was loaded, also beyond the cap."""
    tenant = Tenant(name="a", salt=b"a", cache_cap=pages / 200)
    meeting = Meeting(tenant=tenant)
    world = meeting.world
    meeting.world.clock.now += 5
    world.add("again", LONG, max_tokens=1, tenant=tenant)
    meeting.run("again")
    right(world, "again", LONG, 1)
    assert world.transfers.stats.meeting_loads == 1 and world.runner.computed_tokens <= 193
    world.check()


def test_beams_meet_a_load_too() -> None:
    meeting = Meeting()
    world = meeting.world
    world.add("again", LONG, max_tokens=2, beam_width=2, n=1)
    meeting.run("again")
    assert world.transfers.stats.meeting_loads == 1 and world.runner.computed_tokens < 110
    last = world.seen["again"].last
    assert last is not None and last.cached_tokens > 80


def test_a_meeting_is_one_use_for_the_eviction_policy() -> None:
    meeting = Meeting()
    world = meeting.world
    policy, uses = world.cache.index.shares.alone.policy, list[Use]()
    touch = policy.touch
    policy.touch = lambda node, use: (uses.extend([use] if use else []), touch(node, use))  # type: ignore[method-assign]
    world.add("again", LONG, max_tokens=1)
    meeting.run("again")
    assert [use.prompt_tokens for use in uses] == [193] and 80 <= uses[0].cached_tokens <= 112


def test_who_waits_for_the_seat_of_one_that_waits_gets_it_when_that_one_leaves() -> None:
    meeting = Meeting(seats=1)
    world = meeting.world
    meeting.rate = 0.0
    world.add("waits", LONG, max_tokens=1)
    while not world.engine.pause():
        world.step()
    world.add("next", [9, 9, 9], max_tokens=1)
    world.step()
    assert (world.engine.pause() or 0) > 0
    world.engine.abort("waits")
    assert world.engine.pause() == 0
    meeting.run("next")


def test_a_meeting_that_nobody_came_to_says_what_the_tier_gave() -> None:
    """The client leaves, the load goes on: the tier isn't thought to be slower than it was."""
    meeting = Meeting()
    world = meeting.world
    page = world.memory.bytes_per_page
    world.add("again", LONG, max_tokens=1)
    world.step()
    world.engine.abort("again")
    meeting.rate = 20.0
    while world.transfers._flights:
        meeting.deliver()
        world.clock.now += min(world.engine.pause() or 0.0, 1 / 48)
        world.engine.settle()
    assert world.cache.stats().loading_pages == 0
    assert page / world.transfers._speeds["disk"].seconds(page, world.clock.now, 0.0) == pytest.approx(
        20 * page, rel=0.2
    )


@pytest.mark.parametrize("public", [12, 80])
def test_past_public_pages_a_prompt_looks_for_its_own(public: int) -> None:
    """However the public part came to be there: a load or, where that isn't worth it, computing."""
    meeting = Meeting()
    world = meeting.world
    world.engine.public.declare(LONG[:public])
    world.add("own", LONG, max_tokens=1)
    meeting.run("own")
    world.forget_pool()
    world.clock.now += 5
    world.transfers.note_prefill(192, 0, 1)
    world.runner.computed_tokens = 0
    world.add("again", LONG, max_tokens=1)
    meeting.run("again")
    right(world, "again", LONG, 1)
    assert world.runner.computed_tokens < 130 and world.transfers.stats.meeting_loads >= 1


@pytest.mark.parametrize("how", ["cancelled", "reset", "preempted"])
def test_who_leaves_a_meeting_leaves_nothing_behind(how: str) -> None:
    """The one that computes goes away: the load ends, all pages come back, and the next one gets the right text."""
    meeting = Meeting()
    world = meeting.world
    world.add("again", LONG, max_tokens=1)
    for _ in range(3):
        world.step()
        meeting.deliver()
    assert world.cache.stats().loading_pages > 0
    if how == "cancelled":
        world.engine.abort("again")
    elif how == "reset":
        world.engine.reset_prefix_cache()
    else:
        (sequence,) = world.engine._scheduler.running
        world.engine._scheduler._preempt(sequence, Schedule())
    world.check()
    if how != "cancelled":
        meeting.run("again")
        right(world, "again", LONG, 1)
        assert world.runner.computed_tokens <= 193
    for _ in range(100):
        world.clock.now += world.engine.pause() or 0.0
        world.step()
        if not world.cache.stats().loading_pages:
            break
    assert world.cache.stats().loading_pages == 0 and world.cache.stats().active_pages == 0
    world.check()
    world.add("later", LONG, max_tokens=1)
    meeting.run("later")
    right(world, "later", LONG, 1)
