"""A store that several servers share: one prefix, computed anywhere, is found everywhere.

What is read from it is signed with the servers' common secret, so nobody else can plant pages. A store that fails is
left alone for a while, which grows as it goes on failing; each outage is one line in the log.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

import numpy as np

from pagetrie.errors import ConfigError
from pagetrie.kv.shares import Allowance
from pagetrie.kv.tiers.interface import Bytes, PageRef, Speed, TierStats, TierTraits
from pagetrie.kv.tiers.record import HEAD_BYTES, Signature, matches, pack_head, parse_head

log = logging.getLogger(__name__)

BATCH_BYTES = 4 << 20
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
RETRY_SECONDS = 30.0
"""How long nothing is stored after the store was full."""
_KNOWN_KEYS = 65_536

T = TypeVar("T")


class StoreFullError(Exception):
    """The store works, and takes nothing more for now: it has no room, or may not be written to."""


class Backend(Protocol):
    """A key-value store, seen by a tier. Calls block, are made from several threads, and raise on any fault."""

    def exists(self, names: Sequence[str]) -> list[bool]: ...

    def get(self, names: Sequence[str], limit: int) -> list[bytes | memoryview | None]:
        """The values; None for those that aren't there. No value is read beyond ``limit`` bytes."""
        ...

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Store values. Raises StoreFullError if there is no room."""
        ...

    def close(self) -> None: ...


class StoreTier:
    """Pages in a shared store (``Tier``).

    Args:
        backend: the store.
        secret: 32 bytes that all servers on it share.
        bytes_per_page: bytes of a page.
        title: what to call it in the log.
        clock: seconds.
    """

    name = "store"
    traits = TierTraits(remote=True, speed=Speed(5e-3, 200e6))

    def __init__(
        self,
        backend: Backend,
        *,
        secret: bytes,
        bytes_per_page: int,
        title: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._seal = Signature(secret)
        self._bytes_per_page = bytes_per_page
        self._title = title
        self._clock = clock
        self._batch = max(1, BATCH_BYTES // bytes_per_page)
        # Keys that this server stored or has seen there.
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._lock = Lock()
        self._pause = 0.0
        self._silent_until = 0.0
        self._full_until = 0.0
        self._failure = ""
        self._stats = TierStats()

    @property
    def stats(self) -> TierStats:
        stats, full = self._stats, self._clock() < self._full_until
        stats.problem = self._failure or ("it takes no pages: those that it has are read" if full else "")
        stats.healthy = not stats.problem
        return stats

    def holds(self, key: bytes) -> bool:
        return key in self._known

    def contains(self, keys: Sequence[bytes]) -> int:
        count = 0
        for start in range(0, len(keys), 256):
            some = keys[start : start + 256]
            found = self._try(partial(self._backend.exists, [_name(key) for key in some])) or []
            self._forget([key for key, there in zip(some, found, strict=False) if not there])
            here = next((i for i, there in enumerate(found) if not there), len(found))
            count += here
            if here < len(some):
                break
        self._note(keys[:count])
        return count

    def get(self, refs: Sequence[PageRef]) -> Iterator[Bytes]:
        for start in range(0, len(refs), self._batch):
            batch = refs[start : start + self._batch]
            began = self._clock()
            limit = HEAD_BYTES + max(len(ref.tokens) for ref in batch) + self._bytes_per_page
            values = self._try(partial(self._backend.get, [_name(ref.key) for ref in batch], limit))
            self._stats.get_seconds += self._clock() - began
            for ref, value in zip(batch, values or [None], strict=False):
                data = None if value is None else self._open(ref, memoryview(value))
                if data is None:
                    self._stats.failed_pages += 1
                    self._forget([ref.key])
                    return
                self._stats.hit_pages += 1
                self._stats.hit_bytes += data.nbytes
                yield data

    def _open(self, ref: PageRef, value: memoryview) -> Bytes | None:
        front = HEAD_BYTES + len(ref.tokens)
        if len(value) != front + self._bytes_per_page:
            return None
        data = value[front:]
        return (
            np.frombuffer(data, np.uint8)
            if matches(parse_head(value[:front], self._seal), ref, data, self._seal)
            else None
        )

    def put(self, pages: Sequence[tuple[PageRef, Bytes]]) -> int:
        stored = 0
        for start in range(0, len(pages), self._batch):
            batch = pages[start : start + self._batch]
            began = self._clock()
            done = self._try(partial(self._put, batch)) if began >= self._full_until else None
            self._stats.put_seconds += self._clock() - began
            if not done:
                self._stats.refused_pages += len(batch)
                continue
            stored += len(batch)
            self._note([ref.key for ref, _ in batch])
        return stored

    def _put(self, pages: Sequence[tuple[PageRef, Bytes]]) -> bool:
        """What another server stored meanwhile isn't sent again. False if there is no room."""
        there = self._backend.exists([_name(ref.key) for ref, _ in pages])
        items = [
            (_name(ref.key), b"".join((pack_head(ref, data.data, self._seal), data.data)))
            for (ref, data), known in zip(pages, there, strict=True)
            if not known
        ]
        if items:
            try:
                self._backend.put(items)
            except StoreFullError as error:
                log.warning("the store %s takes no pages for %.0f s: %s", self._title, RETRY_SECONDS, _line(error))
                self._full_until = self._clock() + RETRY_SECONDS
                return False
        self._stats.stored_pages += len(items)
        self._stats.stored_bytes += len(items) * self._bytes_per_page
        return True

    def touch(self, key: bytes) -> None:
        """Nothing: the store decides by its own reads what it gives up."""

    def name_namespace(self, key: bytes, namespace: bytes) -> None:
        """Nothing: pages here are never named anew."""

    def allow(self, allowances: Mapping[bytes, Allowance]) -> None:
        """Nothing: what a store holds, and gives up, is its own affair."""

    def drop_owner(self, tag: bytes) -> None:
        """Nothing: pages in a store have names that nobody can tell an owner from."""

    def clear(self) -> None:
        """Forget what is known of the store; what it holds belongs to others, too."""
        with self._lock:
            self._known.clear()

    def close(self) -> None:
        self._backend.close()

    def _note(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._known[key] = None
                self._known.move_to_end(key)
            while len(self._known) > _KNOWN_KEYS:
                self._known.popitem(last=False)

    def _forget(self, keys: Sequence[bytes]) -> None:
        """The store has these no more: they are to be stored again."""
        with self._lock:
            for key in keys:
                self._known.pop(key, None)

    def _try(self, call: Callable[[], T]) -> T | None:
        """What a call gives; None if it fails, or if the store is being left alone.

        What began before the latest failure tells nothing new, however it ends.
        """
        began = self._clock()
        if began < self._silent_until:
            return None
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - each client library has its own
            with self._lock:
                if began >= self._silent_until:
                    if not self._pause:
                        log.warning("the store %s fails, going on without it: %s", self._title, _line(error))
                    self._pause = min(LONGEST_PAUSE, 2 * self._pause or FIRST_PAUSE)
                    self._silent_until = self._clock() + self._pause
                    self._failure = f"it fails ({type(error).__name__}) and is left alone for a while"
            return None
        if self._pause and began >= self._silent_until:
            with self._lock:
                self._pause = 0.0
                self._failure = ""
                self._known.clear()  # it may have begun anew, without its values
            log.warning("the store %s works again", self._title)
        return result


def _line(error: Exception) -> str:
    """The first line of what an error says, or else what it is: some clients tell their whole life."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _name(key: bytes) -> str:
    return key.hex()


def open_backend(url: str) -> Backend:
    """The store that a URL names.

    Raises:
        ConfigError: no such kind of store, or what it needs isn't installed.
    """
    scheme = urlsplit(url).scheme
    try:
        if scheme in ("redis", "rediss", "valkey", "unix"):
            from pagetrie.kv.tiers.store_redis import RedisBackend

            return RedisBackend(url)
        if scheme in ("file", "s3"):
            from pagetrie.kv.tiers.store_objects import ObjectBackend

            return ObjectBackend(url)
        if scheme == "mooncake":
            from pagetrie.kv.tiers.store_mooncake import MooncakeBackend

            return MooncakeBackend(url)
    except ImportError as error:
        raise ConfigError(
            f"{scheme}:// stores need what isn't installed ({error}); "
            f"pip install 'pagetrie[{'mooncake' if scheme == 'mooncake' else 'store'}]'"
        ) from error
    raise ConfigError(f"no kind of store is called {scheme!r}; there are redis://, file://, s3:// and mooncake://")
