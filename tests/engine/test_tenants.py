"""Tenants that come and go: what each keeps of the tiers, and that nothing of one that was removed stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagetrie.engine.request import ContextUse
from pagetrie.engine.tenant import Owner, Tenant
from pagetrie.errors import InvalidRequestError
from pagetrie.kv.keys import ChainKeys
from tests.engine.tiers import TieredWorld, ToldTier
from tests.engine.toy import World, expected

A, B = Tenant("a", b"a" * 32), Tenant("b", b"b" * 32)
PROMPT = list(range(10, 51))


def cached(world: World, name: str) -> int:
    last = world.seen[name].last
    assert last is not None and last.error is None
    return last.cached_tokens


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_nothing_of_a_removed_tenant_stays(index: str) -> None:
    tier = ToldTier()
    world = TieredWorld(tier, ram_pages=20, index=index)
    world.engine.set_tenants([A, B])
    for tenant in (A, B):
        world.add(f"{tenant.name}1", PROMPT, tenant=tenant, max_tokens=3)
        world.finish()
        owner = Owner(tenant)
        made = world.engine.contexts.create(owner, PROMPT)
        use = ContextUse(made.id, owner)
        world.add(f"{tenant.name}2", PROMPT, tenant=tenant, context=use, max_tokens=0)
        world.finish()
    assert world.ram is not None
    world.add("a3", [1, 2, 3, 4, 5], tenant=A, max_tokens=100, ignore_eos=True)  # runs
    world.add("a4", [*PROMPT, 1], tenant=A, max_tokens=100, ignore_eos=True)
    world.step()
    before = world.cache.index.shares.owned_by(A.owner)
    assert before.pages > 10 and before.pinned > 0 and len(world.engine.contexts) == 2

    ended = world.engine.set_tenants([B])
    for output in ended:
        world.seen[output.request_id].add(output)
    world.work()
    world.check()
    assert {output.request_id for output in ended} == {"a3", "a4"}
    assert all(world.seen[name].reasons == {0: "abort"} for name in ("a3", "a4"))
    assert [context.owner.tenant for context in world.engine.contexts] == [B]
    assert A.owner not in {share.owner for share in world.cache.index.shares}
    keys = ChainKeys(bytes(32))
    tags = [ref.namespace[:8] for key, ref in tier.refs.items() if key in tier.pages]
    assert keys.tag(A.owner) not in tags and keys.tag(B.owner) in tags
    with pytest.raises(InvalidRequestError, match="has been removed") as refused:
        world.add("a5", PROMPT, tenant=A, max_tokens=1)
    assert refused.value.status == 401
    with pytest.raises(InvalidRequestError, match="No request 'a1'"):
        world.engine.cache_records.get(Owner(A), "a1")
    world.add("b3", PROMPT, tenant=B, max_tokens=3)
    world.finish()
    assert cached(world, "b3") == len(PROMPT) - 1
    # One of the same name that comes later is another one: it has another salt.
    later = Tenant("a", b"c" * 32)
    world.engine.set_tenants([later, B])
    world.add("c1", PROMPT, tenant=later, max_tokens=3)
    world.finish()
    assert cached(world, "c1") == 0 and world.seen["c1"].tokens[0] == expected(PROMPT, 3)


def test_a_load_for_a_removed_tenant_ends_and_its_pages_come_free() -> None:
    tier = ToldTier()
    world = TieredWorld(tier)
    world.engine.set_tenants([A, B])
    world.add("a1", PROMPT, tenant=A, max_tokens=3)
    world.finish()
    share = world.cache.index.shares.owned_by(A.owner)
    world.cache.index.evict(share.cached, only=share)
    world.work()
    world.add("a2", PROMPT, tenant=A, max_tokens=3)
    world.step()
    assert world.cache.stats().loading_pages == 10
    world.engine.set_tenants([B])
    world.work()
    world.engine.settle()
    world.check()
    stats = world.cache.stats()
    assert stats.free_pages == stats.total_pages and not world.engine.has_work


def test_a_context_is_limited_by_its_tenants_own_part() -> None:
    world = World(num_pages=40, page_size=4)
    world.engine.set_tenants([replace(A, pinned=0.1), replace(B, pinned=0.5)])
    with pytest.raises(InvalidRequestError, match="takes 11 pages, but all pinned prefixes together may take 4"):
        world.engine.contexts.create(Owner(A), PROMPT)
    world.engine.contexts.create(Owner(B), PROMPT)


def test_floors_reach_the_tiers() -> None:
    tier = ToldTier()
    world = TieredWorld(tier, ram_pages=5)
    world.engine.set_tenants([replace(A, cache_floor=0.3), replace(B, cache_cap=0.5)])
    world.work()
    keys = ChainKeys(bytes(32))
    assert {tag: (a.floor, a.cap) for tag, a in tier.allowances.items()} == {
        keys.tag(A.owner): (0.3, 1.0),
        keys.tag(B.owner): (0.0, 0.5),
    }
