"""The live view: what it shows, to whom, and what it costs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagetrie.engine.loop import EngineLoop
from pagetrie.engine.timeline import Timeline
from pagetrie.errors import EngineError
from pagetrie.kv.picture import ACTIVE, CACHED, FREE, NOBODY, Picture
from pagetrie.server import live
from pagetrie.server.auth import Access
from pagetrie.server.live_frame import EDGE_FIELDS, MAX_CELLS, _cells
from tests.engine.toy import World
from tests.server.conftest import Site
from tests.server.double import ByteTokenizer
from tests.server.test_auth import Keys, bearer

pytestmark = pytest.mark.anyio
RULES = "These are the rules that every player of the game must keep."


class Watched:
    """A served world, its feed and a client."""

    def __init__(self, access: Access | None = None, **options: Any) -> None:
        self.timeline = Timeline()
        options.setdefault("clock", lambda: 0.0)
        self.world = World(num_pages=80, max_model_len=300, observer=self.timeline, **options)
        parts = {"loop": EngineLoop(self.world.engine), "timeline": self.timeline, "access": access}
        self.site = Site(tokenizer=ByteTokenizer(add_bos=False), options=parts)
        self.feed = self.site.app.state.live
        self.feed._interval = 0.01
        self.http = httpx.AsyncClient()

    async def complete(self, prompt: str, **fields: Any) -> Any:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
        return (await self.http.post("/v1/completions", json=body)).raise_for_status().json()

    @asynccontextmanager
    async def watching(self, **headers: str) -> AsyncIterator[AsyncIterator[Any]]:
        async with self.http.stream("GET", "/v1/admin/live/events", headers=headers) as response:
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
    assert trunk["heat"] <= 90 and not trunk["active"]
    assert frame["owners"] == [{"tenant": "", "salted": False, "public": False}]
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
        assert (await site.http.get("/v1/admin/live/events")).status_code == 429


async def test_the_pause_follows_what_a_snapshot_costs():
    now = iter(range(10_000))
    async with watched() as site:
        site.feed._cpu_clock = site.feed._view._cpu_clock = lambda: float(next(now))
        async with site.watching() as frames:
            await anext(frames)
        # By its clock taking a snapshot lasts a second, and so does writing it.
        assert site.feed._due - asyncio.get_running_loop().time() >= 2 * live.SHARE - 1
        assert site.feed.snapshots == 1
        for _ in range(2):
            assert (await site.http.get("/v1/admin/live")).status_code == 200
        assert site.feed.snapshots == 1


async def test_texts_of_others_are_neither_shown_nor_found():
    async with watched() as site:
        await site.complete(RULES)
        await site.complete("A secret plan that nobody else may read.", cache_salt="theirs")
        async with site.watching() as frames:
            frame = await anext(frames)
        labels = [edge["label"] for edge in edges(frame)]
        assert sorted(label is None for label in labels) == [False, True]
        assert sorted(owner["salted"] for owner in frame["owners"]) == [False, True]
        for text, found in (("secret", 0), ("RULES that", 1), ("every player of the game must keep", 1), ("zebra", 0)):
            answer = (await site.http.get("/v1/admin/find", params={"text": text})).json()
            assert len(answer["matches"]) == found and not answer["more"]
        assert (await site.http.get("/v1/admin/find")).status_code == 400
        assert (await site.http.get("/v1/admin/find", params={"text": "x" * 201})).status_code == 400


async def test_texts_are_for_their_own_tenant_and_labels_for_admins(tmp_path: Path):
    keys = Keys(tmp_path / "keys.json")
    acme, chief, ops = keys.add("acme"), keys.add("acme", admin=True), keys.add("ops", admin=True)
    async with watched(access=keys.access()) as site:
        site.http.headers = bearer(ops)
        await site.http.post("/v1/admin/public_prefixes", json={"prompt": RULES})
        for text in (f"{RULES} Who begins?", "A secret plan that nobody else may read."):
            site.http.headers = bearer(acme)
            await site.complete(text)
        seen, found = {}, {}
        for name, key in (("acme", chief), ("ops", ops)):
            site.http.headers = bearer(key)
            seen[name] = (await site.http.get("/v1/admin/live")).json()
            for text in ("secret", "Who begins", "rules that"):
                answer = (await site.http.get("/v1/admin/find", params={"text": text})).json()
                found[name, text] = len(answer["matches"])
                assert answer["searched_all"] and not answer["more"]
        for path in ("/v1/admin/live", "/v1/admin/live/events", "/v1/admin/find?text=x"):
            assert (await site.http.get(path, headers=bearer(acme))).status_code == 403
            assert (await site.http.get(path, headers=bearer("wrong"))).status_code == 401
    assert seen["acme"]["owners"] == seen["ops"]["owners"]
    owners = {(owner["tenant"], owner["public"]) for owner in seen["ops"]["owners"]}
    assert owners == {("acme", False), (None, True), ("", False)}  # the end of the public prefix is the server's own
    assert {request["tenant"] for request in seen["ops"]["requests"]} == {"acme", ""}
    labels = {name: {edge["label"] for edge in edges(frame)} for name, frame in seen.items()}
    assert len(labels["acme"]) == 4 and len(labels["ops"]) == 2
    assert "secret" in str(seen["acme"]) and "secret" not in str(seen["ops"]) and "rules that" in str(seen["ops"])
    assert found == {
        ("acme", "secret"): 1, ("acme", "Who begins"): 1, ("acme", "rules that"): 1,
        ("ops", "secret"): 0, ("ops", "Who begins"): 0, ("ops", "rules that"): 1,
    }  # fmt: skip


async def test_who_is_no_longer_an_admin_sees_no_further_frame(tmp_path: Path):
    keys = Keys(tmp_path / "keys.json")
    ops = keys.add("ops", admin=True)
    async with watched(access=keys.access()) as site, site.watching(**bearer(ops)) as frames:
        assert "error" not in await anext(frames)
        keys.remove("ops")
        async for frame in frames:
            if "error" in frame:
                break
        assert frame["error"]["code"] == "invalid_api_key"


async def test_the_page_is_open_where_keys_are_and_local_where_none_are(tmp_path: Path):
    keys = Keys(tmp_path / "keys.json")
    for access, expected in ((keys, {"/dashboard": 200, "/v1/admin/live": 401}), (None, {})):
        if access is not None:
            access.add("ops", admin=True)
        async with watched(access=access and access.access()) as site:
            for path in ("/dashboard", "/dashboard/app.js", "/v1/admin/live", "/v1/admin/find?text=x"):
                answer = await site.http.get(path, headers={"host": "rebound.example.com"})
                assert answer.status_code == expected.get(path, 401 if "find" in path else 200) if access else 403
            page = await site.http.get("/dashboard")
            assert "default-src 'none'" in page.headers["content-security-policy"]
            assert (await site.http.get("/dashboard/other.js")).status_code == 404


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


@pytest.mark.parametrize("engine", ["answers", "has ended"])
async def test_a_stopping_server_ends_its_streams(engine: str, monkeypatch: pytest.MonkeyPatch):
    async def refuse(question: Any) -> Any:
        raise EngineError("the server is shutting down")

    site = Watched()
    site.feed._share = 0  # so that the next look takes a snapshot
    async with site.site.running() as server:
        site.http = httpx.AsyncClient(base_url=server.url, timeout=60)
        async with site.http, site.watching() as frames:
            await anext(frames)
            if engine == "has ended":  # before the next snapshot
                context = site.site.app.state.context
                context.stopping = True
                monkeypatch.setattr(context.loop, "ask", refuse)
            server.stop()
            async for frame in frames:
                if "error" in frame:
                    break
            assert frame["error"]["code"] == "service_unavailable"


def test_a_large_pool_is_shown_in_cells_of_several_pages():
    pages = 3 * MAX_CELLS - 1
    states = bytes([ACTIVE] * 4 + [CACHED] * 2 + [FREE] * (pages - 6))
    shares = bytes([1, 40, 2, 3] + [0] * (pages - 4))
    owner = bytes([0] * 6 + [NOBODY] * (pages - 6))
    cells = _cells(Picture(states, shares, owner))
    assert cells["per_cell"] == 3 and {len(cells[plane]) for plane in ("states", "shares", "owner")} == {MAX_CELLS}
    assert cells["states"] == "12" + "0" * (MAX_CELLS - 2) and cells["shares"].startswith("z300")
    assert cells["owner"] == "00" + "-" * (MAX_CELLS - 2)
