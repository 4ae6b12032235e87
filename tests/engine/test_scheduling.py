"""Who runs when: priorities, bypass, victims, guarantees. Texts must be those of plain runs all the same."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from pagetrie.engine.victims import MAX_PREEMPTIONS
from pagetrie.errors import DeadlineExceededError, EngineError, InvalidRequestError
from pagetrie.kv import PendingPage
from tests.engine.test_engine import prompt
from tests.engine.toy import World, expected


def finished(world: World, name: str) -> bool:
    last = world.seen[name].last
    return last is not None and last.finished


def check_text(world: World, name: str, tokens: list[int], max_tokens: int) -> None:
    assert world.seen[name].tokens[0] == expected(tokens, max_tokens, eos=False)


def test_an_urgent_request_takes_a_seat_in_the_next_step_and_the_victim_resumes_before_unstarted_peers() -> None:
    """Pain C6."""
    world = World(seats=2, budget=32)
    for name in range(2):
        world.add(f"low {name}", prompt(name, 8), priority=10, max_tokens=20, ignore_eos=True)
    world.step()
    world.add("low 2", prompt(2, 8), priority=10, max_tokens=4, ignore_eos=True)
    world.step()
    world.add("urgent", prompt(3, 8), priority=0, max_tokens=4, ignore_eos=True)
    world.step()
    assert world.running() == ["urgent", "low 0"], "the younger of two equals gives way"
    while not finished(world, "urgent"):
        world.step()
    world.step()
    assert world.running() == ["low 0", "low 1"]
    world.run()
    for name in range(2):
        check_text(world, f"low {name}", prompt(name, 8), 20)
    check_text(world, "low 2", prompt(2, 8), 4)


def test_an_urgent_request_goes_before_the_rest_of_a_long_prompt() -> None:
    world = World(num_pages=100, budget=16)
    world.add("long", prompt(1, 150), priority=1, max_tokens=2, ignore_eos=True)
    world.step()
    world.add("peer", prompt(2, 8), priority=1, max_tokens=2, ignore_eos=True)
    world.add("urgent", prompt(3, 8), priority=0, max_tokens=2, ignore_eos=True)
    world.step()
    assert len(world.seen["urgent"].tokens[0]) == 1
    world.run()
    check_text(world, "long", prompt(1, 150), 2)


def test_an_urgent_request_takes_pages_and_no_more_than_it_needs() -> None:
    world = World(num_pages=16, page_size=4, max_model_len=60)
    for name in range(3):
        world.add(str(name), prompt(name, 15), priority=5, max_tokens=40, ignore_eos=True)
    for _ in range(4):
        world.step()
    assert len(world.running()) == 3
    world.add("urgent", prompt(7, 16), priority=0, max_tokens=4, ignore_eos=True)
    world.step()
    # 1 page is free, 5 are needed: one victim brings them, the one that has computed least.
    assert world.running() == ["urgent", "0", "1"]
    world.run()
    for name in range(3):
        check_text(world, str(name), prompt(name, 15), 40)


def test_a_request_that_could_not_fit_even_so_takes_nothing() -> None:
    world = World(num_pages=16, page_size=4, max_model_len=60, budget=64)
    world.add("low", prompt(1, 8), priority=5, max_tokens=30, ignore_eos=True)
    world.add("equal", prompt(2, 30), priority=0, max_tokens=20, ignore_eos=True)
    for _ in range(3):
        world.step()
    world.add("urgent", prompt(7, 40), priority=0, max_tokens=4, ignore_eos=True)
    world.step()
    assert set(world.running()) == {"low", "equal"}
    world.run()


def test_priorities_out_of_range_are_refused() -> None:
    world = World()
    for priority in (-101, 101):
        with pytest.raises(InvalidRequestError, match=f"between -100 and 100, got {priority}") as refused:
            world.add("x", [1], priority=priority)
        assert refused.value.param == "priority"


def test_nobody_starves_behind_endless_urgent_requests() -> None:
    """Ageing: 3 levels of priority are worth 3 x 8 steps of waiting."""
    world = World(seats=1, budget=8, ageing=8)
    world.add("first", prompt(0, 4), max_tokens=4, ignore_eos=True)
    world.step()
    world.add("patient", prompt(1, 4), priority=3, max_tokens=4, ignore_eos=True)
    arrived, before = world.engine._scheduler.step, []
    for turn in range(200):
        if not finished(world, "patient"):
            world.add(f"urgent {turn}", prompt(turn, 4), priority=0, max_tokens=4, ignore_eos=True)
        world.step()
        if "patient" in world.running():
            break
        before += world.running()
    # One comes per step; those before step 24 are of lower levels than 3 = 3 + 1 // 8, and nobody after them.
    ahead = {int(name.split()[1]) for name in before if name.startswith("urgent")}
    assert ahead == set(range(24 - arrived))
    world.run()


def test_small_requests_pass_a_big_one_that_starts_within_its_bound() -> None:
    """Pain C3: endless small arrivals behind a big head."""
    world = World(num_pages=20, page_size=4, max_model_len=80, seats=8, budget=80, ageing=64, bypass=6)
    world.add("long", prompt(0, 20), max_tokens=40, ignore_eos=True)
    world.step()
    world.add("big", prompt(1, 60), max_tokens=4, ignore_eos=True)
    started_before: set[str] = set()
    for turn in range(300):
        world.add(f"small {turn}", prompt(100 + turn, 4), max_tokens=4, ignore_eos=True)
        world.step()
        if "big" in world.running():
            break
        started_before.update(name for name in world.running() if name.startswith("small"))
    assert len(started_before) == 6, "exactly as many as may"
    # The long one ends by step 41; big has to wait for it and for the smalls that passed.
    assert turn <= 41 + 4
    check_text(world, "long", prompt(0, 20), 40)
    world.run()
    check_text(world, "big", prompt(1, 60), 4)


def test_no_more_pass_in_one_step_than_may() -> None:
    world = World(num_pages=40, page_size=4, max_model_len=150, budget=80, bypass=2)
    world.add("long", prompt(0, 20), max_tokens=40, ignore_eos=True)
    world.step()
    world.add("big", prompt(1, 140), max_tokens=4, ignore_eos=True)
    for number in range(5):
        world.add(f"small {number}", prompt(100 + number, 4), max_tokens=4, ignore_eos=True)
    world.step()
    assert world.running() == ["long", "small 0", "small 1"]
    world.run()


def test_without_bypass_the_order_is_strict() -> None:
    world = World(num_pages=20, page_size=4, max_model_len=80, budget=80, bypass=0)
    world.add("long", prompt(0, 20), max_tokens=40, ignore_eos=True)
    world.step()
    world.add("big", prompt(1, 60), max_tokens=4, ignore_eos=True)
    world.add("small", prompt(2, 4), max_tokens=4, ignore_eos=True)
    for _ in range(30):
        world.step()
        assert world.running() == ["long"]
    world.run()


def test_bypass_ends_with_its_time() -> None:
    world = World(num_pages=20, page_size=4, max_model_len=80, budget=80, ageing=5, bypass=1000)
    world.add("long", prompt(0, 20), max_tokens=40, ignore_eos=True)
    world.step()
    world.add("big", prompt(1, 60), max_tokens=4, ignore_eos=True)
    passing = 0
    for turn in range(30):
        world.add(f"small {turn}", prompt(100 + turn, 4), max_tokens=1, ignore_eos=True)
        before = world.engine.num_waiting
        world.step()
        passing += before > world.engine.num_waiting
    assert passing == 5
    world.run()


def test_the_least_valuable_is_preempted_first() -> None:
    """By priority, then by what it has computed, then by age."""
    world = World(num_pages=14, page_size=4, max_model_len=56, budget=64)
    world.add("young but dear", prompt(1, 12), priority=-1, max_tokens=20, ignore_eos=True)
    world.add("much computed", prompt(2, 16), max_tokens=20, ignore_eos=True)
    world.add("little computed", prompt(3, 8), max_tokens=20, ignore_eos=True)
    world.step()
    assert len(world.running()) == 3
    while len(world.running()) == 3:
        world.step()
    assert world.running() == ["young but dear", "much computed"]
    while len(world.running()) == 2:
        world.step()
    assert world.running() == ["young but dear"]
    world.run()
    for name, seed, length in (("young but dear", 1, 12), ("much computed", 2, 16), ("little computed", 3, 8)):
        check_text(world, name, prompt(seed, length), 20)


@pytest.mark.parametrize("seed", range(20))
def test_no_choice_is_preempted_more_often_than_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    world = World(num_pages=rng.randrange(10, 24), page_size=4, max_model_len=40, seats=16, budget=32, ageing=16)
    jobs = {}
    for name in range(24):
        tokens, most = prompt(name, rng.randrange(1, 20)), rng.randrange(1, 20)
        n = rng.choice([1, 1, 1, 3])
        world.add(str(name), tokens, n=n, max_tokens=most, priority=rng.randrange(-2, 3), ignore_eos=True)
        jobs[str(name)] = (tokens, n, most)
        if rng.random() < 0.5:
            world.step()
    most_often = 0
    while world.engine.has_work:
        world.step()
        for sequence in [*world.engine._scheduler.running, *world.engine._scheduler.waiting]:
            assert sequence.preemptions <= MAX_PREEMPTIONS
            most_often = max(most_often, sequence.preemptions)
    assert most_often
    for name, (tokens, n, most) in jobs.items():
        for index in range(n):
            assert world.seen[name].tokens[index] == expected(tokens, most, eos=False)


def test_requests_that_share_a_prefix_run_together() -> None:
    """Among equals the prompt order is depth-first over the tree of prompts, whatever the order of arrival."""
    world = World(num_pages=100, page_size=4, seats=1, budget=64, max_model_len=100)
    trunks = [prompt(50 + i, 20) for i in range(3)]
    branches = [[*trunk, *prompt(60 + j, 8)] for trunk in trunks for j in range(2)]
    world.add("busy", prompt(1, 4), max_tokens=3, ignore_eos=True)
    world.step()
    leaves = [(branch, leaf) for leaf in range(2) for branch in range(6)]
    random.Random(0).shuffle(leaves)
    for branch, leaf in leaves:
        tokens = [*branches[branch], *prompt(200 + leaf, 4)]
        world.add(f"{branch}.{leaf}", tokens, max_tokens=1, ignore_eos=True)
    order: list[str] = []
    while world.engine.has_work:
        order += [output.request_id for output in world.step() if output.request_id != "busy"]
    by_branch = [name.split(".")[0] for name in order]
    by_trunk = [int(branch) // 2 for branch in by_branch]
    assert len([1 for a, b in pairwise(by_branch) if a != b]) == 5
    assert len([1 for a, b in pairwise(by_trunk) if a != b]) == 2


def test_what_is_cached_runs_first_but_only_among_equals() -> None:
    world = World(num_pages=100, page_size=4, seats=1, budget=64, max_model_len=100, ageing=4)
    world.add("seed", prompt(9, 24), max_tokens=1)
    world.run()
    world.add("busy", prompt(1, 4), max_tokens=12, ignore_eos=True)
    while world.engine._scheduler.step % 4:
        world.step()
    world.add("cold", prompt(2, 20), max_tokens=1, ignore_eos=True)
    world.add("warm", [*prompt(9, 24), 5], max_tokens=1, ignore_eos=True)
    for _ in range(4):
        world.step()
    world.add("late and warm", [*prompt(9, 24), 6], max_tokens=1, ignore_eos=True)
    order: list[str] = []
    while world.engine.has_work:
        order += [output.request_id for output in world.step() if output.request_id != "busy"]
    assert order == ["warm", "cold", "late and warm"]


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def timed_world(**limits: int) -> tuple[World, Clock]:
    world, clock = World(**limits), Clock()  # type: ignore[arg-type]
    world.engine._clock = clock
    return world, clock


def test_time_runs_out_for_a_running_and_for_a_waiting_request() -> None:
    world, clock = timed_world(seats=2)
    world.add("free", prompt(0, 8), max_tokens=30, ignore_eos=True)
    world.add("running", prompt(1, 8), timeout=5.0, max_tokens=30, ignore_eos=True)
    world.add("waiting", prompt(2, 8), timeout=4.0, max_tokens=30, n=2, ignore_eos=True)
    while clock.now < 6.0:
        world.step()
        clock.now += 1.0
    assert world.running() == ["free"]
    assert world.engine.num_waiting == 0
    for name, tokens, timeout in (("running", 5, 5.0), ("waiting", 0, 4.0)):
        seen = world.seen[name]
        assert set(seen.reasons.values()) == {"timeout"}
        assert seen.last is not None and seen.last.finished
        assert isinstance(seen.last.error, DeadlineExceededError)
        assert str(seen.last.error) == f"the request's timeout of {timeout:g} s passed after {tokens} generated tokens"
    check_text(world, "running", prompt(1, 8), 5)
    world.run()
    check_text(world, "free", prompt(0, 8), 30)
    assert world.idle_pages() == 0


def test_an_id_used_again_does_not_inherit_a_deadline() -> None:
    world, clock = timed_world()
    world.add("a", prompt(0, 8), timeout=5.0, max_tokens=3, ignore_eos=True)
    world.run()
    world.add("a", prompt(0, 8), max_tokens=3, ignore_eos=True)
    clock.now = 10.0
    world.run()
    assert world.seen["a"].reasons == {0: "length"}


def test_deadlines_of_the_past_are_forgotten() -> None:
    world, _ = timed_world()
    for turn in range(300):
        world.add(str(turn), [turn % 200 + 1], timeout=1000.0, max_tokens=1, ignore_eos=True)
        world.run()
    assert len(world.engine._deadlines) <= 66


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf")])
def test_timeouts_that_mean_nothing_are_refused(timeout: float) -> None:
    world = World()
    with pytest.raises(InvalidRequestError, match="timeout must be more than 0 and at most 604800 seconds") as refused:
        world.add("x", [1], timeout=timeout)
    assert refused.value.param == "timeout"


@pytest.mark.parametrize("counter", ["free", "private", "indexed", "held", "leader"])
def test_the_watchdog_finds_its_way_again(counter: str, caplog: pytest.LogCaptureFixture) -> None:
    """Waiting, nothing running, pages free: counters that are off are derived anew, and all goes on (pain B3)."""
    world = World(num_pages=16, page_size=4, max_model_len=60, budget=64)
    world.add("before", prompt(1, 30), max_tokens=3, ignore_eos=True)
    world.run()
    pool, index = world.cache.pool, world.cache.index
    world.add("a", prompt(2, 40), max_tokens=10, ignore_eos=True)
    match counter:
        case "free":
            del pool._free[:]
        case "private":
            pool.private_pages += 5
            del pool._free[:]
        case "indexed":
            index.indexed_pages -= 6
            del pool._free[:]
        case "held":
            index.active_pages += 100
            pool.common.cached -= 100
        case "leader":
            waiting = world.engine._scheduler.waiting
            sequence = next(iter(waiting))
            waiting.line(sequence).waiting.park(sequence, PendingPage())
    world.step()
    assert world.running() == ["a"]
    assert "had come to a stop and goes on" in caplog.text
    assert ("the count of" in caplog.text) == (counter != "leader")
    world.run()
    check_text(world, "a", prompt(2, 40), 10)
    assert world.idle_pages() == 0


def test_who_finds_no_room_in_an_idle_pool_does_not_hold_up_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    world = World(num_pages=16, page_size=4, max_model_len=60, budget=64)
    lost = world.cache.open([250], b"nobody gives these back")
    assert not lost.extend(30)
    world.add("big", prompt(1, 50), max_tokens=4, ignore_eos=True)
    world.add("small", prompt(2, 10), max_tokens=4, ignore_eos=True)
    world.run()
    last = world.seen["big"].last
    assert last is not None and isinstance(last.error, EngineError)
    check_text(world, "small", prompt(2, 10), 4)
    assert "finds no room, though nothing runs and 8 pages are free" in caplog.text
