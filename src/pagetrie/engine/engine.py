"""The step loop: admit, plan, compute, commit, hand out.

An ``Engine`` does nothing by itself; whoever owns it calls ``step`` while ``has_work``. It is not thread-safe, except
for ``validate``.
"""

from __future__ import annotations

import logging
import random
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Sequence_
from heapq import heappop, heappush
from itertools import islice

from pagetrie.engine.beam_search import BeamSearch
from pagetrie.engine.beams import BeamGroup
from pagetrie.engine.cache_records import CacheRecords
from pagetrie.engine.config import EngineConfig
from pagetrie.engine.contexts import Contexts
from pagetrie.engine.door import Door
from pagetrie.engine.observer import (
    AdmissionReport,
    ArrivalReport,
    EngineObserver,
    FinishReport,
    PrefillReport,
    RejoinReport,
    SeatReport,
    StepReport,
    TokenReport,
)
from pagetrie.engine.output import ChoiceDelta, FinishReason, RequestOutput
from pagetrie.engine.planning import step_plan
from pagetrie.engine.public import PublicPrefixes
from pagetrie.engine.request import Request
from pagetrie.engine.runner import Runner, SequenceResult, TokenLogprob
from pagetrie.engine.scheduler import Scheduler
from pagetrie.engine.sequence import SEED_MASK, RequestState, Sequence
from pagetrie.engine.tenant import LOCAL, Tenant
from pagetrie.engine.text_stream import TextStream, Vocabulary
from pagetrie.engine.usage import CacheUsage, measure_usage
from pagetrie.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    PagetrieError,
    QueueFullError,
)
from pagetrie.kv import CacheLease, CacheStats, KVCache, ResetReport, TransferReport, encode_namespace

log = logging.getLogger(__name__)

_TELLING_PREFILL = 64
"""Prompt tokens in a step from which its duration says something about the speed of prefill."""


class Engine:
    """Serves requests over a paged cache.

    Args:
        runner: computes steps.
        cache: the pages.
        vocabulary: token bytes and end-of-sequence ids.
        config: limits.
        clock: seconds, for reports, requests' timeouts and the life of contexts; scheduling never depends on it.
        rng: draws seeds for requests that bring none.
        observer: hears what happens.
        new_context_id: makes the ids of contexts, which must be unguessable.

    Attributes:
        contexts: what requests may start from; see ``Contexts``.
        cache_records: why the latest requests hit or missed the cache.
        public: prefixes that all tenants share.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        cache: KVCache,
        vocabulary: Vocabulary,
        config: EngineConfig,
        clock: Callable[[], float],
        rng: random.Random,
        observer: EngineObserver | None = None,
        new_context_id: Callable[[], str] = lambda: f"ctx-{secrets.token_urlsafe(24)}",
    ) -> None:
        self.config = config
        self._runner = runner
        self._cache = cache
        self._vocabulary = vocabulary
        self._clock = clock
        self._rng = rng
        self._observer = observer or EngineObserver()
        self._tells_tokens = type(self._observer).on_token is not EngineObserver.on_token
        self._door = Door(config, cache, vocabulary, self.namespace)
        # What streams of text know of tokens, for those that show special tokens and those that skip them.
        self._pieces: tuple[dict[int, str], dict[int, str]] = ({}, {})
        # When the tokens of the current step were there.
        self._computed_at = 0.0
        self._scheduler = Scheduler(
            cache,
            max_seats=config.max_num_seqs,
            max_step_tokens=config.max_num_batched_tokens,
            ageing_steps=config.ageing_steps,
            max_bypass=config.max_bypass,
        )
        self._transfers = cache.transfers
        # The last step found nothing to compute.
        self._stalled = False
        self._states: dict[str, RequestState] = {}
        self.contexts = Contexts(
            cache,
            namespace=self.namespace,
            clock=clock,
            new_id=new_context_id,
            max_per_owner=config.max_contexts,
        )
        self.cache_records = CacheRecords(cache, namespace=self.namespace, clock=clock)
        self.public = PublicPrefixes(cache, self._pages_namespace({"public": config.public_salt}))
        # Owners whose requests are taken; None for anybody's.
        self._tenants: set[bytes] | None = None
        self._arrivals = 0
        # (deadline, arrival number, request id); those that ended before are skipped when they come up.
        self._deadlines: list[tuple[float, int, str]] = []

    # -- the door ----------------------------------------------------------------------------------------------------

    def validate(self, request: Request) -> None:
        """Refuse what can never be served. Raises InvalidRequestError. Thread-safe."""
        self._door.validate(request)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never be served, or its id is in use.
            QueueFullError: the queue is at its cap.
        """
        self.validate(request)
        if self._tenants is not None and request.tenant.owner not in self._tenants:
            raise InvalidRequestError("this tenant has been removed", code="invalid_api_key", status=401)
        if request.request_id in self._states:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use", param="request_id")
        if self.num_waiting >= self.config.max_queue:
            raise QueueFullError(self.config.max_queue)
        params = request.params
        use = request.context
        context = None if use is None else self.contexts.begin(use)
        room = self._door.max_len(request.tenant) - len(request.prompt_ids)
        state = RequestState(
            request=request,
            order=self._arrivals,
            namespace=self.namespace(request.namespace_salt, request.tenant),
            arrival=self._clock(),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            prompt_logprobs_due=params.prompt_logprobs is not None,
            level=self._scheduler.level(request.priority),
            end_ids=self._door.end_ids(params),
            context=context,
        )
        self._arrivals += 1
        seed = self._rng.getrandbits(64) if params.seed is None else params.seed
        root = Sequence(
            state=state, index=0, seed=seed & SEED_MASK, ids=list(request.prompt_ids), text=self._text(state)
        )
        if state.max_tokens:
            root.forks = max(params.n, params.beam_width) - 1
            root.beams = self._beams(state) if params.beam_width else None
        state.sequences.append(root)
        self._states[request.request_id] = state
        if request.timeout is not None:
            if len(self._deadlines) > 2 * len(self._states) + 64:  # mostly of requests that have ended
                living = {state.order for state in self._states.values()}
                self._deadlines = sorted(entry for entry in self._deadlines if entry[1] in living)
            heappush(self._deadlines, (state.arrival + request.timeout, state.order, request.request_id))
        self._scheduler.add(root)
        self._stalled = False
        self._observer.on_arrival(
            ArrivalReport(
                request.request_id,
                state.arrival,
                request.prompt_ids,
                state.namespace,
                params,
                request.trace_headers,
                request.kind,
            )
        )

    def set_tenants(self, tenants: Iterable[Tenant]) -> list[RequestOutput]:
        """Who there is, and how much of the cache each may keep. Others' requests are refused from now on.

        Who was there before and isn't any more loses everything: its requests end (their outputs are returned), its
        contexts and its pages go.

        Raises:
            ValueError: the floors are more than the whole cache.
        """
        allowances = {tenant.owner: tenant.allowance for tenant in tenants}
        self._cache.allow({owner: allowance for owner, allowance in allowances.items() if owner})
        server = Tenant(salt=self.config.public_salt).owner  # computes public prefixes
        gone = set[bytes]() if self._tenants is None else self._tenants - allowances.keys() - {server}
        self._tenants = {server, *allowances}
        outputs = [
            self._end(state, "abort") for state in list(self._states.values()) if state.request.tenant.owner in gone
        ]
        for owner in gone:
            self.contexts.drop(owner)
            self.cache_records.drop(owner)
            self._cache.drop_owner(owner)
        return outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in whatever phase it is; its pages are free when this returns.

        Returns the final output for a listener that is still there; None if no such request is in flight.
        """
        state = self._states.get(request_id)
        return None if state is None else self._end(state, "abort")

    def abort_all(self) -> list[RequestOutput]:
        """End every request."""
        return [self._end(state, "abort") for state in list(self._states.values())]

    def reset_prefix_cache(self) -> ResetReport:
        """Forget every stored prefix; see ``ResetReport`` for what running requests keep."""
        return self._cache.reset()

    @property
    def has_work(self) -> bool:
        return bool(self._states)

    def settle(self) -> None:
        """Take in what has arrived from tiers below the pool. ``step`` does so too."""
        if self._transfers is not None:
            self._transfers.settle()

    def set_waker(self, waker: Callable[[], None]) -> None:
        """What to call, from any thread, when a pause may be over before its time."""
        if self._transfers is not None:
            self._transfers.set_waker(waker)

    def pause(self) -> float | None:
        """How long nothing has to be done, in seconds: 0 for a step (or ``settle``) now, None until something is added.

        A pause of a certain length means that all requests wait for pages from tiers below the pool.
        """
        now, waits = self._clock(), []
        if self._transfers is not None and (arrival := self._transfers.next_deadline()) is not None:
            waits.append(0.0 if self._transfers.has_news() else arrival - now)
        if self.has_work:
            if not (self._stalled and waits):
                return 0.0
            waits += [deadline - now for deadline, _, _ in self._deadlines[:1]]
        if (expiry := self.contexts.seconds_to_expiry()) is not None:
            waits.append(expiry)
        return max(0.0, min(waits)) if waits else None

    def transfer_report(self) -> TransferReport | None:
        """The tiers below the pool in numbers; None if there are none. May be called from any thread."""
        return None if self._transfers is None else self._transfers.report()

    def close(self) -> None:
        """Write what the pool holds to the tiers below it, for a bounded time. Nothing is stored after that."""
        if self._transfers is not None:
            self._transfers.close()

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return self._door.longest

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def running(self) -> Sequence_[Sequence]:
        """Sequences with a seat, by rank."""
        return self._scheduler.running

    @property
    def requests(self) -> Collection[RequestState]:
        """All requests in flight, the oldest first."""
        return self._states.values()

    @property
    def cache(self) -> KVCache:
        return self._cache

    def now(self) -> float:
        """Seconds, by the clock of all reports."""
        return self._clock()

    @property
    def num_deferred(self) -> int:
        """Those of the waiting that wait for pages that are being computed or loaded."""
        return self._scheduler.waiting.num_parked

    def cache_stats(self) -> CacheStats:
        return self._cache.stats()

    def usage(self) -> CacheUsage:
        """How well the memory is used now. Takes a walk over the tree and the running sequences."""
        return measure_usage(
            self._cache,
            [lease for sequence in self._scheduler.running for lease in sequence.leases],
            self.config.max_model_len,
        )

    @property
    def page_size(self) -> int:
        return self._cache.page_size

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step and return what it brought, at most one output per request.

        A failure of the runner ends the requests in the step with an error and leaves the others untouched.
        """
        started = self._clock()
        self.contexts.expire()
        outputs: dict[str, RequestOutput] = {}
        self._expire(started, outputs)
        self.settle()
        plan = self._scheduler.schedule()
        if self._transfers is not None:
            self._transfers.note_step(bool(plan.shares))
        self._stalled = not (plan.shares or plan.preempted)
        for sequence in plan.parked:
            if sequence.state.parked_at is None:
                sequence.state.parked_at = started
        for sequence in plan.preempted:
            self._observer.on_seat(SeatReport(sequence.state.request.request_id, sequence.index, started, False))
        # First, since whoever is admitted now may stand on what one of these has waited for.
        for sequence, count in plan.rejoined.items():
            self._on_rejoined(sequence, count, started)
        for sequence in plan.admitted:
            self._on_admitted(sequence, started)
        for sequence in plan.outgrown:
            self._finish(sequence, "length", None, outputs)
        for sequence in plan.stranded:
            failure = EngineError("there is no room for this request, though nothing else runs; try again")
            outputs[sequence.state.request.request_id] = self._end(sequence.state, "error", failure)
        prefills = [
            PrefillReport(
                sequence.state.request.request_id, sequence.lease.computed, count * sequence.rows, started, started
            )
            for sequence, count in plan.chunks.items()
            if (count > 1 or not sequence.output_ids) and sequence.lease is not None
        ]
        prefill_tokens = sum(report.tokens for report in prefills)
        generated = 0
        if plan.shares:
            todo = step_plan(plan, self._cache.take_copies())
            try:
                results = self._runner.execute(todo)
            except Exception as error:
                log.exception("the runner failed; %d sequences end with an error", len(plan.shares))
                failure = EngineError(f"the model failed on this request ({type(error).__name__}); try again")
                for state in {sequence.state for sequence in plan.shares}:
                    outputs[state.request.request_id] = self._end(state, "error", failure)
            else:
                self._computed_at = self._clock()
                for report in prefills:
                    report.end = self._computed_at
                    self._observer.on_prefill(report)
                coming = iter(results)
                for sequence, count in plan.shares.items():
                    lease = sequence.lease
                    if (
                        sequence.decode_step is not None
                        and lease is not None
                        and lease.computed + 1 == len(sequence.ids)
                    ):
                        generated += self._append(sequence, next(coming).samples[0], outputs, decoded=True)
                    elif sequence.beams is None:
                        generated += self._commit(sequence, count, next(coming), outputs)
                    else:
                        taken = list(islice(coming, sequence.rows))
                        generated += self._commit_beams(sequence, sequence.beams, count, taken, outputs)
        now = self._clock()
        if self._transfers is not None and prefill_tokens >= _TELLING_PREFILL:
            attended = sum(report.tokens * (report.position + report.tokens // 2) for report in prefills)
            self._transfers.note_prefill(prefill_tokens, attended, now - started)
        if self._transfers is not None and not self._scheduler.running:
            self._transfers.note_step(False)  # whoever comes next finds the cores free
        self._observer.on_step(
            StepReport(
                time=now,
                duration=now - started,
                running=self.num_running,
                waiting=self.num_waiting,
                computed_tokens=plan.tokens,
                prefill_tokens=prefill_tokens,
                generated_tokens=generated,
                preemptions=len(plan.preempted),
            )
        )
        return list(outputs.values())

    def _expire(self, now: float, outputs: dict[str, RequestOutput]) -> None:
        """End the requests whose time is up."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, order, request_id = heappop(self._deadlines)
            state = self._states.get(request_id)
            if state is not None and state.order == order:
                error = DeadlineExceededError(state.request.timeout or 0.0, state.completion_tokens)
                outputs[request_id] = self._end(state, "timeout", error)

    def _on_admitted(self, sequence: Sequence, now: float) -> None:
        state, request = sequence.state, sequence.state.request
        if state.admitted_at is not None:
            self._observer.on_seat(SeatReport(request.request_id, sequence.index, now, True))
        if state.admitted_at is not None or sequence.lease is None:
            return
        state.admitted_at = now
        state.cached_tokens = sequence.lease.cached_tokens
        state.cached_by_tier = self._claim(sequence.lease)
        self._observer.on_admission(
            AdmissionReport(
                request_id=request.request_id,
                queue_time=now - state.arrival,
                prompt_tokens=len(request.prompt_ids),
                cached_tokens=state.cached_tokens,
                cached_by_tier=state.cached_by_tier,
                reason=self.cache_records.note(sequence, self._scheduler.running).reason,
                time=now,
                wait_time=0.0 if state.parked_at is None else now - state.parked_at,
                tenant=request.tenant.name,
            )
        )

    def _claim(self, lease: CacheLease) -> dict[str, int]:
        """Of a lease's tokens, how many came from which tier and are used for the first time since."""
        claimed = {} if self._transfers is None else self._transfers.claim(lease.pages)
        return {name: pages * self._cache.page_size for name, pages in claimed.items()}

    def _on_rejoined(self, sequence: Sequence, count: int, now: float) -> None:
        state = sequence.state
        # Of one that lost its seat it was told before what was cached.
        if sequence.lease is None or sequence.preemptions or sequence.output_ids:
            return
        tiers = self._claim(sequence.lease)
        state.cached_tokens += count
        state.cached_by_tier = dict(Counter(state.cached_by_tier) + Counter(tiers))
        self.cache_records.add_cached(state)
        self._observer.on_rejoin(RejoinReport(state.request.request_id, now, count, tiers))

    def _commit(self, sequence: Sequence, count: int, result: SequenceResult, outputs: dict[str, RequestOutput]) -> int:
        """Take in what a step gave for a sequence. Returns the number of tokens handed out."""
        lease, state = sequence.lease, sequence.state
        assert lease is not None
        lease.commit(count)
        if state.prompt_logprobs_due:
            state.prompt_logprobs += result.prompt_logprobs
        if lease.computed < len(sequence.ids):
            return 0
        output = self._output(state, outputs)
        if state.prompt_logprobs_due:
            output.prompt_logprobs = [None, *state.prompt_logprobs]
            state.prompt_logprobs_due = False
        if not state.max_tokens:
            self._finish(sequence, "length", None, outputs)
            return 0
        sequences = [sequence, *self._fork(sequence)]
        return sum(
            self._append(choice, token, outputs) for choice, token in zip(sequences, result.samples, strict=True)
        )

    def _beams(self, state: RequestState) -> BeamGroup:
        params = state.request.params
        search = BeamSearch(
            width=params.beam_width,
            max_tokens=state.max_tokens,
            end_ids=state.end_ids,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            top_logprobs=params.logprobs or 0,
        )
        return BeamGroup(search, state.request.prompt_ids, self._cache.page_size)

    def _commit_beams(
        self,
        sequence: Sequence,
        group: BeamGroup,
        count: int,
        results: list[SequenceResult],
        outputs: dict[str, RequestOutput],
    ) -> int:
        """``_commit`` for a sequence that stands for a group of beams."""
        lease, state = sequence.lease, sequence.state
        assert lease is not None
        lease.commit(count)
        if state.prompt_logprobs_due:
            state.prompt_logprobs += results[0].prompt_logprobs
        if lease.computed < len(sequence.ids):
            return 0
        if state.prompt_logprobs_due:
            self._output(state, outputs).prompt_logprobs = [None, *state.prompt_logprobs]
            state.prompt_logprobs_due = False
        sequence.lease = group.take(lease, results)
        if group.search.done:
            before = state.completion_tokens
            self._finish(sequence, "length", None, outputs)
            return state.completion_tokens - before
        best = group.search.live[0]
        sequence.ids[len(state.request.prompt_ids) :] = best.tokens
        sequence.output_ids = best.tokens
        if state.first_token_at is None:
            self._report_token(sequence)
        return 0

    def _finish_beams(
        self, sequence: Sequence, group: BeamGroup, reason: FinishReason, outputs: dict[str, RequestOutput]
    ) -> None:
        """Hand out a group's best hypotheses and end the request; ``reason`` is that of those that no token ended."""
        state, params = sequence.state, sequence.state.request.params
        output = self._output(state, outputs)
        best = group.search.best(params.n) if reason in ("length", "timeout") else []
        deltas = [ChoiceDelta(index, finish_reason=reason) for index in range(params.n)]
        for delta, beam in zip(deltas, best, strict=False):
            delta.token_ids = beam.tokens
            delta.text = self._whole_text(state, beam.tokens)
            delta.logprobs = beam.logprobs if params.logprobs is not None else []
            if beam.end is not None:
                delta.finish_reason = "stop"
                delta.stop_reason = beam.end if beam.end in params.stop_token_ids else None
            state.completion_tokens += len(beam.tokens)
        output.choices += deltas
        output.completion_tokens = state.completion_tokens
        self._scheduler.remove(sequence, publish_tail=reason != "error")
        state.sequences.clear()
        output.finished = True
        self._leave_context(sequence, reason)
        del self._states[state.request.request_id]
        for delta in deltas:
            sequence.index, sequence.output_ids = delta.index, delta.token_ids
            self._report_finish(sequence, delta.finish_reason or reason, last=delta is deltas[-1])

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """Make the choices that share the prompt just computed."""
        state, lease, children = sequence.state, sequence.lease, []
        assert lease is not None
        for index in range(1, sequence.seats):
            child = Sequence(
                state=state,
                index=index,
                seed=(sequence.seed + index) & SEED_MASK,
                ids=sequence.ids.copy(),
                text=self._text(state),
                lease=lease.fork(),
            )
            children.append(child)
            state.sequences.append(child)
        sequence.forks = 0
        for child in children:
            self._scheduler.start_fork(child)
        return children

    def _append(
        self, sequence: Sequence, token: TokenLogprob, outputs: dict[str, RequestOutput], decoded: bool = False
    ) -> int:
        """Give a choice its next token; end it if this was the last. Returns 1 if the token was handed out, else 0.

        It runs for every sequence in every step. ``decoded``: the token before it has just been computed, but isn't
        committed yet.
        """
        state, lease = sequence.state, sequence.lease
        request = state.request
        params = request.params
        assert lease is not None
        token_id, text, made = token.token_id, sequence.text, sequence.output_ids
        if token_id in state.end_ids:
            if decoded:
                lease.commit(1)
            self._finish(sequence, "stop", token_id if token_id in params.stop_token_ids else None, outputs)
            return 0
        sequence.ids.append(token_id)
        made.append(token_id)
        if decoded:
            lease.advance(token_id)
        else:
            lease.append((token_id,))
        state.completion_tokens += 1
        # A choice gets one token in a step, so its delta is new.
        delta = ChoiceDelta(
            sequence.index,
            text.push(token_id, len(made) >= params.min_tokens),
            [token_id],
            [] if params.logprobs is None else [token],
        )
        output = outputs.get(request.request_id)
        if output is None:
            outputs[request.request_id] = self._new_output(state, [delta])
        else:
            output.choices.append(delta)
            output.completion_tokens = state.completion_tokens
        if self._tells_tokens or state.first_token_at is None:
            self._report_token(sequence)
        if text.stopped is not None:
            self._finish(sequence, "stop", text.stopped, outputs)
        elif len(made) >= state.max_tokens:
            self._finish(sequence, "length", None, outputs)
        return 1

    def _report_token(self, sequence: Sequence) -> None:
        state, now, last = sequence.state, self._computed_at, sequence.last_token_at
        sequence.last_token_at = now
        if state.first_token_at is None:
            state.first_token_at = now
        if self._tells_tokens:
            gap = now - (state.arrival if last is None else last)
            self._observer.on_token(TokenReport(state.request.request_id, last is None, gap, now))

    # -- endings -----------------------------------------------------------------------------------------------------

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop_reason: str | int | None,
        outputs: dict[str, RequestOutput],
    ) -> None:
        """End one choice; with the last one, the request."""
        if sequence.beams is not None:
            self._finish_beams(sequence, sequence.beams, reason, outputs)
            return
        delta = self._delta(sequence, outputs)
        delta.text += sequence.text.finish()
        if sequence.text.stopped is not None and reason in ("stop", "length"):
            # Held-back text completed a stop string only now, at the very end.
            reason, stop_reason = "stop", sequence.text.stopped
        delta.finish_reason, delta.stop_reason = reason, stop_reason
        # After a failed step the last page's content is in doubt.
        self._scheduler.remove(sequence, publish_tail=reason != "error")
        state = sequence.state
        state.sequences.remove(sequence)
        if not state.sequences:
            self._output(state, outputs).finished = True
            self._leave_context(sequence, reason)
            del self._states[state.request.request_id]
        self._report_finish(sequence, reason, last=not state.sequences)

    def _leave_context(self, sequence: Sequence, reason: FinishReason) -> None:
        """The last choice of a request on a context has ended and given its pages back; the hold follows at once."""
        context, use = sequence.state.context, sequence.state.request.context
        if context is None or use is None:
            return
        if not use.append or reason not in ("stop", "length"):
            self.contexts.end(context, append=use.append)
            return
        text = self._whole_text(sequence.state, sequence.output_ids)
        self.contexts.end(context, append=True, ids=sequence.ids, note=use.note(text))

    def _end(self, state: RequestState, reason: FinishReason, error: PagetrieError | None = None) -> RequestOutput:
        """End all choices of a request at once."""
        self._stalled = False  # somebody may wait for its seat
        outputs: dict[str, RequestOutput] = {}
        for sequence in state.sequences.copy():
            self._finish(sequence, reason, None, outputs)
        output = outputs[state.request.request_id]
        output.error = error
        return output

    def _report_finish(self, sequence: Sequence, reason: FinishReason, *, last: bool) -> None:
        state, now = sequence.state, self._clock()
        request, admitted, first = state.request, state.admitted_at, state.first_token_at
        self._observer.on_finish(
            FinishReport(
                request_id=request.request_id,
                reason=reason,
                n=request.params.n,
                max_tokens=state.max_tokens,
                prompt_tokens=len(request.prompt_ids),
                generated_tokens=len(sequence.output_ids),
                cached_tokens=state.cached_tokens,
                e2e_time=now - state.arrival,
                queue_time=None if admitted is None else admitted - state.arrival,
                prefill_time=None if admitted is None or first is None else first - admitted,
                decode_time=None if first is None else now - first,
                last_of_request=last,
                time=now,
                tenant=request.tenant.name,
                output_ids=sequence.output_ids,
            )
        )

    # -- small helpers -----------------------------------------------------------------------------------------------

    def _output(self, state: RequestState, outputs: dict[str, RequestOutput]) -> RequestOutput:
        request_id = state.request.request_id
        output = outputs.get(request_id)
        if output is None:
            output = outputs[request_id] = self._new_output(state, [])
        else:
            output.completion_tokens = state.completion_tokens
        return output

    def _new_output(self, state: RequestState, choices: list[ChoiceDelta]) -> RequestOutput:
        return RequestOutput(
            state.request.request_id,
            choices,
            len(state.request.prompt_ids),
            state.cached_tokens,
            state.completion_tokens,
            None,
            False,
            None,
            state.cached_by_tier,
        )

    def _delta(self, sequence: Sequence, outputs: dict[str, RequestOutput]) -> ChoiceDelta:
        output = self._output(sequence.state, outputs)
        for delta in output.choices:
            if delta.index == sequence.index:
                return delta
        delta = ChoiceDelta(sequence.index)
        output.choices.append(delta)
        return delta

    def _text(self, state: RequestState) -> TextStream:
        params = state.request.params
        skip = params.skip_special_tokens
        return TextStream(self._vocabulary, params.stop, skip_special=skip, pieces=self._pieces[skip])

    def _whole_text(self, state: RequestState, tokens: list[int]) -> str:
        stream = self._text(state)
        return "".join(map(stream.push, tokens)) + stream.finish()

    def namespace(self, salt: str = "", tenant: Tenant = LOCAL) -> bytes:
        """Under which requests with this salt, of this tenant, find and store pages."""
        return self._pages_namespace({"salt": salt or None, "tenant": tenant.salt or None})

    def _pages_namespace(self, whose: Mapping[str, str | bytes | None]) -> bytes:
        return encode_namespace({"model": self.config.model_fingerprint, "page_size": self._cache.page_size, **whose})
