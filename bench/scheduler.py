"""What a step costs besides the model: ``python -m bench.scheduler [--json]``.

The real engine, scheduler and cache manager over a runner that only hands out tokens: planning (schedule), the runner's
plan, taking in its tokens (commit) and making the outputs. Every running sequence decodes one token per step. Times are
CPU times of whole steps, less the runner's, as means over blocks of 16 steps, so that each block has one in which the
sequences fill a page: the median block, and the best one, which says what the machine can do when it shares its caches
and its clock with nobody. With ``waiting`` requests in the queue, all seats are taken.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, dataclass
from statistics import median
from time import monotonic, thread_time

from pagetrie.engine.config import EngineConfig
from pagetrie.engine.engine import Engine
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import Request
from pagetrie.engine.runner import SequenceResult, StepPlan, TokenLogprob
from pagetrie.kv import CacheManager

PAGE_SIZE = 16
PROMPT = 512
SHARED = 256
TARGET = 1_000.0
"""Microseconds for 256 running sequences."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds per step: everything but the model, the part of it that chooses what runs, and the best block."""

    running: int
    waiting: int
    step: float
    schedule: float
    best: float


class Letters:
    """A vocabulary of single letters; nothing ends a text."""

    vocab_size = 26
    eos_ids = frozenset[int]()
    special_ids = frozenset[int]()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([97 + token_id])


class NoModel:
    """Hands out one token to each that asks, and knows how long it took."""

    def __init__(self) -> None:
        self.spent = 0.0

    def execute(self, plan: StepPlan) -> list[SequenceResult]:
        start = thread_time()
        results = [
            SequenceResult([TokenLogprob((share.start + number) % 26, 0.0) for _ in share.samples])
            for number, share in enumerate(plan.sequences)
        ]
        self.spent = thread_time() - start
        return results


def measure(running: int, waiting: int = 0, *, steps: int = 400, seed: int = 0) -> Cost:
    """Costs of ``steps`` (at least 16) decode steps of ``running`` sequences with half of their prompts shared."""
    rng = random.Random(seed)
    pages = (running + 1) * ((PROMPT + steps) // PAGE_SIZE + 2)
    runner = NoModel()
    engine = Engine(
        runner=runner,
        cache=CacheManager(num_pages=pages, page_size=PAGE_SIZE),
        vocabulary=Letters(),
        config=EngineConfig(max_model_len=8192, max_num_seqs=running, max_num_batched_tokens=8192),
        clock=monotonic,
        rng=random.Random(seed),
    )
    shared = [rng.randrange(26) for _ in range(SHARED)]
    params = SamplingParams(max_tokens=None, temperature=0.0)
    for number in range(running + waiting):
        prompt = shared + [rng.randrange(26) for _ in range(PROMPT - SHARED)]
        engine.add(Request(str(number), prompt, params))
    while len(engine.step()) != running:  # until all prompts are computed
        pass
    scheduler = engine._scheduler
    real, planning = scheduler.schedule, [0.0]

    def timed() -> object:
        start = thread_time()
        plan = real()
        planning[0] = thread_time() - start
        return plan

    scheduler.schedule = timed  # type: ignore[assignment, method-assign]
    whole, schedule = [], []
    for _ in range(steps):
        start = thread_time()
        outputs = engine.step()
        whole.append(thread_time() - start - runner.spent)
        schedule.append(planning[0])
        if len(outputs) != running or engine.num_waiting != waiting:
            raise RuntimeError(f"{len(outputs)} outputs, {engine.num_waiting} waiting: not the state to be measured")
    blocks = [_means(times) for times in (whole, schedule)]
    return Cost(running, waiting, median(blocks[0]), median(blocks[1]), min(blocks[0]))


def _means(seconds: list[float]) -> list[float]:
    """Means of blocks of as many steps as fill a page, in microseconds."""
    starts = range(0, len(seconds) - PAGE_SIZE + 1, PAGE_SIZE)
    return [sum(seconds[start : start + PAGE_SIZE]) / PAGE_SIZE * 1e6 for start in starts]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scheduler", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--steps", type=int, default=400, help="steps to take the median of (default 400)")
    options = parser.parse_args()
    costs = [measure(*case, steps=options.steps) for case in ((16, 0), (64, 0), (256, 0), (256, 512))]
    if options.json:
        print(json.dumps([asdict(cost) for cost in costs], indent=2))
        return
    print(f"A decode step without the model, microseconds (target at 256 running: {TARGET:,.0f})")
    print(f"{'running':>8}{'waiting':>9}{'step':>9}{'of it schedule':>16}{'per sequence':>14}{'best':>9}")
    for cost in costs:
        per = cost.step / cost.running
        print(f"{cost.running:>8}{cost.waiting:>9}{cost.step:>9.0f}{cost.schedule:>16.0f}{per:>14.2f}{cost.best:>9.0f}")


if __name__ == "__main__":
    main()
