"""The live view over HTTP: one snapshot per interval for all viewers, none while there are none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pagetrie.engine.engine import Engine
from pagetrie.engine.live import LiveView
from pagetrie.errors import EngineError, InvalidRequestError
from pagetrie.kv.picture import EdgeText
from pagetrie.kv.tokens import unpack_tokens
from pagetrie.server.context import HttpError, ServerContext
from pagetrie.server.live_frame import Labels, frame
from pagetrie.server.sse import EventStream, encode, event
from pagetrie.server.text_api import TokenizerLike

INTERVAL = 1.0
"""Seconds between snapshots, at least."""
SHARE = 200
"""And at least this many times what taking one costs the engine."""
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
        interval: seconds between them.

    Attributes:
        snapshots: how many were taken.
    """

    def __init__(self, context: ServerContext, view: LiveView, interval: float = INTERVAL) -> None:
        self._context = context
        self._view = view
        self._interval = interval
        self._labels: Labels | None = None
        self._viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._frame = b""
        self._error: Exception | None = None
        self._news = asyncio.Condition()
        self.snapshots = 0

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
        return EventStream(self._frames(seen), self._leave, f"live-{self._context.new_id()}")

    async def _leave(self) -> None:
        self._viewers -= 1

    async def _frames(self, seen: int) -> AsyncGenerator[bytes, None]:
        while True:
            async with self._news:
                while self.snapshots == seen and self._error is None:
                    await self._news.wait()
                if self._error is not None:
                    raise self._error
                seen, now = self.snapshots, self._frame
            yield now

    async def _run(self) -> None:
        while self._viewers:
            try:
                pause = await self._take()
            except Exception as error:  # noqa: BLE001 - handed to the viewers
                await self._tell(b"", error)
                return
            if self._context.stopping:
                await self._tell(b"", EngineError("the server is shutting down"))
                return
            await asyncio.sleep(pause)

    async def _take(self) -> float:
        """Take a snapshot and hand it out. Returns how long to wait before the next."""
        context = self._context
        snapshot = await context.loop.ask(self._view.take)
        labels = self._labels
        if labels is None:
            labels = self._labels = Labels(context.tokenizer, await context.loop.ask(lambda e: e.namespace("")))
        server = {
            "model": context.model_name,
            "version": context.version,
            "max_model_len": context.max_model_len,
            "time": context.clock(),
            "interval": self._interval,
        }
        await self._tell(await context.workers.run(0, lambda: event(frame(snapshot, labels, server))))
        return max(self._interval, SHARE * snapshot.build_seconds)

    async def _tell(self, news: bytes, error: Exception | None = None) -> None:
        async with self._news:
            self._frame, self._error = news, error
            self.snapshots += error is None
            self._news.notify_all()

    async def find(self, http: HttpRequest) -> Response:
        """Where a text is stored: edges of the viewer's own namespace that hold it.

        Raises:
            InvalidRequestError: no text, or too long a one.
        """
        self._context.check_available()
        query = http.query_params.get("text", "")
        if not 1 <= len(query) <= _LONGEST_QUERY:
            raise InvalidRequestError(
                f"'text' must have 1 to {_LONGEST_QUERY} characters, got {len(query)}.", param="text"
            )

        def look(engine: Engine) -> list[EdgeText]:
            return self._view.texts(engine, "", SEARCHED_TOKENS)

        texts = await self._context.loop.ask(look)
        size = sum(len(text.tokens) for text in texts)
        found = await self._context.workers.run(size, lambda: encode(search(texts, query, self._context.tokenizer)))
        return Response(found, media_type="application/json")


def search(texts: list[EdgeText], query: str, tokenizer: TokenizerLike) -> dict[str, Any]:
    """Edges whose text holds ``query``, which may begin in the edge before, in any case.

    Returns:
        ``matches``: ``path`` (numbers of edges), ``start`` (tokens before the edge), ``text`` around the place.
        ``more``: whether there are further ones.
    """
    matches: list[dict[str, Any]] = []
    wanted = query.casefold()
    for text in texts:
        before = tokenizer.decode(unpack_tokens(text.before), skip_special=False)
        # The end of the edge before, as far as a match may reach into it.
        before = before[-len(query) :]
        whole = before + tokenizer.decode(unpack_tokens(text.tokens), skip_special=False)
        at = whole.casefold().find(wanted, max(0, len(before) - len(query) + 1))
        if at < 0:
            continue
        if len(matches) == FOUND:
            return {"matches": matches, "more": True}
        around = whole[max(0, at - _AROUND) : at + len(query) + _AROUND]
        matches.append({"path": text.path, "start": text.start, "text": around})
    return {"matches": matches, "more": False}
