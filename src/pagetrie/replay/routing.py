"""Which replica a request goes to, in replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

Routing = Literal["round-robin", "least-loaded", "prefix"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)

ENOUGH = 0.5
"""Share of a prompt that a replica must hold for ``prefix`` to send it there."""


class Router:
    """Chooses replicas by number.

    ``prefix`` goes where most of the prompt is stored, if that is at least half of it, and else to the least loaded
    (the rule of SGLang's cache-aware router). Ties go to the lowest number.
    """

    def __init__(self, routing: Routing, replicas: int) -> None:
        self._routing = routing
        self._replicas = replicas
        self._next = 0

    def choose(self, length: int, stored: Callable[[int], int], load: Sequence[float]) -> int:
        """Pick one.

        Args:
            length: of the prompt, in the unit of ``stored``.
            stored: how much of the prompt a replica holds; only asked if it matters.
            load: what each replica has to do.
        """
        if self._routing == "round-robin":
            chosen = self._next
            self._next = (chosen + 1) % self._replicas
            return chosen
        if self._routing == "prefix" and self._replicas > 1:
            held = [stored(replica) for replica in range(self._replicas)]
            best = max(range(self._replicas), key=lambda replica: (held[replica], -replica))
            if held[best] >= ENOUGH * length:
                return best
        return min(range(self._replicas), key=lambda replica: (load[replica], replica))
