"""The simulated runner with a suspicious eye on every write, and with failures and slow steps on order."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from pagetrie.engine.beams import GroupLease
from pagetrie.engine.runner import SampleSpec, SequenceResult, StepPlan, TokenLogprob
from pagetrie.engine.sequence import Sequence
from pagetrie.kv import CacheLease, KVCache, Lease
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
    return logprob_of(prefix, token, max(spec.params.logprobs or 0, spec.candidates), _SIZE)


def root_of(salt: str) -> int:
    """A tenant's model computes numbers of its own, so that a page read across tenants is noticed."""
    return extend_prefix(0, sum(salt.encode())) if salt else 0


@dataclass(frozen=True, slots=True)
class Row:
    """Whose a share of a step is: a sequence, or one of its beams with a lease and tokens of its own."""

    sequence: Sequence
    lease: CacheLease
    ids: list[int]


def rows_of(sequence: Sequence) -> list[Row]:
    """The rows that a running sequence has in a step."""
    lease, group = sequence.lease, sequence.beams
    assert lease is not None, "a running sequence has no lease"
    if group is None or not isinstance(lease, GroupLease):
        return [Row(sequence, lease, sequence.ids)]
    return [
        Row(sequence, own, [*sequence.state.request.prompt_ids, *beam.tokens])
        for beam, own in zip(group.search.live, lease.leases, strict=True)
    ]


class CheckedRunner(SimRunner):
    """Refuses writes to pages that anyone else holds and reads that aren't the sequence's own tokens.

    Attributes:
        rows: whose the shares of the step are, in the order of the plan; set by the world before each step.
        computed: what others may hit after the step: the identities of all prefixes of a row's tokens.
        fault: what was found wrong, for the world to raise: the engine takes it for a failure of the model.
        failures: how many planned failures there were.
        meanwhile: called while a step is computed: what other threads do at that time.
    """

    def __init__(
        self,
        cache: KVCache,
        clock: VirtualClock,
        memory: PageMemory,
        *,
        rng: random.Random,
        failure_rate: float,
        slow_rate: float,
        cost: StepCost,
    ) -> None:
        super().__init__(
            memory=memory,
            clock=clock,
            cost=cost,
            vocab_size=_SIZE,
            choose=choose,
        )
        self._pool: PagePool | None = getattr(cache, "pool", None)
        self._page_size = cache.page_size
        self._rng = rng
        self._failure_rate = failure_rate
        self._slow_rate = slow_rate
        self._prefixes: dict[Sequence, list[int]] = {}
        self.rows: Many[Row] = ()
        self.computed: list[list[int]] = []
        self.fault: Exception | None = None
        self.failures = 0
        self.meanwhile: Callable[[], None] = lambda: None

    def execute(self, plan: StepPlan) -> list[SequenceResult]:
        self.computed = []
        try:
            self._check(plan)
            if self._rng.random() < self._failure_rate:
                self._fail(plan)
            if self._rng.random() < self._slow_rate:
                self.clock.advance(30.0)
            self.meanwhile()
            return super().execute(plan)
        except PlannedError:
            raise
        except Exception as error:
            self.fault = error
            raise

    def root(self, number: int) -> int:
        return root_of(self.rows[number].sequence.state.request.namespace_salt)

    def on_read(self, number: int, prefix: int) -> None:
        row = self.rows[number]
        end = row.lease.computed + len(self._shares[number].token_ids)
        prefixes = self.prefixes(row.sequence, row.ids, end)
        assert prefix == prefixes[-1], f"{end} positions hold other tokens than the sequence's"
        forgotten = isinstance(row.lease, Lease) and row.lease._root.dead
        if row.sequence.state.request.params.use_prefix_cache and not forgotten:
            self.computed.append(prefixes)

    def prefixes(self, sequence: Sequence, ids: Many[int], end: int) -> list[int]:
        """Identities of the prefixes of a sequence's (or one of its beams') first ``end`` tokens."""
        # What a beam holds changes from step to step.
        known = self._prefixes.setdefault(sequence, []) if sequence.beams is None else []
        prefix = known[-1] if known else root_of(sequence.state.request.namespace_salt)
        for token in ids[len(known) : end]:
            prefix = extend_prefix(prefix, token)
            known.append(prefix)
        return known[:end]

    def _check(self, plan: StepPlan) -> None:
        self._shares = plan.sequences
        written: set[int] = set()
        for row, share in zip(self.rows, plan.sequences, strict=True):
            count, size = len(share.token_ids), self._page_size
            assert count >= 1, "an empty share"
            assert list(share.token_ids) == row.ids[share.start : share.start + count], "tokens at a wrong place"
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
