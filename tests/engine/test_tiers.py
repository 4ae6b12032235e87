"""Pages that leave the pool and come back: the text is that of a cold run whatever the tiers do."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from pagetrie.kv.keys import ChainKeys
from pagetrie.kv.pool import FREE
from pagetrie.kv.tiers.disk import DiskTier
from pagetrie.kv.tiers.folder import CacheFolder
from pagetrie.kv.tiers.interface import Bytes
from pagetrie.kv.tiers.stack import TierStack
from pagetrie.kv.tiers.workers import REST
from pagetrie.kv.transfers import Transfers
from tests.engine.tiers import FAULTS, PROMPT, TieredWorld, ToldTier, right, stored
from tests.engine.toy import ToyMemory, World, expected


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_pages_come_back(index: str) -> None:
    tier = ToldTier()
    world = stored(tier, index=index)
    world.add("again", PROMPT, max_tokens=3)
    assert world.step() == []
    assert world.cache.stats().loading_pages == 10
    assert (world.engine.pause() or 0) > 0
    world.work()
    assert world.engine.pause() == 0
    world.finish()
    right(world, "again")
    last = world.seen["again"].last
    assert last is not None and last.cached_tokens == 40 and last.cached_by_tier == {"disk": 40}
    assert world.transfers.stats.loaded_pages == 10
    world.add("third", PROMPT, max_tokens=3)
    world.finish()
    last = world.seen["third"].last
    assert last is not None and last.cached_tokens == 40 and last.cached_by_tier == {}
    assert len(tier.reads) == 1


def test_memory_takes_what_the_pool_evicts() -> None:
    """More prefixes than the pool holds: the second round computes next to nothing."""
    world = TieredWorld(num_pages=24, ram_pages=200)
    prompts = {f"p{n}": [n, *PROMPT] for n in range(1, 6)}
    for name, prompt in prompts.items():
        world.add(name, prompt, max_tokens=3)
    world.finish()
    world.runner.computed_tokens = 0
    for name, prompt in prompts.items():
        world.add(f"{name}-again", prompt, max_tokens=3)
    world.finish()
    for name, prompt in prompts.items():
        right(world, name, prompt)
        right(world, f"{name}-again", prompt)
    assert world.runner.computed_tokens < 5 * 20
    assert world.ram is not None and world.ram.stats.hit_pages >= 20


def test_a_partly_filled_last_page_comes_back_too() -> None:
    world = TieredWorld(ram_pages=50)
    world.add("first", PROMPT[:30], max_tokens=1)
    world.finish()
    world.forget_pool()
    world.add("again", PROMPT[:32], max_tokens=3)
    world.finish()
    right(world, "again", PROMPT[:32])
    last = world.seen["again"].last
    assert last is not None and last.cached_tokens == 30


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_tier_that_says_yes_and_fails(fault: str, index: str) -> None:
    """D1: exactly what didn't come is computed; whoever waits for the same pages gets on as well."""
    tier = ToldTier()
    world = stored(tier, index=index)
    tier.fault = fault
    for name in ("again", "other"):
        world.add(name, PROMPT, max_tokens=3)
    world.finish()
    for name in ("again", "other"):
        right(world, name)
    came = {"short": 5, "stops": 1, "too many": 10}.get(fault, 0)
    assert world.transfers.stats.loaded_pages == came
    assert world.transfers.stats.failed_loads == (fault != "too many")
    assert len(tier.reads) == 1, "what has failed isn't asked for again at once"
    last = world.seen["again"].last
    assert last is not None and last.cached_by_tier == ({"disk": 4 * came} if came else {})


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "nothing"])
def test_damage_on_a_real_disk(tmp_path: Path, damage: str) -> None:
    """D1 and D2 with the disk tier: a miss and the right text, and the damaged page is dropped."""
    tier = DiskTier(CacheFolder(tmp_path), 10**6)
    world = TieredWorld(tier)
    world.add("first", PROMPT, max_tokens=3)
    world.finish()
    world.forget_pool()
    (segment,) = tmp_path.glob("segment-*")
    raw = bytearray(segment.read_bytes())
    if damage == "flip":
        raw[len(raw) // 2] ^= 4
        with segment.open("r+b") as file:
            file.write(raw)
    elif damage == "truncate":
        with segment.open("r+b") as file:
            file.truncate(len(raw) // 2)
    elif damage == "delete":
        segment.unlink()
    world.add("again", PROMPT, max_tokens=3)
    world.finish()
    right(world, "again")
    broken = damage in ("flip", "truncate")
    assert tier.stats.failed_pages == world.transfers.stats.failed_loads == broken
    assert (0 < world.transfers.stats.loaded_pages < 10) if broken else world.transfers.stats.loaded_pages == 10
    tier.close()


@pytest.mark.parametrize("outcome", ["arrives", "fails", "never"])
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_a_request_that_leaves_while_its_pages_are_on_their_way(moment: str, outcome: str) -> None:
    """B2: no page is freed while it may still be written, and every page is freed exactly once."""
    tier = ToldTier()
    world = stored(tier)
    world.add("again", PROMPT, max_tokens=3)
    world.step()
    tier.fault = "short" if outcome == "fails" else ""
    if moment == "during":
        tier.on_read = lambda: world.abort("again") if len(tier.reads) == 2 else None
    if moment == "before":
        world.abort("again")
    if outcome != "never":
        world.work()
    if moment == "after":
        world.abort("again")
    world.clock.now += 100
    assert world.engine.pause() in (0.0, None)
    world.engine.settle()
    world.check()
    stats = world.cache.stats()
    assert stats.loading_pages == stats.active_pages == 0
    # What still comes writes to no page that is free or somebody else's.
    world.add("other", list(range(100, 140)), max_tokens=3)
    world.work()
    world.finish()
    right(world, "other", list(range(100, 140)))


def test_a_page_that_is_being_written_is_not_freed() -> None:
    """The deadline passes in the middle of a write: its page stays held until the write has ended."""
    tier = ToldTier()
    world = stored(tier)
    write = world.memory.write_page
    during: list[int] = []

    def slow_write(page: int, data: Bytes) -> None:
        if not during:
            world.clock.now += 100
            world.engine.settle()
            world.cache.check()
            during.append(world.cache.stats().loading_pages)
            assert world.cache.pool.state[page] != FREE
        write(page, data)

    world.memory.write_page = slow_write  # type: ignore[method-assign]
    world.add("again", PROMPT, max_tokens=3)
    world.step()
    world.work()
    assert during == [10] and world.transfers.stats.late_loads == 1
    world.finish()
    assert world.cache.stats().loading_pages == 0
    right(world, "again")


def test_prompts_in_turn_come_back_every_time_however_short_the_pool() -> None:
    """What was used and evicted again is loaded again at once: the time between turns says nothing."""
    world = TieredWorld(num_pages=24, ram_pages=200)
    prompts = [[first, *PROMPT] for first in range(1, 4)]
    for turn in range(4):
        world.runner.computed_tokens = 0
        for first, prompt in enumerate(prompts):
            name = f"{first} {turn}"
            world.add(name, prompt, max_tokens=1)
            world.finish()
            right(world, name, prompt, 1)
            world.clock.now += 0.1
        assert turn == 0 or world.runner.computed_tokens <= 3 * 4
    assert world.transfers.stats.loads == 9


def test_what_was_loaded_for_nothing_is_not_loaded_again_at_once() -> None:
    """Evicted before anyone used it: loading it again and again would only keep everybody from computing."""
    tier = ToldTier()
    world = stored(tier)
    for reads in (1, 1, 2):
        world.add("left", PROMPT, max_tokens=1)
        world.step()
        world.engine.abort("left")
        for _ in range(3):
            world.work()
            world.engine.settle()
        world.forget_pool()
        assert len(tier.reads) == reads
        world.clock.now += 1.5


def test_a_late_tier_is_not_waited_for() -> None:
    """D7: past the deadline the prompt is computed into other pages; what comes late touches none of them."""
    tier = ToldTier()
    world = stored(tier)
    world.add("again", PROMPT, max_tokens=3)
    world.step()
    pause = world.engine.pause()
    assert pause is not None and 0 < pause <= 41 / 500  # no longer than computing it takes
    world.clock.now += pause
    while world.engine.has_work:  # the tier's thread hangs all the while
        world.step()
    right(world, "again")
    assert world.transfers.stats.late_loads == 1 and world.cache.stats().loading_pages == 0
    before = [page.copy() for page in world.runner.memory]
    world.work()
    assert world.runner.memory == before
    world.finish()


def test_loads_that_queue_or_go_on_well_are_waited_for() -> None:
    """Six loads, one reader, all slower than guessed: as long as waiting beats computing, nothing is computed twice."""
    tier = ToldTier()
    world = TieredWorld(tier, num_pages=200, seats=8)
    prompts = [[first, *range(100, 160)] for first in range(1, 7)]
    for number, prompt in enumerate(prompts):
        world.add(f"first {number}", prompt, max_tokens=1)
    world.finish()
    world.forget_pool()
    world.transfers.note_prefill(100, 0, 10)  # 10 tokens per second: six seconds for each
    world.runner.computed_tokens = 0
    for number, prompt in enumerate(prompts):
        world.add(f"again {number}", prompt, max_tokens=1)
    world.step()
    pages, looks = 0, 0

    def slow() -> None:  # the engine's thread goes on meanwhile
        nonlocal pages, looks
        pages += 1
        for _ in range(5):
            world.clock.now += 0.01
            looks += 1
            world.step()

    tier.on_read = slow
    world.finish()
    for number, prompt in enumerate(prompts):
        right(world, f"again {number}", prompt, 1)
    assert pages == 15 * 6 and world.transfers.stats.late_loads == 0
    assert world.runner.computed_tokens == 6


def test_who_would_queue_for_longer_than_to_compute_computes() -> None:
    """D8: a short prompt doesn't stand behind somebody's long load, though its own would be fast."""
    tier = ToldTier(bandwidth=48 * ToyMemory(1, 4).bytes_per_page)  # a second for the long one
    world = TieredWorld(tier, num_pages=200, seats=8)
    long, short = [2, *[7] * 192], list(range(10, 19))
    for prompt in (long, short):
        world.add(f"first {len(prompt)}", prompt, max_tokens=1)
    world.finish()
    world.forget_pool()
    world.transfers.note_prefill(100, 0, 2)
    world.add("long", long, max_tokens=1)
    world.step()
    world.add("short", short, max_tokens=1)
    world.step()
    right(world, "short", short, 1)
    assert world.transfers.stats.declined_loads == 1 and world.cache.stats().loading_pages == 48
    world.finish()
    right(world, "long", long, 1)
    assert [len(read) for read in tier.reads] == [48]


def test_a_tier_that_hangs_keeps_nobody_from_another() -> None:
    """Each is read by a thread of its own: who hits memory doesn't stand behind who waits for the disk."""
    near, far = ToldTier("near"), ToldTier("far")
    world = TieredWorld(near, far, num_pages=100)
    other = [9, *PROMPT]
    world.add("near", PROMPT, max_tokens=1)
    world.finish()
    in_near = set(near.pages)
    world.add("far", other, max_tokens=1)
    world.finish()
    world.forget_pool()
    near.pages = {key: page for key, page in near.pages.items() if key in in_near}
    far.pages = {key: page for key, page in far.pages.items() if key not in in_near}
    world.transfers.note_prefill(1, 0, 1)  # whatever is estimated, loading is faster
    world.runner.computed_tokens = 0
    world.add("far again", other, max_tokens=1)
    world.add("near again", PROMPT, max_tokens=1)
    world.step()
    assert world.cache.stats().loading_pages == 20
    world.workers["near-reader"].run()
    world.step()
    right(world, "near again", PROMPT, 1)
    assert world.seen["near again"].last is not None and world.cache.stats().loading_pages == 10
    world.finish()
    right(world, "far again", other, 1)
    assert world.runner.computed_tokens == 3 and world.transfers.stats.late_loads == 0


def test_a_page_that_is_gone_makes_no_tier_slow() -> None:
    tier = ToldTier()
    world = stored(tier)
    world.transfers.note_prefill(41, 0, 1)
    tier.fault = "missing"
    world.add("gone", PROMPT, max_tokens=1)
    world.finish()
    tier.fault = ""
    world.forget_pool()
    world.clock.now += 5
    world.add("again", PROMPT, max_tokens=1)
    world.finish()
    last = world.seen["again"].last
    assert last is not None and last.cached_tokens == 40 and world.transfers.stats.declined_loads == 0


@pytest.mark.parametrize("busy", [False, True])
def test_rests_count_when_others_compute_and_never_as_the_tiers_fault(busy: bool) -> None:
    """Beside steps a load takes its rests as well: they decide for this one, and make no tier look slow afterwards."""
    tier = ToldTier()
    world = stored(tier)
    tier.on_read = lambda: setattr(world, "computed", world.computed + 0.002)
    if busy:
        world.add("busy", [7, 7, 7], max_tokens=500, ignore_eos=True)
        world.step()
    world.transfers.note_prefill(41, 0, 0.5)  # half a second to compute; ten pages of 2 ms, and their rests
    world.add("again", PROMPT, max_tokens=1)
    world.step()
    began = world.clock.now
    world.work()
    rested = world.clock.now - began
    assert (rested > 0) == busy
    world.step()
    right(world, "again", max_tokens=1)
    for slow, seconds in ((False, 0.0), (True, 0.02 * REST)):
        world.transfers.note_step(slow)
        assert world.transfers._loading([tier] * 10, world.clock.now) == pytest.approx(seconds, abs=2e-3)


def test_who_comes_when_nobody_computes_any_more_finds_loads_at_full_speed() -> None:
    world = stored(ToldTier())
    world.add("busy", [7, 7, 7], max_tokens=3, ignore_eos=True)
    world.step()
    assert world.transfers.stack.pace.slow
    world.finish()
    assert not world.transfers.stack.pace.slow


@pytest.mark.parametrize("after", [0, 4])
def test_a_load_that_comes_to_a_stop_is_given_up(after: int) -> None:
    """What stalls half-way is as late as what never comes: soon, not only when computing would have been done."""
    tier = ToldTier()
    world = stored(tier)
    world.transfers.note_prefill(41, 0, 41)  # a second per token
    world.add("again", PROMPT, max_tokens=1)
    other = [*PROMPT[:-1], 7]
    world.step()
    count = 0
    began = world.clock.now

    def stop() -> None:
        nonlocal count
        count += 1
        if count > after:
            world.add("other", other, max_tokens=1)
            while world.engine.has_work:
                world.clock.now += world.engine.pause() or 0.0
                world.step()

    tier.on_read = stop
    world.work()
    assert world.clock.now - began < 1.5
    right(world, "again", max_tokens=1)
    right(world, "other", other, 1)
    assert world.transfers.stats.late_loads == 1
    world.finish()
    assert world.cache.stats().loading_pages == 0


def test_a_slow_tier_is_left_alone_and_tried_again_later() -> None:
    """D7: what was measured decides; a measured speed is not believed for ever."""
    tier = ToldTier()
    world = stored(tier)

    def slow() -> None:
        world.clock.now += 0.02

    tier.on_read = slow
    for turn, reads in ((1, 1), (2, 1), (3, 2)):
        world.forget_pool()
        world.add(f"turn {turn}", PROMPT, max_tokens=3)
        world.finish()
        right(world, f"turn {turn}")
        assert len(tier.reads) == reads
        world.clock.now += 5 if turn == 1 else 60
    assert world.transfers.stats.declined_loads >= 1


def test_ten_requests_on_one_loading_prefix_make_one_load() -> None:
    """D8: one load for all, and those who don't need it go on meanwhile."""
    tier = ToldTier()
    world = stored(tier, seats=16)
    world.add("neighbour", [7, 7, 7], max_tokens=30, ignore_eos=True)
    world.step()
    for number in range(10):
        world.add(f"user {number}", [*PROMPT, number], max_tokens=3)
    for _ in range(3):
        before = len(world.seen["neighbour"].tokens.get(0, []))
        world.step()
        assert len(world.seen["neighbour"].tokens[0]) == before + 1
    world.finish()
    assert len(tier.reads) == 1 and len(tier.reads[0]) == 10
    assert world.runner.computed_tokens < 10 * 12 + 40
    for number in range(10):
        right(world, f"user {number}", [*PROMPT, number])


def test_a_load_takes_no_pages_that_others_will_need() -> None:
    """A short pool with a sequence at work: it is neither starved nor ended early by a load that never comes."""
    tier = ToldTier()
    world = stored(tier, num_pages=16)
    long = list(range(60, 84))
    world.add("busy", long, max_tokens=16, ignore_eos=True)
    world.step()
    world.add("again", PROMPT, max_tokens=3)
    for _ in range(60):
        world.step()
        world.clock.now += 0.01
    world.finish()
    right(world, "again")
    assert world.seen["busy"].tokens[0] == expected(long, 16, eos=False)
    assert world.seen["busy"].reasons[0] == "length"


def test_a_load_gives_way_to_who_runs() -> None:
    """Pages that a load holds are taken back before anyone is preempted for them."""
    tier = ToldTier()
    world = stored(tier, num_pages=16)
    world.add("again", PROMPT, max_tokens=3)
    world.step()
    assert world.cache.stats().loading_pages == 10
    long = list(range(60, 80))
    world.add("busy", long, max_tokens=20, ignore_eos=True)
    while "busy" not in world.seen or not world.seen["busy"].reasons:
        world.step()
    assert world.seen["busy"].tokens[0] == expected(long, 20, eos=False)
    assert world.seen["busy"].last is not None and world.transfers.stats.late_loads == 1
    assert not [s for s in world.runner.steps if s.copies], "nobody was preempted"
    world.finish()
    right(world, "again")


def test_a_page_is_not_filled_before_it_is_copied() -> None:
    """A step's copy reads a page that is evicted for a load: the load begins when the copy is done."""
    tier = ToldTier()
    world = TieredWorld(tier, num_pages=7)
    long, short = list(range(100, 121)), [7, 8, 9, 10, 11, 12]
    world.add("first", long, max_tokens=1)
    world.finish()
    world.forget_pool()
    world.add("short", short, max_tokens=1)
    world.finish()  # a page and a half, the half one cached
    execute, loading = world.runner.execute, list[int]()

    def during(plan):  # type: ignore[no-untyped-def]
        if plan.copies:
            loading.append(world.cache.stats().loading_pages)
            world.work()  # the tier is faster than the copy
        return execute(plan)

    world.runner.execute = during  # type: ignore[method-assign]
    world.add("goes on", [*short, 13, 14], max_tokens=1)
    world.add("again", long, max_tokens=1)
    world.finish()
    assert loading == [5], "no load was on its way during the copy"
    right(world, "goes on", [*short, 13, 14], 1)
    right(world, "again", long, 1)


def test_reset_forgets_tiers_and_what_is_on_its_way() -> None:
    """A11: nothing stored before a reset is hit after it, also if it arrives later."""
    tier = ToldTier()
    world = stored(tier, ram_pages=50)
    world.add("again", PROMPT, max_tokens=3)
    world.step()
    world.engine.reset_prefix_cache()
    world.check()
    world.finish()
    right(world, "again")
    last = world.seen["again"].last
    assert last is not None and last.cached_tokens == 0
    assert world.cache.stats().loading_pages == 0


def test_what_ran_during_a_reset_reaches_no_tier_after_it() -> None:
    """A11: pages that a running request keeps over a reset aren't written down when they are evicted later."""
    tier = ToldTier()
    world = TieredWorld(tier, ram_pages=50)
    world.add("first", PROMPT, max_tokens=8, ignore_eos=True)
    world.step()
    world.engine.reset_prefix_cache()
    world.finish()
    world.forget_pool()
    world.add("again", PROMPT, max_tokens=3)
    world.finish()
    right(world, "again")
    last = world.seen["again"].last
    assert last is not None and last.cached_tokens == 0
    assert world.transfers.stats.loads == 0


def test_tenants_and_secrets_have_their_own_pages() -> None:
    """D10, H1: another salt never hits, the same one does."""
    tier = ToldTier()
    world = TieredWorld(tier)
    hits = []
    for turn, salt in enumerate(("a", "b", "a", "")):
        world.add(f"turn {turn}", PROMPT, salt=salt, max_tokens=2)
        world.finish()
        world.forget_pool()
        last = world.seen[f"turn {turn}"].last
        assert last is not None
        hits.append(last.cached_tokens)
    assert hits == [0, 0, 40, 0]


def test_a_shared_store_is_asked_in_the_background() -> None:
    tier = ToldTier("store", remote=True)
    world = stored(tier)
    other = TieredWorld(tier)  # another replica on the same store
    other.add("again", PROMPT, max_tokens=3)
    assert other.step() == [] and other.cache.stats().loading_pages == 0
    other.finish()
    right(other, "again")
    last = other.seen["again"].last
    assert last is not None and last.cached_by_tier == {"store": 40}
    asked = tier.asked
    other.add("unknown", list(range(100, 140)), max_tokens=3)
    other.finish()
    right(other, "unknown", list(range(100, 140)))
    assert tier.asked == asked + 1
    assert world.transfers.stats.loads == 0


def test_a_silent_store_is_not_waited_for() -> None:
    tier = ToldTier("store", remote=True)
    world = TieredWorld(tier)
    world.add("first", PROMPT, max_tokens=3)
    world.step()
    pause = world.engine.pause()
    assert pause is not None and 0 < pause <= 0.25
    world.clock.now += pause
    while world.engine.has_work:
        world.step()
    right(world, "first")
    world.work()
    world.finish()


def test_at_the_end_all_is_written() -> None:
    tier = ToldTier()
    world = TieredWorld(tier)
    world.add("first", PROMPT[:31], max_tokens=1)
    world.finish()
    assert len(tier.pages) == 7
    for worker in world.workers.values():
        worker.eager = True
    world.engine.close()
    assert len(tier.pages) == 8  # the partly filled page, too
    world.engine.close()


def test_at_the_end_a_store_that_hangs_keeps_nothing_from_the_disk() -> None:
    """Its queue is full and stays so: the disk gets all that it lacks, and the end comes."""
    disk, store = ToldTier(), ToldTier("store", remote=True)
    world = TieredWorld(disk, store)
    stuck = world.transfers.stack.queues[1]
    stuck._capacity = world.memory.bytes_per_page

    def wait(seconds: float) -> bool:
        world.clock.now += seconds
        return False

    stuck.wait = wait  # type: ignore[method-assign]
    world.add("first", PROMPT[:31], max_tokens=1)
    while world.engine.has_work:
        world.clock.now += world.engine.pause() or 0.0
        world.step()
    right(world, "first", PROMPT[:31], 1)
    world.workers["disk-writer"].eager = True
    world.workers["disk-writer"].run()
    assert (len(disk.pages), len(store.pages)) == (7, 0)
    closed = list[float]()
    for worker in world.workers.values():
        worker.close = closed.append  # type: ignore[method-assign]
    began = world.clock.now
    world.transfers.close(10.0)
    assert len(disk.pages) == 8
    assert world.clock.now - began == 10 and max(closed) == 0


class UnsureTier(ToldTier):
    """Fails at random, in every way it knows."""

    def __init__(self, rng: random.Random, name: str, *, remote: bool = False) -> None:
        super().__init__(name, remote=remote)
        self._rng = rng

    def get(self, refs):  # type: ignore[no-untyped-def]
        self.fault = self._rng.choice(["", "", "", *FAULTS])
        return super().get(refs)

    def put(self, pages):  # type: ignore[no-untyped-def]
        kept = [page for page in pages if self._rng.random() < 0.9]
        for key in list(self.pages):
            if self._rng.random() < 0.02:
                del self.pages[key]
        super().put(kept)
        return len(kept)


@pytest.mark.parametrize("seed", range(40))
def test_random_histories(seed: int) -> None:
    """Short pools, failing tiers, threads that come late or never, aborts and resets: the text is the cold one."""
    rng = random.Random(seed)
    tiers = [UnsureTier(rng, "disk")]
    if seed % 3 == 0:
        tiers.append(UnsureTier(rng, "store", remote=True))
    world = TieredWorld(
        *tiers,
        num_pages=rng.choice([14, 20, 40]),
        ram_pages=rng.choice([0, 5, 30]),
        index=rng.choice(["radix", "hash"]),
        seats=rng.choice([2, 5]),
    )
    stems = [[rng.randrange(1, 150) for _ in range(rng.randrange(5, 30))] for _ in range(4)]
    prompts: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for number in range(60):
        if rng.random() < 0.5:
            name = f"r{number}"
            prompts[name] = rng.choice(stems)[: rng.randrange(4, 30)] + [rng.randrange(1, 150)] * rng.randrange(1, 4)
            world.add(name, prompts[name], max_tokens=rng.randrange(1, 6))
        for worker in world.workers.values():
            while worker.jobs and rng.random() < 0.5:
                worker.jobs.pop(rng.randrange(len(worker.jobs)) if rng.random() < 0.2 else 0)()
        if rng.random() < 0.05 and prompts:
            aborted.add(rng.choice(list(prompts)))
            for name in aborted:
                world.abort(name)
        if rng.random() < 0.02:
            world.engine.reset_prefix_cache()
            world.check()
        world.clock.now += rng.choice([0.0, 0.001, 0.01, 0.3])
        world.step()
    for _ in range(500):
        if not world.engine.has_work:
            break
        world.clock.now += 0.05  # threads that never run again
        world.step()
    assert not world.engine.has_work
    for name, prompt in prompts.items():
        seen = world.seen[name]
        if name not in aborted:
            tokens = seen.tokens[0]
            assert tokens == expected(prompt, 6)[: len(tokens)]
            assert seen.reasons[0] in ("length", "stop")
    world.work()
    world.engine.settle()
    world.check()
    assert world.cache.stats().loading_pages == 0 and world.idle_pages() == 0


def test_real_threads_wake_a_loop_that_waits(tmp_path: Path) -> None:
    """The engine sleeps while everything waits for pages, and the thread that brings them wakes it."""
    world: World

    def open_world() -> World:
        def make(memory: ToyMemory) -> Transfers:
            tier = DiskTier(CacheFolder(tmp_path), 10**6)
            return Transfers(TierStack([tier], memory), ChainKeys(tier.folder.secret))

        return World(make_transfers=make)

    world = open_world()
    world.add("first", PROMPT, max_tokens=3)
    world.run()
    world.engine.close()
    world = open_world()
    woken = threading.Event()
    world.engine.set_waker(woken.set)
    world.add("again", PROMPT, max_tokens=3)
    world.step()
    assert woken.wait(60)
    assert world.engine.pause() == 0
    world.run()
    right(world, "again")
    last = world.seen["again"].last
    assert last is not None and last.cached_by_tier == {"disk": 40}
    world.engine.close()
