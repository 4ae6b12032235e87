"""Folders and S3 as shared store, through obstore."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import obstore
from obstore.store import from_url

T = TypeVar("T")

ANSWER_SECONDS = 10


class ObjectBackend:
    """One object per page (``store.Backend``). Objects are written whole or not at all, and never changed.

    Args:
        url: ``file:///folder`` (made if it isn't there) or ``s3://bucket/prefix``; S3's credentials, region and
            endpoint come from the usual ``AWS_*`` variables (``AWS_ENDPOINT_URL``; ``AWS_ALLOW_HTTP=true`` for an
            endpoint without TLS).
    """

    def __init__(self, url: str) -> None:
        if url.startswith("file:"):
            self._store = from_url(url, mkdir=True)
        else:
            self._store = from_url(
                url,
                # Options that are given replace what these variables say.
                client_options={
                    "timeout": timedelta(seconds=ANSWER_SECONDS),
                    "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"),
                },
                retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=ANSWER_SECONDS)},
            )

    def exists(self, names: Sequence[str]) -> list[bool]:
        async def head(name: str) -> bool:
            try:
                await obstore.head_async(self._store, _path(name))
            except FileNotFoundError:
                return False
            return True

        return _all([head(name) for name in names])

    def get(self, names: Sequence[str], limit: int) -> list[bytes | memoryview | None]:
        async def read(name: str) -> memoryview | None:
            try:
                answer = await obstore.get_async(self._store, _path(name))
                if answer.meta["size"] > limit:
                    return None
                return memoryview(await answer.bytes_async())
            except FileNotFoundError:
                return None

        return list(_all([read(name) for name in names]))

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        async def write(name: str, value: bytes) -> None:
            await obstore.put_async(self._store, _path(name), value)

        _all([write(name, value) for name, value in items])

    def close(self) -> None:
        pass


def _path(name: str) -> str:
    return f"{name[:2]}/{name}"


def _all(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All answers, asked for at once."""

    async def run() -> list[T]:
        return list(await asyncio.gather(*calls))

    return asyncio.run(run())
