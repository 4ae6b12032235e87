"""The description of the interface: whole, and nothing made up from it gets the server off its feet."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from starlette.testclient import TestClient

from pagetrie.engine.loop import EngineLoop
from pagetrie.server.serve import HttpServer
from tests.engine.toy import World
from tests.server.conftest import Site
from tests.server.double import ByteTokenizer


def routed(site: Site) -> set[tuple[str, str]]:
    return {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in site.app.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }


def test_every_route_is_described_and_every_body_has_its_model(site: Site) -> None:
    with TestClient(site.app) as client:
        described = client.get("/openapi.json").json()
    operations = {(method, path): op for path, item in described["paths"].items() for method, op in item.items()}
    assert operations.keys() == routed(site) - {("get", "/openapi.json")}
    bodiless = {path for (method, path), op in operations.items() if method == "post" and "requestBody" not in op}
    assert bodiless == {"/reset_prefix_cache"}
    assert len({op["operationId"] for op in operations.values()}) == len(operations)
    chat = described["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "temperature", "cache_salt", "priority", "context"} <= chat.keys()
    assert "security" not in described


@pytest.fixture(scope="module")
def api() -> Iterator[schemathesis.BaseSchema]:
    """A server over the real engine and cache with the toy model, on a socket."""
    world = World(num_pages=80, max_model_len=300)
    site = Site(tokenizer=ByteTokenizer(add_bos=False), options={"loop": EngineLoop(world.engine)})
    ready = threading.Event()
    server = HttpServer(site.app, port=0, shutdown_timeout=5, on_ready=lambda url: ready.set())
    thread = threading.Thread(target=server.run)
    thread.start()
    assert ready.wait(30)
    yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    server.stop()
    thread.join(30)
    world.check()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_made_up_requests_find_no_5xx(api: schemathesis.BaseSchema) -> None:
    """Requests as the description allows them and as it doesn't; every refusal is in OpenAI's form."""
    statuses: Counter[int] = Counter()
    for result in api.get_all_operations():
        if result.ok().path == "/v1/admin/live/events":  # goes on until the client leaves
            continue

        @settings(
            max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(case=result.ok().as_strategy())
        def attempt(case: schemathesis.Case) -> None:
            response = case.call()
            statuses[response.status_code] += 1
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                assert json.loads(response.content)["error"].keys() == {"message", "type", "param", "code"}

        attempt()
    assert statuses[200] > 50 and statuses[400] > 100
