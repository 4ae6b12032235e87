"""The live view: what it shows, to whom, and what it costs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from pagetrie.engine.loop import EngineLoop
from pagetrie.engine.timeline import Timeline
from pagetrie.kv.picture import ACTIVE, CACHED, FREE, NOBODY, Picture
from pagetrie.server import live
from pagetrie.server.live_frame import EDGE_FIELDS, MAX_CELLS, _cells
from tests.engine.toy import World
from tests.server.conftest import Site
from tests.server.double import ByteTokenizer

pytestmark = pytest.mark.anyio
RULES = "These are the rules that every player of the game must keep."


class Watched:
    """A served world, its feed and a client."""

    def __init__(self, **options: Any) -> None:
        self.timeline = Timeline()
        options.setdefault("clock", lambda: 0.0)
        self.world = World(num_pages=80, max_model_len=300, observer=self.timeline, **options)
        parts = {"loop": EngineLoop(self.world.engine), "timeline": self.timeline}
        self.site = Site(tokenizer=ByteTokenizer(add_bos=False), options=parts)
        self.feed = self.site.app.state.live
        self.feed._interval = 0.01
        self.http = httpx.AsyncClient()

    async def complete(self, prompt: str, **fields: Any) -> Any:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
        return (await self.http.post("/v1/completions", json=body)).raise_for_status().json()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[AsyncIterator[Any]]:
        async with self.http.stream("GET", "/v1/admin/live") as response:
            assert response.status_code == 200, await response.aread()
            lines = response.aiter_lines()
            yield (json.loads(line[6:]) async for line in lines if line.startswith("data: "))


@asynccontextmanager
async def watched(**options: Any) -> AsyncIterator[Watched]:
    made = Watched(**options)
    async with made.site.running() as server:
        made.http = httpx.AsyncClient(base_url=server.url, timeout=60)
        async with made.http:
            yield made


def edges(frame: Any) -> list[dict[str, Any]]:
    return [dict(zip(EDGE_FIELDS, row, strict=True)) for row in frame["tree"]["edges"]]


async def test_a_frame_tells_pages_tree_and_requests():
    async with watched() as site:
        for question in ("Who begins?", "Who wins?"):
            await site.complete(f"{RULES} {question}")
        async with site.watching() as frames:
            frame = await anext(frames)
    pages, stats = frame["pages"], site.world.cache.stats()
    counted = {name: pages["states"].count(str(code)) for name, code in (("free", 0), ("active", 1), ("cached", 2))}
    assert counted == {name: pages[name] for name in counted}
    assert counted == {"free": stats.free_pages, "active": 0, "cached": stats.cached_pages}
    trunk, *branches = edges(frame)
    assert trunk["label"].startswith(RULES[:20]) and len(branches) == trunk["leaves"] == 2
    assert trunk["heat"] <= 90 and not trunk["active"] and frame["namespaces"] == ["shared"]
    assert [request["reason"] for request in frame["requests"]] == ["length", "length"]
    assert frame["hits"]["prompt"] == 2 * len(RULES) + 22 and frame["hits"]["tiers"]["pool"] >= len(RULES)
    assert frame["misses"] == {"never_stored": 1, "differs": 1}
    assert frame["latency"]["ttft"]["count"] == 2 and frame["memory"]["pages"] == 0
    assert frame["server"]["model"] == "tiny" and frame["server"]["page_size"] == 4


async def test_one_snapshot_serves_all_and_nobody_costs_nothing(monkeypatch: pytest.MonkeyPatch):
    async with watched() as site:
        assert site.feed.snapshots == 0
        async with site.watching() as one, site.watching() as other:
            for _ in range(5):
                a, b = await anext(one), await anext(other)
            assert {a["server"]["build_ms"], b["server"]["build_ms"]}
            assert site.feed._viewers == 2
        while site.feed._viewers or not site.feed._task.done():
            await asyncio.sleep(0.001)
        taken = site.feed.snapshots
        await site.complete(RULES)
        assert site.feed.snapshots == taken
        monkeypatch.setattr(live, "MAX_VIEWERS", 0)
        assert (await site.http.get("/v1/admin/live")).status_code == 429


async def test_the_pause_follows_what_a_snapshot_costs():
    now = iter(range(10_000))
    async with watched(clock=lambda: float(next(now))) as site:
        async with site.watching() as frames:
            await anext(frames)
        pause = await site.feed._take()
        assert pause >= live.SHARE * 1.0  # by this clock each look at it takes a second


async def test_texts_of_others_are_neither_shown_nor_found():
    async with watched() as site:
        await site.complete(RULES)
        await site.complete("A secret plan that nobody else may read.", cache_salt="theirs")
        async with site.watching() as frames:
            frame = await anext(frames)
        labels = [edge["label"] for edge in edges(frame)]
        assert sorted(label is None for label in labels) == [False, True]
        assert set(frame["namespaces"]) == {"shared", "private 2"}
        for text, found in (("secret", 0), ("RULES that", 1), ("every player of the game must keep", 1), ("zebra", 0)):
            answer = (await site.http.get("/v1/admin/find", params={"text": text})).json()
            assert len(answer["matches"]) == found and not answer["more"]
        assert (await site.http.get("/v1/admin/find")).status_code == 400
        assert (await site.http.get("/v1/admin/find", params={"text": "x" * 201})).status_code == 400


async def test_a_text_is_found_across_edges():
    async with watched() as site:
        for question in ("Who begins?", "Who wins?"):
            await site.complete(f"{RULES} {question}")
        async with site.watching() as frames:
            trunk, *branches = edges(await anext(frames))
        answer = (await site.http.get("/v1/admin/find", params={"text": "keep. Who wins"})).json()
        (match,) = answer["matches"]
        assert match["path"][0] == trunk["number"] and match["path"][1] in {branch["number"] for branch in branches}
        assert "keep. Who wins?" in match["text"]


async def test_a_stopping_server_ends_its_streams():
    site = Watched()
    async with site.site.running() as server:
        site.http = httpx.AsyncClient(base_url=server.url, timeout=60)
        async with site.http, site.watching() as frames:
            await anext(frames)
            server.stop()
            async for frame in frames:
                if "error" in frame:
                    break
            assert frame["error"]["code"] == "engine_error"


def test_a_large_pool_is_shown_in_cells_of_several_pages():
    pages = 3 * MAX_CELLS - 1
    states = bytes([ACTIVE] * 4 + [CACHED] * 2 + [FREE] * (pages - 6))
    shares = bytes([1, 40, 2, 3] + [0] * (pages - 4))
    owners = bytes([0] * 6 + [NOBODY] * (pages - 6))
    cells = _cells(Picture(states, shares, owners))
    assert cells["per_cell"] == 3 and len(cells["states"]) == MAX_CELLS
    assert cells["states"].startswith("1200") and cells["shares"].startswith("z300")
    assert cells["owners"].startswith("00--")
