"""The contract between the step loop and whatever computes a step.

The engine plans a step; a runner computes it. The torch model is one runner, the simulator's cost model another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagetrie.engine.params import SamplingParams


@dataclass(slots=True)
class SampleSpec:
    """One token to draw from a sequence's last row of logits.

    Attributes:
        params: the request's sampling parameters.
        seed: 64-bit seed of this choice. Draw ``i`` of a choice depends on (seed, i) alone, so a preempted
            sequence goes on exactly as it would have.
        prompt_ids: the prompt (for the repetition penalty). Not to be changed by the runner.
        output_ids: tokens generated so far; the token to draw is number ``len(output_ids)``.
        banned_ids: ids that must not be drawn (end-of-sequence before min_tokens).
        candidates: report at least so many of the likeliest tokens, whatever ``params`` ask for (a beam search).
    """

    params: SamplingParams
    seed: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    banned_ids: Sequence[int] = ()
    candidates: int = 0


@dataclass(slots=True)
class SequenceStep:
    """One sequence's share of a step.

    Attributes:
        token_ids: the tokens to compute, ``n`` of them (at least 1).
        start: the position of the first; keys and values of positions ``0..start-1`` are in the pages already.
        pages: physical page ids, logical page i at index i; they have room for ``start + n`` tokens.
        samples: tokens to draw after the last position; empty when this is not the prompt's last chunk.
        prompt_targets: with prompt logprobs, the token that follows each computed position (n of them, or n - 1
            on the last chunk); None otherwise.
        prompt_logprobs: how many alternatives to report per prompt position.
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    samples: list[SampleSpec] = field(default_factory=list)
    prompt_targets: Sequence[int] | None = None
    prompt_logprobs: int = 0


@dataclass(slots=True)
class StepPlan:
    """Everything to compute in one step.

    Attributes:
        copies: (source page, destination page) pairs. The runner applies them in order before it writes anything.
        sequences: the shares, prefill chunks and single decode tokens mixed.
    """

    copies: list[tuple[int, int]]
    sequences: list[SequenceStep]


@dataclass(slots=True, frozen=True)
class TokenLogprob:
    """A token with its log-probability under the model (before temperature and penalties) and the likeliest others.

    ``top`` is sorted by falling log-probability and holds (token id, logprob) pairs. Values are finite
    (clamped at -9999.0).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class SequenceResult:
    """What a step gave for one sequence, in the order of ``SequenceStep.samples``.

    ``samples[i].logprob`` is meaningful (and ``top`` filled) only if that sample asks for them, by its params or
    ``candidates``.
    """

    samples: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


class Runner(Protocol):
    """Computes steps. Page contents change only inside ``execute``."""

    def execute(self, plan: StepPlan) -> list[SequenceResult]:
        """Apply the copies, compute every share and draw the tokens; results in the order of ``plan.sequences``.

        The plan is valid until this returns: its parts are used again for later steps.
        """
        ...
