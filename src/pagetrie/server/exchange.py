"""One HTTP request and its answer, as logs, metrics and traces see it: no text, no keys, no query string."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagetrie.server.auth import find_caller
from pagetrie.server.errors import INTERNAL_ERROR
from pagetrie.server.fanin import OutputStream
from pagetrie.server.sse import encode

logger = logging.getLogger("pagetrie.server")

QUIET_PATHS = ("/health", "/ready", "/metrics")
"""Asked every few seconds, by machines."""
METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS")
_LONGEST_PATH = 500


@dataclass(slots=True)
class Exchange:
    """What is known of a request; complete once it has been answered.

    Attributes:
        path: percent-encoded, so that it is one word.
        handler: the route's path, with names in place of values; ``none`` for unknown paths.
        status: 0 if the client was gone before there was one.
        seconds: until the whole answer was sent.
        headers: the request's, as ASGI gives them.
        tenant: whose key came with it; empty without keys.
        request_id: the answer's id; empty where there is none.
        outputs: what the engine gave for it.
    """

    method: str
    path: str
    client: str
    headers: Sequence[tuple[bytes, bytes]]
    handler: str = "none"
    status: int = 0
    seconds: float = 0.0
    tenant: str = ""
    request_id: str = ""
    outputs: list[OutputStream] = field(default_factory=list)

    def some_headers(self, names: Collection[str]) -> dict[str, str]:
        """The request's headers of these (lower-case) names."""
        if not names:
            return {}
        decoded = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in self.headers)
        return {name: value for name, value in decoded if name in names}

    def tokens(self) -> dict[str, int]:
        """Prompt, cached and completion tokens; empty if the engine was not asked."""
        prompts = [prompt for outputs in self.outputs for prompt in outputs.prompts]
        if not prompts:
            return {}
        return {
            "prompt_tokens": sum(prompt.prompt_tokens for prompt in prompts),
            "cached_tokens": sum(prompt.cached_tokens for prompt in prompts),
            "completion_tokens": sum(prompt.completion_tokens for prompt in prompts),
        }


_current: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


def current() -> Exchange | None:
    """The exchange that this task works for; None for the server's own work."""
    return _current.get()


class Exchanges:
    """Follows each request to its end and tells ``listeners``. A crash is logged once, and answered without details."""

    def __init__(
        self,
        app: ASGIApp,
        listeners: Sequence[Callable[[Exchange], None]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.app = app
        self.listeners = listeners
        self.clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = self.clock()
        client = scope.get("client") or ("-", 0)
        method = scope["method"] if scope["method"] in METHODS else "other"
        exchange = Exchange(method, quote(scope["path"][:_LONGEST_PATH]), client[0], scope["headers"])
        token = _current.set(exchange)

        async def noting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                if not exchange.request_id:
                    named = [value for name, value in message["headers"] if name == b"x-request-id"]
                    exchange.request_id = named[0].decode("latin-1") if named else ""
            await send(message)

        try:
            await self.app(scope, receive, noting_send)
        except Exception:
            logger.exception("%s %s failed", exchange.method, exchange.path)
            if not exchange.status:
                await INTERNAL_ERROR.response()(scope, receive, noting_send)
        finally:
            _current.reset(token)
            exchange.seconds = self.clock() - start
            route, caller = scope.get("route"), find_caller(scope)
            exchange.handler = "none" if route is None else route.path
            exchange.tenant = caller.tenant.name if caller is not None and caller.key_id else ""
            for listener in self.listeners:
                listener(exchange)


def plain_log(exchange: Exchange) -> None:
    """One short line per request in the server's log, at level info."""
    if exchange.path not in QUIET_PATHS:
        logger.info(
            "%s %s %s %s %.0f ms",
            exchange.client,
            exchange.method,
            exchange.path,
            exchange.status or "-",
            exchange.seconds * 1000,
        )


def json_log(
    write: Callable[[bytes], object] | None = None, clock: Callable[[], float] = time.time
) -> Callable[[Exchange], None]:
    """One line of JSON per request.

    Args:
        write: takes a line; standard output if None.
        clock: seconds since the epoch.
    """

    def log(exchange: Exchange) -> None:
        if exchange.path in QUIET_PATHS:
            return
        line = {
            "time": datetime.fromtimestamp(clock(), UTC).isoformat(timespec="milliseconds"),
            "client": exchange.client,
            "method": exchange.method,
            "path": exchange.path,
            "status": exchange.status or None,
            "ms": round(exchange.seconds * 1000, 1),
            "request_id": exchange.request_id or None,
            "tenant": exchange.tenant or None,
            **exchange.tokens(),
        }
        (write or _to_stdout)(encode(line) + b"\n")

    return log


def _to_stdout(line: bytes) -> None:
    sys.stdout.write(line.decode())
    sys.stdout.flush()
