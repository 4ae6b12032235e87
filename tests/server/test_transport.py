"""What only shows on a real connection: clients that leave, big and slow bodies, slow readers, stopping."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from contextlib import asynccontextmanager

import httpx
import pytest

from pagetrie.errors import ConfigError
from pagetrie.server.serve import HttpServer
from tests.server.double import ByteTokenizer, EngineDouble
from tests.server.test_chat import HI, events

pytestmark = pytest.mark.anyio


async def within(awaitable, seconds: float = 10.0):
    return await asyncio.wait_for(awaitable, seconds)


@asynccontextmanager
async def connection(server: HttpServer):
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


def raw_post(path: str, body: object, length: int | None = None) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content) if length is None else length}\r\n\r\n"
    )
    return head.encode() + content


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("free_steps", [0, 1], ids=["queued", "running"])
async def test_leaving_closes_the_request(make_site, path, stream, free_steps):
    site = make_site(EngineDouble(texts=["abcdef"], gate=asyncio.Event(), free_steps=free_steps))
    async with site.running() as server:
        async with connection(server) as (reader, writer):
            writer.write(raw_post(path, {**(HI if "chat" in path else {"prompt": "x"}), "stream": stream, "n": 4}))
            await within(site.engine.arrived.wait())
            if stream and free_steps:
                await within(reader.readuntil(b"ab"))
        await within(site.engine.streams[0].closed.wait())
    assert not site.engine.streams[0].finished


async def test_leaving_closes_every_prompt_of_the_request(make_site):
    site = make_site(EngineDouble(texts=["abcdef"], gate=asyncio.Event()))
    async with site.running() as server:
        async with connection(server) as (_, writer):
            writer.write(raw_post("/v1/completions", {"prompt": ["x", "y", "z"]}))
            await within(site.engine.arrived.wait())
        for _ in range(3):
            await within(site.engine.streams[0].closed.wait())
    assert [stream.closed.is_set() for stream in site.engine.streams] == [True] * 3


async def test_leaving_during_tokenisation_submits_nothing(make_site):
    site = make_site(tokenizer=ByteTokenizer())
    entered, release = threading.Event(), threading.Event()

    def hold(text: str) -> None:
        if "slow" in text:
            entered.set()
            release.wait(10)

    site.tokenizer.before_encode = hold
    async with site.running() as server, httpx.AsyncClient(base_url=server.url) as client:
        async with connection(server) as (_, writer):
            writer.write(raw_post("/v1/completions", {"prompt": "slow"}))
            await asyncio.to_thread(entered.wait, 10)
        # Others go on meanwhile, their own tokenisation too.
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": "quick"})).status_code == 200
        release.set()
        assert (await client.post("/v1/completions", json={"prompt": "later"})).status_code == 200
    prompts = [bytes(stream.request.prompt_ids[1:]) for stream in site.engine.streams]
    assert prompts == [b"quick", b"later"]


async def test_big_bodies_in_work_leave_small_ones_room(make_site):
    site = make_site(EngineDouble(max_len=10**9))
    release = threading.Event()
    site.tokenizer.before_encode = lambda text: release.wait(10) if len(text) > 300_000 else None
    async with site.running() as server, httpx.AsyncClient(base_url=server.url) as client:
        big = [asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x" * 400_000})) for _ in range(8)]
        assert (await within(client.post("/v1/completions", json={"prompt": "small"}))).status_code == 200
        assert not any(task.done() for task in big)
        release.set()
        assert [response.status_code for response in await within(asyncio.gather(*big))] == [200] * 8


async def test_a_declared_big_body_is_refused_at_once(make_site):
    site = make_site(options={"max_body_bytes": 1000})
    async with site.running() as server:
        async with connection(server) as (reader, writer):
            writer.write(raw_post("/v1/completions", b"{", length=1001))  # the rest never comes
            head = await within(reader.readuntil(b"\r\n\r\n"))
            body = await within(reader.readuntil(b"}}"))
        assert head.startswith(b"HTTP/1.1 413 ")
        assert b"1000 bytes" in body and json.loads(body)["error"]["code"] == "request_too_large"


async def test_a_client_that_asks_first_is_told_before_it_sends(make_site):
    site = make_site(options={"max_body_bytes": 1000})
    async with site.running() as server, connection(server) as (reader, writer):
        head = raw_post("/v1/completions", b"", length=5000)
        writer.write(head.replace(b"Host: x", b"Host: x\r\nExpect: 100-continue"))
        answer = await within(reader.read())
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert answer.endswith(b"}}")


async def test_a_client_that_sends_a_big_body_to_its_end_reads_the_refusal(make_site):
    site = make_site(options={"max_body_bytes": 1000})
    async with site.running() as server, httpx.AsyncClient(base_url=server.url) as client:
        response = await client.post("/v1/completions", json={"prompt": "x" * 5_000_000})
        assert response.status_code == 413
        assert (await client.get("/health")).status_code == 200


async def test_an_undeclared_big_body_is_refused_while_it_comes(make_site):
    site = make_site(options={"max_body_bytes": 1000})
    async with site.running() as server, connection(server) as (reader, writer):
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(6):
            writer.write(b"c8\r\n" + b"x" * 200 + b"\r\n")
        await writer.drain()
        assert (await within(reader.readuntil(b"\r\n\r\n"))).startswith(b"HTTP/1.1 413 ")
    assert not site.engine.streams


async def test_a_body_at_the_limit_is_taken(make_site):
    body = json.dumps({"prompt": "x" * 50}).encode()
    for limit, status in ((len(body), 200), (len(body) - 1, 413)):
        site = make_site(options={"max_body_bytes": limit})
        async with site.running() as server, httpx.AsyncClient(base_url=server.url) as client:
            response = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert response.status_code == status


async def test_slow_bodies_hold_up_nobody(site):
    async with site.running() as server, connection(server) as (reader, writer):
        whole = raw_post("/v1/completions", {"prompt": "slow"})
        writer.write(whole[:-3])
        await writer.drain()
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
            assert len(site.engine.streams) == 1
        writer.write(whole[-3:])
        assert (await within(reader.readline())).startswith(b"HTTP/1.1 200 ")


async def test_a_reader_that_pauses_gets_everything_and_delays_nobody(make_site):
    text = "".join(chr(97 + i % 26) for i in range(6000))
    site = make_site(EngineDouble(texts=[text], chunk=1))
    body = {"prompt": "x", "max_tokens": 6000, "stream": True, "logprobs": 5}
    loop = asyncio.get_running_loop()
    async with site.running() as server:
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await loop.sock_connect(sock, server._socket.getsockname())
            request = raw_post("/v1/completions", body).replace(b"Host: x", b"Host: x\r\nConnection: close")
            await loop.sock_sendall(sock, request)
            await within(site.engine.arrived.wait())
            stream = site.engine.streams[0]
            async with httpx.AsyncClient(base_url=server.url) as client:
                while not stream.finished:  # the engine is read to the end although the client reads nothing
                    assert (await client.get("/health")).status_code == 200
            raw = b""
            while piece := await within(loop.sock_recv(sock, 65536)):
                raw += piece
    payloads = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]
    assert "".join(p["choices"][0]["text"] for p in payloads) == text
    assert sum(len(p["choices"][0]["logprobs"]["tokens"]) for p in payloads if p["choices"][0]["logprobs"]) == 6000
    assert len(payloads) < 3000  # what waited for the reader was joined


async def test_events_arrive_one_by_one(make_site):
    gate = asyncio.Event()
    site = make_site(EngineDouble(texts=["abcd"], gate=gate))
    async with site.running() as server, httpx.AsyncClient(base_url=server.url) as client:
        async with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
            pieces = response.aiter_text()
            first = await within(anext(pieces))
            assert events(first)[0]["choices"][0]["text"] == "ab"
            gate.set()
            rest = "".join([piece async for piece in pieces])
        assert events(rest)[-1] == "[DONE]"


async def test_stopping_lets_running_requests_finish_and_refuses_new_ones(make_site):
    gate = asyncio.Event()
    site = make_site(EngineDouble(texts=["abcd"], gate=gate))
    site.engine.stop = _record_stop(site.engine)
    async with site.running(shutdown_timeout=10) as server, httpx.AsyncClient(base_url=server.url) as client:
        running = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x"}))
        await within(site.engine.arrived.wait())
        server.stop()
        await within(site.engine.stopping.wait())
        assert (await site.get("/health")).status_code == 503
        refused = await site.post("/v1/completions", {"prompt": "y"})
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient().get(server.url + "/health")
        gate.set()
        assert (await within(running)).json()["choices"][0]["text"] == "abcd"
    assert site.engine.stops[0] == 10


def _record_stop(engine):
    engine.stopping = asyncio.Event()

    async def stop(*, drain_seconds: float = 0.0) -> None:
        engine.stops.append(drain_seconds)
        engine.stopping.set()

    return stop


async def test_stopping_tells_the_requests_it_aborts(make_site):
    site = make_site(EngineDouble(texts=["abcd"], gate=asyncio.Event()))  # the double's stop aborts what is held
    async with site.running(shutdown_timeout=0) as server, httpx.AsyncClient(base_url=server.url) as client:
        whole = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x"}))
        streamed = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x", "stream": True}))
        while len(site.engine.streams) < 2:
            site.engine.arrived.clear()
            await within(site.engine.arrived.wait())
        server.stop()
        response = await within(whole)
        assert response.status_code == 503 and response.json()["error"]["code"] == "service_unavailable"
        *chunks, last = events((await within(streamed)).text)
        assert chunks[0]["choices"][0]["text"] == "ab"
        assert last["error"]["code"] == "service_unavailable"


async def test_an_address_in_use_is_a_clear_error(site):
    async with site.running() as server:
        port = int(server.url.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1 port {port}"):
            HttpServer(site.app, port=port)


async def test_two_applications_in_one_process(make_site):
    one, two = make_site(EngineDouble(texts=["one"])), make_site(EngineDouble(texts=["two"]))
    async with one.running() as first, two.running() as second, httpx.AsyncClient() as client:
        for url, text in ((first.url, "one"), (second.url, "two")):
            response = await client.post(url + "/v1/completions", json={"prompt": "x"})
            assert response.json()["choices"][0]["text"] == text


# -- bounds on what a client may make the server keep and wait for ----------------------------------------------------


@asynccontextmanager
async def serving(site, request_timeout: float = 60.0):
    ready = asyncio.Event()
    server = HttpServer(site.app, port=0, request_timeout=request_timeout, on_ready=lambda url: ready.set())
    task = asyncio.ensure_future(server.serve())
    await within(ready.wait())
    try:
        yield server
    finally:
        server.stop()
        await within(task)


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """What comes until the connection is closed."""
    head, _, body = (await within(reader.read())).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET /health HTTP/1.1\r\n", b"x: " + b"y" * 200_000],
        [b"GET /health HTTP/1.1\r\n", *[b"x%d: y\r\n" % number for number in range(300)], b"\r\n"],
        [b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 20_000 + b"\r\n"],
        [b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\nhost: x\r\nx" + b"y" * 100_000 + b": 1\r\n\r\n"],
    ],
    ids=["endless value", "many headers", "many equal headers", "long path", "long name"],
)
async def test_heads_without_measure_are_refused_and_dropped(site, pieces):
    async with site.running() as server, connection(server) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
        status, headers, body = await answer(reader)
        assert status == 431 and headers["connection"] == "close"
        assert json.loads(body)["error"]["code"] == "request_head_too_large"
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/health")).status_code == 200


async def test_heads_of_a_common_size_pass(site):
    async with site.running() as server, httpx.AsyncClient(base_url=server.url) as client:
        headers = {f"x-{number}": "y" * 300 for number in range(100)}
        for _ in range(3):  # on one connection
            assert (await client.get("/health", headers=headers)).status_code == 200
            assert (await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n",
        raw_post("/v1/completions", b'{"prompt":', length=100),
        raw_post("/v1/completions", b"5\r\nabcde\r\n").replace(b"Content-Length: 10", b"Transfer-Encoding: chunked"),
    ],
    ids=["head", "body", "chunks"],
)
async def test_requests_that_do_not_arrive_in_time_are_refused(site, sent):
    async with serving(site, request_timeout=0.2) as server, connection(server) as (reader, writer):
        writer.write(sent)
        status, _, body = await answer(reader)
    assert status == 408 and json.loads(body)["error"]["message"] == "The request didn't arrive within 0.2 s."
    assert site.engine.streams == []


async def test_a_connection_without_a_word_is_closed(site):
    async with serving(site, request_timeout=0.2) as server, connection(server) as (reader, _):
        assert await within(reader.read()) == b""


async def test_the_time_limit_is_for_arriving_not_for_answering(make_site):
    gate = asyncio.Event()
    site = make_site(EngineDouble(texts=["abcdef"], gate=gate))
    async with serving(site, request_timeout=0.2) as server, connection(server) as (reader, writer):
        writer.write(raw_post("/v1/completions", {"prompt": "x", "stream": True}))
        await within(reader.readuntil(b"ab"))
        # Another connection's limit passes meanwhile.
        async with connection(server) as (other, _):
            assert await within(other.read()) == b""
        gate.set()
        await within(reader.readuntil(b"[DONE]"))


async def test_what_is_no_http_is_told_so(site):
    async with site.running() as server, connection(server) as (reader, writer):
        writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
        status, _, body = await answer(reader)
    assert status == 400 and json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/contexts/../../etc/passwd",
        "/v1/contexts/..%2f..%2fetc%2fpasswd",
        "/v1/models/%00",
        "/v1/models/../../health",
        "/v1/models/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/v1/models/" + "a" * 5000,
        "/%ff%fe",
    ],
)
async def test_tricks_in_paths_are_plain_404s(site, path):
    async with site.running() as server, connection(server) as (reader, writer):
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        status, _, body = await answer(reader)
    assert status == 404 and len(body) < 1000
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
