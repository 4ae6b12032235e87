"""The waiting sequences of all tenants, and whose turn it is.

Start-time fair queueing (Goyal, Vin and Cheng 1996) over tokens computed: each tenant has a virtual time, the tokens
computed for it divided by its weight, and the one that is furthest behind goes first. A tenant that comes back after
having had nothing to do starts where the one that was furthest behind stood in the step before: idle times earn no
credit, and it goes before those who were computed since. Within a tenant the order is that of ``WaitingQueue``;
priorities are compared within a tenant only, since its own clients set them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from pagetrie.engine.sequence import Sequence
from pagetrie.engine.tenant import Tenant
from pagetrie.engine.waiting import WaitingQueue
from pagetrie.kv import KVCache


class Line:
    """One tenant's waiting sequences.

    Attributes:
        name: the tenant's.
        weight: its share of the work against others.
        served: its virtual time.
        waiting: the sequences, in the tenant's own order.
        first_since: the step since which the same sequence has been first in line and ready; ``math.inf`` with none.
    """

    def __init__(self, tenant: Tenant, cache: KVCache) -> None:
        self.name = tenant.name
        self.weight = tenant.weight
        self.served = 0.0
        self.waiting = WaitingQueue(cache)
        self.first_since = math.inf
        self._first: Sequence | None = None

    def look(self, step: int) -> None:
        """Note who is first in line in this step."""
        first = self.waiting.first
        if first is not self._first or first is None:
            self._first = first
            self.first_since = math.inf if first is None else step


class FairQueue:
    """All lines. Iterating gives every waiting sequence.

    Args:
        cache: says how much of a prompt is stored.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._lines: dict[str, Line] = {}
        self._active: set[str] = set()
        # Where the line that was furthest behind stood when the latest step began.
        self._now = 0.0

    def __len__(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for line in self._lines.values() for sequence in line.waiting)

    @property
    def first(self) -> Sequence | None:
        """Somebody who is next in a line; None if nobody is ready."""
        nexts = (line.waiting.next() for line in self._lines.values())
        return next((sequence for sequence in nexts if sequence is not None), None)

    @property
    def num_parked(self) -> int:
        """Sequences that wait for a page that somebody computes or loads."""
        return sum(line.waiting.num_parked for line in self._lines.values())

    def line(self, sequence: Sequence) -> Line:
        """The line that a sequence belongs to."""
        tenant = sequence.state.request.tenant
        line = self._lines.get(tenant.name)
        if line is None:
            line = self._lines[tenant.name] = Line(tenant, self._cache)
        return line

    def add(self, sequence: Sequence) -> None:
        """Take in a newcomer or a victim."""
        line = self.line(sequence)
        line.weight = sequence.state.request.tenant.weight
        line.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands. Raises ValueError if it doesn't wait."""
        self.line(sequence).waiting.remove(sequence)

    def wake(self, *, everyone: bool = False) -> None:
        """See ``WaitingQueue.wake``."""
        for line in self._lines.values():
            line.waiting.wake(everyone=everyone)

    def forget(self) -> None:
        """See ``WaitingQueue.forget``."""
        for line in self._lines.values():
            line.waiting.forget()

    def in_turn(self, running: Collection[str]) -> list[Line]:
        """The lines that have something to do, the one furthest behind first, of equals the shorter. Once per step.

        Args:
            running: tenants of those that run.
        """
        if len(self._lines) == 1:
            return list(self._lines.values())
        lines = [line for line in self._lines.values() if line.name in running or len(line.waiting)]
        for line in lines:
            if line.name not in self._active:
                line.served = max(line.served, self._now)
        self._active = {line.name for line in lines}
        lines.sort(key=lambda line: (line.served, len(line.waiting), line.name))
        if lines:
            self._now = max(self._now, lines[0].served)
        # Who has nothing to do and nothing to catch up comes back as a newcomer would.
        for name in [
            name for name, line in self._lines.items() if name not in self._active and line.served <= self._now
        ]:
            del self._lines[name]
        return lines

    def charge(self, shares: Mapping[Sequence, int], tokens: int) -> None:
        """Tokens that a step computes, per sequence and in all."""
        if len(self._lines) == 1:
            for line in self._lines.values():
                self._now = line.served
                line.served += tokens / line.weight
            return
        for sequence, count in shares.items():
            line = self.line(sequence)
            line.served += count * sequence.rows / line.weight
