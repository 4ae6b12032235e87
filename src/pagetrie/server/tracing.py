"""OpenTelemetry spans for each request: where its time went, and what the cache gave it. No text.

The names of attributes are vLLM's and OpenTelemetry's for generative AI; our own begin with ``pagetrie.``. Spans are
made once a request has ended, on a thread of their own, from what the engine reported. OpenTelemetry itself is an
optional extra, and imported only by ``open_tracer``.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pagetrie.engine.observer import (
    AdmissionReport,
    ArrivalReport,
    EngineObserver,
    FinishReport,
    PrefillReport,
    RejoinReport,
    SeatReport,
)
from pagetrie.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger("pagetrie.server")

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]

MAX_CHUNKS = 64
"""Spans for chunks of one prompt; what comes after is part of the last."""
MAX_PREEMPTIONS = 64
_TRACES_PATH = "/v1/traces"
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass(slots=True)
class _Trace:
    """What is known of a request so far. Times are seconds of the engine's clock."""

    arrival: ArrivalReport
    admission: AdmissionReport | None = None
    chunks: list[PrefillReport] = field(default_factory=list)
    # (choice, when it lost its seat, when it got one again)
    preempted: list[tuple[int, float, float | None]] = field(default_factory=list)
    preemptions: int = 0
    finished: list[FinishReport] = field(default_factory=list)


class RequestTracer(EngineObserver):
    """Makes spans of requests that have ended.

    Args:
        provider: gives them to exporters; shut down by ``close``.
        model_name: of the model.
        wall_clock: seconds since the epoch.
    """

    def __init__(self, provider: TracerProvider, model_name: str, wall_clock: Callable[[], float] = time.time) -> None:
        from opentelemetry import propagate, trace

        self._provider = provider
        self._tracer = provider.get_tracer("pagetrie")
        self._model_name = model_name
        self._wall_clock = wall_clock
        self._propagator = propagate.get_global_textmap()
        self._in = trace.set_span_in_context
        self._server_kind = trace.SpanKind.SERVER
        self._failed = trace.Status(trace.StatusCode.ERROR)
        self._open: dict[str, _Trace] = {}
        self._maker = ThreadPoolExecutor(1, "pagetrie-spans")

    @property
    def headers(self) -> set[str]:
        """Names of the headers of HTTP that say which trace a request belongs to."""
        return set(self._propagator.fields)

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def on_arrival(self, report: ArrivalReport) -> None:
        self._open[report.request_id] = _Trace(report)

    def on_admission(self, report: AdmissionReport) -> None:
        if (trace := self._open.get(report.request_id)) is not None:
            trace.admission = report

    def on_rejoin(self, report: RejoinReport) -> None:
        trace = self._open.get(report.request_id)
        if trace is not None and trace.admission is not None:
            trace.admission = replace(
                trace.admission,
                cached_tokens=trace.admission.cached_tokens + report.cached_tokens,
                cached_by_tier=Counter(trace.admission.cached_by_tier) + Counter(report.cached_by_tier),
            )

    def on_prefill(self, report: PrefillReport) -> None:
        trace = self._open.get(report.request_id)
        if trace is None:
            return
        if len(trace.chunks) < MAX_CHUNKS:
            trace.chunks.append(report)
        else:
            last = trace.chunks[-1]
            trace.chunks[-1] = PrefillReport(
                last.request_id, last.position, last.tokens + report.tokens, last.start, report.end
            )

    def on_seat(self, report: SeatReport) -> None:
        trace = self._open.get(report.request_id)
        if trace is None:
            return
        if not report.seated:
            trace.preemptions += 1
            if len(trace.preempted) < MAX_PREEMPTIONS:
                trace.preempted.append((report.index, report.time, None))
            return
        for place, (index, lost, again) in enumerate(trace.preempted):
            if index == report.index and again is None:
                trace.preempted[place] = (index, lost, report.time)

    def on_finish(self, report: FinishReport) -> None:
        trace = self._open.get(report.request_id)
        if trace is None:
            return
        trace.finished.append(report)
        if report.last_of_request:
            del self._open[report.request_id]
            offset = self._wall_clock() - report.time
            self._maker.submit(self._make_logged, trace, offset)

    # -- the spans' own thread ---------------------------------------------------------------------------------------

    def _make_logged(self, trace: _Trace, offset: float) -> None:
        try:
            self._make(trace, offset)
        except Exception:
            log.exception("the spans of a request could not be made")

    def _make(self, trace: _Trace, offset: float) -> None:
        def nanoseconds(moment: float) -> int:
            return int((moment + offset) * 1e9)

        last, arrival = trace.finished[-1], trace.arrival.time
        parent = self._propagator.extract(trace.arrival.trace_headers)
        root = self._tracer.start_span(
            "llm_request",
            parent,
            self._server_kind,
            _request_attributes(trace, self._model_name),
            start_time=nanoseconds(arrival),
        )
        inside = self._in(root, parent)

        def span(name: str, start: float, end: float, attributes: Attributes) -> None:
            made = self._tracer.start_span(name, inside, attributes=attributes, start_time=nanoseconds(start))
            made.end(nanoseconds(end))

        admission = trace.admission
        if admission is None:
            span("queue", arrival, last.time, {})
        else:
            waited = admission.time - admission.wait_time
            span("queue", arrival, waited, {})
            tiers = {f"pagetrie.cached_tokens.{tier}": tokens for tier, tokens in admission.cached_by_tier.items()}
            if admission.wait_time > 0:
                # For pages of a tier, or for those that another request computed.
                span("load" if tiers else "wait", waited, admission.time, tiers)
            span("match", admission.time, admission.time, _cache_attributes(admission))
        first = None if last.queue_time is None or last.prefill_time is None else arrival + _ttft(last)
        for chunk in trace.chunks:
            again = first is not None and chunk.start >= first
            attributes = {"pagetrie.position": chunk.position, "pagetrie.tokens": chunk.tokens}
            span("prefill", chunk.start, chunk.end, {**attributes, "pagetrie.after_preemption": again})
        if first is not None:
            tokens = sum(report.generated_tokens for report in trace.finished)
            span("decode", first, last.time, {"gen_ai.usage.completion_tokens": tokens})
        for index, lost, again_at in trace.preempted:
            span("preempted", lost, last.time if again_at is None else again_at, {"pagetrie.choice": index})
        if last.reason == "error":
            root.set_status(self._failed)
        root.end(nanoseconds(last.time))

    def close(self) -> None:
        """Make what is left to make, and export it; a collector that doesn't answer is given up after some seconds."""
        self._maker.shutdown()
        self._provider.shutdown()


def _ttft(report: FinishReport) -> float:
    return (report.queue_time or 0.0) + (report.prefill_time or 0.0)


def _cache_attributes(report: AdmissionReport) -> dict[str, str | int]:
    pool = report.cached_tokens - sum(report.cached_by_tier.values())
    return {
        "pagetrie.cached_tokens": report.cached_tokens,
        "pagetrie.cached_tokens.pool": pool,
        **{f"pagetrie.cached_tokens.{tier}": tokens for tier, tokens in report.cached_by_tier.items()},
        "pagetrie.miss_reason": report.reason,
    }


def _request_attributes(trace: _Trace, model_name: str) -> dict[str, Any]:
    last, params = trace.finished[-1], trace.arrival.params
    completion = sum(report.generated_tokens for report in trace.finished)
    attributes: dict[str, Any] = {
        "gen_ai.request.id": last.request_id,
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.request.max_tokens": last.max_tokens,
        "gen_ai.request.n": last.n,
        "gen_ai.usage.num_sequences": len(trace.finished),
        "gen_ai.usage.prompt_tokens": last.prompt_tokens,
        "gen_ai.usage.completion_tokens": completion,
        # What OpenTelemetry calls these two today.
        "gen_ai.usage.input_tokens": last.prompt_tokens,
        "gen_ai.usage.output_tokens": completion,
        "gen_ai.usage.cache_read.input_tokens": last.cached_tokens,
        "gen_ai.response.finish_reasons": [report.reason for report in trace.finished],
        "gen_ai.latency.e2e": last.e2e_time,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "pagetrie.preemptions": trace.preemptions,
    }
    if trace.admission is not None:
        attributes |= _cache_attributes(trace.admission)
    if last.queue_time is not None:
        attributes["gen_ai.latency.time_in_queue"] = last.queue_time
        attributes["gen_ai.latency.time_in_model_inference"] = last.e2e_time - last.queue_time
    if last.prefill_time is not None:
        attributes["gen_ai.latency.time_in_model_prefill"] = last.prefill_time
        attributes["gen_ai.latency.time_to_first_token"] = _ttft(last)
    if last.decode_time is not None:
        attributes["gen_ai.latency.time_in_model_decode"] = last.decode_time
    return attributes


def wanted_by_environment() -> bool:
    """Whether OpenTelemetry's own variables name a collector and don't say that nothing is to go there."""
    return (
        any(os.environ.get(name) for name in _ENDPOINT_VARIABLES)
        and os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true"
        and os.environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp"
    )


def open_tracer(endpoint: str | None, model_name: str, version: str) -> RequestTracer:
    """A tracer that exports with OTLP over HTTP.

    Sampling, headers, certificates, resource attributes and so on are as OpenTelemetry's variables (``OTEL_...``) say.

    Args:
        endpoint: where to; without a path, that of traces is added. None for what the variables say.
        model_name: of the model.
        version: pagetrie's.

    Raises:
        ConfigError: OpenTelemetry isn't installed, or the endpoint is no http or https URL.
    """
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"traces are exported over HTTP; {endpoint!r} is no http:// or https:// URL")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"traces need a package that isn't installed ({error.name}); pip install 'pagetrie[trace]'"
        ) from error
    if endpoint is not None and endpoint.rstrip("/").count("/") == 2:
        endpoint = endpoint.rstrip("/") + _TRACES_PATH
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({"service.version": version, **({} if named else {"service.name": "pagetrie"})})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return RequestTracer(provider, model_name)
