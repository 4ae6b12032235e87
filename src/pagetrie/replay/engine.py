"""Full replay: the real engine, scheduler and cache manager, over a runner that costs time instead of computing.

Each replica has a virtual clock. Requests arrive at the trace's times; between two arrivals every replica runs the
steps that its clock allows. Prompts, and answers where the trace tells of them, are made-up tokens that are equal
where the trace's are.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagetrie.engine.config import EngineConfig
from pagetrie.engine.engine import Engine
from pagetrie.engine.observer import (
    AdmissionReport,
    EngineObserver,
    FinishReport,
    RejoinReport,
    StepReport,
    TokenReport,
)
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import Request
from pagetrie.engine.runner import SampleSpec, SequenceResult, StepPlan, TokenLogprob
from pagetrie.errors import ConfigError
from pagetrie.kv import CacheManager
from pagetrie.kv.eviction import make_policy
from pagetrie.kv.metering import MeteredCache
from pagetrie.kv.transfers import Transfers
from pagetrie.replay.routing import Router, Routing
from pagetrie.replay.trace import Trace, TraceRequest
from pagetrie.sim import SimTierOptions, VirtualClock, VirtualThreads, sim_transfers

_ANSWER = 0
"""The token that answers are made of which the trace doesn't tell of. Prompts' tokens begin at 1."""
_IDLE = 1e-3
"""Seconds that a step takes which finds nothing to compute."""
_METER_EVERY = 64
"""Steps between two looks at how full the held pages are."""


class CostModel(Protocol):
    """Tells what a step takes, in seconds (more than 0)."""

    def seconds(self, plan: StepPlan) -> float: ...


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """What a replica is made of.

    Attributes:
        num_pages: pages in its pool.
        page_size: tokens per page.
        eviction, index: as for ``pagetrie serve``.
        max_num_seqs, max_num_batched_tokens: the scheduler's limits.
        tiers: below the pool, fastest first; each replica has its own.
        bytes_per_token: of keys and values; decides what tiers hold and how long a load takes.
    """

    num_pages: int
    page_size: int
    eviction: str = "lru"
    index: str = "radix"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    tiers: tuple[SimTierOptions, ...] = ()
    bytes_per_token: int = 0


@dataclass(slots=True)
class Served:
    """What became of one request. Times are seconds after its arrival; infinite if it never got there."""

    request: TraceRequest
    cached_tokens: int = 0
    first: float = float("inf")
    last: float = float("inf")
    tokens: int = 0

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 with fewer than two."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(slots=True)
class Outcome:
    """A whole replay.

    Attributes:
        served: requests in the trace's order.
        refused: requests that could never fit, left out of all other figures.
        seconds: virtual time from the first arrival to the last token.
        computed_tokens, evicted_pages, preemptions, steps: summed over the replicas.
        loaded_tokens: of the cached tokens, those that came from a tier below the pool, by its name.
        held_slots, used_slots: token slots in held pages, and those that hold a token, summed over looks at them.
    """

    served: list[Served] = field(default_factory=list)
    refused: int = 0
    seconds: float = 0.0
    computed_tokens: int = 0
    evicted_pages: int = 0
    preemptions: int = 0
    steps: int = 0
    loaded_tokens: Counter[str] = field(default_factory=Counter)
    held_slots: int = 0
    used_slots: int = 0

    def hit_rates(self) -> dict[str, float]:
        """The hit rate by where the tokens were found: ``pool``, then the tiers that gave any."""
        total = sum(one.request.prompt_tokens for one in self.served)
        tiers = {name: tokens / total for name, tokens in self.loaded_tokens.items()}
        return {"pool": self.hit_rate - sum(tiers.values()), **tiers}

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens over prompt tokens."""
        total = sum(one.request.prompt_tokens for one in self.served)
        return sum(one.cached_tokens for one in self.served) / total if total else 0.0

    @property
    def waste(self) -> float:
        """Share of the held slots that hold nothing."""
        return 1 - self.used_slots / self.held_slots if self.held_slots else 0.0

    def goodput(self, ttft: float, tpot: float) -> float:
        """Requests per second that met both limits, in seconds (DistServe, Zhong et al. 2024)."""
        good = sum(one.first <= ttft and one.tpot <= tpot for one in self.served)
        return good / self.seconds if self.seconds else 0.0


def percentiles(values: Sequence[float], shares: Sequence[float] = (0.5, 0.9, 0.99)) -> list[float]:
    """Nearest-rank percentiles; NaN of nothing."""
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan") for share in shares]


def replay_engine(
    trace: Trace,
    options: ReplicaOptions,
    cost: CostModel,
    *,
    replicas: int = 1,
    routing: Routing = "prefix",
    on_progress: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Serve a trace.

    Args:
        trace: what arrives.
        options, replicas, routing: the fleet. A replica's load is its prompt tokens still to be computed.
        cost: what a step takes.
        on_progress: told how many requests have arrived.

    Raises:
        ConfigError: the options don't fit each other.
    """
    if trace.page_tokens % options.page_size:
        raise ConfigError(
            f"the trace's pages of {trace.page_tokens} tokens aren't made of pages of {options.page_size} tokens"
        )
    outcome = Outcome()
    fleet = [_Replica(options, cost, outcome) for _ in range(replicas)]
    router = Router(routing, replicas)
    for number, request in enumerate(trace.requests):
        for replica in fleet:
            replica.run_until(request.time)
        if not request.prompt_tokens:
            continue
        if not fleet[0].can_serve(request):
            outcome.refused += 1
            continue
        prompt, answer = trace.prompt_ids(request), trace.answer_ids(request)

        def stored(number: int, prompt: list[int] = prompt) -> int:
            return fleet[number].cache.stored_tokens(prompt, fleet[number].namespace)

        load = [replica.pending for replica in fleet]
        fleet[router.choose(len(prompt), stored, load)].add(number, request, prompt, answer)
        on_progress(number + 1)
    for replica in fleet:
        replica.run_until(float("inf"))
        replica.close()
        outcome.evicted_pages += replica.cache.stats().evicted_pages
    start = trace.requests[0].time if trace.requests else 0.0
    outcome.seconds = max((one.request.time + one.last - start for one in outcome.served), default=0.0)
    return outcome


class _Plain:
    """A vocabulary as large as there are numbers for; no token ends anything."""

    vocab_size = 1 << 32
    eos_ids: frozenset[int] = frozenset()
    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return b"."


class _CostRunner:
    """Implements ``engine.runner.Runner``: lets time pass and answers as it was told, by the requests' seeds."""

    def __init__(self, clock: VirtualClock, cost: CostModel) -> None:
        self._clock = clock
        self._cost = cost
        self.answers: dict[int, list[int]] = {}

    def execute(self, plan: StepPlan) -> list[SequenceResult]:
        self._clock.advance(self._cost.seconds(plan))
        return [SequenceResult([self._draw(spec) for spec in share.samples]) for share in plan.sequences]

    def _draw(self, spec: SampleSpec) -> TokenLogprob:
        answer, number = self.answers.get(spec.seed, ()), len(spec.output_ids)
        return TokenLogprob(answer[number] if number < len(answer) else _ANSWER, 0.0)


class _Replica(EngineObserver):
    """An engine on its virtual clock, and what is seen of it."""

    def __init__(self, options: ReplicaOptions, cost: CostModel, outcome: Outcome) -> None:
        self.clock = VirtualClock()
        self.pending = 0
        self._outcome = outcome
        self._serving: dict[str, Served] = {}
        policy = make_policy(options.eviction, options.num_pages, options.page_size, self.clock)
        page_bytes = options.page_size * options.bytes_per_token
        self._transfers: Transfers | None = None
        self._threads: VirtualThreads | None = None
        if options.tiers:
            self._transfers, self._threads = sim_transfers(options.tiers, page_bytes, self.clock)
        self.cache = MeteredCache(
            CacheManager(
                num_pages=options.num_pages,
                page_size=options.page_size,
                index=options.index,  # type: ignore[arg-type]
                policy=policy,
                transfers=self._transfers,
            )
        )
        self._runner = _CostRunner(self.clock, cost)
        self._engine = Engine(
            runner=self._runner,
            cache=self.cache,
            vocabulary=_Plain(),
            config=EngineConfig(
                max_model_len=options.num_pages * options.page_size,
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                max_queue=1 << 40,
            ),
            clock=self.clock,
            rng=random.Random(0),
            observer=self,
        )
        self.namespace = self._engine.namespace("")

    def can_serve(self, request: TraceRequest) -> bool:
        return request.prompt_tokens + max(request.output_tokens, 1) <= self._engine.max_len

    def add(self, number: int, request: TraceRequest, prompt: list[int], answer: list[int]) -> None:
        name = str(number)
        served = self._serving[name] = Served(request)
        self._runner.answers[number] = answer
        self._outcome.served.append(served)
        self.pending += request.prompt_tokens
        params = SamplingParams(max_tokens=max(request.output_tokens, 1), temperature=0, ignore_eos=True, seed=number)
        self._engine.add(Request(name, prompt, params, kind=request.kind))

    def run_until(self, time: float) -> None:
        """Steps that begin before ``time``; the last one may end after it."""
        engine, clock = self._engine, self.clock
        while engine.has_work and clock.now < time:
            before = clock.now
            if self._threads is not None:
                self._threads.run()
            engine.step()
            if clock.now == before:  # nothing could be computed
                clock.now = min(time, self._next_event())
        if clock.now < time < float("inf"):
            clock.now = time

    def _next_event(self) -> float:
        """When there may be something to compute, if there is nothing now."""
        now, events = self.clock.now, list[float]()
        if self._threads is not None and self._transfers is not None:
            due, deadline = self._threads.next_due(), self._transfers.next_deadline()
            if due is not None:  # now, if the step has just begun a load
                events.append(due)
            if deadline is not None and deadline > now:
                events.append(deadline)
        return min(events, default=now + _IDLE)

    def close(self) -> None:
        """End what runs in the background."""
        if self._threads is not None:
            self._threads.close()

    # -- what is seen ------------------------------------------------------------------------------------------------

    def on_step(self, report: StepReport) -> None:
        outcome = self._outcome
        outcome.steps += 1
        outcome.computed_tokens += report.computed_tokens
        outcome.preemptions += report.preemptions
        if outcome.steps % _METER_EVERY == 0:
            holding = self.cache.measure()
            outcome.held_slots += holding.slots
            outcome.used_slots += holding.used

    def on_admission(self, report: AdmissionReport) -> None:
        self._serving[report.request_id].cached_tokens = report.cached_tokens
        self._outcome.loaded_tokens.update(report.cached_by_tier)

    def on_rejoin(self, report: RejoinReport) -> None:
        self._serving[report.request_id].cached_tokens += report.cached_tokens
        self._outcome.loaded_tokens.update(report.cached_by_tier)

    def on_token(self, report: TokenReport) -> None:
        served = self._serving[report.request_id]
        served.tokens += 1
        served.last = self.clock.now - served.request.time
        if report.first:
            served.first = served.last
            self.pending -= served.request.prompt_tokens

    def on_finish(self, report: FinishReport) -> None:
        del self._serving[report.request_id], self._runner.answers[int(report.request_id)]
