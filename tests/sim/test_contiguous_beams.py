"""Beams over the baseline cache, where each takes a reservation of its own."""

from __future__ import annotations

import random

from pagetrie.engine.config import EngineConfig
from pagetrie.engine.engine import Engine
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import Request
from pagetrie.engine.victims import MAX_PREEMPTIONS
from pagetrie.kv import ContiguousCacheManager
from pagetrie.sim import PageMemory, SimRunner, StepCost, VirtualClock
from tests.simulation.vocabulary import AwkwardVocabulary


def test_a_guarantee_counts_a_reservation_per_beam() -> None:
    """Four beams need the whole pool, so they don't start beside another sequence that must not be preempted."""
    clock = VirtualClock()
    vocabulary = AwkwardVocabulary()
    engine = Engine(
        runner=SimRunner(
            memory=PageMemory(16, 4), clock=clock, cost=StepCost(1.0, 0.0), vocab_size=vocabulary.vocab_size
        ),
        cache=ContiguousCacheManager(num_pages=16, page_size=4, max_tokens=16),
        vocabulary=vocabulary,
        config=EngineConfig(max_model_len=16),
        clock=clock,
        rng=random.Random(0),
    )
    plain = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    engine.add(Request("one", [5, 6, 7], plain))
    engine.step()
    engine.add(Request("beams", [8, 9], SamplingParams(beam_width=4, max_tokens=6, ignore_eos=True)))
    (one,), (beams,) = (engine._states[name].sequences for name in ("one", "beams"))
    queue = engine._scheduler.waiting
    queue.remove(beams)
    one.preemptions = beams.preemptions = MAX_PREEMPTIONS
    queue.add(beams)
    reasons = {}
    while engine.has_work:
        for output in engine.step():
            reasons[output.request_id] = output.choices[0].finish_reason
        assert one.lease is None or beams.lease is None
    assert reasons == {"one": "length", "beams": "length"}
    assert one.preemptions == beams.preemptions == MAX_PREEMPTIONS
