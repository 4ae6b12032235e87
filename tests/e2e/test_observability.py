"""What a real server tells its operator besides metrics: readiness, traces, the access log, and ``pagetrie top``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Server
from tests.server.test_tracing import PARENT, TRACE, ExportTraceServiceRequest, collector

__all__ = ["collector"]  # a fixture


@pytest.mark.slow
def test_a_server_with_everything_on(start_server: Callable[..., Server], tmp_path: Path, collector: Any) -> None:
    server = start_server(
        "--num-pages", "100", "--max-model-len", "512", "--ram-cache", "16MiB", "--disk-cache", str(tmp_path / "pages"),
        "--otlp-traces-endpoint", collector.url, "--access-log", "json", "--log-level", "warning",
    )  # fmt: skip
    ready = server.http.get("/ready")
    checks = {"model": "ok", "steps": "ok", "ram": "ok", "disk": "ok"}
    assert (ready.status_code, ready.json()) == (200, {"status": "ready", "reasons": [], "checks": checks})

    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    for _ in range(2):
        body = {"prompt": "One, two, three, four, five, six, seven. " * 8, "max_tokens": 4, "ignore_eos": True}
        answer = server.http.post("/v1/completions", json=body, headers=headers).raise_for_status().json()
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == usage["prompt_tokens"] - 1

    command = [str(Path(sys.executable).parent / "pagetrie"), "top", "--url", server.url, "--once"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert server.model in text and "of 100 pages" in text and f"{answer['id']}-0" in text
    told = json.loads(subprocess.run([*command, "--json"], capture_output=True, timeout=120, check=True).stdout)
    assert told["load"]["generated_tokens"] == 8 and told["totals"]["prompt_tokens"] == 2 * usage["prompt_tokens"]

    assert server.stop() == 0
    server.reader.join(60)
    lines = [json.loads(line) for line in server.log if line.startswith("{")]
    completions = [line for line in lines if line["path"] == "/v1/completions"]
    assert [line["cached_tokens"] for line in completions] == [0, cached]
    assert completions[1]["request_id"] == answer["id"] and completions[1]["completion_tokens"] == 4
    spans = [
        span
        for _, _, message in collector.got
        for resource in ExportTraceServiceRequest.FromString(message).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    roots = [span for span in spans if span.name == "llm_request"]
    assert len(roots) == 2 and all(root.trace_id.hex() == TRACE for root in roots)
    assert all(root.parent_span_id.hex() == PARENT for root in roots)
    attributes = {attribute.key: attribute.value for attribute in roots[1].attributes}
    assert attributes["gen_ai.request.id"].string_value == f"{answer['id']}-0"
    assert attributes["pagetrie.cached_tokens"].int_value == cached
    assert {"queue", "match", "prefill", "decode"} <= {span.name for span in spans}
