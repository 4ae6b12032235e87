"""When will a prefix be asked for again? Learnt online from what requests looked like and what became of them.

A ``Turn`` is one request, seen from the end of its prompt. Two things are learnt from the latest turns:

- whether it will be continued at all, from its features, by boosted trees (``boosting``). A turn that has waited for
  a while without an answer counts as a "no" to the degree in which answers come that soon, so that learning need not
  wait for the horizon (delayed feedback).
- how long that takes, by the product-limit estimate over all turns (Kaplan & Meier 1958), which reckons with those
  still open.

Together they give the index of Gittins (1979): the best expected number of reuses per second of holding a page ahead,
``max over h of P(reuse in h | none so far) / E(time held, at most h)``. It ranks pages right also where the hazard
isn't monotone, as with people, who hardly ever answer within seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque

import numpy as np
from numpy.typing import NDArray

from pagetrie.kv.eviction.boosting import BoostedTrees, fit

Floats = NDArray[np.float64]

HORIZON = 1800.0
"""Seconds after which a prefix counts as given up."""
WINDOW = 2000
"""Turns to learn from: the latest."""
OFTENEST, RAREST = 100, 500
"""Turns between fits: an eighth of those seen so far, within these bounds."""
FEWEST = 20
"""Continued turns without which nothing can be learnt."""

_AGES = np.concatenate([[0.0], np.geomspace(0.5, HORIZON, 59)])
_AGE_LIST: list[float] = _AGES.tolist()
_LEVELS = 48
_UNKNOWN = 0.5
_TYPICAL_WAIT = 120.0
"""Mean wait assumed before anything is known, seconds. Only the shape matters then: all turns are equally likely."""


class Turn:
    """A request whose prefix may be continued.

    Attributes:
        time: when it ended, seconds.
        pages: full pages of its prompt; their end is where it is continued from.
        last_page: the tokens of the last of them.
        number: how many turns came before it in its conversation.
        prompt_tokens, new_tokens, output_tokens: of its prompt, of its prompt without what the turn before it had,
            and of its answer.
        features: what the model sees.
        level: the model's probability that it is continued, in ``_LEVELS`` steps.
        continued: when it was; infinity if not yet.
    """

    __slots__ = (
        "continued",
        "features",
        "last_page",
        "level",
        "new_tokens",
        "number",
        "output_tokens",
        "pages",
        "prompt_tokens",
        "time",
    )

    def __init__(
        self,
        time: float,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        before: Turn | None,
        kind: int = 0,
    ) -> None:
        self.time = time
        self.pages = 0
        self.last_page = b""
        self.number: int = 0 if before is None else before.number + 1
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.new_tokens = prompt_tokens - (
            cached_tokens if before is None else before.prompt_tokens + before.output_tokens
        )
        self.features = (
            float(self.number),
            float(self.new_tokens),
            float(output_tokens),
            float(prompt_tokens),
            float(cached_tokens),
            -1.0 if before is None else time - before.time,
            0.0 if before is None else float(before.output_tokens),
            0.0 if before is None else float(before.new_tokens),
            float(kind),
        )
        self.level = 0
        self.continued = math.inf


class ReuseModel:
    """Learns from turns and says what holding their pages is worth."""

    def __init__(self) -> None:
        self._turns: deque[Turn] = deque(maxlen=WINDOW)
        self._seen = 0
        self._due = OFTENEST
        self._trees: BoostedTrees | None = None
        self._index = _gittins(1 - np.exp(-_AGES / _TYPICAL_WAIT))

    def observe(self, turn: Turn) -> bool:
        """Take in a turn that just ended, and give it its level. True if the model was fitted anew on the way."""
        self._turns.append(turn)
        self._seen += 1
        chance = _UNKNOWN if self._trees is None else self._trees.probability(turn.features)
        turn.level = min(int(chance * _LEVELS), _LEVELS - 1)
        if self._seen < self._due:
            return False
        self._due = self._seen + min(max(self._seen // 8, OFTENEST), RAREST)
        return self._fit(turn.time)

    def worth(self, turn: Turn, now: float) -> float:
        """The Gittins index of a page that this turn's continuation would hit, in reuses per second."""
        age = now - turn.time
        return self._index[turn.level][bisect_right(_AGE_LIST, age) - 1] if 0 <= age < HORIZON else 0.0

    def _fit(self, now: float) -> bool:
        turns = list(self._turns)
        features = np.array([turn.features for turn in turns])
        ended = np.array([turn.time for turn in turns])
        waited = np.array([turn.continued for turn in turns]) - ended
        watched = np.minimum(now - ended, HORIZON)
        continued = waited <= watched
        if continued.sum() < FEWEST:
            return False
        waits = waiting_times(np.where(continued, waited, watched), continued)
        weights = np.where(continued, 1.0, 0.01 + 0.98 * np.interp(watched, _AGES, waits))
        self._trees = fit(features, continued.astype(np.float64), weights)
        self._index = _gittins(waits)
        chances = 1 / (1 + np.exp(-self._trees.log_odds_of(features)))
        levels = np.minimum((chances * _LEVELS).astype(np.int64), _LEVELS - 1).tolist()
        for turn, level in zip(turns, levels, strict=True):
            turn.level = level
        return True


def waiting_times(watched: Floats, continued: NDArray[np.bool_]) -> Floats:
    """Share of all continuations within ``HORIZON`` that have come by each age of the grid [60].

    Args:
        watched: seconds until each turn was continued, or for which it hasn't been [n].
        continued: which of the two [n].
    """
    place = np.searchsorted(_AGES, watched, side="right") - 1
    events = np.bincount(place[continued], minlength=len(_AGES)).astype(np.float64)
    left = np.bincount(place, minlength=len(_AGES)) - events
    at_risk = (events + left)[::-1].cumsum()[::-1] - left / 2
    hazard = np.minimum(events / np.maximum(at_risk, 1e-9), 1.0)
    share = 1 - np.concatenate([[1.0], np.cumprod(1 - hazard)[:-1]])
    return np.asarray(share / max(float(share[-1]), 1e-9))


def _gittins(waits: Floats) -> list[list[float]]:
    """The index by level and age, from the distribution of waits [60]."""
    chance = (np.arange(_LEVELS) + 0.5) / _LEVELS
    returned = chance[:, None] * waits
    open_share = 1 - returned
    step = (open_share[:, 1:] + open_share[:, :-1]) / 2 * np.diff(_AGES)
    held = np.concatenate([np.zeros((_LEVELS, 1)), np.cumsum(step, axis=1)], axis=1)
    gain = returned[:, None, :] - returned[:, :, None]
    cost = held[:, None, :] - held[:, :, None]
    index = np.where(cost > 0, gain / np.where(cost > 0, cost, 1.0), 0.0).max(axis=2)
    table: list[list[float]] = index.tolist()
    return table
