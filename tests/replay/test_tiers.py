"""Replay with tiers below the pool: the real transfers, over media that only take time and room."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetrie.errors import ConfigError
from pagetrie.kv.tiers.interface import Speed
from pagetrie.replay.engine import Outcome, ReplicaOptions, replay_engine
from pagetrie.replay.index_only import PageStores, replay_index
from pagetrie.replay.trace import Trace, TraceRequest
from pagetrie.sim import SimTierOptions, StepCost, VirtualClock, VirtualThreads

PAGE, TOKEN_BYTES = 16, 100
PAGE_BYTES = PAGE * TOKEN_BYTES
COST = StepCost(per_step=0.01, per_token=0.01)
FAST = Speed(1e-3, 1e6)


def rounds(turns: int, prompts: int = 4, pages: int = 20) -> Trace:
    """So many prompts in turn, far apart; together they are twice what the pool holds."""
    trace = Trace("rounds", PAGE)
    for number in range(turns * prompts):
        first = 100 * (number % prompts)
        trace.requests.append(TraceRequest(60.0 * number, pages * PAGE, 1, list(range(first, first + pages))))
    return trace


def tier(name: str, pages: int, speed: Speed = FAST) -> SimTierOptions:
    return SimTierOptions(name, pages * PAGE_BYTES, speed)


def serve(*tiers: SimTierOptions, trace: Trace | None = None) -> Outcome:
    options = ReplicaOptions(num_pages=42, page_size=PAGE, tiers=tiers, bytes_per_token=TOKEN_BYTES)
    return replay_engine(trace or rounds(4), options, COST)


def test_what_the_pool_forgot_comes_back_from_where_it_is() -> None:
    assert serve().hit_rate == 0
    # Three turns in four; the last page is computed, since a prompt's last token always is.
    most = 0.75 * 19 / 20
    for name in ("ram", "disk"):
        outcome = serve(tier(name, 100))
        assert outcome.hit_rates() == pytest.approx({"pool": 0, name: most}, abs=0.01)
        assert outcome.hit_rate == pytest.approx(most, abs=0.01)
        # 19 pages of 1,600 bytes at 1 MB/s, then a step of 16 tokens; without, a step of 320.
        assert outcome.served[-1].first == pytest.approx(0.001 + 19 * 0.0016 + 0.01 + 0.16)
        assert outcome.served[0].first == pytest.approx(0.01 + 3.2)


def test_ram_is_asked_before_disk() -> None:
    rates = serve(tier("ram", 45), tier("disk", 200), trace=rounds(4, prompts=6)).hit_rates()
    assert rates == pytest.approx({"pool": 0, "disk": 0.7125})
    rates = serve(tier("ram", 100), tier("disk", 100)).hit_rates()
    assert rates["ram"] > 0.7 and "disk" not in rates


def test_a_load_that_takes_longer_than_computing_is_left() -> None:
    outcome = serve(tier("disk", 100, Speed(1e-3, 5e2)))
    assert outcome.hit_rate == 0
    assert outcome.served[-1].first == pytest.approx(outcome.served[0].first)


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_a_slow_tier_gives_the_last_pages_while_the_first_are_computed(rate: float) -> None:
    """A tier that is so many times as fast as computing: both together take 1 / (1 + rate) of the time."""
    outcome = serve(tier("disk", 100, Speed(1e-3, rate * PAGE_BYTES / (PAGE * COST.per_token))))
    for served in outcome.served[4:]:
        assert served.first == pytest.approx(3.2 / (1 + rate), abs=0.35)
        assert served.cached_tokens == pytest.approx(320 * rate / (1 + rate), abs=2 * PAGE)


def test_a_tier_that_is_too_small_forgets() -> None:
    assert serve(tier("disk", 25)).hit_rate < 0.2
    with pytest.raises(ConfigError, match="1599 bytes hold no page: one takes 1600 bytes"):
        serve(SimTierOptions("ram", 1599, FAST))


def test_others_go_on_while_one_waits_for_a_load() -> None:
    trace = rounds(2)
    begin = trace.requests[-1].time + 60.0
    trace.requests.append(TraceRequest(begin, 320, 1, list(range(20))))
    trace.requests.append(TraceRequest(begin + 0.001, 16, 1, [999]))
    outcome = serve(tier("disk", 200, Speed(1e-3, 4e4)), trace=trace)
    loaded, short = outcome.served[-2:]
    assert loaded.cached_tokens > 300 and loaded.first > 0.75
    assert short.first < 0.3


def test_it_is_the_same_every_time() -> None:
    trace = rounds(3)
    trace.requests = [replace(request, time=request.time / 200) for request in trace.requests]
    tiers = (tier("ram", 10), tier("disk", 60, Speed(1e-3, 1e5)))
    one, again = serve(*tiers, trace=trace), serve(*tiers, trace=trace)
    assert one == again and one.hit_rates()["disk"] > 0


def test_threads_run_in_order_of_time_and_pass_on_errors() -> None:
    clock, log = VirtualClock(), list[tuple[str, float]]()
    threads = VirtualThreads(clock)

    def job(name: str, seconds: float) -> None:
        for _ in range(2):
            threads.sleep(seconds)
            log.append((name, threads.now()))

    slow, fast = threads.make_worker("slow"), threads.make_worker("fast")
    slow.submit(lambda: job("slow", 1.0))
    fast.submit(lambda: job("fast", 0.4))
    fast.submit(lambda: job("again", 0.1))
    threads.run()
    assert log == [] and threads.next_due() == pytest.approx(0.4)
    clock.advance(1.5)
    threads.run()
    assert sorted(name for name, _ in log) == ["again", "again", "fast", "fast", "slow"]
    assert [time for _, time in log] == pytest.approx([0.4, 0.8, 0.9, 1.0, 1.0])
    assert threads.now() == 1.5 and threads.next_due() == pytest.approx(2.0)
    fast.submit(lambda: [][0])
    with pytest.raises(IndexError):
        threads.run()
    threads.close()


def test_the_index_alone_counts_what_the_full_replay_hits() -> None:
    tiers = {"ram": 45, "disk": 200}
    (count,) = replay_index(rounds(4, prompts=6), 42, tiers=tiers)
    assert count.below == {"disk": 3 * 6 * 20} and count.hits == 3 * 6 * 20
    (count,) = replay_index(rounds(4), 42, tiers={"ram": 100, "disk": 200})
    assert count.below == {"ram": 3 * 4 * 20}
    halves = replay_index(rounds(4), 42, tiers={"disk": 100}, parts=(0.5, 1.0))
    assert [half.below["disk"] for half in halves] == [4 * 20, 2 * 4 * 20]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 4)), max_size=60), st.integers(1, 8))
def test_stores_are_lru_with_first_pages_last(uses: list[tuple[bool, int, int]], capacity: int) -> None:
    stores, model = PageStores({"ram": capacity, "disk": 2}), list[int]()
    for put, prompt, length in uses:
        pages = [10 * prompt + number for number in range(length)]
        if put:
            stores.put("ram", pages)
        else:
            held = next((number for number, page in enumerate(pages) if page not in model), length)
            assert stores.find(pages) == ["ram"] * held
            pages = pages[:held]
        model = [page for page in model if page not in pages] + pages[::-1]
        model = model[-capacity:]
