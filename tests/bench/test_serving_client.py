"""The benchmark's HTTP client against servers that answer well, badly and not at all."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable

import pytest

from bench.serving_client import Client, EventParser, RequestFailedError, answers, parse_head
from tests.bench import fake_server

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

EVENTS = b'data: {"a": 1}\r\n\r\n: note\nevent: x\ndata:{"b": "\xc3\xa9"}\n\ndata: [DONE]\n\n'


def says(answer: bytes) -> Handler:
    """A server that reads a request, gives this answer and hangs up."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(answer)
        await writer.drain()
        writer.close()

    return handle


def with_server(handler: Handler, act: Callable[[Client], Awaitable[object]]) -> Client:
    """Run ``act`` with a client of a server; the clock counts its own calls."""

    async def run() -> Client:
        async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
            ticks = itertools.count()
            port = server.sockets[0].getsockname()[1]
            client = Client("127.0.0.1", port, "m", {"extra": 1}, lambda: float(next(ticks)))
            await act(client)
            return client

    return asyncio.run(run())


def closed(*events: object) -> bytes:
    """A body that ends with the connection."""
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + body


def text(piece: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": piece}]}


def usage(prompt: int, completion: int) -> dict[str, object]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_come_whole_however_they_are_cut(size: int) -> None:
    parser = EventParser()
    found = [item for at in range(0, len(EVENTS), size) for item in parser.feed(EVENTS[at : at + size])]
    assert found == ['{"a": 1}', '{"b": "é"}', "[DONE]"]


def test_head_gives_status_and_headers() -> None:
    head = b"HTTP/1.1 429 Too Many\r\nRetry-After: 3\r\nTransfer-Encoding: Chunked\r\n\r\n"
    assert parse_head(head) == (429, {"retry-after": "3", "transfer-encoding": "chunked"})


def test_a_chunked_answer_is_read_and_counted() -> None:
    client = with_server(fake_server.handle, lambda client: client.ask([5, 6, 7], 4))
    (reply,) = client.replies
    assert reply.text == " word word word word"
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens, reply.events) == (3, 4, 2, 4)


def test_times_are_those_of_the_first_text_and_the_last_event() -> None:
    answer = closed(text(""), text("a"), text("b"), usage(2, 2))
    (reply,) = with_server(says(answer), lambda client: client.ask([1, 2], 2)).replies
    # The clock: 0 when sent, 1 at the empty piece, 2 and 3 at text, 4 at the usage.
    assert (reply.ttft, reply.ended, reply.tpot) == (2.0, 4.0, 2.0)
    assert reply.cached_tokens is None


def test_a_reply_without_text_has_the_time_of_its_end() -> None:
    (reply,) = with_server(says(closed(text(""), usage(2, 1))), lambda client: client.ask([1, 2], 1)).replies
    assert reply.ttft == 2.0
    assert reply.tpot is None


def test_the_request_asks_for_exact_lengths() -> None:
    seen = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
        seen.append(json.loads(await reader.readexactly(length)))
        writer.write(closed(text("a"), usage(2, 7)))
        writer.close()

    with_server(handle, lambda client: client.ask([1, 2], 7))
    (body,) = seen
    expected = {"prompt": [1, 2], "max_tokens": 7, "temperature": 0, "ignore_eos": True, "stream": True, "extra": 1}
    assert expected.items() <= body.items()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 400 Bad\r\nContent-Length: 8\r\n\r\ntoo long", "status 400: too long"),
        (closed(text("a"), usage(2, 1)), "asked for 3 tokens, got 1"),
        (closed(text("a"), usage(9, 3)), "sent 2 prompt tokens, the system counts 9"),
        (closed({"error": {"message": "broken"}}), "error in the stream: .*broken"),
        (closed(), "the stream was empty"),
        (closed(text("a")), "asked for 3 tokens, got 0"),
        (b"HTTP/1.1 200 OK\r\n", "the connection failed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\ndata:", "the connection failed"),
        (closed(text("a"), {"usage": {"total": 3}}), "the answer isn't as expected"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {]\n\n", "the answer isn't as expected"),
        (b"hello\r\n\r\n", "the answer isn't as expected"),
    ],
)
def test_a_request_that_is_not_answered_in_full_says_how(answer: bytes, words: str) -> None:
    async def act(client: Client) -> None:
        with pytest.raises(RequestFailedError, match=words):
            await client.ask([1, 2], 3)

    with_server(says(answer), act)


def test_readiness_is_a_get_with_status_200() -> None:
    async def run() -> list[bool]:
        async with await asyncio.start_server(fake_server.handle, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            up = await answers("127.0.0.1", port, "/health")
        return [up, await answers("127.0.0.1", port, "/health")]

    assert asyncio.run(run()) == [True, False]
