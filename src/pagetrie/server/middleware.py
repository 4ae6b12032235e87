"""The limit on request bodies, as plain ASGI middleware."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagetrie.server.auth import caller_of
from pagetrie.server.errors import http_error

LINGER_BYTES = 64 * 2**20
LINGER_SECONDS = 2.0


class BodyTooLargeError(Exception):
    """Raised out of ``receive`` once a body has passed the limit."""


class BodyLimit:
    """Answers 413 to bodies over ``max_bytes``, or the caller's own limit if that is less: at once if Content-Length
    says so, else while reading."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        own = caller_of(scope).limits.max_body_bytes
        limit = self.max_bytes if own is None else min(self.max_bytes, own)
        declared = headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
            await _refuse_body(limit, receive, send, linger="expect" not in headers)
            return
        seen = 0
        started = False

        async def limited_receive() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > limit:
                    raise BodyTooLargeError
            return message

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, limited_receive, noting_send)
        except BodyTooLargeError:
            if not started:
                await _refuse_body(limit, receive, send, linger=True)


async def _refuse_body(limit: int, receive: Receive, send: Send, *, linger: bool) -> None:
    """Send the whole answer, then read on a while: closing under a client that still sends would reset the
    connection, and the client might never see why. ``linger`` is False for a client that waits for leave."""
    body = http_error(413, f"The body is larger than the limit of {limit} bytes.").body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": linger})
    if not linger:
        return
    dropped = 0
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while dropped < LINGER_BYTES:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body"):
                    break
                dropped += len(message.get("body", b""))
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
