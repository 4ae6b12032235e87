"""uvicorn's HTTP connection, with bounds on what a client may make it keep and wait for."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pagetrie.server.errors import http_error

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together."""

MAX_HEADERS = 200

LINGER_SECONDS = 2.0
"""How long what comes after a refusal is read and dropped: closing under a client that still sends would reset the
connection, and the client might never see why."""

_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class BoundedConnection(HttpToolsProtocol):
    """Refuses heads beyond ``MAX_HEAD_BYTES`` (431) and requests that take too long to arrive (408).

    Attributes:
        request_timeout: seconds from a connection's start, or a request's first byte, to the request's last byte.
    """

    request_timeout: ClassVar[float] = 60.0

    _raw_bytes = 0  # received while the head isn't whole
    _head_bytes = 0  # of the head, as parsed
    _in_head = True
    _ended = 0  # requests that have arrived whole
    _began = False
    _refused = False
    _timer: asyncio.TimerHandle | None = None

    @classmethod
    def with_timeout(cls, seconds: float) -> type[BoundedConnection]:
        """This class with another time limit."""
        return type(cls.__name__, (cls,), {"request_timeout": seconds})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        ended = self._ended
        super().data_received(data)
        # Data in which a request ended was its body, for all but what little of a next head may follow.
        if self._in_head and self._ended == ended:
            self._raw_bytes += len(data)
            if self._raw_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse_head()

    # -- what the parser says ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._began = True
        self._head_bytes = 0
        self._set_timer()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._count(MAX_HEAD_BYTES + 1)

    def _count(self, more: int) -> None:
        self._head_bytes += more
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the head is too large")  # the parser stops, and we get to send_400_response

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._in_head, self._raw_bytes = True, 0
        self._ended += 1
        super().on_message_complete()

    # -- refusals ----------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        else:
            self._refuse(400, msg)

    def _refuse_head(self) -> None:
        self._refuse(431, f"The request line and headers take more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} lines.")

    def _refuse(self, status: int, message: str) -> None:
        if self._refused:
            return
        if self.cycle is not None and not self.cycle.response_complete and self.cycle.response_started:
            self.transport.close()  # in the middle of another answer
            return
        body = http_error(status, message).body()
        head = (
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        ) % (status, _REASONS[status], len(body))
        self._refused = True
        self._stop_timer()
        self.transport.write(head + body)
        self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    # -- time --------------------------------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.request_timeout, self._on_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_late(self) -> None:
        if self.transport.is_closing():
            return
        answering = self._in_head and self.cycle is not None and not self.cycle.response_complete
        if answering or self.flow.read_paused:
            self._set_timer()  # it isn't the client that we wait for
        elif not self._began:
            self.transport.close()  # a connection without a word
        else:
            self._refuse(408, f"The request didn't arrive within {self.request_timeout:g} s.")
