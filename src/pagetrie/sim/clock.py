"""Time that passes only when told to."""

from __future__ import annotations


class VirtualClock:
    """A clock for the engine: call it for the time in seconds. It never goes back.

    Attributes:
        now: the time in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` (at least 0) pass."""
        if not seconds >= 0:
            raise ValueError(f"time can't go back: asked to advance by {seconds} s")
        self.now += seconds
