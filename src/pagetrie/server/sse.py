"""Server-sent events as OpenAI frames them, over a response that stops its source when the client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagetrie.server.disconnect import cancel_and_wait, wait_for_disconnect
from pagetrie.server.errors import is_expected, to_api_error

logger = logging.getLogger("pagetrie.server")

DONE = b"data: [DONE]\n\n"

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode(value: Any) -> bytes:
    """Compact UTF-8 JSON. NaN and infinities are a bug, not JSON."""
    return _JSON.encode(value).encode()


def event(value: Any) -> bytes:
    """One event."""
    return b"data: " + encode(value) + b"\n\n"


class EventStream(Response):
    """Streams events, then ``[DONE]``; an error on the way becomes an error event and the end.

    ``close`` is awaited exactly once, however the stream ends: all sent, failed, client gone, task cancelled.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]], request_id: str
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._close = close
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", "x-request-id": request_id})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = asyncio.ensure_future(self._stream(send))
        gone = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait((stream, gone), return_when=asyncio.FIRST_COMPLETED)
            if stream.done():
                stream.result()
        finally:
            try:
                await cancel_and_wait(stream, gone)
            finally:
                await self._close()

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with aclosing(self._events) as events:
                async for chunk in events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            last = DONE
        except Exception as error:
            if not is_expected(error):
                logger.error("a stream failed", exc_info=error)
            last = b"data: " + to_api_error(error).body() + b"\n\n"
        await send({"type": "http.response.body", "body": last, "more_body": False})
