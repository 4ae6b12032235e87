"""What the server needs of an engine, and no more. ``pagetrie.engine.loop.EngineLoop`` provides it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, TypeVar

from pagetrie.engine.engine import Engine as CoreEngine
from pagetrie.engine.output import RequestOutput
from pagetrie.engine.request import Request
from pagetrie.engine.tenant import Tenant
from pagetrie.kv import TransferReport

T = TypeVar("T")


class Snapshot(Protocol):
    """The engine's numbers at one moment; ``evicted_pages`` and ``cow_copies`` only grow."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def total_pages(self) -> int: ...
    @property
    def free_pages(self) -> int: ...
    @property
    def active_pages(self) -> int: ...
    @property
    def cached_pages(self) -> int: ...
    @property
    def loading_pages(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def evicted_pages(self) -> int: ...
    @property
    def cow_copies(self) -> int: ...
    @property
    def pinned_pages(self) -> int: ...
    @property
    def contexts(self) -> int: ...
    @property
    def deferred(self) -> int: ...


class Reset(Protocol):
    """What a reset of the prefix cache did: pages freed, and pages that running requests still hold."""

    @property
    def freed_pages(self) -> int: ...
    @property
    def busy_pages(self) -> int: ...


class Source(Protocol):
    """A request's outputs. Closing it aborts the request, in every phase; idempotent."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    async def aclose(self) -> None: ...


class Engine(Protocol):
    """An engine on its own thread, seen from an event loop."""

    def start(self) -> None: ...

    async def stop(self, *, drain_seconds: float = 0.0) -> None:
        """Refuse new work, let running requests finish for up to ``drain_seconds``, then abort the rest."""
        ...

    async def submit(self, request: Request) -> Source:
        """Queue a request; nothing of it has begun when this returns.

        Raises:
            InvalidRequestError: the request can't be served as it stands.
            QueueFullError: too many are waiting.
            EngineError: the engine is not running.
        """
        ...

    async def reset_prefix_cache(self) -> Reset: ...

    async def set_tenants(self, tenants: Sequence[Tenant]) -> None:
        """Who there is; who was and isn't any more loses its requests, contexts and pages. Raises EngineError."""
        ...

    async def ask(self, question: Callable[[CoreEngine], T]) -> T:
        """Call a function with the engine between two steps; returns or raises what it does."""
        ...

    def snapshot(self) -> Snapshot: ...

    def transfer_report(self) -> TransferReport | None:
        """The tiers below the pool; None if there are none."""
        ...

    def is_alive(self) -> bool: ...

    def stands_still(self) -> float:
        """Seconds since the last step, while there is work; 0 while there is none."""
        ...
