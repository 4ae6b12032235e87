"""A completion server without a model, for tests of the benchmark: ``fake_server.py [--fail | --hang] --port N``.

It answers as many words as were asked for and reports all but one prompt token as cached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any


async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, hang: bool = False) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET "):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            return
        length = next(int(line.split(":")[1]) for line in head.splitlines() if line.startswith("Content-Length"))
        request = json.loads(await reader.readexactly(length))
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        if hang:
            await reader.read()  # until the client gives up
            return
        for _ in range(request["max_tokens"]):
            send(writer, {"choices": [{"index": 0, "text": " word"}]})
        count = len(request["prompt"])
        usage = {"prompt_tokens": count, "completion_tokens": request["max_tokens"]}
        send(writer, {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": count - 1}}})
        part(writer, b"data: [DONE]\n\n")
        part(writer, b"")
        await writer.drain()
    finally:
        writer.close()


def send(writer: asyncio.StreamWriter, data: dict[str, Any]) -> None:
    part(writer, b"data: " + json.dumps(data).encode() + b"\n\n")


def part(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def main(options: argparse.Namespace) -> None:
    server = await asyncio.start_server(
        lambda reader, writer: handle(reader, writer, hang=options.hang), "127.0.0.1", options.port
    )
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--hang", action="store_true")
    chosen = parser.parse_args()
    if chosen.fail:
        sys.exit("no such model")
    asyncio.run(main(chosen))
