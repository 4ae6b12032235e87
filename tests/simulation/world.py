"""A world at work: submits, steps, cancels, and checks everything after every step."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import count, pairwise

from pagetrie.engine.config import EngineConfig
from pagetrie.engine.engine import Engine
from pagetrie.engine.output import ChoiceDelta, RequestOutput
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import Request
from pagetrie.engine.scheduler import Schedule
from pagetrie.engine.sequence import RequestState, Sequence
from pagetrie.errors import DeadlineExceededError, InvalidRequestError, QueueFullError
from pagetrie.kv import CacheManager, ContiguousCacheManager, KVCache
from pagetrie.kv.eviction import make_policy
from pagetrie.kv.pool import FREE
from pagetrie.sim import PageMemory, StepCost, VirtualClock
from pagetrie.sim.runner import logprob_of
from tests.simulation.contexts import MAX_CONTEXTS, ContextKeeper
from tests.simulation.fairness import Fairness
from tests.simulation.holders import check_holders
from tests.simulation.reference import Alone, prefix_of, run_alone, run_beams_alone
from tests.simulation.runner import CheckedRunner, choose, root_of, rows_of
from tests.simulation.spec import RequestSpec, WorldSpec
from tests.simulation.tiers import SimTiers
from tests.simulation.vocabulary import AwkwardVocabulary

MAX_SEED = 2**64 - 1
MOST_IDLE_STEPS = 50
COST = StepCost(per_step=0.01, per_token=0.001, per_attended=1e-6, per_copy=1e-4)
SLOW_COST = StepCost(per_step=0.05, per_token=0.005)
"""With it, it is worth most waits to load pages."""


@dataclass(slots=True)
class Choice:
    """What a client has seen of one choice."""

    alone: Alone
    tokens: int = 0
    text: str = ""
    reason: str | None = None


@dataclass(slots=True)
class Client:
    """A request and what its client has seen."""

    spec: RequestSpec
    request: Request
    state: RequestState
    choices: list[Choice]
    seen_of_phase: int = 0
    cached_tokens: int | None = None
    deadline: float = math.inf
    prompt_logprobs: bool = False
    finished: bool = False


class World:
    """Plays a ``WorldSpec``. ``run`` raises an exception at the first thing that is wrong.

    Attributes:
        steps: steps taken so far.
        fairness: watches the scheduler.
    """

    def __init__(self, spec: WorldSpec) -> None:
        self.spec = spec
        self.steps = 0
        self.clock = VirtualClock()
        memory = PageMemory(spec.num_pages, spec.page_size)
        self.tiers: SimTiers | None = None
        if spec.tiers is not None:
            self.tiers = SimTiers(spec.tiers, memory, self.clock, random.Random(f"faults of tiers of {spec.seed}"))
        self.cache = _cache(spec, self.clock, self.tiers)
        self._rng = random.Random(f"faults of {spec.seed}")
        self.runner = CheckedRunner(
            self.cache,
            self.clock,
            memory,
            rng=self._rng,
            failure_rate=spec.failure_rate,
            slow_rate=spec.slow_rate,
            cost=COST if spec.tiers is None else SLOW_COST,
        )
        self.engine = Engine(
            runner=self.runner,
            cache=self.cache,
            vocabulary=AwkwardVocabulary(),
            config=EngineConfig(
                max_model_len=spec.max_model_len,
                max_num_seqs=spec.seats,
                max_num_batched_tokens=spec.budget,
                max_queue=spec.max_queue,
                ageing_steps=spec.ageing_steps,
                max_bypass=spec.max_bypass,
                max_contexts=MAX_CONTEXTS,
            ),
            clock=self.clock,
            rng=random.Random(spec.seed),
            new_context_id=map("ctx-{}".format, count()).__next__,
        )
        self.clients: dict[str, Client] = {}
        self._arrivals = sorted((r for r in spec.requests if r.follows is None), key=lambda r: r.arrival)
        self._followers: dict[str, list[RequestSpec]] = {}
        for request in spec.requests:
            if request.follows is not None:
                self._followers.setdefault(request.follows, []).append(request)
        self._now = 0
        self._step_failed = False
        self._step_began = 0.0
        self.fairness = Fairness(
            self.engine._scheduler,
            self.cache,
            budget=spec.budget,
            ageing_steps=spec.ageing_steps,
            max_bypass=spec.max_bypass,
        )
        self.contexts = ContextKeeper(self.engine.contexts, self.cache, spec.contexts)
        self._outgrown: set[str] = set()
        self._stored: set[int] = set()  # prefixes computed since the last reset
        self._watch_schedule()
        self._resets = self._idle_steps = 0
        if self.tiers is not None:
            self.runner.meanwhile = self.tiers.turns.run

    def run(self) -> None:
        """Play to the end."""
        while self._arrivals or self.engine.has_work:
            while self._arrivals and self._arrivals[0].arrival <= self._now:
                self._submit(self._arrivals.pop(0))
            if not self.engine.has_work:
                self._now = max(self._now, self._arrivals[0].arrival) if self._arrivals else self._now
                continue
            if self._rng.random() < self.spec.reset_rate:
                self.engine.reset_prefix_cache()
                self._stored.clear()
                self._resets += 1
            for warm in self.contexts.change(self._now):
                self._submit(warm)
            self._step()
            self._cancel()
        self._check_the_end()

    def close(self) -> None:
        """End the threads of the tiers. Idempotent."""
        if self.tiers is not None:
            self.tiers.close()

    # -- what happens ------------------------------------------------------------------------------------------------

    def _submit(self, spec: RequestSpec) -> None:
        prompt = spec.prompt
        use = None
        if spec.context is not None:
            use = self.contexts.use(spec)
            if use is None:
                self._release_followers(spec.name)
                return
            prompt = (*self.contexts.by_id[use.id].ids, *prompt)
        if spec.follows is not None:
            earlier = self.clients.get(spec.follows)
            if earlier is not None:
                said = [token.token_id for token in earlier.choices[0].alone.tokens[: earlier.choices[0].tokens]]
                prompt = (*earlier.request.prompt_ids, *said, *prompt)
        params = SamplingParams(**spec.params)  # type: ignore[arg-type]
        request = Request(
            spec.name, list(prompt), params, spec.salt, priority=spec.priority, timeout=spec.timeout, context=use
        )
        room = min(self.spec.max_model_len, self.spec.num_pages * self.spec.page_size) - len(prompt)
        full = len(self.engine._scheduler.waiting) >= self.spec.max_queue
        impossible = room < (params.max_tokens != 0) or max(params.n, params.beam_width) > self.spec.seats
        if params.beam_width:
            whole = len(prompt) // self.cache.page_size
            each = self.cache.pages_for(len(prompt) + 1) - whole
            impossible = impossible or whole + params.beam_width * each > self.spec.num_pages
        try:
            self.engine.add(request)
        except (InvalidRequestError, QueueFullError) as refusal:
            if not (impossible if isinstance(refusal, InvalidRequestError) else full):
                raise
            self._release_followers(spec.name)
            return
        assert not full, "the queue took more than its cap"
        assert not impossible, "accepted what can't be served"
        self.fairness.arrived(spec.name, spec.priority)
        state = self.engine._states[spec.name]
        seed = state.sequences[0].seed
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        count = params.n if limit else 1
        root = root_of(spec.salt)
        if params.beam_width and limit:
            alone = run_beams_alone(choose, root, prompt, params, limit)
        else:
            seeds = [seed + index & MAX_SEED for index in range(count)]
            alone = [run_alone(choose, root, prompt, params, seed, limit) for seed in seeds]
        self.clients[spec.name] = Client(
            spec=spec,
            request=request,
            state=state,
            deadline=math.inf if spec.timeout is None else self.clock.now + spec.timeout,
            choices=[Choice(one) for one in alone],
        )

    def _release_followers(self, name: str) -> None:
        for follower in self._followers.pop(name, ()):
            self._arrivals.append(replace(follower, arrival=self._now + follower.arrival))
        self._arrivals.sort(key=lambda r: r.arrival)

    def _step(self) -> None:
        if self.tiers is not None:
            assert isinstance(self.cache, CacheManager)
            if pause := self.engine.pause():
                self.tiers.wait(pause)
            self.tiers.go_on(self.cache)
            self._idle_steps = self._idle_steps + 1 if self.clock.now == self._step_began else 0
            assert self._idle_steps < MOST_IDLE_STEPS, "all wait for pages, and the engine doesn't"
        failures, self._step_began = self.runner.failures, self.clock.now
        self.runner.computed.clear()
        outputs = self.engine.step()
        if self.runner.fault is not None:
            raise self.runner.fault
        self._step_failed = self.runner.failures > failures
        self.steps += 1
        self._now += 1
        seen = [output.request_id for output in outputs]
        assert len(set(seen)) == len(seen), "two outputs for one request in one step"
        for prefixes in self.runner.computed:
            self._remember(prefixes)
        for output in outputs:
            self._take(output)
        self._check()

    def _cancel(self) -> None:
        for name in [*self.engine._states]:
            client = self.clients[name]
            if client.spec.cancel is None:
                continue
            phase, times = client.spec.cancel
            client.seen_of_phase += phase in ("any", *self._phases(client))
            if client.seen_of_phase >= times:
                output = self.engine.abort(name)
                assert output is not None
                self._take(output, cancelled=True)
                self._check()

    def _phases(self, client: Client) -> list[str]:
        phases = []
        for sequence in client.state.sequences:
            if sequence.lease is not None:
                phases.append("decode" if sequence.started else "prefill")
            else:
                phases.append("preempted" if self.fairness.preemptions[sequence] else "waiting")
                if sequence.awaits is not None:
                    phases.append("awaiting")
        return phases

    # -- what clients see --------------------------------------------------------------------------------------------

    def _take(self, output: RequestOutput, *, cancelled: bool = False) -> None:
        client = self.clients[output.request_id]
        params = client.request.params
        assert not client.finished, "news after the end"
        assert output.prompt_tokens == len(client.request.prompt_ids)
        self._take_cached(client, output.cached_tokens)
        indexes = [delta.index for delta in output.choices]
        assert len(set(indexes)) == len(indexes), "two deltas of one choice in one step"
        timed_out = isinstance(output.error, DeadlineExceededError)
        # Beams that don't get to their end are handed out as far as they got, those that ended by themselves too.
        unfinished = params.beam_width > 0 and (timed_out or output.request_id in self._outgrown)
        for delta in output.choices:
            choice = client.choices[delta.index]
            if unfinished:
                choice.tokens, choice.reason = len(delta.token_ids), delta.finish_reason
            else:
                self._take_delta(choice, delta, params, cancelled)
        if output.prompt_logprobs is not None:
            self._take_prompt_logprobs(client, output)
        assert output.completion_tokens == sum(choice.tokens for choice in client.choices)
        done = all(choice.reason is not None for choice in client.choices)
        early = {choice.reason for choice in client.choices} & {"abort", "error", "timeout"}
        if unfinished and timed_out:
            early.add("timeout")
        # Choices that were not forked yet end with the first.
        assert output.finished == (done or bool(early))
        assert (output.error is not None) == bool(early & {"error", "timeout"})
        assert isinstance(output.error, DeadlineExceededError) == ("timeout" in early)
        if "timeout" in early:
            assert client.deadline <= self._step_began, "ended before its time"
        if output.finished:
            client.finished = True
            self._check_appended(client, early=bool(early))
            if params.prompt_logprobs is not None and not early:
                assert client.prompt_logprobs
            self._release_followers(output.request_id)

    def _check_appended(self, client: Client, *, early: bool) -> None:
        if (use := client.request.context) is not None and use.append:
            prompt = client.request.prompt_ids
            answer = [token.token_id for token in client.choices[0].alone.tokens]
            before = prompt[: len(prompt) - len(client.spec.prompt)]
            self.contexts.check(use, before if early else [*prompt, *answer])

    def _take_cached(self, client: Client, cached: int) -> None:
        params, prompt = client.request.params, client.request.prompt_ids
        if client.cached_tokens is None and client.state.admitted_at is not None:
            client.cached_tokens = cached
            assert 0 <= cached < len(prompt)
            if cached:
                assert params.use_prefix_cache and params.prompt_logprobs is None
                assert self.spec.index in ("radix", "hash")
        assert cached == (client.cached_tokens or 0), "cached_tokens changed"

    def _take_delta(self, choice: Choice, delta: ChoiceDelta, params: SamplingParams, cancelled: bool) -> None:
        assert choice.reason is None, "a choice went on after its end"
        alone, before = choice.alone, choice.tokens
        choice.tokens += len(delta.token_ids)
        expected = alone.tokens[before : choice.tokens]
        assert delta.token_ids == [token.token_id for token in expected], "other tokens than alone, lost or twice"
        assert delta.logprobs == (expected if params.logprobs is not None else [])
        choice.text += delta.text
        if delta.finish_reason is None:
            assert choice.text == alone.shown[choice.tokens], "text held back too long or not long enough"
            return
        choice.reason = delta.finish_reason
        if cancelled:
            assert delta.finish_reason == "abort"
        elif delta.finish_reason == "error":
            assert self._step_failed, "an error that nobody planned"
        elif delta.finish_reason == "timeout":
            assert not delta.token_ids
        else:
            assert (delta.finish_reason, delta.stop_reason) == (alone.reason, alone.stop_reason)
            assert choice.tokens == len(alone.tokens), "it ended too early"
            assert choice.text == alone.final, "other text than alone"

    def _take_prompt_logprobs(self, client: Client, output: RequestOutput) -> None:
        params, prompt = client.request.params, client.request.prompt_ids
        assert params.prompt_logprobs is not None and not client.prompt_logprobs
        client.prompt_logprobs = True
        prefix, expected = root_of(client.request.namespace_salt), [None]
        for token, target in pairwise(prompt):
            prefix = prefix_of(prefix, (token,))
            expected.append(logprob_of(prefix, target, params.prompt_logprobs, AwkwardVocabulary.vocab_size))  # type: ignore[arg-type]
        assert output.prompt_logprobs == expected

    # -- what must hold after every step -----------------------------------------------------------------------------

    def _watch_schedule(self) -> None:
        """See each step's plan before the engine does."""
        scheduler = self.engine._scheduler
        schedule = scheduler.schedule

        def watched() -> Schedule:
            self.fairness.before()
            plan = schedule()
            self.fairness.after(plan)
            for sequence in plan.admitted:
                self._check_hit(sequence)
            self.runner.rows = [row for sequence in plan.shares for row in rows_of(sequence)]
            self._outgrown.update(sequence.state.request.request_id for sequence in plan.outgrown)
            return plan

        scheduler.schedule = watched  # type: ignore[method-assign]

    def _check_hit(self, sequence: Sequence) -> None:
        """What an admission found in the cache was computed after the last reset, for the same tenant."""
        lease = sequence.lease
        if lease is None:  # it was preempted again at once
            return
        context = sequence.state.context
        if context is not None and sequence.ids[: len(context.ids)] == context.ids and sequence.state.reads_cache:
            held = min(context.held_tokens, len(sequence.ids) - 1)
            # Of a page that is hit in part the hit may be given up for room.
            assert lease.cached_tokens >= held - held % self.cache.page_size, "held pages were evicted"
        if lease.computed:
            prefixes = self.runner.prefixes(sequence, sequence.ids, lease.computed)
            assert prefixes[-1] in self._stored, "a hit on what was never computed"

    def _check(self) -> None:
        engine, scheduler = self.engine, self.engine._scheduler
        self.cache.check()
        for name in engine._states:
            assert self.clients[name].deadline > self._step_began, "a request outlived its time"
        seats = sum(sequence.seats for sequence in scheduler.running)
        assert seats <= self.spec.seats, f"{seats} seats taken of {self.spec.seats}"
        in_flight = [sequence for state in engine._states.values() for sequence in state.sequences]
        assert len(in_flight) == len(scheduler.running) + len(scheduler.waiting), "a sequence was dropped"
        assert {*in_flight} == {*scheduler.running, *scheduler.waiting}
        assert all(sequence.lease is None for sequence in scheduler.waiting)
        leases = [row.lease for sequence in scheduler.running for row in rows_of(sequence)]
        assert not any(lease.closed for lease in leases)
        if isinstance(self.cache, CacheManager):
            check_holders(self.cache, leases)
            to_copy = {source for source, _ in self.cache._copies}
            self.runner.memory.clear(page for page in self.cache.pool._free if page not in to_copy)

    def _remember(self, prefixes: list[int]) -> None:
        """All these prefixes are computed and may be hit by others."""
        for prefix in reversed(prefixes):
            if prefix in self._stored:
                break
            self._stored.add(prefix)

    def _check_the_end(self) -> None:
        assert not self.engine._states and not self.engine._scheduler.running and not self.engine._scheduler.waiting
        self.contexts.delete_all()
        if self.tiers is not None:
            assert isinstance(self.cache, CacheManager)
            self.tiers.finish(self.cache, exact=self.spec.index == "radix" and not self._resets)
        assert self.cache.stats().active_pages == self.cache.stats().pinned_pages == 0, "pages left behind"
        for client in self.clients.values():
            assert client.finished, f"{client.spec.name} never ended"
        self.engine.reset_prefix_cache()
        self.cache.check()
        assert self.cache.stats().free_pages == self.spec.num_pages, "pages are neither free nor cached"
        if isinstance(self.cache, CacheManager):
            assert self.cache.pool._free and self.cache.pool.state.count(FREE) == self.spec.num_pages
            assert not self.cache._computing, "a page is said to be computed by nobody"


def _cache(spec: WorldSpec, clock: VirtualClock, tiers: SimTiers | None) -> KVCache:
    if spec.index == "contiguous":
        return ContiguousCacheManager(num_pages=spec.num_pages, page_size=spec.page_size, max_tokens=spec.max_model_len)
    return CacheManager(
        num_pages=spec.num_pages,
        page_size=spec.page_size,
        index=spec.index,
        hold_limit=spec.hold_limit,
        policy=make_policy(spec.eviction, spec.num_pages, spec.page_size, clock),
        transfers=None if tiers is None else tiers.transfers,
    )
