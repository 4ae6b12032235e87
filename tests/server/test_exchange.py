"""The access log and the counts of HTTP requests: one line each, complete, and nothing in it that is private."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from pagetrie.engine.tenant import Tenant
from pagetrie.server.auth import Access, Caller
from pagetrie.server.exchange import json_log, plain_log
from tests.server.conftest import Site
from tests.server.double import EngineDouble
from tests.server.test_chat import HI

pytestmark = pytest.mark.anyio


class Lines:
    """A site that logs in JSON, and its lines."""

    def __init__(self, make_site: Callable[..., Site], engine: EngineDouble | None = None, **options: Any) -> None:
        self.written: list[bytes] = []
        log = json_log(self.written.append, lambda: 1234.5)
        self.site = make_site(engine or EngineDouble(cached=2), options={"access_log": log, **options})

    def take(self) -> dict[str, Any]:
        [line] = self.written
        self.written.clear()
        assert line.count(b"\n") == 1 and line.endswith(b"\n")
        return json.loads(line)  # type: ignore[no-any-return]


async def test_a_line_in_plain(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pagetrie.server")
    await site.post("/v1/chat/completions", HI)
    for path in ("/health", "/ready", "/metrics"):
        await site.get(path)
    await site.get("/a%0A2026 INFO all is well")
    first, second = [record.getMessage() for record in caplog.records if record.name == "pagetrie.server"]
    assert "POST /v1/chat/completions 200" in first and len(first) < 100
    assert "GET /a%0A2026%20INFO%20all%20is%20well 404" in second and "\n" not in second


@pytest.mark.parametrize("stream", [False, True])
async def test_a_line_in_json(make_site: Callable[..., Site], stream: bool) -> None:
    lines = Lines(make_site)
    await lines.site.post("/v1/completions", {"prompt": "abcd", "stream": stream})
    line = lines.take()
    assert line.pop("ms") >= 0
    assert line == {
        "time": "1970-01-01T00:20:34.500+00:00", "client": "127.0.0.1", "method": "POST", "path": "/v1/completions",
        "status": 200, "request_id": "cmpl-1", "tenant": None, "prompt_tokens": 5, "cached_tokens": 2,
        "completion_tokens": 6,
    }  # fmt: skip


async def test_prompts_of_one_request_are_added_up(make_site: Callable[..., Site]) -> None:
    lines = Lines(make_site)
    await lines.site.post("/v1/completions", {"prompt": ["abcd", "ab"], "n": 2, "max_tokens": 3})
    line = lines.take()
    assert (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (8, 4, 12)


async def test_what_never_reached_the_engine_has_no_tokens(make_site: Callable[..., Site]) -> None:
    lines = Lines(make_site)
    await lines.site.get("/v1/models?cache_salt=SENSITIVE")
    line = lines.take()
    assert (line["path"], line["status"], line["request_id"]) == ("/v1/models", 200, None)
    assert "prompt_tokens" not in line
    await lines.site.post("/v1/completions", {"prompt": "SENSITIVE", "cache_salt": "SENSITIVE", "nonsense": 1})
    assert lines.take()["status"] == 400
    lines.site.tokenizer.before_encode = lambda text: 1 / 0
    await lines.site.post("/v1/completions", {"prompt": "SENSITIVE"})
    line = lines.take()
    assert line["status"] == 500 and "SENSITIVE" not in str(line)


async def test_tenants_are_named_and_keys_are_not(make_site: Callable[..., Site]) -> None:
    class Keyed(Access):
        def identify(self, headers: Any) -> Caller | None:
            return Caller(Tenant("acme"), admin=False, key_id="k1") if "authorization" in headers else None

    lines = Lines(make_site, access=Keyed())
    async with lines.site.client() as client:
        await client.post("/v1/completions", json={"prompt": "hi"}, headers={"authorization": "Bearer SENSITIVE"})
        assert "SENSITIVE" not in lines.written[0].decode()
        line = lines.take()
        assert (line["tenant"], line["status"]) == ("acme", 200)
        await client.post("/v1/completions", json={"prompt": "hi"})
    line = lines.take()
    assert (line["tenant"], line["status"]) == (None, 401)


async def test_a_client_that_leaves_is_logged_with_what_it_got(make_site: Callable[..., Site]) -> None:
    lines = Lines(make_site, EngineDouble(("abcdef",), gate=asyncio.Event()))
    async with lines.site.running() as server:
        _, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
        body = b'{"prompt": "hi"}'
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await lines.site.engine.arrived.wait()
        writer.close()
        while not lines.written:
            await asyncio.sleep(0)
    line = lines.take()
    assert (line["status"], line["completion_tokens"]) == (499, 2)


async def test_requests_are_counted_by_route(site: Site) -> None:
    await site.post("/v1/completions", {"prompt": "hi"})
    await site.get("/v1/requests/cmpl-7/cache")
    await site.get("/nowhere")
    await site.get("/health")
    counted = {
        (sample.labels["handler"], sample.labels["method"], sample.labels["status"]): sample.value
        for family in site.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "http_requests_total"
    }
    assert counted == {
        ("/v1/completions", "POST", "2xx"): 1,
        ("/v1/requests/{request_id}/cache", "GET", "5xx"): 1,  # the double can't be asked
        ("none", "GET", "4xx"): 1,
    }


async def test_no_log_at_all(make_site: Callable[..., Site], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pagetrie.server")
    await make_site(options={"access_log": None}).post("/v1/completions", {"prompt": "hi"})
    assert not caplog.records
    await make_site(options={"access_log": plain_log}).post("/v1/completions", {"prompt": "hi"})
    assert len(caplog.records) == 1


async def test_json_goes_to_standard_output(make_site: Callable[..., Site], capsys: pytest.CaptureFixture[str]) -> None:
    await make_site(options={"access_log": json_log()}).post("/v1/completions", {"prompt": "hi"})
    assert json.loads(capsys.readouterr().out)["status"] == 200
