"""A recording, replayed, hits what was hit when it was made: to the token, in a pool that is short of pages."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pagetrie.engine.config import EngineConfig
from pagetrie.engine.engine import Engine
from pagetrie.engine.observer import AdmissionReport, EngineObserver, FinishReport, Observers
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.recording import TraceRecorder
from pagetrie.engine.request import Request
from pagetrie.kv import CacheManager, RequestKind
from pagetrie.replay.engine import ReplicaOptions, replay_engine
from pagetrie.replay.trace import read_trace
from pagetrie.sim import PageMemory, SimRunner, StepCost, VirtualClock
from tests.engine.toy import ToyVocabulary

PAGES, SIZE = 80, 8
TICK = 1 / 64
"""Seconds; all times are multiples of it, so that the microseconds that a recording keeps are exact."""
COST = StepCost(per_step=8 * TICK, per_token=TICK)


class Chats(EngineObserver):
    """What was hit, and the talks that go on from an answer once it is there."""

    def __init__(self) -> None:
        self.cached: dict[str, int] = {}
        self.talks: list[list[int]] = []
        self.prompts: dict[str, list[int]] = {}
        self.kinds: list[RequestKind] = []

    def on_admission(self, report: AdmissionReport) -> None:
        self.cached[report.request_id] = report.cached_tokens

    def on_finish(self, report: FinishReport) -> None:
        self.talks.append(self.prompts[report.request_id] + list(report.output_ids))


@pytest.mark.parametrize("seed", range(4))
def test_a_recording_hits_what_was_hit(tmp_path: Path, seed: int) -> None:
    rng, clock, chats = random.Random(seed), VirtualClock(), Chats()
    recorder = TraceRecorder(tmp_path / "trace", SIZE)
    vocabulary = ToyVocabulary()
    engine = Engine(
        runner=SimRunner(memory=PageMemory(PAGES, SIZE), clock=clock, cost=COST, vocab_size=vocabulary.vocab_size),
        cache=CacheManager(num_pages=PAGES, page_size=SIZE),
        vocabulary=vocabulary,
        config=EngineConfig(max_model_len=PAGES * SIZE, max_num_seqs=8, max_num_batched_tokens=64, max_queue=1000),
        clock=clock,
        rng=random.Random(0),
        observer=Observers([chats, recorder]),
    )

    def ids(count: int) -> list[int]:
        return [rng.randrange(vocabulary.vocab_size) for _ in range(count)]

    def run_until(time: float) -> None:
        while engine.has_work and clock.now < time:
            engine.step()
        clock.now = max(clock.now, time)

    trunk, time = ids(21), 0.0
    for number in range(60):
        # Never at the moment of the one before: a recording doesn't tell their order.
        time = max(time + TICK * round(rng.expovariate(0.01)), clock.now + TICK)
        run_until(time)
        talk = chats.talks.pop(rng.randrange(len(chats.talks))) if chats.talks and rng.random() < 0.6 else trunk
        prompt = chats.prompts[str(number)] = [*talk, *ids(rng.randrange(1, 30))][: PAGES * SIZE // 3]
        params = SamplingParams(max_tokens=rng.randrange(1, 20), temperature=0, ignore_eos=True)
        kind = rng.choice(list(RequestKind))
        chats.kinds.append(kind)
        engine.add(Request(str(number), prompt, params, kind=kind))
    run_until(float("inf"))
    recorder.close()
    assert engine.cache_stats().evicted_pages > 0

    trace = read_trace(tmp_path / "trace")
    options = ReplicaOptions(num_pages=PAGES, page_size=SIZE, max_num_seqs=8, max_num_batched_tokens=64)
    outcome = replay_engine(trace, options, COST)
    assert [served.request.kind for served in outcome.served] == chats.kinds
    # Of pages that begin equally alike, the order of the tokens decides which is copied; a recording has other tokens.
    pairs = [(served.cached_tokens, chats.cached[str(number)]) for number, served in enumerate(outcome.served)]
    assert sum(here != there for here, there in pairs) <= 2
    prompts = sum(served.request.prompt_tokens for served in outcome.served)
    assert abs(outcome.hit_rate - sum(chats.cached.values()) / prompts) < 0.01
    assert sum(here % SIZE > 0 for here, _ in pairs) > 30, "hits that whole pages explain show nothing"
