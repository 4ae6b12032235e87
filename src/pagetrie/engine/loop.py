"""The engine on a thread of its own, and the asyncio side that feeds and listens to it.

Commands cross to the engine's thread in a list under a lock; outputs cross back one ``call_soon_threadsafe`` per step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pagetrie.engine.engine import Engine
from pagetrie.engine.output import RequestOutput
from pagetrie.engine.request import Request
from pagetrie.engine.tenant import Tenant
from pagetrie.errors import EngineError, InvalidRequestError, PagetrieError, QueueFullError
from pagetrie.kv import ResetReport, TransferReport

__all__ = ["EngineLoop", "EngineSnapshot", "RequestStream", "ResetReport"]

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine in numbers, as it stood between two steps; its page counts add up."""

    running: int
    waiting: int
    total_pages: int
    free_pages: int
    active_pages: int
    cached_pages: int
    page_size: int
    evicted_pages: int
    cow_copies: int
    pinned_pages: int
    contexts: int
    loading_pages: int = 0
    deferred: int = 0


class RequestStream(AsyncIterator[RequestOutput]):
    """A request's outputs, in order, ending after the one that says ``finished``.

    Closing it (or dropping out of a loop over it and then calling ``aclose``) aborts the request, whatever its phase.
    """

    def __init__(self, owner: EngineLoop, request_id: str) -> None:
        self._owner = owner
        self._request_id = request_id
        self._loop = asyncio.get_running_loop()
        self._outputs: deque[RequestOutput] = deque()
        self._arrived = asyncio.Event()
        self._ended = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._outputs:
            if self._ended:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        output = self._outputs.popleft()
        if output.finished:
            self._ended = True
        return output

    async def aclose(self) -> None:
        """Abort the request unless it has ended. Idempotent; doesn't wait."""
        if not self._ended:
            self._ended = True
            self._outputs.clear()
            self._arrived.set()
            self._owner._abort(self._request_id)

    def _deliver(self, output: RequestOutput) -> None:
        if not self._ended:
            self._outputs.append(output)
            self._arrived.set()


class EngineLoop:
    """Runs an engine on its own thread. ``submit`` and the rest may be called from any event loop.

    Args:
        engine: which.
        clock: seconds, never going back; only to tell whether the engine stands still.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        # When the engine last ended a step, or since when there has been work; None while there is none.
        self._working_since: float | None = None
        self._wake = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._streams: dict[str, RequestStream] = {}
        self._submitted = 0  # requests on their way to the engine's queue
        self._closing = False
        self._stopped = False
        self._idle_waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._snapshot = self._take_snapshot()
        engine.set_waker(self._notify)
        self._thread = threading.Thread(target=self._run, name="pagetrie-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def snapshot(self) -> EngineSnapshot:
        """The state after the latest step or command."""
        return self._snapshot

    def stands_still(self) -> float:
        """Seconds since the last step, while there is work; 0 while there is none. Takes no lock."""
        since = self._working_since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    def transfer_report(self) -> TransferReport | None:
        """The tiers below the pool in numbers; None if there are none."""
        return self._engine.transfer_report()

    async def submit(self, request: Request) -> RequestStream:
        """Queue a request and return its outputs.

        Raises at once, before anything is streamed:
            InvalidRequestError: it can never be served, or its id is in use.
            QueueFullError: the queue is at its cap.
            EngineError: the engine is shutting down.
        """
        self._engine.validate(request)
        stream = RequestStream(self, request.request_id)
        with self._wake:
            if self._closing or not self.is_alive():
                raise EngineError("the server is shutting down")
            if request.request_id in self._streams:
                raise InvalidRequestError(f"request id {request.request_id!r} is already in use", param="request_id")
            if self._submitted + self._snapshot.waiting >= self._engine.config.max_queue:
                raise QueueFullError(self._engine.config.max_queue)
            self._streams[request.request_id] = stream
            self._submitted += 1
            self._command(lambda: self._add(request))
        return stream

    async def reset_prefix_cache(self) -> ResetReport:
        """Forget every stored prefix, between two steps."""
        return await self.ask(Engine.reset_prefix_cache)

    async def set_tenants(self, tenants: Sequence[Tenant]) -> None:
        """See ``Engine.set_tenants``. Raises EngineError: it is shutting down."""
        await self.ask(lambda engine: self._deliver(engine.set_tenants(tenants)))

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """Call a function with the engine on its thread, between two steps, and return what it returns.

        It is called even if the caller is cancelled meanwhile.

        Raises:
            EngineError: the engine is shutting down.
            PagetrieError: what the function raises.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def answer() -> None:
            try:
                settle = partial(future.set_result, question(self._engine))
            except Exception as error:  # noqa: BLE001 - handed to who asked
                settle = partial(future.set_exception, error)
            with contextlib.suppress(RuntimeError):  # that event loop has been closed: nobody listens any more
                loop.call_soon_threadsafe(lambda: None if future.done() else settle())

        with self._wake:
            if self._stopped or not self.is_alive():
                raise EngineError("the server is shutting down")
            self._command(answer)
        return await future

    async def stop(self, *, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let those in flight end for up to ``drain_seconds``, abort the rest, end the thread."""
        idle = asyncio.Event()
        with self._wake:
            self._closing = True
            self._idle_waiters.append((asyncio.get_running_loop(), idle))
            self._wake.notify()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(idle.wait(), drain_seconds)
        with self._wake:
            self._stopped = True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    # -- called on the event loop's thread ---------------------------------------------------------------------------

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._command(command)

    def _command(self, command: Callable[[], None]) -> None:
        """Under the lock: have the engine's thread call this before its next step."""
        if self._working_since is None:
            self._working_since = self._clock()
        self._commands.append(command)
        self._wake.notify()

    def _abort(self, request_id: str) -> None:
        def abort() -> None:
            self._engine.abort(request_id)
            self._streams.pop(request_id, None)

        self._post(abort)

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._commands or self._stopped):
                    if not self._engine.has_work:
                        self._working_since = None
                        self._tell_idle()
                    pause = self._engine.pause()
                    if pause == 0:
                        break
                    self._wake.wait(pause)
                commands, self._commands = self._commands, []
                stopped = self._stopped
            self._engine.contexts.expire()
            for command in commands:
                command()
            if stopped:
                outputs = self._engine.abort_all()
                self._snapshot = self._take_snapshot()
                self._deliver(outputs)
                self._engine.close()
                return
            outputs = self._step() if self._engine.has_work else self._settle()
            # First the snapshot: who has read a token must not find metrics from before it.
            self._snapshot = self._take_snapshot()
            self._deliver(outputs)
            self._working_since = self._clock()

    def _tell_idle(self) -> None:
        for loop, idle in self._idle_waiters:
            loop.call_soon_threadsafe(idle.set)
        self._idle_waiters.clear()

    def _add(self, request: Request) -> None:
        with self._wake:
            self._submitted -= 1
        try:
            self._engine.add(request)
        except PagetrieError as error:  # lost a race for the last place in the queue
            self._deliver([RequestOutput(request.request_id, finished=True, error=error)])

    def _step(self) -> list[RequestOutput]:
        try:
            return self._engine.step()
        except Exception:
            # A fault in our own bookkeeping: end what is in flight rather than the server.
            log.exception("the step loop failed; all requests in flight end with an error")
            outputs = self._engine.abort_all()
            for output in outputs:
                output.error = EngineError("the step loop failed; try again")
            return outputs

    def _settle(self) -> list[RequestOutput]:
        self._engine.settle()
        return []

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, RequestOutput]]] = {}
        for output in outputs:
            streams = self._streams
            stream = streams.pop(output.request_id, None) if output.finished else streams.get(output.request_id)
            if stream is not None:
                by_loop.setdefault(stream._loop, []).append((stream, output))
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver_batch, batch)
            except RuntimeError:  # that event loop has been closed: nobody listens any more
                for stream, _ in batch:
                    self._engine.abort(stream._request_id)
                    self._streams.pop(stream._request_id, None)

    def _take_snapshot(self) -> EngineSnapshot:
        engine = self._engine
        stats = engine.cache_stats()
        return EngineSnapshot(
            running=engine.num_running,
            waiting=engine.num_waiting,
            total_pages=stats.total_pages,
            free_pages=stats.free_pages,
            active_pages=stats.active_pages,
            cached_pages=stats.cached_pages,
            page_size=engine.page_size,
            evicted_pages=stats.evicted_pages,
            cow_copies=stats.copied_pages,
            pinned_pages=stats.pinned_pages,
            contexts=len(engine.contexts),
            loading_pages=stats.loading_pages,
            deferred=engine.num_deferred,
        )


def _deliver_batch(batch: list[tuple[RequestStream, RequestOutput]]) -> None:
    for stream, output in batch:
        stream._deliver(output)
