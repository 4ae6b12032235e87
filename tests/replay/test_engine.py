"""Full replay: times that can be told in advance, figures that agree with the index, and fleets."""

from __future__ import annotations

import pytest

from pagetrie.errors import ConfigError
from pagetrie.replay.engine import ReplicaOptions, percentiles, replay_engine
from pagetrie.replay.index_only import replay_index
from pagetrie.replay.routing import Router
from pagetrie.replay.trace import Trace, TraceRequest
from pagetrie.sim import StepCost
from tests.replay.test_index_only import random_trace

COST = StepCost(per_step=1.0, per_token=0.25)
OPTIONS = ReplicaOptions(num_pages=64, page_size=16, max_num_batched_tokens=128, max_num_seqs=8)


def test_one_request_takes_what_its_steps_cost() -> None:
    trace = Trace("one", 16, [TraceRequest(5.0, 200, 3, list(range(13)))])
    outcome = replay_engine(trace, OPTIONS, COST)
    (served,) = outcome.served
    # 128 and 72 prompt tokens, then two more steps of one token.
    assert served.first == pytest.approx(2 * 1.0 + 200 * 0.25)
    assert served.tokens == 3 and served.tpot == pytest.approx(1.25)
    assert outcome.seconds == pytest.approx(served.first + 2 * 1.25)
    assert outcome.computed_tokens == 202 and outcome.steps == 4


def test_a_request_that_comes_in_the_middle_of_a_step_waits_for_its_end() -> None:
    first = TraceRequest(0.0, 100, 1, list(range(7)))
    second = TraceRequest(20.0, 10, 1, [100])
    outcome = replay_engine(Trace("two", 16, [first, second]), OPTIONS, COST)
    assert outcome.served[1].first == pytest.approx(26.0 + 3.5 - 20.0)


def test_what_was_served_is_hit_again_to_the_token() -> None:
    pages = list(range(4))
    requests = [TraceRequest(1000.0 * number, 60, 5, pages) for number in range(3)]
    outcome = replay_engine(Trace("again", 16, requests), OPTIONS, COST)
    assert [served.cached_tokens for served in outcome.served] == [0, 59, 59]
    assert outcome.hit_rate == pytest.approx(118 / 180)


@pytest.mark.parametrize("eviction", ["lru", "s3-fifo", "adaptive"])
def test_apart_in_time_it_hits_what_the_index_alone_hits(eviction: str) -> None:
    """The engine keeps answers too and leaves a last token to compute, so the pool is roomy and tails are cut off."""
    trace = random_trace(1, requests=300)
    spaced = Trace("spaced", 16, [])
    for number, request in enumerate(trace.requests):
        full = request.prompt_tokens // 16
        spaced.requests.append(
            TraceRequest(1000.0 * number, full * 16 + 1, 1, [*request.pages[:full], 10_000 + number])
        )
    by_index = replay_index(spaced, 4000, eviction)[0]
    options = ReplicaOptions(num_pages=4000, page_size=16, eviction=eviction)
    outcome = replay_engine(spaced, options, COST)
    assert sum(served.cached_tokens for served in outcome.served) == 16 * by_index.hits


def test_a_short_pool_preempts_and_still_answers_all() -> None:
    requests = [TraceRequest(0.0, 100, 200, [number * 10 + page for page in range(7)]) for number in range(8)]
    options = ReplicaOptions(num_pages=40, page_size=16, max_num_seqs=8)
    outcome = replay_engine(Trace("short", 16, requests), options, COST)
    assert outcome.preemptions > 0
    assert [served.tokens for served in outcome.served] == [200] * 8
    assert 0 < outcome.waste < 0.2


def test_goodput_counts_who_met_both_limits() -> None:
    requests = [
        TraceRequest(1000.0 * number, 100, 5, list(range(100 * number, 100 * number + 7))) for number in range(4)
    ]
    requests.append(TraceRequest(3000.5, 100, 5, list(range(900, 907))))
    outcome = replay_engine(Trace("goodput", 16, requests), OPTIONS, COST)
    assert outcome.goodput(1e9, 1e9) * outcome.seconds == pytest.approx(5)
    assert outcome.goodput(27.0, 1e9) * outcome.seconds == pytest.approx(4)
    assert outcome.goodput(27.0, 1.3) * outcome.seconds == pytest.approx(3)


def test_what_can_never_fit_is_refused() -> None:
    big, small = TraceRequest(0.0, 2000, 5, list(range(125))), TraceRequest(1.0, 20, 5, [200, 201])
    outcome = replay_engine(Trace("big", 16, [big, small]), OPTIONS, COST)
    assert outcome.refused == 1 and len(outcome.served) == 1


def test_pages_must_divide_the_traces() -> None:
    with pytest.raises(ConfigError, match="aren't made of pages of 32"):
        replay_engine(Trace("odd", 16, []), ReplicaOptions(num_pages=8, page_size=32), COST)


def test_a_fleet_that_knows_prefixes_hits_more_than_one_that_takes_turns() -> None:
    trace = random_trace(2, requests=400, branching=3, depth=6)
    hits = {
        routing: replay_index(trace, 60, replicas=3, routing=routing)[0].hits
        for routing in ("round-robin", "least-loaded", "prefix")
    }
    assert hits["prefix"] > max(hits["round-robin"], hits["least-loaded"])
    short = Trace("short", 16, trace.requests[:60])
    options = ReplicaOptions(num_pages=60, page_size=16)
    rates = {
        routing: replay_engine(short, options, COST, replicas=3, routing=routing).hit_rate
        for routing in ("round-robin", "prefix")
    }
    assert rates["prefix"] > rates["round-robin"]


def test_routing() -> None:
    held = [0, 30, 60]
    turns = Router("round-robin", 3)
    assert [turns.choose(100, held.__getitem__, [9, 9, 9]) for _ in range(4)] == [0, 1, 2, 0]
    assert Router("least-loaded", 3).choose(100, held.__getitem__, [5, 1, 1]) == 1
    assert Router("prefix", 3).choose(100, held.__getitem__, [0, 1, 9]) == 2
    assert Router("prefix", 3).choose(200, held.__getitem__, [3, 1, 9]) == 1


def test_percentiles() -> None:
    assert percentiles(list(range(100))) == [50, 90, 99]
    assert percentiles([7.0]) == [7.0, 7.0, 7.0]
    assert all(value != value for value in percentiles([]))
