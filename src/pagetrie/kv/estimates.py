"""How long it takes to load pages and to compute them, from what both have taken so far."""

from __future__ import annotations

from pagetrie.kv.tiers.interface import Speed
from pagetrie.kv.tiers.load import Sample

_SMOOTHING = 0.3
_SPEED_LASTS = 30.0  # seconds after which a measured speed is tried anew
_PREFILL_SPEED = 500.0  # tokens per second, until measured


class TierSpeed:
    """A tier's speed: the first guess, then what loads have shown."""

    def __init__(self, guess: Speed) -> None:
        self._guess = guess
        self._computing = guess.computing
        self._bandwidth = guess.bandwidth
        self._since: float | None = None

    def seconds(self, size: int, now: float, rest: float) -> float:
        """Estimated time to read so many bytes, with so many seconds of rest per second of computing."""
        if self._since is not None and now - self._since > _SPEED_LASTS:
            self._bandwidth, self._since = self._guess.bandwidth, None
        return self._guess.latency + size / self._bandwidth + rest * size * self._computing

    def take(self, size: int, seconds: float, now: float) -> None:
        """So many bytes came in that time, rests not counted."""
        seen = size / max(seconds, 1e-6)
        weight = self._weight()
        # Means of times per byte, so that one very slow read counts for what it cost.
        self._bandwidth = 1 / ((1 - weight) / self._bandwidth + weight / max(seen, 1.0))
        self._since = now

    def take_sample(self, sample: Sample, now: float) -> None:
        """A load, or its part from this tier, has ended; the sample's size isn't 0."""
        weight = self._weight()
        self._computing = (1 - weight) * self._computing + weight * sample.computed / sample.size
        self.take(sample.size, sample.seconds, now)

    def _weight(self) -> float:
        return _SMOOTHING if self._since is not None else 1.0


class PrefillSpeed:
    """How fast prompt tokens are computed, wherever they stand: a later one attends to more.

    Args:
        attention: what it takes to attend to one position, as a part of all else that a token takes.
    """

    def __init__(self, attention: float) -> None:
        self._attention = attention
        self._speed: float | None = None

    def note(self, tokens: int, attended: int, seconds: float) -> None:
        """A step computed so many tokens, which attended to so many positions together, in that time."""
        speed = (tokens + self._attention * attended) / max(seconds, 1e-6)
        self._speed = speed if self._speed is None else (1 - _SMOOTHING) * self._speed + _SMOOTHING * speed

    def seconds(self, start: int, tokens: int) -> float:
        """Estimated time to compute so many tokens that follow ``start`` others."""
        work = tokens + self._attention * tokens * (start + tokens / 2)
        return work / (self._speed or _PREFILL_SPEED)
