"""OpenVINO GenAI behind a thin OpenAI-like HTTP server, so that the benchmark's client can drive it.

Runs in the peer's own environment: the standard library and openvino_genai, nothing of this project. One thread steps
the continuous batching pipeline (prefix caching on); the event loop only moves bytes.

``python openvino_adapter.py --model FILE.gguf --port 8000 --threads 2 --cache-gib 2``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import threading
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai


class Engine:
    """Steps the pipeline on a thread of its own; per token it calls back into the event loop."""

    def __init__(self, model: str, threads: int, cache_gib: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        scheduler.cache_size = cache_gib
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._texts: dict[int, str] = {}
        self._new: queue.SimpleQueue[tuple[list[int], int, Any]] = queue.SimpleQueue()
        self._count = 0
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, prompt: list[int], max_tokens: int, put: Any) -> None:
        """``put`` gets each piece of text, then None; or an exception."""
        self._new.put((prompt, max_tokens, put))

    def _run(self) -> None:
        running: list[tuple[Any, Any]] = []
        while True:
            while not running or not self._new.empty():
                self._begin(running, *self._new.get())
            try:
                self._pipeline.step()
                running = [(handle, put) for handle, put in running if self._deliver(handle, put)]
            except Exception as error:
                for _, put in running:
                    put(error)
                raise

    def _begin(self, running: list[tuple[Any, Any]], prompt: list[int], max_tokens: int, put: Any) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        self._count += 1
        try:
            running.append((self._pipeline.add_request(self._count, ids, config), put))
        except Exception as error:  # noqa: BLE001  whatever it is, the client is told
            put(error)

    def _deliver(self, handle: Any, put: Any) -> bool:
        """Pass on what is there; whether more is to come."""
        while handle.can_read():
            for output in handle.read().values():
                for token in output.generated_ids:
                    put(self._text(token))
        if handle.get_status() == genai.GenerationStatus.RUNNING:
            return True
        put(None)
        return False

    def _text(self, token: int) -> str:
        # Token by token, each decoded once: a real decoder of streams would cost this peer time per token.
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return self._texts[token]


async def handle(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        if head.startswith("GET "):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            return
        fields = dict(line.lower().split(": ", 1) for line in head.strip().split("\r\n")[1:])
        request = json.loads(await reader.readexactly(int(fields["content-length"])))
        await complete(engine, request, writer)
    finally:
        writer.close()


async def complete(engine: Engine, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Stream one completion of token ids."""
    pieces: asyncio.Queue[Any] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    prompt = request["prompt"]
    engine.submit(prompt, request["max_tokens"], lambda piece: loop.call_soon_threadsafe(pieces.put_nowait, piece))
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
    count = 0
    while (piece := await pieces.get()) is not None:
        if isinstance(piece, Exception):
            send(writer, {"error": {"message": str(piece)}})
            return
        count += 1
        send(writer, {"choices": [{"index": 0, "text": piece}]})
    send(writer, {"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": count}})
    writer.write(b"data: [DONE]\n\n")
    await writer.drain()


def send(writer: asyncio.StreamWriter, data: dict[str, Any]) -> None:
    writer.write(b"data: " + json.dumps(data).encode() + b"\n\n")


async def serve(options: argparse.Namespace) -> None:
    engine = Engine(options.model, options.threads, options.cache_gib)
    server = await asyncio.start_server(
        lambda reader, writer: handle(engine, reader, writer), "127.0.0.1", options.port, limit=1 << 22
    )
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache-gib", type=int, default=2)
    asyncio.run(serve(parser.parse_args()))
