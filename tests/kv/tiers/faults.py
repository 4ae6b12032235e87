"""Media that lie, cut short, flip bits, lose pages, fill up and die, and threads that stall where they are told to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from pagetrie.kv.tiers.store import StoreFullError
from pagetrie.sim.clock import VirtualClock
from pagetrie.sim.threads import ThreadInTurns


class Turns:
    """The tiers' threads, real ones, of which one runs at a time: deterministic.

    They go from stop to stop; a medium that stalls is one that stops for long.

    Args:
        clock: when it is whose turn.
        when: the time at which somebody who stops now, or is given something to do, goes on.

    Attributes:
        fault: what was found wrong on one of them, for ``run`` to raise.
    """

    def __init__(self, clock: VirtualClock, when: Callable[[], float]) -> None:
        self._clock = clock
        self._when = when
        self._threads: list[ThreadInTurns] = []
        self.fault: Exception | None = None

    def make_worker(self, name: str) -> ThreadInTurns:
        self._threads.append(ThreadInTurns(self._when))
        return self._threads[-1]

    def stop(self, seconds: float | None = None) -> None:
        """A place where a thread stops, for so long or until ``when`` says; nothing on the engine's."""
        for thread in self._threads:
            if thread.is_current():
                thread.stop(self._when() if seconds is None else self._clock.now + seconds)

    def run(self) -> None:
        """Let all go on whose time has come."""
        while (due := self.next_due()) is not None and due <= self._clock.now:
            next(thread for thread in self._threads if thread.due == due).turn()
        if self.fault is not None:
            raise self.fault

    def next_due(self) -> float | None:
        return min((thread.due for thread in self._threads if thread.due is not None), default=None)

    def finish(self) -> None:
        """Let time pass until nobody has anything to do."""
        while (due := self.next_due()) is not None:
            self._clock.advance(max(0.0, due - self._clock.now))
            self.run()

    def end(self) -> None:
        for thread in self._threads:
            thread.close(0.0)


class FaultyBackend:
    """A store in a dictionary (``tiers.store.Backend``).

    Args:
        fault: what goes wrong in this call of ``exists``, ``get`` or ``put``, "" for nothing: "lie" (it says to have
            what it hasn't), "flip", "truncate", "swap" (another page's value), "lose" (a value; in ``put``: it has no
            room), "die" (half-way through a ``put``).
        rng: which value, which bit.
        capacity: values that it keeps; the oldest go first.

    Attributes:
        values: what it holds, by name.
        failed_reads: reads that gave something wrong.
    """

    def __init__(self, fault: Callable[[str], str], rng: random.Random, capacity: int) -> None:
        self._fault = fault
        self._rng = rng
        self._capacity = capacity
        self.values: dict[str, bytes] = {}
        self.failed_reads = 0

    def exists(self, names: Sequence[str]) -> list[bool]:
        fault = self._fault("exists")
        if fault == "die":
            raise OSError("planted")
        return [name in self.values or fault == "lie" for name in names]

    def get(self, names: Sequence[str], limit: int) -> list[bytes | memoryview | None]:
        fault = self._fault("get")
        values: list[bytes | memoryview | None] = [self.values.get(name) for name in names]
        wrong = self._rng.randrange(len(names))
        good = values[wrong]
        if isinstance(good, bytes):
            flipped = bytearray(good)
            flipped[-self._rng.randrange(1, len(good) // 4)] ^= 1 << self._rng.randrange(8)
            other = self._rng.choice([value for value in self.values.values() if value != good] or [b""])
            values[wrong] = {"flip": bytes(flipped), "truncate": good[:-8], "swap": other, "lose": None}.get(
                fault, good
            )
        self.failed_reads += fault == "die" or values[wrong] is not good
        if fault == "die":
            raise OSError("planted")
        return values

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        fault = self._fault("put")
        for name, value in items if fault != "die" else items[: len(items) // 2]:
            self.values[name] = value
        while len(self.values) > self._capacity:
            del self.values[next(iter(self.values))]
        if fault == "die":
            raise OSError("planted")
        if fault == "lose":
            raise StoreFullError("planted")

    def close(self) -> None:
        pass


def harm(path: Path, how: str, rng: random.Random) -> None:
    """Damage a file in place: "flip" (one bit, or 200), "truncate" (anywhere) or "delete" it."""
    if how == "delete":
        path.unlink()
        return
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        if how == "truncate":
            file.truncate(rng.randrange(size + 1))
            return
        for _ in range(min(size, rng.choice((1, 200)))):
            at = rng.randrange(size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes((byte ^ 1 << rng.randrange(8),)))
