"""Requests and sequences in flight: what the scheduler moves between waiting and running."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from pagetrie.engine.beams import BeamGroup, GroupLease
from pagetrie.engine.contexts import Context
from pagetrie.engine.request import Request
from pagetrie.engine.runner import SequenceStep, TokenLogprob
from pagetrie.engine.text_stream import TextStream
from pagetrie.kv import CacheLease, PendingPage

SEED_MASK = 2**64 - 1
"""Seeds have 64 bits."""


@dataclass(slots=True, eq=False)
class RequestState:
    """A request in flight and its choices.

    Attributes:
        order: arrival number; among equals, older requests go first and are preempted last.
        level: ``priority + arrival step // ageing_steps``; lower goes first (see ``waiting``).
        max_tokens: tokens each choice may generate, after the context's and the pool's limits.
        end_ids: every token that ends a choice.
        cached_by_tier: of the cached tokens, those that came from a tier below the pool, by its name.
        parked_at: when it first had to wait for pages that another request computes or a tier delivers.
        sequences: the unfinished choices. Until the prompt is computed there is one, from which the others fork.
    """

    request: Request
    order: int
    namespace: bytes
    arrival: float
    max_tokens: int
    sequences: list[Sequence] = field(default_factory=list)
    admitted_at: float | None = None
    parked_at: float | None = None
    first_token_at: float | None = None
    cached_tokens: int = 0
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    completion_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_logprobs_due: bool = False
    level: int = 0
    end_ids: Set[int] = frozenset()
    context: Context | None = None

    @property
    def reads_cache(self) -> bool:
        """Whether stored prefixes may be hit. Prompt logprobs need the logits of every prompt position."""
        return self.request.params.use_prefix_cache and not self.prompt_logprobs_due


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request: its tokens, and its lease while it runs.

    Attributes:
        ids: prompt and output tokens.
        output_ids: the output alone.
        lease: pages held; None while waiting.
        forks: choices still to be forked from this one once the prompt is computed (n - 1, then 0).
        awaits: another sequence computes this one's next page; worth waiting for.
        last_token_at: when the previous token was made.
        preemptions: times it lost its seat.
        bypasses: sequences behind it that started while it didn't fit.
        blocked_at: step at which it first didn't fit; None before.
        look_again: with ``pages_wanted``: until this step it is known to lack that many pages.
        prompt_key: namespace and packed tokens while it waits for its first seat; empty if it shares nothing.
        stored_tokens: prompt tokens that were cached when it arrived.
        decode_step: its share of a step that computes one token; made once and changed from step to step.
        beams: the beams of a request, if this stands for them; ``ids`` and ``output_ids`` are the best one's.
    """

    state: RequestState
    index: int
    seed: int
    ids: list[int]
    text: TextStream
    forks: int = 0
    output_ids: list[int] = field(default_factory=list)
    lease: CacheLease | None = None
    awaits: PendingPage | None = None
    last_token_at: float | None = None
    preemptions: int = 0
    bypasses: int = 0
    blocked_at: int | None = None
    look_again: int = 0
    pages_wanted: int = 0
    prompt_key: bytes = b""
    stored_tokens: int = 0
    decode_step: SequenceStep | None = None
    beams: BeamGroup | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Age: arrival, then choice. Smaller is older."""
        return self.state.order, self.index

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order of service: level, arrival, choice."""
        return self.state.level, self.state.order, self.index

    @property
    def max_len(self) -> int:
        """Tokens that it may come to hold."""
        return self.beams.max_len if self.beams else len(self.state.request.prompt_ids) + self.state.max_tokens

    @property
    def rows(self) -> int:
        """Tokens that are computed for one more position."""
        return len(self.lease.leases) if isinstance(self.lease, GroupLease) else 1

    @property
    def leases(self) -> list[CacheLease]:
        """Every lease it holds: none while it waits, one per beam, else one."""
        if isinstance(self.lease, GroupLease):
            return self.lease.leases
        return [] if self.lease is None else [self.lease]

    @property
    def fork_pages(self) -> int:
        """Pages to take once what it has in common with its beams is computed."""
        return self.beams.fork_pages if self.beams and not isinstance(self.lease, GroupLease) else 0

    @property
    def seats(self) -> int:
        """Seats this sequence takes once its choices exist."""
        return 1 + self.forks

    @property
    def started(self) -> bool:
        return bool(self.output_ids)
