"""Does paper agree with the machine? ``python -m bench.agreement [--requests N] [--json]``. Takes about a minute.

1. Planner: pages that fit, against the engine's pool; first token of a 2,000-token prompt, and time per token of 16
   sequences at once, as ``plan`` predicts them from shorter runs, against the engine.
2. Replay: the engine is given requests at random times while it records them; the recording, replayed with the measured
   step costs and the same pool, must show the same hit rate and the same median time to first token.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from pagetrie.assembly import Parts, build
from pagetrie.cli.plan import BUNDLED
from pagetrie.engine.observer import AdmissionReport, EngineObserver, Observers, TokenReport
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.recording import TraceRecorder
from pagetrie.engine.request import Request
from pagetrie.plan.devices import Device
from pagetrie.plan.estimate import Efficiency, Planner
from pagetrie.plan.measure import StepRecorder, measure
from pagetrie.plan.shapes import SHAPES
from pagetrie.replay.engine import ReplicaOptions, percentiles, replay_engine
from pagetrie.replay.trace import read_trace
from pagetrie.settings import Settings, format_size

POOL, PAGE = 192, 16
MEMORY = 512 << 20
"""Of the engine that the planner is compared with, in bytes."""
LONG, BATCH = 2000, 16


@dataclass
class Watch(EngineObserver):
    """First tokens, hits and ends, by request."""

    first: dict[str, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0

    def on_admission(self, report: AdmissionReport) -> None:
        self.prompt += report.prompt_tokens
        self.cached += report.cached_tokens

    def on_token(self, report: TokenReport) -> None:
        if report.first:
            self.first[report.request_id] = report.gap
        else:
            self.gaps.append(report.gap)


def drain(parts: Parts) -> None:
    while parts.engine.has_work:
        parts.engine.step()


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(300, 40_000) for _ in range(count)]


def conversations(rng: random.Random, requests: int) -> list[tuple[float, list[int], int]]:
    """(time, prompt, output): a few talks that go on now and then, on one system prompt."""
    system, talks, now, made = ids(rng, 160), [], 0.0, []
    for _ in range(requests):
        now += rng.expovariate(1.2)
        if not talks or rng.random() < 0.35:
            talks.append(list(system))
        talk = rng.choice(talks)
        talk += ids(rng, rng.randrange(20, 180))
        if len(talk) > 1200:
            talks.remove(talk)
        made.append((now, list(talk), rng.randrange(4, 24)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.agreement", description=__doc__)
    parser.add_argument("--requests", type=int, default=40, help="requests to record and replay (default 40)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    rng, recorder, watch = random.Random(1), StepRecorder(), Watch()
    parts = build(Settings(kv_memory=MEMORY), make_observer=lambda *_: Observers([recorder, watch]))
    timings = measure(parts.engine, recorder, parts.config.vocab_size)
    found: dict[str, tuple[float, float]] = {}
    device = Device("its pool alone", 1.0 + MEMORY, 1.0, 1.0)
    pages = Planner(SHAPES[BUNDLED], device, 1.0, Efficiency(memory=1.0)).pages(PAGE, "fp16")
    found[f"pages in {format_size(MEMORY)}"] = pages, parts.cache.num_pages

    watch.first.clear()
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, use_prefix_cache=False)
    for number in range(3):
        parts.engine.add(Request(f"long-{number}", ids(rng, LONG), params))
        drain(parts)
    found[f"first token of {LONG:,} tokens, ms"] = 1e3 * timings.ttft(LONG), 1e3 * median(watch.first.values())
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, use_prefix_cache=False)
    watch.gaps.clear()
    for number in range(BATCH):
        parts.engine.add(Request(f"batch-{number}", ids(rng, 250), params))
    drain(parts)
    # The middle of the run, when all decode and none computes its prompt.
    found[f"per token, {BATCH} at once, ms"] = 1e3 * timings.tpot(BATCH, 270), 1e3 * median(watch.gaps)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        tape, seen = TraceRecorder(path, PAGE), Watch()
        parts = build(Settings(num_pages=POOL), make_observer=lambda *_: Observers([seen, tape]))
        parts.engine.add(Request("warm-up", ids(rng, 64), SamplingParams(max_tokens=4, use_prefix_cache=False)))
        drain(parts)
        seen.first.clear()
        seen.prompt = seen.cached = 0
        start = time.monotonic()
        todo = conversations(rng, options.requests)
        while todo or parts.engine.has_work:
            while todo and time.monotonic() - start >= todo[0][0]:
                _, prompt, output = todo.pop(0)
                params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
                parts.engine.add(Request(str(len(todo)), prompt, params))
            if parts.engine.has_work:
                parts.engine.step()
            else:
                time.sleep(0.001)
        tape.close()
        trace = read_trace(path)
        del trace.requests[0]
    outcome = replay_engine(trace, ReplicaOptions(num_pages=POOL, page_size=PAGE), timings)
    (ttft,) = percentiles([one.first for one in outcome.served], (0.5,))
    found["hit rate of the recorded requests, %"] = 100 * outcome.hit_rate, 100 * seen.cached / seen.prompt
    found["first token, median of them, ms"] = 1e3 * ttft, 1e3 * median(seen.first.values())
    if options.json:
        print(json.dumps({name: {"paper": paper, "machine": machine} for name, (paper, machine) in found.items()}))
        return
    print(f"{'':<42}{'on paper':>10}{'measured':>10}{'off by':>9}")
    for name, (paper, machine) in found.items():
        print(f"{name:<42}{paper:>10.1f}{machine:>10.1f}{paper / machine - 1:>+9.1%}")


if __name__ == "__main__":
    main()
