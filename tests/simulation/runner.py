"""The simulated runner with a suspicious eye on every write, and with failures and slow steps on order."""

from __future__ import annotations

import random
from collections.abc import Sequence as Many

from pagetrie.engine.runner import SampleSpec, SequenceResult, StepPlan, TokenLogprob
from pagetrie.engine.sequence import Sequence
from pagetrie.kv import KVCache, Lease
from pagetrie.kv.pool import PRIVATE, PagePool
from pagetrie.sim import PageMemory, SimRunner, StepCost, VirtualClock, extend_prefix
from pagetrie.sim.runner import logprob_of
from tests.simulation.vocabulary import AwkwardVocabulary

_SIZE = AwkwardVocabulary.vocab_size
GARBAGE = 0xDEAD


class PlannedError(RuntimeError):
    """The model failed because the world wanted it to."""


def choose(prefix: int, spec: SampleSpec) -> TokenLogprob:
    """As ``pagetrie.sim.draw``, but every other text ends by itself after some 25 tokens."""
    if not spec.params.greedy:
        prefix = extend_prefix(extend_prefix(prefix, spec.seed), len(spec.output_ids))
    token = prefix % _SIZE
    while token in spec.banned_ids:
        token = (token + 1) % _SIZE
    return logprob_of(prefix, token, spec.params.logprobs or 0, _SIZE)


def root_of(salt: str) -> int:
    """A tenant's model computes numbers of its own, so that a page read across tenants is noticed."""
    return extend_prefix(0, sum(salt.encode())) if salt else 0


class CheckedRunner(SimRunner):
    """Refuses writes to pages that anyone else holds and reads that aren't the sequence's own tokens.

    Attributes:
        sequences: the engine's sequences of the step, in the order of the plan; set by the world before each step.
        computed: sequences whose pages others may hit after the step, and how many of their tokens are in them.
        fault: what was found wrong, for the world to raise: the engine takes it for a failure of the model.
        failures: how many planned failures there were.
    """

    def __init__(
        self, cache: KVCache, clock: VirtualClock, *, rng: random.Random, failure_rate: float, slow_rate: float
    ) -> None:
        super().__init__(
            memory=PageMemory(cache.num_pages, cache.page_size),
            clock=clock,
            cost=StepCost(per_step=0.01, per_token=0.001, per_attended=1e-6, per_copy=1e-4),
            vocab_size=_SIZE,
            choose=choose,
        )
        self._pool: PagePool | None = getattr(cache, "pool", None)
        self._page_size = cache.page_size
        self._rng = rng
        self._failure_rate = failure_rate
        self._slow_rate = slow_rate
        self._prefixes: dict[Sequence, list[int]] = {}
        self.sequences: Many[Sequence] = ()
        self.computed: list[tuple[Sequence, int]] = []
        self.fault: Exception | None = None
        self.failures = 0

    def execute(self, plan: StepPlan) -> list[SequenceResult]:
        self.computed = []
        try:
            self._check(plan)
            if self._rng.random() < self._failure_rate:
                self._fail(plan)
            if self._rng.random() < self._slow_rate:
                self.clock.advance(30.0)
            return super().execute(plan)
        except PlannedError:
            raise
        except Exception as error:
            self.fault = error
            raise

    def root(self, number: int) -> int:
        return root_of(self.sequences[number].state.request.namespace_salt)

    def on_read(self, number: int, prefix: int) -> None:
        sequence = self.sequences[number]
        lease = sequence.lease
        assert lease is not None
        end = lease.computed + len(self._shares[number].token_ids)
        assert prefix == self.prefix(sequence, end), f"{end} positions hold other tokens than the sequence's"
        forgotten = isinstance(lease, Lease) and lease._root.dead
        if sequence.state.request.params.use_prefix_cache and not forgotten:
            self.computed.append((sequence, end))

    def prefix(self, sequence: Sequence, end: int) -> int:
        """Identity of a sequence's first ``end`` tokens, at least 1."""
        known = self._prefixes.setdefault(sequence, [])
        while len(known) < end:
            before = known[-1] if known else root_of(sequence.state.request.namespace_salt)
            known.append(extend_prefix(before, sequence.ids[len(known)]))
        return known[end - 1]

    def forget(self, sequence: Sequence) -> None:
        self._prefixes.pop(sequence, None)

    def _check(self, plan: StepPlan) -> None:
        self._shares = plan.sequences
        assert len(self.sequences) == len(plan.sequences)
        written: set[int] = set()
        for sequence, share in zip(self.sequences, plan.sequences, strict=True):
            count, size = len(share.token_ids), self._page_size
            assert count >= 1, "an empty share"
            assert list(share.token_ids) == sequence.ids[share.start : share.start + count], "tokens at a wrong place"
            pages = share.pages[share.start // size : (share.start + count - 1) // size + 1]
            for page in pages:
                assert page not in written, f"two sequences write page {page} in one step"
                written.add(page)
                if self._pool is not None:
                    assert self._pool.state[page] == PRIVATE, f"page {page} is written, but is indexed or free"
                    assert self._pool.references[page] == 1, f"page {page} is written, but others hold it too"

    def _fail(self, plan: StepPlan) -> None:
        """Fail half-way: the copies are done, and the pages that were to be written hold nonsense throughout."""
        self.failures += 1
        self.memory.copy(plan.copies)
        for share in plan.sequences:
            start = share.start - share.start % self._page_size
            self.memory.write(
                share.pages, start, [GARBAGE] * (share.start - start + len(share.token_ids)), root=GARBAGE
            )
        raise PlannedError("planned")
