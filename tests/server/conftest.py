"""Applications over the engine double, reached in-process or over a real socket."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from pagetrie.server.app import create_app
from pagetrie.server.metrics import Metrics
from pagetrie.server.serve import HttpServer
from tests.server.double import ByteTokenizer, EngineDouble, PlainTemplate


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Site:
    """One application with its parts."""

    engine: EngineDouble = field(default_factory=EngineDouble)
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    template: PlainTemplate | None = field(default_factory=PlainTemplate)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = itertools.count(1)
        self.metrics = Metrics("tiny", 200, {"cache_dtype": "fp16"})
        self.app: FastAPI = create_app(
            **{
                "loop": self.engine,
                "tokenizer": self.tokenizer,
                "chat_template": self.template,
                "model_name": "tiny",
                "aliases": ["also-tiny"],
                "max_model_len": 200,
                "metrics": self.metrics,
                "clock": lambda: 1234.5,
                "new_id": lambda: str(next(numbers)),
                "system_fingerprint": "fp_x",
                **self.options,
            }
        )

    def client(self) -> httpx.AsyncClient:
        """A client that calls the application in-process."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
        return httpx.AsyncClient(transport=transport, base_url="http://site")

    async def post(self, path: str, body: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.post(path, json=body)

    async def get(self, path: str) -> httpx.Response:
        async with self.client() as client:
            return await client.get(path)

    @asynccontextmanager
    async def running(self, shutdown_timeout: float = 1.0) -> AsyncIterator[HttpServer]:
        """The application behind uvicorn on a free port of this event loop."""
        ready = asyncio.Event()
        server = HttpServer(self.app, port=0, shutdown_timeout=shutdown_timeout, on_ready=lambda url: ready.set())
        task = asyncio.ensure_future(server.serve())
        await asyncio.wait_for(ready.wait(), 10)
        try:
            yield server
        finally:
            server.stop()
            await asyncio.wait_for(task, 10)


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def make_site() -> Callable[..., Site]:
    return Site
