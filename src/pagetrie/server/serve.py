"""Running the application on a socket until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Generator
from math import ceil
from types import FrameType

import uvicorn
from fastapi import FastAPI

from pagetrie.errors import ConfigError
from pagetrie.server.connection import BoundedConnection
from pagetrie.server.context import ServerContext
from pagetrie.server.disconnect import cancel_and_wait

FLUSH_SECONDS = 2.0
"""Time for aborted requests to say so to their clients."""

KEEP_ALIVE_SECONDS = 65
"""Longer than the minute after which common proxies and clients drop idle connections, so that they close first."""


class _Server(uvicorn.Server):
    """uvicorn's server with a shutdown that tells the engine, and a normal return after a signal."""

    def __init__(self, config: uvicorn.Config, context: ServerContext, drain_seconds: float, ready: Callable[[], None]):
        super().__init__(config)
        self._context = context
        self._drain_seconds = drain_seconds
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._context.stopping = True
        stop = asyncio.ensure_future(self._context.loop.stop(drain_seconds=self._drain_seconds))
        await super().shutdown(sockets)
        if self.force_exit:
            await cancel_and_wait(stop)
            await self._context.loop.stop()
        else:
            await stop

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """As uvicorn's, but without raising the signal again at the end: a stop that was asked for is a success."""
        signals = (signal.SIGINT, signal.SIGTERM)
        try:
            before = {number: signal.signal(number, self._on_signal) for number in signals}
        except ValueError:  # not in the main thread; whoever runs this stops it by should_exit
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True  # a second signal: don't wait for anyone
        self.should_exit = True


def _ignore(url: str) -> None:
    pass


class HttpServer:
    """An application on its own socket. The socket listens from the start; requests are answered once ``run`` runs.

    Args:
        app: from ``create_app``.
        host, port: where to listen; port 0 takes a free one.
        shutdown_timeout: seconds that running requests get to finish after a stop; the rest is aborted.
        request_timeout: seconds that a request may take to arrive.
        on_ready: called with the base URL as soon as requests are answered.

    Attributes:
        url: the base URL.

    Raises:
        ConfigError: the address can't be listened on.
    """

    def __init__(
        self,
        app: FastAPI,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        shutdown_timeout: float = 30.0,
        request_timeout: float = 60.0,
        on_ready: Callable[[str], None] = _ignore,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=2048)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"can't listen on {host} port {port}: {error}") from error
        bound_port = self._socket.getsockname()[1]
        self.url = f"http://[{host}]:{bound_port}" if ":" in host else f"http://{host}:{bound_port}"
        config = uvicorn.Config(
            app,
            http=BoundedConnection.with_timeout(request_timeout),
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=ceil(shutdown_timeout + FLUSH_SECONDS),
        )
        self._server = _Server(config, app.state.context, shutdown_timeout, lambda: on_ready(self.url))

    def run(self) -> None:
        """Serve until ``stop`` or, in the main thread, SIGTERM or SIGINT; return when all has ended.

        A second signal ends the waiting for running requests.
        """
        self._server.run(sockets=[self._socket])

    async def serve(self) -> None:
        """``run`` inside an event loop that is running already."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Ask ``run`` to end, from any thread."""
        self._server.should_exit = True


def serve(
    app: FastAPI,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    shutdown_timeout: float = 30.0,
    request_timeout: float = 60.0,
    on_ready: Callable[[str], None] = _ignore,
) -> None:
    """Serve ``app`` until SIGTERM or SIGINT. See ``HttpServer``."""
    HttpServer(
        app, host, port, shutdown_timeout=shutdown_timeout, request_timeout=request_timeout, on_ready=on_ready
    ).run()
