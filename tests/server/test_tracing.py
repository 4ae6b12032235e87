"""Traces: the spans of requests add up to their time, tell the cache's part in it, and continue the client's trace."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from pagetrie.engine.loop import EngineLoop
from pagetrie.errors import ConfigError
from pagetrie.server.tracing import MAX_CHUNKS, RequestTracer, open_tracer, wanted_by_environment
from tests.engine.test_tiers import PROMPT, stored
from tests.engine.tiers import ToldTier
from tests.engine.toy import World
from tests.server.conftest import Site
from tests.server.double import ByteTokenizer

pytest.importorskip("opentelemetry.sdk", reason="the extra 'trace' isn't installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

EPOCH = 1_000_000.0
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Traced:
    """A tracer that keeps its spans, and the engine's clock, which every look at it moves by a quarter of a second."""

    now: float = 0.0
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def __post_init__(self) -> None:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = RequestTracer(provider, "tiny", lambda: EPOCH + self.now)

    def clock(self) -> float:
        self.now += 0.25
        return self.now

    def spans(self) -> list[ReadableSpan]:
        """In order of their start, a request's own before its parts."""
        self.tracer.close()
        spans = self.exporter.get_finished_spans()
        return sorted(spans, key=lambda span: (span.start_time, span.name != "llm_request", span.end_time))


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def named(spans: list[ReadableSpan], name: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name == name]


def test_a_requests_parts_fill_its_time() -> None:
    traced = Traced()
    world = World(observer=traced.tracer, clock=traced.clock, budget=16)
    prompt = list(range(1, 41))
    world.add("cold", prompt, max_tokens=3, ignore_eos=True)
    world.run()
    cold_end = traced.now
    world.add("warm", [*prompt[:24], 99, 98], max_tokens=3, ignore_eos=True, n=2, temperature=0.5)
    world.run()
    spans = traced.spans()
    root, other = named(spans, "llm_request")
    assert root.start_time is not None and root.start_time / 1e9 >= EPOCH
    assert root.end_time is not None and root.end_time / 1e9 <= EPOCH + cold_end
    parts = [span for span in spans if span.parent is not None and span.parent.span_id == root.context.span_id]
    assert [span.name for span in parts] == ["queue", "match", "prefill", "prefill", "prefill", "decode"]
    chunks = [(span.attributes["pagetrie.position"], span.attributes["pagetrie.tokens"]) for span in parts[2:5]]
    assert chunks == [(0, 16), (16, 16), (32, 8)]
    assert parts[0].start_time == root.start_time and parts[-1].end_time == root.end_time
    assert parts[0].end_time == parts[1].start_time == parts[2].start_time  # the step begins with the match
    assert parts[2].end_time <= parts[3].start_time and parts[4].end_time == parts[5].start_time
    assert root.attributes["gen_ai.latency.e2e"] == seconds(root)
    assert root.attributes["gen_ai.latency.time_in_queue"] == seconds(parts[0])
    assert root.attributes["gen_ai.latency.time_in_model_decode"] == seconds(parts[-1])
    assert root.attributes["gen_ai.latency.time_to_first_token"] == (parts[-1].start_time - root.start_time) / 1e9
    attributes = dict(other.attributes or {})
    expected = {
        "gen_ai.request.id": "warm", "gen_ai.request.n": 2, "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 1.0, "gen_ai.response.model": "tiny",
        "gen_ai.usage.prompt_tokens": 26, "gen_ai.usage.completion_tokens": 6, "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.input_tokens": 26, "gen_ai.usage.output_tokens": 6, "gen_ai.usage.cache_read.input_tokens": 24,
        "gen_ai.response.finish_reasons": ("length", "length"), "pagetrie.cached_tokens": 24,
        "pagetrie.cached_tokens.pool": 24, "pagetrie.miss_reason": "differs", "pagetrie.preemptions": 0,
    }  # fmt: skip
    assert {name: attributes.get(name) for name in expected} == expected
    assert not any("99" in str(value) for value in attributes.values())


def test_waiting_for_anothers_pages_is_told_from_waiting_for_a_seat() -> None:
    traced = Traced()
    world = World(observer=traced.tracer, clock=traced.clock, budget=64)
    world.add("first", range(1, 41), max_tokens=2, ignore_eos=True)
    world.add("second", range(1, 41), max_tokens=2, ignore_eos=True)
    world.run()
    [wait] = named(traced.spans(), "wait")
    assert seconds(wait) > 0 and wait.parent is not None


def test_a_load_from_a_tier_shows_with_its_tokens() -> None:
    traced = Traced()
    world = stored(ToldTier(), observer=traced.tracer)
    world.add("again", PROMPT, max_tokens=2, ignore_eos=True)
    world.step()
    world.clock.now += 0.25
    world.finish()
    spans = traced.spans()
    [load] = named(spans, "load")
    assert load.parent is not None and seconds(load) == 0.25
    root = next(root for root in named(spans, "llm_request") if root.attributes["gen_ai.request.id"] == "again")
    loaded = load.attributes["pagetrie.cached_tokens.disk"]
    assert root.attributes["pagetrie.cached_tokens.disk"] == loaded > 0
    assert root.attributes["pagetrie.cached_tokens"] == loaded + root.attributes["pagetrie.cached_tokens.pool"]


def test_preemptions_show_with_what_is_computed_again() -> None:
    traced = Traced()
    world = World(observer=traced.tracer, clock=traced.clock, num_pages=10, max_model_len=40, seats=4)
    for number in range(3):
        world.add(str(number), range(50 * number + 1, 50 * number + 9), max_tokens=24, ignore_eos=True)
    world.run()
    spans = traced.spans()
    lost = sum(int(root.attributes["pagetrie.preemptions"]) for root in named(spans, "llm_request"))
    preempted = named(spans, "preempted")
    assert len(preempted) == lost > 0 and all(seconds(span) > 0 for span in preempted)
    assert any(span.attributes["pagetrie.after_preemption"] for span in named(spans, "prefill"))


def test_failures_aborts_and_what_never_ran() -> None:
    traced = Traced()
    world = World(observer=traced.tracer, clock=traced.clock, seats=1)
    world.add("fails", range(1, 9), max_tokens=5)
    world.runner.fail_on = lambda plan: True
    world.step()
    world.runner.fail_on = lambda plan: False
    world.add("runs", range(1, 9), max_tokens=5)
    world.add("waits", range(11, 19), max_tokens=5)
    world.step()
    world.abort("waits")
    world.abort("runs")
    spans = traced.spans()
    status = {root.attributes["gen_ai.request.id"]: root.status.status_code for root in named(spans, "llm_request")}
    assert status == {"fails": StatusCode.ERROR, "runs": StatusCode.UNSET, "waits": StatusCode.UNSET}
    waits = next(root for root in named(spans, "llm_request") if root.attributes["gen_ai.request.id"] == "waits")
    parts = [span.name for span in spans if span.parent is not None and span.parent.span_id == waits.context.span_id]
    assert parts == ["queue"] and not traced.tracer._open


def test_a_long_prompt_has_a_bounded_number_of_spans() -> None:
    traced = Traced()
    world = World(observer=traced.tracer, clock=traced.clock, seats=2, budget=2)
    world.add("long", [1 + number % 199 for number in range(190)], max_tokens=1, ignore_eos=True)
    world.run()
    chunks = named(traced.spans(), "prefill")
    assert len(chunks) == MAX_CHUNKS and sum(chunk.attributes["pagetrie.tokens"] for chunk in chunks) == 190


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_trace_goes_on(stream: bool) -> None:
    traced = Traced()
    world = World(observer=traced.tracer)
    headers = traced.tracer.headers
    assert {"traceparent", "tracestate"} <= headers
    loop = EngineLoop(world.engine)
    site = Site(tokenizer=ByteTokenizer(add_bos=False), options={"loop": loop, "trace_headers": headers})
    body = {"prompt": ["one prompt", "and another"], "max_tokens": 2, "stream": stream}
    async with site.app.router.lifespan_context(site.app), site.client() as client:
        parent = {"TraceParent": f"00-{TRACE}-{PARENT}-01", "authorization": "Bearer SENSITIVE"}
        assert (await client.post("/v1/completions", json=body, headers=parent)).status_code == 200
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert (await client.post("/v1/completions", json=body, headers={"traceparent": "ff-x"})).status_code == 200
    roots = named(traced.spans(), "llm_request")
    ids = [f"{root.context.trace_id:032x}" for root in roots]
    assert ids.count(TRACE) == 2 and len(set(ids)) == 5
    ours = [root for root in roots if f"{root.context.trace_id:032x}" == TRACE]
    assert all(root.parent is not None and f"{root.parent.span_id:016x}" == PARENT for root in ours)
    assert {root.attributes["gen_ai.request.id"] for root in ours} == {"cmpl-1-0", "cmpl-1-1"}


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes OTLP over HTTP."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append((self.path, dict(self.headers), body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Any]:
    server: Any = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    server.got = []
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("way", ["option", "option with a path", "environment"])
def test_a_collector_gets_them(collector: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not wanted_by_environment()
    endpoint: str | None = collector.url + ("/v1/traces" if way == "option with a path" else "")
    if way == "environment":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=blue")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "library")
        assert wanted_by_environment()
        endpoint = None
    tracer = open_tracer(endpoint, "tiny", "1.2.3")
    world = World(observer=tracer)
    world.add("r", range(1, 9), max_tokens=3, ignore_eos=True)
    world.run()
    tracer.close()
    [(path, headers, body)] = collector.got
    assert path == "/v1/traces" and headers["content-type"] == "application/x-protobuf"
    request = ExportTraceServiceRequest.FromString(body)
    [resource] = request.resource_spans
    told = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert told["service.name"] == ("library" if way == "environment" else "pagetrie")
    assert told["service.version"] == "1.2.3"
    assert (headers.get("x-team") == "blue") == (way == "environment")
    names = [span.name for span in resource.scope_spans[0].spans]
    assert sorted(names) == ["decode", "llm_request", "match", "prefill", "queue"]


def test_environments_that_say_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:4318/v1/traces")
    assert wanted_by_environment()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert not wanted_by_environment()
    monkeypatch.delenv("OTEL_TRACES_EXPORTER")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not wanted_by_environment()


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="'grpc://localhost:4317' is no http"):
        open_tracer("grpc://localhost:4317", "tiny", "1")


def test_nothing_of_it_is_imported_unless_it_is_on() -> None:
    program = (
        "import sys, pagetrie.server.app, pagetrie.server.tracing\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"
