"""Threads for parsing, templates and tokenisation, so that the event loop only moves bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

BIG_BODY_BYTES = 256 * 1024


class WorkerPool:
    """Two small pools: one thread for big bodies and a few for all others, so that big ones never hold up small ones.

    Threads start when first needed.
    """

    def __init__(self, threads: int = 4) -> None:
        self._small = ThreadPoolExecutor(threads, thread_name_prefix="pagetrie-prepare")
        self._big = ThreadPoolExecutor(1, thread_name_prefix="pagetrie-prepare-big")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread. ``size``: bytes of input, which choose the pool. Cancelling drops work that still
        waits for a thread; what already runs ends unheard."""
        pool = self._big if size > BIG_BODY_BYTES else self._small
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        """Let the threads end once idle; waiting work is dropped."""
        self._small.shutdown(wait=False, cancel_futures=True)
        self._big.shutdown(wait=False, cancel_futures=True)
