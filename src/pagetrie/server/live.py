"""The live view over HTTP: one snapshot per interval for all viewers, none while there are none."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pagetrie.engine.engine import Engine
from pagetrie.engine.live import LiveSnapshot, LiveView
from pagetrie.engine.tenant import Tenant
from pagetrie.errors import InvalidRequestError
from pagetrie.kv.picture import EdgeText
from pagetrie.kv.tokens import unpack_tokens
from pagetrie.server.auth import Access, caller
from pagetrie.server.context import HttpError, ServerContext
from pagetrie.server.errors import ServerStoppingError
from pagetrie.server.live_frame import FrameWriter
from pagetrie.server.sse import EventStream, encode
from pagetrie.server.text_api import TokenizerLike

INTERVAL = 1.0
"""Seconds between snapshots, at least."""
SHARE = 125
"""And at least this many times the CPU time of taking one and writing it as JSON: it takes less than 1 % of a core."""
MAX_VIEWERS = 32
SEARCHED_TOKENS = 400_000
FOUND = 50
_AROUND = 40
_LONGEST_QUERY = 200


class LiveFeed:
    """Takes snapshots while somebody watches.

    Args:
        context: the app's.
        view: takes them.
        access: knows the tenants.
        interval: seconds between them, at least.
        share: and at least this many times what one costs.
        cpu_clock: seconds that the calling thread has computed.

    Attributes:
        snapshots: how many were taken.
    """

    def __init__(
        self,
        context: ServerContext,
        view: LiveView,
        access: Access,
        interval: float = INTERVAL,
        share: float = SHARE,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._context = context
        self._view = view
        self._access = access
        self._interval = interval
        self._share = share
        self._cpu_clock = cpu_clock
        self._writer = FrameWriter(context.tokenizer)
        self._viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._news = asyncio.Condition()
        self._snapshot: LiveSnapshot | None = None
        # When it was taken, by the event loop's clock, and the seconds that it has cost so far.
        self._taken, self._cost = 0.0, 0.0
        self._taking = asyncio.Lock()
        # The latest snapshot as JSON, for each tenant that has asked for it: texts are its own.
        self._frames: dict[Tenant, bytes] = {}
        self._writing = asyncio.Lock()
        self.snapshots = 0

    async def show(self, http: HttpRequest) -> Response:
        """One frame, not older than the interval."""
        self._context.check_available()
        await self._take()
        return Response(await self._frame(caller(http).tenant), media_type="application/json")

    async def watch(self, http: HttpRequest) -> Response:
        """A stream of frames. A viewer that is slow skips frames.

        Raises:
            HttpError: 429, too many viewers.
        """
        self._context.check_available()
        if self._viewers >= MAX_VIEWERS:
            raise HttpError(429, f"At most {MAX_VIEWERS} viewers may watch at a time.")
        self._viewers += 1
        seen = self.snapshots - 1
        if self._task is None or self._task.done():
            seen, self._error = self.snapshots, None  # the last frame is old
            self._task = asyncio.ensure_future(self._run())
        return EventStream(self._events(http, seen), self._leave, f"live-{self._context.new_id()}")

    async def _leave(self) -> None:
        self._viewers -= 1

    async def _events(self, http: HttpRequest, seen: int) -> AsyncGenerator[bytes, None]:
        while True:
            async with self._news:
                while self.snapshots == seen and self._error is None:
                    await self._news.wait()
                if self._error is not None:
                    raise self._error
                seen = self.snapshots
            watching = self._access.identify(http.headers)
            if watching is None or not watching.admin:  # since the stream began
                raise InvalidRequestError("This API key is no longer an admin's.", code="invalid_api_key", status=401)
            yield b"data: " + await self._frame(watching.tenant) + b"\n\n"

    async def _run(self) -> None:
        while self._viewers:
            error: Exception | None = None
            try:
                await self._take()
            except Exception as failure:  # noqa: BLE001 - handed to the viewers
                error = failure
            if self._context.stopping:  # which is also why the engine may have refused to answer
                error = ServerStoppingError()
            await self._tell(error)
            if error is not None:
                return
            await asyncio.sleep(self._due - asyncio.get_running_loop().time())

    @property
    def _due(self) -> float:
        """When the next snapshot may be taken."""
        return self._taken + max(self._interval, self._share * self._cost)

    async def _take(self) -> None:
        """Take a snapshot, unless the latest is young enough."""
        loop = asyncio.get_running_loop()
        async with self._taking:
            if self._snapshot is not None and loop.time() < self._due:
                return
            self._snapshot = snapshot = await self._context.loop.ask(self._view.take)
            self._frames = {}
            self._taken, self._cost = loop.time(), snapshot.build_seconds
            self.snapshots += 1

    async def _frame(self, tenant: Tenant) -> bytes:
        """The latest snapshot, which there must be, as JSON for a viewer of this tenant."""
        async with self._writing:
            frames, snapshot, context = self._frames, self._snapshot, self._context
            assert snapshot is not None
            if tenant not in frames:
                tenants = self._access.tenants()
                server = {
                    "model": context.model_name,
                    "version": context.version,
                    "max_model_len": context.max_model_len,
                    "time": context.clock(),
                    "interval": self._interval,
                }

                def write() -> tuple[bytes, float]:
                    begun = self._cpu_clock()
                    return encode(self._writer.write(snapshot, tenant, tenants, server)), self._cpu_clock() - begun

                frames[tenant], spent = await context.workers.run(0, write)
                self._cost += spent
            return frames[tenant]

    async def _tell(self, error: Exception | None) -> None:
        async with self._news:
            self._error = error
            self._news.notify_all()

    async def find(self, http: HttpRequest) -> Response:
        """Where a text is stored: edges that hold it, of those that the viewer's tenant may read.

        Raises:
            InvalidRequestError: no text, or too long a one.
        """
        self._context.check_available()
        query, tenant = http.query_params.get("text", ""), caller(http).tenant
        if not 1 <= len(query) <= _LONGEST_QUERY:
            raise InvalidRequestError(
                f"'text' must have 1 to {_LONGEST_QUERY} characters, got {len(query)}.", param="text"
            )

        def look(engine: Engine) -> tuple[list[EdgeText], bool]:
            return self._view.texts(engine, tenant, SEARCHED_TOKENS)

        texts, whole = await self._context.loop.ask(look)
        size = sum(len(text.tokens) for text in texts)
        matches, more = await self._context.workers.run(size, lambda: search(texts, query, self._context.tokenizer))
        found = {"matches": matches, "more": more, "searched_all": whole}
        return Response(encode(found), media_type="application/json")


def search(texts: list[EdgeText], query: str, tokenizer: TokenizerLike) -> tuple[list[dict[str, Any]], bool]:
    """Edges whose text holds ``query``, which may begin in the edge before, in any case.

    Returns:
        Up to ``FOUND`` matches: ``path`` (numbers of edges), ``start`` (tokens before the edge), ``text`` around the
        place; and whether there are further ones.
    """
    matches: list[dict[str, Any]] = []
    wanted = re.compile(re.escape(query), re.IGNORECASE)
    for text in texts:
        before = tokenizer.decode(unpack_tokens(text.before), skip_special=False)
        # The end of the edge before, as far as a match may reach into it.
        before = before[-len(query) :]
        whole = before + tokenizer.decode(unpack_tokens(text.tokens), skip_special=False)
        found = wanted.search(whole, max(0, len(before) - len(query) + 1))
        if found is None:
            continue
        if len(matches) == FOUND:
            return matches, True
        around = whole[max(0, found.start() - _AROUND) : found.end() + _AROUND]
        matches.append({"path": text.path, "start": text.start, "text": around})
    return matches, False
