"""What this machine really takes for a step, from a few short runs of the engine.

Prefill and decode steps are fitted apart, each as a sum of a fixed part, one per token and one per attended position:
their products have other shapes and reach other shares of the peak.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagetrie.engine.engine import Engine
from pagetrie.engine.observer import EngineObserver, StepReport
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import Request
from pagetrie.engine.runner import StepPlan
from pagetrie.sim.cost import StepCost, work_of

PROMPTS = (64, 192, 512, 1024)
BATCHES = ((1, 64), (1, 640), (4, 64), (8, 64), (8, 384))
"""(sequences, tokens before them) of the decode runs."""
DECODED = 12
_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class StepSample:
    """One measured step: new tokens, pairs of new tokens and positions attended to, seconds."""

    tokens: int
    attended: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Timings:
    """Costs of steps on a machine, and what follows from them.

    Attributes:
        prefill, decode: fitted.
        chunk: tokens of a prompt that a step takes at most.
    """

    prefill: StepCost
    decode: StepCost
    chunk: int

    def ttft(self, new: int, cached: int = 0) -> float:
        """Seconds for ``new`` prompt tokens behind ``cached`` ones, alone on the machine."""
        total, start, end = 0.0, cached, cached + new
        while start < end:
            count = min(self.chunk, end - start)
            total += _cost(self.prefill, count, count * start + count * (count + 1) // 2)
            start += count
        return total

    def tpot(self, batch: int, context: int) -> float:
        """Seconds per step of ``batch`` sequences with ``context`` tokens each."""
        return _cost(self.decode, batch, batch * context)

    def seconds(self, plan: StepPlan) -> float:
        """What a step takes, as a cost model for replay: as a prefill step if any prompt has a part in it."""
        tokens, attended = work_of(plan)
        return _cost(self.decode if tokens == len(plan.sequences) else self.prefill, tokens, attended)


class StepRecorder(EngineObserver):
    """Notes how long each step of an engine took."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)


def measure(engine: Engine, recorder: StepRecorder, vocab_size: int) -> Timings:
    """Run prompts of ``PROMPTS`` tokens one by one, and ``BATCHES`` of sequences that decode together.

    Prompts and pages are random and bypass the cache; those longer than the engine's context are left out.

    Args:
        engine: idle, with ``recorder`` as its observer.
    """
    rng = random.Random(0)
    chunk = engine.config.max_num_batched_tokens

    def run(prompts: Sequence[int], output: int) -> list[StepReport]:
        recorder.steps.clear()
        for number, length in enumerate(prompts):
            ids = [rng.randrange(vocab_size) for _ in range(length)]
            params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True, use_prefix_cache=False)
            engine.add(Request(f"measure-{number}", ids, params))
        while engine.has_work:
            engine.step()
        return list(recorder.steps)

    def fits(length: int) -> bool:
        return length + DECODED < engine.max_len

    run([PROMPTS[0]], 4)  # wakes threads and touches the weights
    prefill = []
    for length in [length for length in PROMPTS if fits(length)] * 2:
        start = 0
        for step in run([length], 1):
            count = step.computed_tokens
            prefill.append(StepSample(count, count * start + count * (count + 1) // 2, step.duration))
            start += count
    decode = []
    for batch, length in BATCHES:
        if not fits(length) or batch > engine.config.max_num_seqs or batch * length > engine.max_len:
            continue
        steps = [s for s in run([length] * batch, DECODED) if s.computed_tokens == batch and s.prefill_tokens == 0]
        seconds = float(np.median([step.duration for step in steps[_WARM_UP:]]))
        decode.append(StepSample(batch, batch * (length + DECODED // 2), seconds))
    return Timings(fit_cost(prefill), fit_cost(decode), chunk)


def fit_cost(samples: Sequence[StepSample]) -> StepCost:
    """Fixed, per-token and per-pair seconds, none below 0, that fit the samples best in relative terms.

    Least squares over every subset of the three, so that a part that came out negative is left out properly.
    """
    seconds = np.array([sample.seconds for sample in samples])
    columns = np.array([[1.0, sample.tokens, sample.attended] for sample in samples]) / seconds[:, None]
    best, least = np.zeros(3), np.inf
    for chosen in ([0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1], [2]):
        parts = np.linalg.lstsq(columns[:, chosen], np.ones(len(samples)), rcond=None)[0]
        error = float(((columns[:, chosen] @ parts - 1) ** 2).sum())
        if (parts >= 0).all() and error < least - 1e-12:
            best, least = np.zeros(3), error
            best[chosen] = parts
    return StepCost(*(float(part) for part in best))


def _cost(cost: StepCost, tokens: int, attended: int) -> float:
    return cost.per_step + cost.per_token * tokens + cost.per_attended * attended
