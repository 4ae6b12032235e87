"""Background threads in virtual time: real threads, of which one runs at a time, until it sleeps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from pagetrie.sim.clock import VirtualClock


class _Over(BaseException):
    """The run has ended: a thread that still waits unwinds."""


class ThreadInTurns:
    """Runs jobs one after another (``kv.tiers.workers.Worker``), on a thread that goes on only when it has the turn.

    Args:
        when: the time at which what is submitted, or comes next, begins.

    Attributes:
        due: when it goes on; None while it has nothing to do.
    """

    def __init__(self, when: Callable[[], float]) -> None:
        self._when = when
        self._jobs: deque[Callable[[], None]] = deque()
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._over = False
        self.due: float | None = None

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        if self.due is None:
            self.due = self._when()

    def turn(self) -> None:
        """Let it run to its next stop, or until nothing is left to do. Raises what a job raised."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        else:
            self._go.release()
        self._stopped.acquire()
        if self._error is not None:
            raise self._error

    def stop(self, due: float | None) -> None:
        """On this thread: go on at that time; None: when there is something to do."""
        self.due = due
        self._stopped.release()
        self._go.acquire()
        if self._over:
            raise _Over

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def close(self, seconds: float) -> None:
        """End at once."""
        self._over = True
        if self._thread is not None and self._thread.is_alive():
            self._go.release()
            self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                self._jobs.popleft()()
                self.stop(self._when() if self._jobs else None)
        except _Over:
            pass
        except BaseException as error:  # noqa: BLE001  raised by ``turn``
            self._error = error
            self._stopped.release()


class VirtualThread(ThreadInTurns):
    """A thread in time of its own, which is behind the clock's while a step is under way."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(lambda: self.now if self.is_current() else clock.now)
        self.now = 0.0

    def turn(self) -> None:
        assert self.due is not None
        self.now = self.due
        super().turn()

    def sleep(self, seconds: float) -> None:
        """On this thread: let so much time pass."""
        self.stop(self.now + seconds)


class VirtualThreads:
    """All threads of a replica.

    Args:
        clock: the replica's.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._threads: list[VirtualThread] = []

    def make_worker(self, name: str) -> VirtualThread:
        self._threads.append(VirtualThread(self._clock))
        return self._threads[-1]

    def now(self) -> float:
        """The time of whoever asks, in seconds."""
        thread = self._current()
        return self._clock.now if thread is None else thread.now

    def sleep(self, seconds: float) -> None:
        """Let time pass for the thread that calls; nothing on the step's own."""
        thread = self._current()
        if thread is not None:
            thread.sleep(seconds)

    def run(self) -> None:
        """Let all run up to the clock's time, in order of time."""
        while (due := self.next_due()) is not None and due <= self._clock.now:
            next(thread for thread in self._threads if thread.due == due).turn()

    def next_due(self) -> float | None:
        """When the next one goes on."""
        return min((thread.due for thread in self._threads if thread.due is not None), default=None)

    def close(self) -> None:
        for thread in self._threads:
            thread.close(0.0)

    def _current(self) -> VirtualThread | None:
        return next((thread for thread in self._threads if thread.is_current()), None)
