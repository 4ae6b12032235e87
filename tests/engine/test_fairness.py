"""Tenants side by side under the virtual clock: nobody's flood is another's wait, and nobody starves."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from pagetrie.engine.config import EngineConfig
from pagetrie.engine.engine import Engine
from pagetrie.engine.observer import EngineObserver, StepReport, TokenReport
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import Request
from pagetrie.engine.scheduler import Schedule
from pagetrie.engine.tenant import Tenant
from pagetrie.errors import InvalidRequestError
from pagetrie.kv import CacheManager
from pagetrie.sim import PageMemory, SimRunner, StepCost, VirtualClock
from tests.simulation.vocabulary import AwkwardVocabulary

A, B, C = (Tenant(name, name.encode()) for name in "ABC")
COST = StepCost(per_step=0.03, per_token=0.002, per_attended=1e-7)
PLENTY = 8000


class Watch(EngineObserver):
    def __init__(self) -> None:
        self.ttft: dict[str, float] = {}
        self.longest_step = 0.0

    def on_token(self, report: TokenReport) -> None:
        if report.first:
            self.ttft[report.request_id] = report.gap

    def on_step(self, report: StepReport) -> None:
        self.longest_step = max(self.longest_step, report.duration)


class World:
    """An engine over the cost model. Prompts are random, so that nothing is shared."""

    def __init__(self, num_pages: int = PLENTY, seats: int = 64, budget: int = 512, ageing_steps: int = 256) -> None:
        self.clock, self.watch, self.rng = VirtualClock(), Watch(), random.Random(1)
        self.cache = CacheManager(num_pages=num_pages, page_size=16)
        memory = PageMemory(num_pages, 16)
        self.engine = Engine(
            runner=SimRunner(memory=memory, clock=self.clock, cost=COST, vocab_size=AwkwardVocabulary.vocab_size),
            cache=self.cache,
            vocabulary=AwkwardVocabulary(),
            config=EngineConfig(
                max_model_len=num_pages * 16,
                max_num_seqs=seats,
                max_num_batched_tokens=budget,
                max_queue=10_000,
                ageing_steps=ageing_steps,
            ),
            clock=self.clock,
            rng=self.rng,
            observer=self.watch,
        )
        self.computed: Counter[str] = Counter()
        self.preemptions: Counter[str] = Counter()
        self.ended: set[str] = set()
        self.cached: dict[str, int] = {}
        self.sent = 0
        self._watch_schedule()

    def _watch_schedule(self) -> None:
        schedule = self.engine._scheduler.schedule

        def watched() -> Schedule:
            plan = schedule()
            for sequence, count in plan.shares.items():
                self.computed[sequence.state.request.tenant.name] += count
            for sequence in plan.preempted:
                self.preemptions[sequence.state.request.request_id] += 1
            return plan

        self.engine._scheduler.schedule = watched  # type: ignore[method-assign]

    def send(self, tenant: Tenant, tokens: int, output: int = 1, **options: int) -> str:
        return self.ask(tenant, [self.rng.randrange(3, 40) for _ in range(tokens)], output, **options)

    def ask(self, tenant: Tenant, prompt: list[int], output: int = 1, **options: int) -> str:
        self.sent += 1
        name = f"{tenant.name}{self.sent}"
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        self.engine.add(Request(name, prompt, params, tenant=tenant, **options))  # type: ignore[arg-type]
        return name

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            if self.engine.has_work:
                for output in self.engine.step():
                    self.cached[output.request_id] = output.cached_tokens
                    self.ended |= {output.request_id} if output.finished else set()

    def until_first_token(self, name: str, most: int = 5000) -> float:
        for _ in range(most):
            if name in self.watch.ttft:
                return self.watch.ttft[name]
            self.step()
        raise AssertionError(f"{name} got no token in {most} steps")


def alone(tokens: int, **options: int) -> float:
    world = World(**options)
    return world.until_first_token(world.send(B, tokens))


FLOODS = {
    "queued": ({}, 2000, 64),
    "all seats": ({"seats": 16}, 200, 3000),
    "all pages": ({"num_pages": 600}, 2000, 300),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_one_tenant_is_not_anothers_wait(flood: str) -> None:
    """100 prompts of A, one of B: at most twice the time alone, plus the step that runs when it comes."""
    options, length, output = FLOODS[flood]
    world = World(**options)
    for _ in range(100):
        world.send(A, length, output)
    waits = {70: alone(70, **options), 500: alone(500, **options), 2000: alone(2000, **options)}
    for pause in (0, 1, 7, 52):
        for tokens, solo in waits.items():
            world.step(pause)
            ttft = world.until_first_token(world.send(B, tokens))
            # It comes between two steps here, so there is no step to wait for unless B was computed in the last one.
            assert ttft <= 2 * solo + (0 if pause else world.watch.longest_step), (pause, tokens)
    assert world.engine.num_waiting > 10, "the flood has passed"
    world.cache.check()


def test_a_short_chat_waits_for_others_decodes_at_most() -> None:
    world = World()
    for _ in range(100):
        world.send(A, 30, 400)
    world.step(60)
    ttft = world.until_first_token(world.send(B, 5))
    assert ttft <= 2 * alone(5) + world.watch.longest_step
    assert ttft <= alone(5) + 64 * COST.per_token * 1.2


def test_three_floods_leave_the_fourth_a_fair_part() -> None:
    world = World()
    for _ in range(40):
        for tenant in (A, C, Tenant("D", b"D")):
            world.send(tenant, 3000, 20)
    world.step(50)
    assert world.until_first_token(world.send(B, 2000)) <= 4 * alone(2000)


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_work_is_shared_by_weight(weight: float) -> None:
    world, heavy = World(), Tenant("H", b"H", weight)
    for _ in range(60):
        world.send(A, 3000, 8)
        world.send(heavy, 500, 8)
        world.send(heavy, 2500, 8)
    world.step(100)
    world.computed.clear()
    world.step(200)
    assert world.computed["H"] / world.computed["A"] == pytest.approx(weight, rel=0.1)


def test_idle_times_earn_no_credit() -> None:
    world = World()
    for _ in range(150):
        world.send(A, 2000, 4)
    world.step(100)  # B could have had half of these
    for _ in range(60):
        world.send(B, 2000, 4)
    world.computed.clear()
    world.step(60)
    assert world.computed["B"] / world.computed["A"] == pytest.approx(1, rel=0.1)


def test_one_tenants_priorities_are_nothing_to_another() -> None:
    world = World()
    for _ in range(100):
        world.send(A, 2000, 64, priority=-100)
    world.step(20)
    ttft = world.until_first_token(world.send(B, 500, priority=100))
    assert ttft <= 2 * alone(500)


def test_taking_over_stops_at_equal_shares() -> None:
    """Neither of two floods takes seats from the other once both have half, and no one is preempted without end."""
    world = World(seats=8)
    for _ in range(20):
        world.send(A, 100, 300)
    world.step(10)
    for _ in range(20):
        world.send(B, 100, 300)
    world.step(30)
    seats = Counter(s.state.request.tenant.name for s in world.engine._scheduler.running)
    assert seats == {"A": 4, "B": 4}
    before = sum(world.preemptions.values())
    assert before <= 8
    world.step(200)
    assert sum(world.preemptions.values()) == before


def test_what_needs_almost_all_pages_gets_them_though_another_tenant_never_rests() -> None:
    world = World(num_pages=64, ageing_steps=40)
    rest = [world.send(B, 100, 20) for _ in range(4)]
    world.step(2)
    big = world.send(A, 900, 4)
    for _ in range(400):
        if sum(name not in world.ended for name in rest) < 4:
            rest.append(world.send(B, 100, 20))
        world.step()
        if big in world.ended:
            return
    raise AssertionError("starved")


def finish(world: World, names: Iterable[str]) -> None:
    """Run until all have ended, each step with some progress."""
    for _ in range(20_000):
        if not world.engine.has_work:
            break
        before = world.computed.total()
        world.step()
        assert world.computed.total() > before, "a step without progress"
    world.cache.check()
    assert world.ended == set(names)


@pytest.mark.parametrize("seed", range(12))
def test_random_worlds_of_tenants_end_well(seed: int) -> None:
    """Everything ends, nobody is preempted more than three times, and every step does something."""
    rng = random.Random(seed)
    world = World(
        num_pages=rng.choice((12, 40, 200)), seats=rng.choice((2, 5, 16)), budget=64, ageing_steps=rng.choice((4, 64))
    )
    longest = world.cache.num_pages * 16
    tenants = (A, B, C, Tenant("heavy", b"h", 5.0))
    names = []
    for _ in range(rng.randrange(20, 60)):
        tokens = min(rng.choice((5, 40, 150, longest // 2)), longest - 60)
        names.append(world.send(rng.choice(tenants), tokens, rng.choice((1, 10, 50)), priority=rng.randrange(-2, 3)))
        world.step(rng.choice((0, 0, 1, 5)))
    finish(world, names)
    assert max(world.preemptions.values(), default=0) <= 3


def test_lines_of_tenants_that_are_gone_are_forgotten() -> None:
    world = World(num_pages=400)
    names = [world.send(Tenant(f"t{number}"), 20, 2) for number in range(40)]
    finish(world, names)
    names += [world.send(A, 4000, 2), world.send(B, 4000, 2)]
    finish(world, names)
    assert len(world.engine._scheduler.waiting._lines) <= 3


# -- floors ----------------------------------------------------------------------------------------------------------


def chat(world: World, tenant: Tenant, prompt: list[int]) -> tuple[float, int]:
    """Time to the first token of a prompt, and what of it was cached."""
    name = world.ask(tenant, prompt)
    return world.until_first_token(name), world.cached[name]


def test_a_flood_costs_another_neither_its_hits_nor_its_first_token_within_the_floor() -> None:
    """B's prompt is served as if it had never been alone: hits whole, first token in a hit's time."""
    floors = [replace(A, cache_floor=0.2), replace(B, cache_floor=0.2)]
    quiet, flooded = World(num_pages=400), World(num_pages=400)
    for world in (quiet, flooded):
        world.engine.set_tenants(floors)
    prompt = [quiet.rng.randrange(3, 40) for _ in range(1000)]
    for world in (quiet, flooded):
        assert chat(world, B, prompt)[1] == 0
        while world.engine.has_work:
            world.step()
    for _ in range(30):
        flooded.send(A, 4000, 100)
    while flooded.engine.num_waiting > 4:
        flooded.step()
    assert flooded.cache.stats().evicted_pages > 3 * 400
    alone, hit = chat(quiet, B, prompt)
    assert hit == len(prompt) - 1
    ttft, cached = chat(flooded, B, prompt)
    assert flooded.engine.has_work, "the flood has passed"
    assert cached == hit and ttft <= 2 * alone + flooded.watch.longest_step
    flooded.cache.check()


def test_what_would_need_anothers_floor_is_refused_at_the_door() -> None:
    world = World(num_pages=100)
    world.engine.set_tenants([replace(A, cache_floor=0.3), replace(B, cache_floor=0.2)])
    with pytest.raises(InvalidRequestError, match="context length is 1280 tokens, but the prompt has 1280"):
        world.send(A, 1280)
    name = world.send(A, 1270, 5)
    world.send(B, 300, 5)
    assert world.until_first_token(name)
    while world.engine.has_work:
        world.step()
    # As floors grow, what runs goes on or ends, and nothing hangs.
    big = world.send(A, 1200, 50)
    world.step(3)
    world.engine.set_tenants([A, replace(B, cache_floor=0.9)])
    world.send(B, 300, 5)
    for _ in range(300):
        world.step()
    assert big in world.ended and not world.engine.has_work
    world.cache.check()


@pytest.mark.parametrize("seed", range(8))
def test_random_worlds_with_floors_and_caps_end_well(seed: int) -> None:
    rng = random.Random(seed)
    world = World(num_pages=rng.choice((24, 60)), seats=rng.choice((3, 8)), budget=64, ageing_steps=rng.choice((4, 64)))
    tenants = [
        replace(tenant, cache_floor=rng.choice((0.0, 0.1, 0.25)), cache_cap=rng.choice((0.3, 1.0)), pinned=0.3)
        for tenant in (A, B, C)
    ]
    world.engine.set_tenants(tenants)
    names = []
    for _ in range(rng.randrange(20, 50)):
        tenant = rng.choice(tenants)
        longest = world.cache.reach(world.engine.namespace("", tenant)) * 16
        tokens = min(rng.choice((5, 40, 150, longest // 2)), longest - 60)
        names.append(world.send(tenant, tokens, rng.choice((1, 10, 50)), priority=rng.randrange(-2, 3)))
        world.step(rng.choice((0, 0, 1, 5)))
        world.cache.check()
    finish(world, names)
    assert max(world.preemptions.values(), default=0) <= 3
