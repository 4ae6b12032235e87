"""A runner that computes nothing: it keeps track of page contents, draws tokens from them and lets time pass."""

from __future__ import annotations

from collections.abc import Callable

from pagetrie.engine.runner import SampleSpec, SequenceResult, SequenceStep, StepPlan, TokenLogprob
from pagetrie.sim.clock import VirtualClock
from pagetrie.sim.cost import StepCost
from pagetrie.sim.memory import EMPTY_PREFIX, PageMemory, extend_prefix

Draw = Callable[[int, SampleSpec], TokenLogprob]
"""Identity of the prefix read from the pages, what to draw  ->  the token."""


def draw(vocab_size: int) -> Draw:
    """Tokens that depend on the prefix alone, and with a temperature on seed and number of the draw too.

    Uniform over the vocabulary but the banned ids. Log-probabilities are made up the same way, so equal prefixes give
    equal ones.
    """

    def choose(prefix: int, spec: SampleSpec) -> TokenLogprob:
        if not spec.params.greedy:
            prefix = extend_prefix(extend_prefix(prefix, spec.seed), len(spec.output_ids))
        token = prefix % vocab_size
        while token in spec.banned_ids:
            token = (token + 1) % vocab_size
        return logprob_of(prefix, token, max(spec.params.logprobs or 0, spec.candidates), vocab_size)

    return choose


def logprob_of(prefix: int, token: int, alternatives: int, vocab_size: int) -> TokenLogprob:
    """A made-up log-probability (nats, below 0) of ``token`` after ``prefix``, with so many of the likeliest tokens."""
    logprob = -1.0 - (extend_prefix(prefix, token) & 1023) / 1024
    top = tuple(
        ((prefix + place) % vocab_size, -(1024 * place + (extend_prefix(prefix, place) & 1023)) / 4096)
        for place in range(min(alternatives, vocab_size))
    )
    return TokenLogprob(token, logprob, top)


class SimRunner:
    """Implements ``engine.runner.Runner`` under a virtual clock.

    It reads the pages as a model would: all positions before the ones to compute, through the sequence's page table,
    after the step's copies and writes. So a page that is shared, copied, evicted or written wrongly raises
    ``PageContentError`` in the step that reads it.

    Args:
        memory: the pages' contents.
        clock: moved by what each step costs.
        cost: what a step costs.
        choose: draws tokens, see ``draw``.
        vocab_size: for the log-probabilities of prompts.
    """

    def __init__(
        self, *, memory: PageMemory, clock: VirtualClock, cost: StepCost, vocab_size: int, choose: Draw | None = None
    ) -> None:
        self.memory = memory
        self.clock = clock
        self.cost = cost
        self._vocab_size = vocab_size
        self._choose = choose or draw(vocab_size)

    def execute(self, plan: StepPlan) -> list[SequenceResult]:
        """See ``engine.runner.Runner``. Raises PageContentError."""
        self.memory.copy(plan.copies)
        roots = [self.root(number) for number in range(len(plan.sequences))]
        for share, root in zip(plan.sequences, roots, strict=True):
            self.memory.write(share.pages, share.start, share.token_ids, root)
        results = []
        for number, (share, root) in enumerate(zip(plan.sequences, roots, strict=True)):
            prefix = self.memory.read(share.pages, share.start + len(share.token_ids), root)
            self.on_read(number, prefix)
            results.append(self._result(share, prefix))
        self.clock.advance(self.cost.seconds(plan))
        return results

    def root(self, number: int) -> int:
        """Identity of the empty prefix for share ``number``; override to tell namespaces apart."""
        return EMPTY_PREFIX

    def on_read(self, number: int, prefix: int) -> None:
        """Share ``number`` reads ``prefix``; override to compare it with what it should be."""

    def _result(self, share: SequenceStep, prefix: int) -> SequenceResult:
        result = SequenceResult([self._choose(prefix, spec) for spec in share.samples])
        if share.prompt_targets is not None:
            ends = self.memory.prefixes(share.pages, share.start, share.start + len(share.prompt_targets))
            result.prompt_logprobs = [
                logprob_of(end, target, share.prompt_logprobs, self._vocab_size)
                for end, target in zip(ends, share.prompt_targets, strict=True)
            ]
        return result
