"""Fitting step costs to measured steps."""

from __future__ import annotations

import random

import pytest

from pagetrie.engine.config import EngineConfig
from pagetrie.engine.engine import Engine
from pagetrie.kv import CacheManager
from pagetrie.plan.measure import BATCHES, StepRecorder, StepSample, Timings, fit_cost, measure
from pagetrie.replay.engine import _CostRunner, _Plain
from pagetrie.sim import StepCost, VirtualClock


def sample(cost: StepCost, tokens: int, start: int) -> StepSample:
    attended = tokens * start + tokens * (tokens + 1) // 2
    return StepSample(tokens, attended, cost.per_step + cost.per_token * tokens + cost.per_attended * attended)


def test_exact_samples_give_back_their_cost() -> None:
    cost = StepCost(0.008, 0.0015, 2e-7)
    found = fit_cost([sample(cost, tokens, start) for tokens in (1, 8, 64, 512) for start in (0, 100, 1000)])
    assert found.per_step == pytest.approx(cost.per_step)
    assert found.per_token == pytest.approx(cost.per_token)
    assert found.per_attended == pytest.approx(cost.per_attended)


def test_no_part_is_negative() -> None:
    falling = [StepSample(tokens, 10 * tokens, 1.0 - tokens / 1000) for tokens in (1, 10, 100, 500)]
    found = fit_cost(falling)
    assert min(found.per_step, found.per_token, found.per_attended) >= 0


def test_times_follow_from_chunks() -> None:
    timings = Timings(StepCost(1.0, 0.1, 0.001), StepCost(2.0, 0.5, 0.01), chunk=100)
    assert timings.ttft(150, 50) == pytest.approx(
        2 * 1.0 + 150 * 0.1 + 0.001 * (100 * 50 + 100 * 101 / 2 + 50 * 150 + 50 * 51 / 2)
    )
    assert timings.tpot(4, 100) == pytest.approx(2.0 + 4 * 0.5 + 400 * 0.01)


def test_an_engine_is_measured_as_it_is() -> None:
    clock, recorder, cost = VirtualClock(), StepRecorder(), StepCost(0.01, 0.002, 1e-6)
    engine = Engine(
        runner=_CostRunner(clock, cost),
        cache=CacheManager(num_pages=1024, page_size=16),
        vocabulary=_Plain(),
        config=EngineConfig(max_model_len=4096),
        clock=clock,
        rng=random.Random(0),
        observer=recorder,
    )
    timings = measure(engine, recorder, 1000)
    for found in (timings.prefill, timings.decode):
        assert found.per_step == pytest.approx(cost.per_step, rel=0.01)
        assert found.per_token == pytest.approx(cost.per_token, rel=0.01)
        assert found.per_attended == pytest.approx(cost.per_attended, rel=0.05)
    assert max(batch for batch, _ in BATCHES) < 16, "a prediction for 16 must be one"
    assert not engine.has_work
