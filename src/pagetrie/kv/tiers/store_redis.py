"""Valkey and Redis as shared store."""

from __future__ import annotations

from collections.abc import Sequence

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from pagetrie.kv.tiers.store import StoreFullError

CONNECT_SECONDS, ANSWER_SECONDS = 1.0, 5.0
_PREFIX = "pagetrie:page:1:"


class RedisBackend:
    """One value per page, asked for and stored in pipelines (``store.Backend``).

    Set ``maxmemory`` and ``maxmemory-policy allkeys-lru`` in the server: pages have no expiry of their own.

    Args:
        url: ``redis://[user:password@]host[:port][/database]``, ``rediss://`` for TLS, ``unix://path``;
            ``valkey://`` is another spelling of the first.
    """

    def __init__(self, url: str) -> None:
        if url.startswith("valkey://"):
            url = "redis" + url[len("valkey") :]
        self._client = redis.Redis.from_url(
            url,
            socket_connect_timeout=CONNECT_SECONDS,
            socket_timeout=ANSWER_SECONDS,
            # Whoever waits has a deadline; the tier decides when to try again.
            retry=Retry(NoBackoff(), 0),
        )

    def exists(self, names: Sequence[str]) -> list[bool]:
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.exists(_PREFIX + name)
            return [bool(answer) for answer in pipeline.execute()]

    def get(self, names: Sequence[str], limit: int) -> list[bytes | memoryview | None]:
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                # One byte more than a page may have, so that a longer value is noticed and not read.
                pipeline.getrange(_PREFIX + name, 0, limit)
            return [answer or None for answer in pipeline.execute()]

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for name, value in items:
                pipeline.set(_PREFIX + name, value)
            try:
                pipeline.execute()
            except redis.ResponseError as error:  # it is there: without memory, a replica, unable to save, ...
                raise StoreFullError(str(error)) from error

    def close(self) -> None:
        self._client.close()
