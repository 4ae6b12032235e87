"""The real model over tiers that lie, stall, cut short, flip bits, fill up and die.

Whatever a tier does, the text is the cold one, what didn't come is computed once, the numbers say so, every page comes
back, nobody waits longer than computing would have taken, and the tier is used again once it works.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pagetrie.assembly import Parts, build
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import Request
from pagetrie.kv.tiers import disk
from pagetrie.kv.tiers.disk import segment_paths
from pagetrie.kv.tiers.interface import TierStats
from pagetrie.settings import Settings
from tests.e2e.tiered_model import PREFILL_SPEED, STALL, TieredModel, damage_page, disk_faults
from tests.simulation.tiers import SlowSpeed

PAGE, PAGES, TOKENS = 16, 6, 4
PROMPT = [1000 + 37 * number for number in range(PAGES * PAGE + 1)]  # one token more than the pages hold
OTHER = [*PROMPT[:-1], 5, 6, 7]
STRANGER = [2000 + 41 * number for number in range(3 * PAGE + 1)]
DECODED = TOKENS - 1
"""Tokens that a request computes besides its prompt: the last one is handed out and never read."""

MOST_WAITED = 0.55
"""Seconds: twice what is spared for the unforeseen, as a load is looked at a second time if something has come, and a
few times the estimate."""


@pytest.fixture(scope="module")
def parts(bundled_model: Path) -> Parts:
    """q4 weights: what a token's computation gives depends on its own sequence alone, to the last bit."""
    return build(
        Settings(model=bundled_model, threads=1, weights="q4", page_size=PAGE, num_pages=30, max_model_len=256)
    )


@pytest.fixture(scope="module")
def cold(parts: Parts) -> dict[int, list[int]]:
    """What the prompts give without any cache, by their last token."""
    texts: dict[int, list[int]] = {}
    for prompt in (PROMPT, OTHER, STRANGER):
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        parts.engine.reset_prefix_cache()
        parts.engine.add(Request("cold", prompt, params))
        texts[prompt[-1]] = []
        while parts.engine.has_work:
            for output in parts.engine.step():
                texts[prompt[-1]] += [token for delta in output.choices for token in delta.token_ids]
    parts.engine.reset_prefix_cache()
    assert parts.cache.stats().free_pages == 30 and len({tuple(text) for text in texts.values()}) == 3
    return texts


MakeWorld = Callable[..., TieredModel]


@pytest.fixture
def make_world(
    parts: Parts, cold: dict[int, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeWorld]:
    """Worlds on one storage, of which one at a time is used."""
    made: list[TieredModel] = []

    def make(tier: str, **options: int) -> TieredModel:
        made.append(TieredModel(parts, tier, tmp_path, **options))
        if tier == "disk":
            disk_faults(made[-1], monkeypatch)
        return made[-1]

    yield make
    for world in made:
        world.engine.abort_all()
        world.faults.clear()
        world.settle()
        world.close()


def stored(world: TieredModel) -> TieredModel:
    """The prompt's pages are in the tier and nowhere else; nothing is remembered of faults and speeds."""
    world.ask(PROMPT)
    world.forget_pool()
    world.clock.advance(120)
    assert world.transfers.report().tiers[world.tier.name].pages >= PAGES or world.tier.name == "store"
    world.computed = 0
    return world


def numbers(world: TieredModel) -> TierStats:
    return world.transfers.report().tiers[world.tier.name]


def right(world: TieredModel, cold: dict[int, list[int]], names: list[str], *prompts: list[int]) -> None:
    assert [world.tokens[name] for name in names] == [cold[prompt[-1]] for prompt in prompts]


def from_tier(world: TieredModel, name: str) -> int:
    """How many tokens of a prompt came from the tier."""
    output = world.last[name]
    assert output.cached_tokens >= sum(output.cached_by_tier.values())
    return output.cached_by_tier.get(world.tier.name, 0)


def some(*cases: tuple[object, ...], fast: Sequence[tuple[object, ...]]) -> list[object]:
    """Cases of which those that aren't named are slow tests."""
    return [pytest.param(*case, marks=() if case in fast else pytest.mark.slow) for case in cases]


READS = some(
    ("ram", "lie"), ("ram", "half"), ("ram", "cut"), ("ram", "die"), ("ram", "stall"),
    ("disk", "lie"), ("disk", "die"), ("disk", "stall"), ("disk", "flip"), ("disk", "cut"), ("disk", "swap"),
    ("store", "lose"), ("store", "flip"), ("store", "truncate"), ("store", "swap"), ("store", "die"),
    ("store", "stall"),
    fast=[("ram", "die"), ("ram", "stall"), ("disk", "flip"), ("disk", "stall"), ("store", "lose"), ("store", "swap")],
)  # fmt: skip


@pytest.mark.parametrize(("tier", "fault"), READS)
def test_a_tier_that_says_yes_and_fails(
    make_world: MakeWorld, cold: dict[int, list[int]], tier: str, fault: str
) -> None:
    """D1, D2, D7: it has the pages when it is asked; then, before they are read, this happens. Two wait for them."""
    world = stored(make_world(tier))
    began, stats = world.clock.now, world.transfers.stats
    failed_before = numbers(world).failed_pages
    names = [world.add(PROMPT), world.add(OTHER)]
    world.begin_load()
    assert world.cache.stats().loading_pages == PAGES
    on_file = tier == "disk" and fault in ("flip", "cut", "swap")
    if on_file:
        damage_page(world, PAGES // 2, fault)
    else:
        world.faults["get"] = fault
    world.finish()
    elapsed = world.clock.now - began
    right(world, cold, names, PROMPT, OTHER)
    came = stats.loaded_pages
    if on_file or (tier == "ram" and fault != "lie"):
        assert came == PAGES // 2
    else:  # where in a batch a store's page is wrong is drawn
        assert came == 0 or (tier == "store" and fault not in ("die", "stall") and came < PAGES)
    assert (stats.loads, stats.failed_loads, stats.late_loads) == (1, fault != "stall", fault == "stall")
    assert numbers(world).failed_pages == failed_before + (tier != "ram" and fault != "stall")
    # Exactly what didn't come is computed, once; and nobody has waited for long.
    assert world.computed == len(PROMPT) - PAGE * came + len(OTHER) - PAGE * PAGES + 2 * DECODED
    assert elapsed <= world.computed / PREFILL_SPEED + MOST_WAITED < STALL
    assert max(from_tier(world, name) for name in names) == PAGE * came
    # What comes after all is written nowhere.
    memory = world.storage._bytes.copy()
    world.settle()
    assert (world.storage._bytes == memory).all()
    # The engine goes on, and the tier is used again.
    world.faults.clear()
    for _ in range(PAGES):  # a file that was cut lacks several pages, and each is noticed when it is asked for
        world.forget_pool()
        world.clock.advance(120)
        (again,) = world.ask(PROMPT)
        right(world, cold, [again], PROMPT)
        if from_tier(world, again) == PAGE * PAGES:
            return
        assert fault == "cut"
    raise AssertionError("the tier is not used any more")


@pytest.mark.parametrize("tier", some(("ram",), ("disk",), ("store",), fast=[("disk",)]))
def test_a_slow_tier_that_is_worth_it(make_world: MakeWorld, cold: dict[int, list[int]], tier: str) -> None:
    """D7: 10 ms where computing takes a second: all of it is loaded, and what isn't there is computed."""
    world = stored(make_world(tier))
    world.faults["get"] = "slow"
    began = world.clock.now
    names = world.ask(PROMPT, OTHER)
    right(world, cold, names, PROMPT, OTHER)
    assert world.transfers.stats.loads == 1 and from_tier(world, names[0]) == PAGE * PAGES
    assert world.computed == 1 + 3 + 2 * DECODED
    assert world.clock.now - began <= world.computed / PREFILL_SPEED + 0.1
    world.settle()


@pytest.mark.parametrize(
    ("fault", "loads", "waited"),
    some(("lie", 1, 0.0), ("die", 0, 0.0), ("stall", 0, 0.25), fast=[("stall", 0, 0.25)]),
)
def test_a_store_that_answers_wrongly_late_or_not(
    make_world: MakeWorld, cold: dict[int, list[int]], fault: str, loads: int, waited: float
) -> None:
    """D1, D7: the question itself goes wrong, for a prompt that nobody has stored."""
    world = make_world("store")
    world.faults["exists"] = fault
    began = world.clock.now
    (name,) = world.ask(STRANGER)
    right(world, cold, [name], STRANGER)
    assert world.clock.now - began == pytest.approx(world.computed / PREFILL_SPEED + waited)
    assert world.computed == len(STRANGER) + DECODED
    stats = world.transfers.stats
    assert (stats.loads, stats.failed_loads, stats.late_loads) == (loads, loads, 0)
    assert numbers(world).healthy == (fault != "die")
    world.settle()
    world.faults.clear()
    world.clock.advance(120)
    (name,) = world.ask(PROMPT)
    world.forget_pool()
    world.clock.advance(120)
    (again,) = world.ask(PROMPT)
    right(world, cold, [name, again], PROMPT, PROMPT)
    assert from_tier(world, again) == PAGE * PAGES and numbers(world).healthy


WRITES = some(
    ("disk", "full"), ("disk", "die"), ("disk", "stall"), ("store", "lose"), ("store", "die"), ("store", "stall"),
    fast=[("disk", "full"), ("disk", "stall")],
)  # fmt: skip


@pytest.mark.parametrize(("tier", "fault"), WRITES)
def test_a_tier_that_takes_nothing(make_world: MakeWorld, cold: dict[int, list[int]], tier: str, fault: str) -> None:
    """D3: full, broken, or hanging in a write: nobody waits for it, what isn't stored is counted and computed again."""
    world = make_world(tier, queue_pages=4)
    world.faults["put"] = fault
    for prompt in (PROMPT, STRANGER, PROMPT):
        began, before = world.clock.now, world.computed
        (name,) = world.ask(prompt)
        right(world, cold, [name], prompt)
        assert world.computed - before == len(prompt) + DECODED and from_tier(world, name) == 0
        assert world.clock.now - began == pytest.approx((world.computed - before) / PREFILL_SPEED)
        world.cache.index.evict(world.cache.index.cached_pages)
        world.cache.check()
    stats = numbers(world)
    assert stats.stored_pages == 0 and stats.refused_pages + stats.dropped_pages >= 2 * PAGES
    assert stats.queued_bytes <= 4 * world.bytes_per_page
    assert (stats.dropped_pages > 0) or fault != "stall"
    assert stats.healthy == (fault == "stall")
    world.faults.clear()
    world.settle()
    world.clock.advance(120)
    for _ in range(2):  # the queue holds four pages: the rest is offered anew when the pool gives it up
        world.ask(PROMPT)
        world.forget_pool()
        world.clock.advance(120)
    (again,) = world.ask(PROMPT)
    right(world, cold, [again], PROMPT)
    works = (tier, fault) != ("disk", "die")  # a broken disk is written to no more
    assert from_tier(world, again) == PAGE * PAGES * works and numbers(world).healthy == works


def test_a_reset_does_not_wait_for_a_write_that_hangs(
    make_world: MakeWorld, cold: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A11, D8: the reset takes effect at once, and is made good on disk when the write has ended."""
    monkeypatch.setattr(disk, "CLOSE_SECONDS", 0.01)
    world = stored(make_world("disk"))
    world.faults["put"] = "stall"
    world.ask(STRANGER)
    reset = threading.Thread(target=world.engine.reset_prefix_cache, daemon=True)
    reset.start()
    reset.join(60)
    assert not reset.is_alive()
    (again,) = world.ask(PROMPT)
    right(world, cold, [again], PROMPT)
    assert world.last[again].cached_tokens == 0
    world.faults.clear()
    world.settle()
    files = sum(path.stat().st_size for path in segment_paths(world.folder))
    assert numbers(world).pages == PAGES and files == numbers(world).used_bytes < (PAGES + 1) * world.bytes_per_page
    world.forget_pool()
    world.clock.advance(120)
    (again,) = world.ask(PROMPT)
    right(world, cold, [again], PROMPT)
    assert from_tier(world, again) == PAGE * PAGES


@pytest.mark.parametrize("tier", some(("ram",), ("disk",), ("store",), fast=[("store",)]))
def test_a_neighbour_decodes_while_a_load_hangs(make_world: MakeWorld, cold: dict[int, list[int]], tier: str) -> None:
    """D8: between two of its tokens there is never more than one step, and while the other waits no pause."""
    world = stored(make_world(tier))
    neighbour = world.add(STRANGER, 60)
    while not world.tokens[neighbour]:
        world.step()
    world.faults["get"] = "stall"
    name = world.add(PROMPT)
    steps = 0
    while world.engine.has_work and not world.tokens[name]:
        before, now, waits = len(world.tokens[neighbour]), world.clock.now, not world.transfers.stats.late_loads
        world.step()
        assert len(world.tokens[neighbour]) == before + 1
        assert world.clock.now - now <= 2 / PREFILL_SPEED or not waits or world.transfers.stats.late_loads
        steps += 1
    assert steps > 20 and world.transfers.stats.late_loads == 1
    world.finish()
    right(world, cold, [name], PROMPT)
    assert world.tokens[neighbour][:TOKENS] == cold[STRANGER[-1]]
    world.settle()


@pytest.mark.parametrize(("fault", "computed"), some(("slow", 0), ("stall", 96), fast=[("stall", 96)]))
def test_ten_requests_on_a_loading_prefix(
    make_world: MakeWorld, cold: dict[int, list[int]], fault: str, computed: int
) -> None:
    """D8: they make one load; if it hangs they make one computation."""
    world = stored(make_world("disk"))
    world.faults["get"] = fault
    prompts = [PROMPT, OTHER, *([*PROMPT[:-1], 50 + user] for user in range(8))]
    names = world.ask(*prompts)
    right(world, cold, names[:2], PROMPT, OTHER)
    assert world.transfers.stats.loads == 1 and world.transfers.stats.late_loads == (fault == "stall")
    assert world.computed == computed + 9 * 1 + 3 + 10 * DECODED
    world.settle()


def test_a_store_that_begins_again_is_filled_again(make_world: MakeWorld, cold: dict[int, list[int]]) -> None:
    """D6: a restart, or somebody else, has emptied it: what is thought to be there is found missing, and comes back."""
    world = stored(make_world("store"))
    world.backend.values.clear()
    (name,) = world.ask(PROMPT)
    right(world, cold, [name], PROMPT)
    assert world.computed == len(PROMPT) + DECODED
    world.forget_pool()
    world.clock.advance(120)
    assert len(world.backend.values) == PAGES
    (again,) = world.ask(PROMPT)
    right(world, cold, [again], PROMPT)
    assert from_tier(world, again) == PAGE * PAGES


@pytest.mark.parametrize(
    ("tier", "fault", "met"), [("disk", "", 3), ("store", "", 3), ("store", "die", 0), ("ram", "stall", 1)]
)
def test_last_pages_are_loaded_while_the_first_are_computed(
    make_world: MakeWorld, cold: dict[int, list[int]], tier: str, fault: str, met: int
) -> None:
    """A tier that seems as slow as computing: each does half, and what fails or stalls is computed as well."""
    world = stored(make_world(tier))
    transfers = world.transfers
    transfers.meeting_pages = 2
    transfers._speeds = {world.tier.name: SlowSpeed(transfers, world.bytes_per_page, PAGE)}
    if fault:
        world.faults["get"] = fault
    names = world.ask(PROMPT, OTHER)
    right(world, cold, names, PROMPT, OTHER)
    assert transfers.stats.meeting_loads == 1
    assert from_tier(world, names[0]) == met * PAGE
    # All of one prompt but what came from the tier, the other's last tokens, and the answers.
    assert world.computed == len(PROMPT) - met * PAGE + len(OTHER) - PAGES * PAGE + 2 * DECODED
