"""What the index gave up lately, so that a miss can be told from a prompt that was never there.

Pages are remembered by name (``PageTree.namer``), not by their tokens, and only so many of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

DEFAULT_CAPACITY = 32_768


@dataclass(frozen=True, slots=True)
class Eviction:
    """Pages that were given up at once.

    Attributes:
        time: seconds of the log's clock.
        cause: ``room``, for a lease or a load that needed pages; ``reset``, with everything else.
        holder: what that lease was opened for; empty for a load or a reset.
        namespace: where that lease stood; who asks about an eviction may be somebody else.
    """

    time: float
    cause: Literal["room", "reset"]
    holder: str = ""
    namespace: bytes = b""


class EvictionLog:
    """The latest evictions by the page's name.

    Args:
        clock: seconds.
        capacity: names kept; the oldest go first.
    """

    def __init__(self, clock: Callable[[], float], capacity: int = DEFAULT_CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"an eviction log needs a capacity of at least 1, got {capacity}")
        self._clock = clock
        self._capacity = capacity
        self._evictions: OrderedDict[bytes, Eviction] = OrderedDict()

    def __len__(self) -> int:
        return len(self._evictions)

    def now(self) -> float:
        return self._clock()

    def note(self, names: Iterable[bytes], eviction: Eviction) -> None:
        """Pages were given up."""
        evictions = self._evictions
        for name in names:
            evictions[name] = eviction
            evictions.move_to_end(name)
        while len(evictions) > self._capacity:
            evictions.popitem(last=False)

    def get(self, name: bytes) -> Eviction | None:
        """When the page of that name was last given up; None if it wasn't, or too long ago."""
        return self._evictions.get(name)
