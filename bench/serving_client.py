"""The one HTTP client that drives every system: POST /v1/completions, streamed, read from a bare socket.

Bare, since at 50 streams a general HTTP library takes a good part of a core that the servers need.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any


class RequestFailedError(Exception):
    """A request that wasn't answered in full; says how."""


@dataclass(slots=True)
class Reply:
    """One request as the client saw it. Times are the clock's, in seconds.

    Attributes:
        first: when the first text arrived (the last event, if there was no text).
        events: chunks with text, while and after it runs.
        cached_tokens: as reported by the system; None if it doesn't report.
    """

    prompt_tokens: int
    measured: bool
    sent: float
    first: float | None = None
    ended: float | None = None
    text: str = ""
    events: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None

    @property
    def ttft(self) -> float:
        return (self.first or 0.0) - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first."""
        if self.ended is None or self.first is None or self.completion_tokens < 2:
            return None
        return (self.ended - self.first) / (self.completion_tokens - 1)


@dataclass(slots=True)
class Client:
    """Sends requests to one server and keeps what came back in ``replies`` (those still running too)."""

    host: str
    port: int
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    clock: Callable[[], float] = perf_counter
    replies: list[Reply] = field(default_factory=list)

    async def ask(self, prompt: Sequence[int], max_tokens: int, measured: bool = True) -> str:
        """Complete ``prompt`` with exactly ``max_tokens`` tokens; the text.

        Raises:
            RequestFailedError: the system refused, broke off, or counted other lengths than were asked for.
        """
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        payload = json.dumps(body).encode()
        reply = Reply(len(prompt), measured, self.clock())
        self.replies.append(reply)
        try:
            async for data in stream(self.host, self.port, "/v1/completions", payload):
                now = self.clock()
                if "error" in data:
                    raise RequestFailedError(f"error in the stream: {str(data['error'])[:200]}")
                text = "".join(choice.get("text") or "" for choice in data.get("choices") or ())
                if text:
                    reply.text += text
                    reply.events += 1
                    reply.first = reply.first or now
                read_usage(reply, data)
                reply.ended = now
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise RequestFailedError(f"the connection failed: {type(error).__name__}: {error}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RequestFailedError(f"the answer isn't as expected: {type(error).__name__}: {error}") from error
        if reply.ended is None:
            raise RequestFailedError("the stream was empty")
        reply.first = reply.first or reply.ended
        if reply.completion_tokens != max_tokens:
            raise RequestFailedError(f"asked for {max_tokens} tokens, got {reply.completion_tokens}")
        return reply.text


def read_usage(reply: Reply, data: Mapping[str, Any]) -> None:
    """Take the token counts from an event that has them.

    Raises:
        RequestFailedError: the system counts another number of prompt tokens than were sent.
    """
    usage = data.get("usage")
    if not usage:
        return
    if usage["prompt_tokens"] != reply.prompt_tokens:
        raise RequestFailedError(
            f"sent {reply.prompt_tokens} prompt tokens, the system counts {usage['prompt_tokens']}"
        )
    reply.completion_tokens = usage["completion_tokens"]
    details = usage.get("prompt_tokens_details") or {}
    reply.cached_tokens = details.get("cached_tokens", reply.cached_tokens)


async def stream(host: str, port: int, path: str, payload: bytes) -> AsyncIterator[dict[str, Any]]:
    """POST and yield the JSON of each server-sent event, until [DONE] or the end of the body.

    Raises:
        RequestFailedError: a status other than 200, with the start of the body.
        OSError, asyncio.IncompleteReadError: the connection broke.
    """
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 22)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload)
        status, headers = parse_head(await reader.readuntil(b"\r\n\r\n"))
        body = chunks(reader) if headers.get("transfer-encoding") == "chunked" else _rest(reader)
        if status != 200:
            text = b"".join([part async for part in body]).decode("utf-8", "replace")
            raise RequestFailedError(f"status {status}: {text[:300]}")
        events = EventParser()
        async for part in body:
            for data in events.feed(part):
                if data == "[DONE]":
                    return
                yield json.loads(data)
    finally:
        writer.close()


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers (names in lower case) of an HTTP/1.1 response."""
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return int(first.split()[1]), {name.strip().lower(): value.strip().lower() for name, _, value in pairs}


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The parts of a body in chunked transfer coding."""
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(1 << 16):
        yield part


class EventParser:
    """Server-sent events from bytes that may be cut anywhere. Only ``data`` matters here."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, part: bytes) -> list[str]:
        """The data of the events that ``part`` completes."""
        *lines, self._pending = (self._pending + part).split(b"\n")
        data = (line[5:].strip().decode("utf-8") for line in lines if line.startswith(b"data:"))
        return [item for item in data if item]


async def answers(host: str, port: int, path: str) -> bool:
    """Whether a GET is answered with status 200."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        status, _ = parse_head(await reader.readuntil(b"\r\n\r\n"))
    except (OSError, asyncio.IncompleteReadError):
        return False
    else:
        return status == 200
    finally:
        writer.close()
