"""API keys: who gets in, who doesn't, what each sees, and that the file may change under a running server."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import httpx
import pytest
from starlette.datastructures import Headers

from pagetrie.errors import ConfigError
from pagetrie.server import app as app_module
from pagetrie.server import keys_file
from pagetrie.server.auth import ADMIN_PATHS, Access, KeyedAccess
from tests.server.conftest import Site
from tests.server.test_chat import HI

pytestmark = pytest.mark.anyio


class Keys:
    """A file of keys, and the keys."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, tenant: str, *, admin: bool = False, **limits: object) -> str:
        with keys_file.editing(self.path) as file:
            file.tenants.setdefault(tenant, keys_file.new_tenant(**limits))
            return keys_file.add_key(file, tenant, admin=admin)[1]

    def remove(self, tenant: str) -> None:
        with keys_file.editing(self.path) as file:
            del file.tenants[tenant]
            file.keys = [key for key in file.keys if key.tenant != tenant]

    def access(self, max_queue: int = 1000) -> KeyedAccess:
        return KeyedAccess(self.path, max_queue)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.json")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(site: Site, headers: dict[str, str], path: str = "/v1/chat/completions", **body) -> httpx.Response:
    async with site.client() as client:
        return await client.post(path, json={**HI, **body}, headers=headers)


async def test_a_key_gets_in_and_says_whose_request_it_is(keys, make_site):
    acme, other = keys.add("acme"), keys.add("other")
    site = make_site(options={"access": keys.access()})
    for key in (acme, other):
        assert (await ask(site, bearer(key))).status_code == 200
        async with site.client() as client:
            assert (await client.post("/v1/chat/completions", json=HI, headers={"x-api-key": key})).status_code == 200
    names = [stream.request.tenant.name for stream in site.engine.streams]
    assert names == ["acme", "acme", "other", "other"]
    assert len({stream.request.tenant.salt for stream in site.engine.streams}) == 2


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_api_key"),
        ({"Authorization": "Bearer wrong"}, "invalid_api_key"),
        ({"Authorization": "Bearer "}, "invalid_api_key"),
        ({"Authorization": "Bearer \udce9".encode("utf-8", "surrogateescape").decode("latin-1")}, "invalid_api_key"),
        ({"Authorization": "KEY"}, "invalid_api_key"),
        ({"Authorization": "key KEY"}, "invalid_api_key"),
        ({"Authorization": "Bearer KEY2"}, "invalid_api_key"),
        ({"Authorization": "Bearer HASH"}, "invalid_api_key"),
        ({"x-api-key": "wrong"}, "invalid_api_key"),
        ({"Authorization": "Basic !!!"}, "invalid_api_key"),
    ],
)
async def test_bad_keys_are_401_in_openais_form_and_reach_nothing(keys, make_site, headers, code):
    key = keys.add("acme")
    file = keys_file.load(keys.path)
    site = make_site(options={"access": keys.access()})
    headers = {
        name: value.replace("HASH", file.keys[0].sha256).replace("KEY", key) if value != "KEY" else key
        for name, value in headers.items()
    }
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    async with site.client() as client:
        response = await client.post("/v1/chat/completions", json=HI, headers=raw)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (401, "invalid_request_error", code)
    assert response.headers["www-authenticate"].startswith("Bearer")
    assert key not in response.text and "acme" not in response.text
    assert site.engine.streams == []


async def test_a_request_without_a_key_is_refused_before_its_body_is_looked_at(keys, make_site):
    keys.add("acme")
    site = make_site(options={"access": keys.access(), "max_body_bytes": 10})
    async with site.client() as client:
        response = await client.post("/v1/chat/completions", content=b"x" * 100)
    assert response.status_code == 401


async def test_keys_come_and_go_without_a_restart(keys, make_site):
    first = keys.add("acme")
    site = make_site(options={"access": keys.access()})
    second = keys.add("acme")
    assert [(await ask(site, bearer(key))).status_code for key in (first, second)] == [200, 200]
    keys.remove("acme")
    assert [(await ask(site, bearer(key))).status_code for key in (first, second)] == [401, 401]
    # Someone new of the same name has other pages.
    third = keys.add("acme")
    assert (await ask(site, bearer(third))).status_code == 200
    salts = [stream.request.tenant.salt for stream in site.engine.streams]
    assert salts[0] == salts[1] != salts[2]


async def test_the_engine_hears_of_tenants_before_their_requests(keys, make_site):
    first = keys.add("acme", cache_floor=0.4, cache_cap=0.7, max_pinned=0.5)
    keys.add("plain")
    access = KeyedAccess(keys.path, 1000, floors=0.25, cap=0.9)
    site = make_site(options={"access": access})
    async with site.client() as client:
        await client.post("/v1/chat/completions", json=HI, headers=bearer(first))
        assert len(site.engine.tenants) == 1
        acme, plain = (site.engine.tenants[0][name] for name in ("acme", "plain"))
        assert (acme.cache_floor, acme.cache_cap, acme.pinned) == (0.4, 0.7, 0.5)
        assert (plain.cache_floor, plain.cache_cap, plain.pinned) == (0.25, 0.9, 0.25)
        keys.remove("acme")
        refused = await client.post("/v1/chat/completions", json=HI, headers=bearer(first))
        assert refused.status_code == 401
        assert [sorted(told) for told in site.engine.tenants] == [["acme", "plain"], ["plain"]]
        # Nothing changed: nothing is told.
        await client.get("/health")
        assert len(site.engine.tenants) == 2


async def test_the_file_is_looked_at_while_nobody_asks(keys, make_site, monkeypatch):
    keys.add("acme")
    keys.add("other")
    looked = asyncio.Event()
    pauses = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        looked.set()
        await go_on.acquire()

    go_on = asyncio.Semaphore(0)
    monkeypatch.setattr(app_module, "pause", pause)
    site = make_site(options={"access": keys.access()})
    async with site.app.router.lifespan_context(site.app):
        await looked.wait()
        keys.remove("acme")
        looked.clear()
        go_on.release()
        await looked.wait()
        assert [sorted(told) for told in site.engine.tenants] == [["acme", "other"], ["other"]]
    assert set(pauses) == {app_module.LOOK_SECONDS}


def test_floors_and_pins_of_tenants_are_no_more_than_there_is(tmp_path):
    keys = Keys(tmp_path / "keys.json")
    keys.add("a", cache_floor=0.7, max_pinned=0.8)
    for name in "bcd":
        keys.add(name)
    tenants = KeyedAccess(keys.path, 1000, floors=0.6).tenants()
    assert sum(tenant.cache_floor for tenant in tenants) == pytest.approx(1.0)
    assert sum(tenant.pinned for tenant in tenants) < 1
    with pytest.raises(ConfigError, match=r"guaranteed 1\.1 of the cache together"):
        keys.add("e", cache_floor=0.4)
    capped = KeyedAccess(keys.path, 1000, floors=0.6, cap=0.05).tenants()
    assert all(tenant.cache_floor <= tenant.cache_cap for tenant in capped)
    by_name = {tenant.name: tenant for tenant in capped}
    assert (by_name["a"].cache_cap, by_name["b"].cache_floor) == (0.7, 0.05)


async def test_a_broken_file_changes_nothing_and_is_logged(keys, make_site, caplog):
    key = keys.add("acme")
    site = make_site(options={"access": keys.access()})
    keys.path.write_text('{"secret": "SENSITIVE"')
    assert (await ask(site, bearer(key))).status_code == 200
    keys.path.unlink()
    assert (await ask(site, bearer(key))).status_code == 200
    assert "the keys stay as they were" in caplog.text and "SENSITIVE" not in caplog.text


def paths(site: Site) -> list[tuple[str, str]]:
    return [
        (next(iter(route.methods)), route.path)  # type: ignore[attr-defined]
        for route in site.app.routes
    ]


async def test_all_that_is_not_named_needs_an_admin_key(keys, make_site):
    plain, admin = keys.add("acme"), keys.add("ops", admin=True)
    site = make_site(options={"access": keys.access()})
    open_to_all, for_tenants = set(), set()
    async with site.client() as client:
        for method, path in paths(site):
            path = path.replace("{context_id}", "x").replace("{name:path}", "tiny")
            status = [
                (await client.request(method, path, headers=headers)).status_code
                for headers in ({}, bearer(plain), bearer(admin))
            ]
            assert status[2] not in (401, 403), path
            if status[0] != 401:
                open_to_all.add(path)
            if status[1] not in (401, 403):
                for_tenants.add(path)
            assert status[1] != 401
    assert open_to_all == {"/health", "/ready", "/dashboard", "/dashboard/{name}"}
    assert not any(path.startswith(ADMIN_PATHS) for path in for_tenants)
    assert {"/metrics", "/reset_prefix_cache"}.isdisjoint(for_tenants)
    assert {"/v1/chat/completions", "/v1/contexts", "/tokenize", "/v1/models"} <= for_tenants


async def test_tenants_by_name_are_for_admins_alone(keys, make_site):
    plain, admin = keys.add("acme"), keys.add("ops", admin=True)
    site = make_site(options={"access": keys.access()})
    await ask(site, bearer(plain))
    async with site.client() as client:
        seen = [await client.get("/metrics", headers=headers) for headers in ({}, bearer(plain), bearer(admin))]
    assert [response.status_code for response in seen] == [401, 403, 200]
    assert 'pagetrie:tenant_admitted_total{tenant="acme"} 1.0' in seen[2].text
    assert not any("acme" in response.text for response in seen[:2])


async def test_browsers_may_look_but_not_change(keys, make_site):
    admin = keys.add("ops", admin=True)
    site = make_site(options={"access": keys.access()})
    basic = {"Authorization": "Basic " + base64.b64encode(f"me:{admin}".encode()).decode()}
    async with site.client() as client:
        assert (await client.get("/metrics")).headers["www-authenticate"].startswith("Basic")
        assert (await client.get("/metrics", headers=basic)).status_code == 200
        assert (await client.post("/reset_prefix_cache", headers=basic)).status_code == 401
        assert (await client.post("/reset_prefix_cache", headers=bearer(admin))).status_code == 200


async def test_without_keys_everybody_is_one_tenant(site):
    assert (await site.post("/v1/chat/completions", HI)).status_code == 200
    assert (await site.get("/metrics")).status_code == 200
    assert site.engine.last.tenant.salt == b""


async def test_every_key_is_compared_in_constant_time(keys, monkeypatch):
    wanted = [keys.add(f"t{number}") for number in range(5)]
    access, compared = keys.access(), []
    monkeypatch.setattr(
        "pagetrie.server.auth.hmac.compare_digest", lambda a, b: compared.append((a, b)) is None and a == b
    )
    for key in (*wanted, "wrong"):
        compared.clear()
        caller = access.identify(Headers(bearer(key)))
        assert (caller is None) == (key == "wrong")
        assert len(compared) == 5 and all(len(a) == len(b) == 32 for a, b in compared)


async def test_a_tenants_own_body_limit(keys, make_site):
    small, large = keys.add("small", max_body_size=200), keys.add("large")
    site = make_site(options={"access": keys.access(), "max_body_bytes": 1000})
    long = {"messages": [{"role": "user", "content": "x" * 300}], "max_tokens": 1}
    statuses = [(await ask(site, bearer(key), **long)).status_code for key in (small, large)]
    assert statuses == [413, 400]  # the second is only too long for the model
    response = await ask(site, bearer(small), **long)
    assert "limit of 200 bytes" in response.json()["error"]["message"]


async def test_a_tenants_own_context_limit_and_share_of_the_queue(keys, make_site):
    keys.add("acme", max_model_len=50, weight=2.0)
    keys.add("other", max_requests=3)
    callers = dict(c for c in keys.access(100)._callers)
    by_name = {caller.tenant.name: caller for caller in callers.values()}
    assert (by_name["acme"].tenant.max_model_len, by_name["acme"].tenant.weight) == (50, 2.0)
    assert (by_name["acme"].limits.max_requests, by_name["other"].limits.max_requests) == (50, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is wrong"),
        ("[]", "is wrong"),
        ('{"secret": "ab"}', "is wrong at secret"),
        (json.dumps({"secret": "0" * 64, "tenants": {"../x": {"secret": "0" * 64}}}), "a tenant's name has"),
        (json.dumps({"secret": "0" * 64, "keys": [{"id": "k", "tenant": "no", "sha256": "0" * 64}]}), "not there"),
        (json.dumps({"secret": "0" * 64, "surprise": 1}), "is wrong at surprise"),
        (json.dumps({"secret": "0" * 64, "tenants": {"a": {"secret": "0" * 64, "weight": 0}}}), "greater than 0"),
        (json.dumps({"secret": "0" * 64, "version": 2}), "is wrong at version"),
    ],
)
async def test_a_wrong_file_is_refused_at_start(tmp_path, content, message):
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        KeyedAccess(path, 10)
    with pytest.raises(ConfigError, match="can't read"):
        KeyedAccess(tmp_path / "none", 10)


async def test_the_file_is_its_owners_alone_and_holds_no_key(keys):
    key = keys.add("acme")
    assert keys_file.is_private(keys.path) and key not in keys.path.read_text()
    assert list(keys.path.parent.glob("*.part")) == []


async def test_a_failed_edit_leaves_the_file_as_it_was(keys):
    keys.add("acme")
    before = keys.path.read_bytes()
    with pytest.raises(ConfigError, match="not there"), keys_file.editing(keys.path) as file:
        file.tenants.clear()
    with pytest.raises(ZeroDivisionError), keys_file.editing(keys.path) as file:
        file.keys = [1 // 0]
    assert keys.path.read_bytes() == before


async def test_the_local_access_knows_one_tenant():
    assert [tenant.name for tenant in Access().tenants()] == [""]
