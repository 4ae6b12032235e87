"""Limits per tenant: what is in flight, tokens per minute, and that nothing leaks out of the accounts."""

from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetrie.engine.loop import EngineLoop
from pagetrie.engine.tenant import Tenant
from pagetrie.server.auth import Access, Caller, KeyedAccess, Limits
from pagetrie.server.errors import RateLimitError
from pagetrie.server.quota import Quotas
from tests.engine.toy import World
from tests.server.double import ByteTokenizer, EngineDouble
from tests.server.test_auth import Keys, bearer
from tests.server.test_chat import HI

pytestmark = pytest.mark.anyio


def limited(name: str = "acme", **limits: int) -> Caller:
    return Caller(Tenant(name), Limits(**limits), admin=False)


class Fixed(Access):
    """Everybody is this caller."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    def identify(self, headers) -> Caller:
        return self.caller


class Now:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


async def test_prompts_in_flight_are_counted_until_they_end():
    quotas, caller, other = Quotas(Now()), limited(max_requests=3), limited("other", max_requests=3)
    first = quotas.admit(caller, 2, 10)
    quotas.admit(caller, 1, 10)
    with pytest.raises(RateLimitError, match="3 prompts in flight and have 3; wait"):
        quotas.check(caller)
    quotas.admit(other, 3, 10)
    first.close()
    first.close()
    with pytest.raises(RateLimitError, match="have 1 and this one brings 3"):
        quotas.admit(caller, 3, 10)
    quotas.admit(caller, 2, 10)


async def test_tokens_per_minute_run_out_and_come_back():
    now = Now()
    quotas, caller = Quotas(now), limited(tokens_per_minute=600)
    quotas.admit(caller, 1, 400).close(completion=100)
    with pytest.raises(RateLimitError, match="may use 600 tokens per minute and have 100 left now") as refused:
        quotas.admit(caller, 1, 200)
    assert refused.value.retry_after == 10
    now.time += 9.9
    with pytest.raises(RateLimitError):
        quotas.admit(caller, 1, 200)
    now.time += 0.2
    quotas.admit(caller, 1, 200)


async def test_what_is_generated_is_paid_for_afterwards_and_a_long_prompt_takes_a_full_bucket():
    now = Now()
    quotas, caller = Quotas(now), limited(tokens_per_minute=60)
    quotas.admit(caller, 1, 500).close(completion=100)
    with pytest.raises(RateLimitError, match="have 0 left") as refused:
        quotas.check(caller)
    assert refused.value.retry_after == 541  # 540 below nothing, and one to go on
    now.time += 600
    quotas.check(caller)


@given(
    st.lists(
        st.tuples(st.sampled_from(("admit", "end")), st.floats(0, 30), st.integers(1, 80), st.integers(0, 50)),
        max_size=60,
    )
)
def test_no_more_than_the_rate_over_time(actions):
    """Admitted prompts and ended outputs stay within rate x time, a bucket, and what was in flight."""
    now, rate, used, generated = Now(), 60, 0, 0
    quotas, caller, open_tickets = Quotas(now), limited(tokens_per_minute=rate, max_requests=4), []
    for action, wait, prompt, output in actions:
        now.time += wait
        if action == "end" and open_tickets:
            open_tickets.pop().close(completion=output)
            generated += output
            continue
        try:
            open_tickets.append(quotas.admit(caller, 1, prompt))
            used += prompt
        except RateLimitError:
            pass
        assert len(open_tickets) <= 4
        assert used + generated <= rate + rate * (now.time - 100) / 60 + 80 + 4 * 50


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_over_the_limit_is_a_429_and_the_end_makes_room(make_site, path, stream):
    body = {**(HI if "chat" in path else {"prompt": "x"}), "stream": stream}
    gate = asyncio.Event()
    site = make_site(
        EngineDouble(gate=gate, free_steps=0), options={"access": Fixed(limited(max_requests=2)), "quotas": Quotas()}
    )
    running = [asyncio.ensure_future(site.post(path, body)) for _ in range(2)]
    while len(site.engine.streams) < 2:
        await asyncio.sleep(0)
    refused = await site.post(path, body)
    error = refused.json()["error"]
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert re.search(r"may have 2 prompts in flight and have 2", error["message"])
    gate.set()
    assert [(await answer).status_code for answer in running] == [200, 200]
    assert (await site.post(path, body)).status_code == 200


async def test_refusals_of_the_engine_and_broken_requests_leave_nothing_in_flight(make_site):
    site = make_site(EngineDouble(), options={"access": Fixed(limited(max_requests=1)), "quotas": Quotas()})
    too_long = {"messages": [{"role": "user", "content": "x" * 500}]}
    for body in (too_long, {"messages": 3}, {**HI, "nonsense": 1}, {**HI, "model": "none"}) * 2:
        assert (await site.post("/v1/chat/completions", body)).status_code in (400, 404)
    assert (await site.post("/v1/chat/completions", HI)).status_code == 200


async def test_several_prompts_count_as_many(make_site):
    site = make_site(EngineDouble(), options={"access": Fixed(limited(max_requests=2)), "quotas": Quotas()})
    assert (await site.post("/v1/completions", {"prompt": ["a", "b"]})).status_code == 200
    refused = await site.post("/v1/completions", {"prompt": ["a", "b", "c"]})
    assert refused.status_code == 429 and "this one brings 3" in refused.json()["error"]["message"]


async def test_pages_are_counted_by_tenant(tmp_path, make_site):
    keys = Keys(tmp_path / "keys.json")
    acme, gone, ops = keys.add("acme"), keys.add("gone"), keys.add("ops", admin=True)
    world = World(num_pages=100, max_model_len=300)
    options = {"loop": EngineLoop(world.engine), "access": KeyedAccess(keys.path, 100)}
    site = make_site(tokenizer=ByteTokenizer(add_bos=False), options=options)

    async def pages(client) -> dict[str, float]:
        text = (await client.get("/metrics", headers=bearer(ops))).text
        found = re.findall(r'^pagetrie:tenant_pages{state="(.*)",tenant="(.*)"} (.+)$', text, re.MULTILINE)
        counts = {f"{name} {state}": float(count) for state, name, count in found if float(count)}
        assert sum(counts.values()) == 100 - world.cache.stats().free_pages
        return counts

    async with site.app.router.lifespan_context(site.app), site.client() as client:
        shared = {"prompt": "what all tenants begin with."}  # seven pages of four, which stay in use
        assert (await client.post("/v1/admin/public_prefixes", json=shared, headers=bearer(ops))).status_code == 200
        for key, prompt in ((acme, "12345678"), (acme, "12345678abcd"), (gone, "1234")):
            body = {"prompt": prompt, "max_tokens": 0, "cache_salt": "s" if key == gone else None}
            assert (await client.post("/v1/completions", json=body, headers=bearer(key))).status_code == 200
        before = await pages(client)
        assert (before["acme cached"], before["gone cached"], before["(others) active"]) == (3, 1, 7)
        keys.remove("gone")  # and with it its pages
        del before["gone cached"]
        assert await pages(client) == before


async def test_who_had_no_rate_begins_with_a_full_bucket_when_it_gets_one():
    now = Now()
    quotas = Quotas(now)
    quotas.admit(limited(), 1, 10_000_000).close(completion=5)
    slow = limited(tokens_per_minute=100)
    quotas.admit(slow, 1, 100).close()
    with pytest.raises(RateLimitError):
        quotas.admit(slow, 1, 100)
    now.time += 60
    quotas.admit(slow, 1, 100)
