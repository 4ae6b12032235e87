"""Beam search over log-probabilities, without any model: which beams go on, which are done, when to stop.

The rules are those of ``transformers``' ``generate(num_beams=..., do_sample=False)``, release 5 (``_beam_search`` in
``generation/utils.py``), so that both give the same sequences.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from pagetrie.engine.params import EarlyStopping
from pagetrie.engine.runner import TokenLogprob

Candidates = Sequence[tuple[int, float]]
"""(token id, log-probability) pairs: the likeliest tokens after one beam, by falling log-probability."""


@dataclass(slots=True, eq=False)
class Beam:
    """A hypothesis.

    Attributes:
        tokens: its output; an ending token is not part of it.
        score: sum of its tokens' log-probabilities; for a finished one divided by length ** length_penalty, where the
            length counts the ending token.
        end: the token that ended it; None if it was cut at the limit or still runs.
        logprobs: one entry per token.
    """

    tokens: list[int] = field(default_factory=list)
    score: float = 0.0
    end: int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


class BeamSearch:
    """The search after one prompt.

    Args:
        width: beams kept.
        max_tokens: tokens of the longest output, an ending token included.
        end_ids: tokens that end a beam.
        length_penalty: above 0 favours long outputs, below 0 short ones.
        early_stopping: True ends the search with the ``width``-th finished beam; False when no running beam would beat
            the worst finished one at its present length; "never" when none could at any length.
        top_logprobs: alternatives to note per token.

    Attributes:
        live: the beams to continue, best first; one without tokens at first.
        candidates: likeliest tokens that ``advance`` needs to know per beam.
        done: nothing more to compute.
    """

    def __init__(
        self,
        *,
        width: int,
        max_tokens: int,
        end_ids: Collection[int],
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        top_logprobs: int = 0,
    ) -> None:
        self.width = width
        self.candidates = max(2, 1 + len(end_ids)) * width
        self.live = [Beam()]
        self.done = False
        self.max_tokens = max_tokens
        self._end_ids = frozenset(end_ids)
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._top_logprobs = top_logprobs
        self._finished: list[Beam] = []

    def advance(self, likeliest: Sequence[Candidates]) -> list[int]:
        """Take one step.

        Args:
            likeliest: for each live beam, at least ``candidates`` tokens (or the whole vocabulary).

        Returns:
            For each of the new live beams, the place of the one it continues among the old ones.
        """
        before, length = self.live, len(self.live[0].tokens) + 1
        ranked = sorted(
            (
                (-(beam.score + logprob), place, token, logprob)
                for place, (beam, after) in enumerate(zip(before, likeliest, strict=True))
                for token, logprob in after[: self.candidates]
            )
        )[: self.candidates]
        at_limit = length >= self.max_tokens
        parents: list[int] = []
        self.live = []
        for rank, (cost, place, token, logprob) in enumerate(ranked):
            parent, ends = before[place], token in self._end_ids
            if not ends and not at_limit:
                if len(self.live) < self.width:
                    parents.append(place)
                    self.live.append(self._continue(parent, token, logprob, -cost, likeliest[place]))
            elif rank < self.width:  # others stand in only for beams that have ended
                score = -cost / length**self._length_penalty
                if ends:
                    self._finish(Beam(parent.tokens, score, token, parent.logprobs))
                else:
                    self._finish(self._continue(parent, token, logprob, score, likeliest[place]))
        self.done = not self.live or self._may_stop(length)
        return parents

    def best(self, count: int) -> list[Beam]:
        """The best hypotheses, best first; where too few are finished, those that run are taken as they stand."""
        length = len(self.live[0].tokens) if self.live else 0
        running = [
            Beam(beam.tokens, beam.score / max(1, length) ** self._length_penalty, None, beam.logprobs)
            for beam in self.live
            if not self.done
        ]
        return sorted([*self._finished, *running], key=lambda beam: -beam.score)[:count]

    def _continue(self, parent: Beam, token: int, logprob: float, score: float, after: Candidates) -> Beam:
        entry = TokenLogprob(token, logprob, tuple(after[: self._top_logprobs]))
        return Beam([*parent.tokens, token], score, None, [*parent.logprobs, entry])

    def _finish(self, beam: Beam) -> None:
        self._finished.append(beam)
        self._finished.sort(key=lambda finished: -finished.score)
        del self._finished[self.width :]

    def _may_stop(self, length: int) -> bool:
        if len(self._finished) < self.width:
            return False
        if self._early_stopping is True:
            return True
        farthest = self.max_tokens if self._early_stopping == "never" and self._length_penalty > 0 else length
        return bool(self.live[0].score / farthest**self._length_penalty <= self._finished[-1].score)


def common_prefix(sequences: Iterable[Sequence[int]]) -> int:
    """Length of the longest prefix that all sequences share."""
    first, *others = sequences
    for place, token in enumerate(first):
        if any(len(other) <= place or other[place] != token for other in others):
            return place
    return len(first)
