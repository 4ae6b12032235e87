"""/health and /ready: what each failing part does to them, and what they say."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from pagetrie.engine.loop import EngineLoop
from pagetrie.kv.interface import TransferReport, TransferStats
from pagetrie.kv.tiers.interface import TierStats
from pagetrie.server import openapi
from tests.engine.toy import World
from tests.server.conftest import Site
from tests.server.double import ByteTokenizer

pytestmark = pytest.mark.anyio

FINE = {"status": "ready", "reasons": [], "checks": {"model": "ok", "steps": "ok"}}


async def test_a_server_at_rest_is_ready(site: Site) -> None:
    answer = await site.get("/ready")
    assert (answer.status_code, answer.json()) == (200, FINE)


async def test_tiers_that_fail_only_degrade(site: Site) -> None:
    tiers = {
        "ram": TierStats(),
        "disk": TierStats(healthy=False, problem="it is read-only"),
        "store": TierStats(healthy=False),
    }
    site.engine.tiers = TransferReport(tiers, TransferStats())
    answer = await site.get("/ready")
    assert answer.status_code == 200
    assert answer.json() == {
        "status": "degraded",
        "reasons": [
            "the disk tier is not used in full: it is read-only",
            "the store tier is not used in full: see the log",
        ],
        "checks": {"model": "ok", "steps": "ok", "ram": "ok", "disk": "degraded", "store": "degraded"},
    }
    assert (await site.get("/health")).status_code == 200


async def test_a_step_loop_that_is_dead_or_stuck_is_not_ready(site: Site) -> None:
    site.engine.still = 60.0
    assert (await site.get("/ready")).status_code == 200
    site.engine.still = 61.4
    answer = await site.get("/ready")
    assert (answer.status_code, answer.json()["status"], answer.json()["checks"]["steps"]) == (503, "unready", "failed")
    assert answer.json()["reasons"] == ["no step has ended for 61 s, though requests wait (limit: 60 s)"]
    site.engine.alive = False
    answer = await site.get("/ready")
    assert answer.status_code == 503 and answer.json()["reasons"] == ["the engine's thread isn't running"]
    assert (await site.get("/health")).json() == {"status": "dead"}
    site.app.state.context.stopping = True
    assert (await site.get("/ready")).json()["reasons"] == ["the server is shutting down"]


async def test_a_step_that_hangs_is_noticed_and_one_that_ends_forgiven() -> None:
    """The real loop, with the clock in hand: what counts is the time since a step, and only while there is work."""
    now = [100.0]
    world = World()
    reached, go_on = threading.Event(), threading.Event()

    def hang(plan: object) -> bool:
        reached.set()
        assert go_on.wait(30)
        return False

    world.runner.fail_on = hang
    loop = EngineLoop(world.engine, clock=lambda: now[0])
    site = Site(tokenizer=ByteTokenizer(add_bos=False), options={"loop": loop, "stuck_after": 5.0})
    async with site.app.router.lifespan_context(site.app):
        now[0] += 1000  # at rest: no work, so no steps
        while loop.stands_still():
            await asyncio.sleep(0)
        asked = asyncio.create_task(site.post("/v1/completions", {"prompt": "abc", "max_tokens": 2}))
        assert await asyncio.to_thread(reached.wait, 30)
        now[0] += 5
        assert (await site.get("/ready")).status_code == 200
        now[0] += 1
        answer = await site.get("/ready")
        assert answer.status_code == 503 and "no step has ended for 6 s" in answer.json()["reasons"][0]
        assert (await site.get("/health")).status_code == 200
        go_on.set()
        assert (await asked).status_code == 200
        now[0] += 1000
        while loop.stands_still():
            await asyncio.sleep(0)
        assert (await site.get("/ready")).json() == FINE
    assert (await site.get("/ready")).status_code == 503


def test_it_is_described() -> None:
    described = openapi.describe(Site().app.routes, "1", keys=False)
    for path in ("/health", "/ready"):
        operation = described["paths"][path]["get"]
        states = operation["responses"]["200"]["content"]["application/json"]["schema"]
        assert operation["summary"] and operation["responses"]["503"]["content"]["application/json"]["schema"] == states
        assert f"`GET {path}`" in (Path(__file__).parents[2] / "docs" / "api.md").read_text()
