"""Prometheus metrics under vLLM's names, so that existing dashboards and routers read them; own ones as ``pagetrie:*``.

Counts follow vLLM where a request has several choices: tokens, inter-token times and ``request_success`` are per
choice; everything else is once per prompt.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from pagetrie.engine.cache_records import MISS_REASONS
from pagetrie.engine.observer import (
    AdmissionReport,
    EngineObserver,
    FinishReport,
    RejoinReport,
    StepReport,
    TokenReport,
)
from pagetrie.engine.usage import CacheUsage
from pagetrie.kv import TransferReport
from pagetrie.server.engine_api import Snapshot
from pagetrie.server.exchange import QUIET_PATHS, Exchange
from pagetrie.server.tier_metrics import tier_metrics

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_TIME_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_TIME_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)
FINISH_REASONS = ("stop", "length", "abort", "error", "timeout")
POOL = "pool"
TIERS = (POOL, "ram", "disk", "store")
"""Where cached tokens come from: the pool, or a tier below it."""
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
HTTP_BUCKETS = (0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
OLD_NAMES = {
    "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
    "vllm:prefix_cache_queries": "vllm:gpu_prefix_cache_queries",
    "vllm:prefix_cache_hits": "vllm:gpu_prefix_cache_hits",
}
"""What older dashboards call them."""


def steps_of_1_2_5(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to ``limit``."""
    buckets: list[int] = []
    power = 1
    while True:
        for step in (1, 2, 5):
            if step * power > limit:
                return buckets or [1]
            buckets.append(step * power)
        power *= 10


@dataclass(slots=True)
class _OpenRequest:
    prompt_tokens: int
    cached_tokens: int
    cached_by_tier: Mapping[str, int]
    prompt_counted: bool = False
    longest_choice: int = 0


class Metrics(EngineObserver):
    """Counts what the engine reports. The engine's thread writes, any thread may call ``expose``.

    Args:
        model_name: the ``model_name`` label.
        max_model_len: upper end of the token histograms.
        cache_config: labels of ``vllm:cache_config_info`` besides ``block_size`` and ``num_gpu_blocks``.
    """

    def __init__(
        self, model_name: str, max_model_len: int = 8192, cache_config: Mapping[str, str] | None = None
    ) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._usage: CacheUsage | None = None
        self._cache_config = dict(cache_config or {})
        self._snapshot: Callable[[], Snapshot] | None = None
        self._transfers: Callable[[], TransferReport | None] = lambda: None
        self._open: dict[str, _OpenRequest] = {}
        self._renamed: list[MetricWrapperBase] = []
        sizes = steps_of_1_2_5(max_model_len)

        def counter(name: str, text: str) -> Counter:
            family = Counter(name, text, tuple(self._labels), registry=self.registry)
            if name in OLD_NAMES:
                self._renamed.append(family)
            return family.labels(**self._labels)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            family = Histogram(name, text, tuple(self._labels), registry=self.registry, buckets=tuple(buckets))
            if name in OLD_NAMES:
                self._renamed.append(family)
            return family.labels(**self._labels)

        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._preemptions = counter("vllm:num_preemptions", "Sequences put back in the queue.")
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens of requests whose prompt is done.")
        self._generation = counter("vllm:generation_tokens", "Generated tokens.")
        self._cached = counter("vllm:prompt_tokens_cached", "Prompt tokens taken from the cache.")
        self._recomputed = counter(
            "vllm:prompt_tokens_recomputed",
            "Last tokens of prompts that were cached up to there; a last token is always computed.",
        )
        by_source = Counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their keys and values came from.",
            (*self._labels, "source"),
            registry=self.registry,
        )
        self._computed = by_source.labels(**self._labels, source="local_compute")
        self._cache_hit = by_source.labels(**self._labels, source="local_cache_hit")
        self._transferred = by_source.labels(**self._labels, source="external_kv_transfer")
        self._external_queries = counter(
            "vllm:external_prefix_cache_queries", "Prompt tokens that the pool lacked, looked up in the tiers below it."
        )
        self._external_hits = counter(
            "vllm:external_prefix_cache_hits", "Prompt tokens loaded from the tiers below the pool."
        )
        by_tier = Counter(
            "pagetrie:prompt_tokens_cached",
            "Prompt tokens taken from the cache, by the tier that they came from.",
            (*self._labels, "tier"),
            registry=self.registry,
        )
        self._by_tier = {tier: by_tier.labels(**self._labels, tier=tier) for tier in TIERS}
        lookups = Counter(
            "pagetrie:cache_lookups",
            "Requests by why the rest of their prompt wasn't cached.",
            (*self._labels, "reason"),
            registry=self.registry,
        )
        self._lookups = {reason: lookups.labels(**self._labels, reason=reason) for reason in MISS_REASONS}
        missed = Counter(
            "pagetrie:missed_tokens",
            "Prompt tokens that weren't cached, by why.",
            (*self._labels, "reason"),
            registry=self.registry,
        )
        self._missed = {reason: missed.labels(**self._labels, reason=reason) for reason in MISS_REASONS}
        success = Counter(
            "vllm:request_success", "Finished choices.", (*self._labels, "finished_reason"), registry=self.registry
        )
        self._success = {reason: success.labels(**self._labels, finished_reason=reason) for reason in FINISH_REASONS}
        self._prefill = counter("pagetrie:prefill_tokens", "Tokens computed for prompts, recomputation included.")

        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Between tokens of a choice.", TOKEN_TIME_BUCKETS)
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first.", TOKEN_TIME_BUCKETS
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", REQUEST_TIME_BUCKETS)
        self._queue = histogram("vllm:request_queue_time_seconds", "Arrival to first seat.", REQUEST_TIME_BUCKETS)
        self._inference = histogram("vllm:request_inference_time_seconds", "First seat to end.", REQUEST_TIME_BUCKETS)
        self._prefill_time = histogram(
            "vllm:request_prefill_time_seconds", "First seat to first token.", REQUEST_TIME_BUCKETS
        )
        self._decode_time = histogram(
            "vllm:request_decode_time_seconds", "First token to last token.", REQUEST_TIME_BUCKETS
        )
        self._request_prompt = histogram("vllm:request_prompt_tokens", "Prompt length.", sizes)
        self._request_generation = histogram("vllm:request_generation_tokens", "Tokens of a choice.", sizes)
        self._request_longest = histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of a request's longest choice.", sizes
        )
        self._params_n = histogram("vllm:request_params_n", "Choices asked for.", N_BUCKETS)
        self._params_max = histogram("vllm:request_params_max_tokens", "Limit of tokens per choice.", sizes)
        self._kv_computed = histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens not taken from the cache.", sizes
        )
        self._iteration = histogram("vllm:iteration_tokens_total", "Tokens computed per step.", ITERATION_BUCKETS)
        self._http = Counter(
            "http_requests",
            "HTTP requests by route, method and class of the answer's status.",
            ("handler", "method", "status"),
            registry=self.registry,
        )
        self._http_time = Histogram(
            "http_request_duration_seconds",
            "HTTP requests, until the whole answer was sent.",
            ("handler", "method"),
            registry=self.registry,
            buckets=HTTP_BUCKETS,
        )
        self._step_time = histogram("pagetrie:step_duration_seconds", "Scheduling and computing a step.", STEP_BUCKETS)
        self.registry.register(_SnapshotCollector(self))
        ProcessCollector(registry=self.registry)

    def bind(
        self, snapshot: Callable[[], Snapshot], transfers: Callable[[], TransferReport | None] = lambda: None
    ) -> None:
        """Say where to read the gauges from when scraped, and the numbers of the tiers."""
        self._snapshot = snapshot
        self._transfers = transfers

    def expose(self, usage: CacheUsage | None = None) -> bytes:
        """Everything in Prometheus' text format.

        Args:
            usage: the memory's numbers of this moment; without them the latest known ones are told.
        """
        self._usage = usage or self._usage
        return generate_latest(self.registry)

    def on_exchange(self, exchange: Exchange) -> None:
        """An HTTP request was answered; called by the event loop."""
        if exchange.path not in QUIET_PATHS:
            status = f"{exchange.status // 100}xx" if exchange.status else "none"
            self._http.labels(exchange.handler, exchange.method, status).inc()
            self._http_time.labels(exchange.handler, exchange.method).observe(exchange.seconds)

    def on_step(self, report: StepReport) -> None:
        self._generation.inc(report.generated_tokens)
        self._prefill.inc(report.prefill_tokens)
        self._preemptions.inc(report.preemptions)
        if report.computed_tokens:
            self._iteration.observe(report.computed_tokens)
            self._step_time.observe(report.duration)

    def on_admission(self, report: AdmissionReport) -> None:
        loaded = sum(report.cached_by_tier.values())
        self._queries.inc(report.prompt_tokens)
        self._hits.inc(report.cached_tokens - loaded)
        self._external_queries.inc(report.prompt_tokens - report.cached_tokens + loaded)
        self._external_hits.inc(loaded)
        self._lookups[report.reason].inc()
        self._missed[report.reason].inc(report.prompt_tokens - report.cached_tokens)
        self._queue.observe(report.queue_time)
        self._open[report.request_id] = _OpenRequest(report.prompt_tokens, report.cached_tokens, report.cached_by_tier)

    def on_rejoin(self, report: RejoinReport) -> None:
        loaded = sum(report.cached_by_tier.values())
        self._hits.inc(max(0, report.cached_tokens - loaded))
        self._external_hits.inc(loaded)
        if (request := self._open.get(report.request_id)) is not None:
            request.cached_tokens += report.cached_tokens
            request.cached_by_tier = Tally(request.cached_by_tier) + Tally(report.cached_by_tier)

    def on_token(self, report: TokenReport) -> None:
        if not report.first:
            self._itl.observe(report.gap)
            return
        request = self._open.get(report.request_id)
        if request is not None and not request.prompt_counted:
            self._ttft.observe(report.gap)
            self._count_prompt(request)

    def on_finish(self, report: FinishReport) -> None:
        self._success[report.reason].inc()
        self._request_generation.observe(report.generated_tokens)
        if report.decode_time is not None and report.generated_tokens > 1:
            self._tpot.observe(report.decode_time / (report.generated_tokens - 1))
        request = self._open.get(report.request_id)
        if request is not None:
            request.longest_choice = max(request.longest_choice, report.generated_tokens)
            if not request.prompt_counted and report.reason in ("stop", "length"):
                self._count_prompt(request)
        if report.last_of_request:
            self._open.pop(report.request_id, None)
            self._finish_request(report, request)

    def _count_prompt(self, request: _OpenRequest) -> None:
        request.prompt_counted = True
        computed = request.prompt_tokens - request.cached_tokens
        self._prompt.inc(request.prompt_tokens)
        loaded = sum(request.cached_by_tier.values())
        self._cached.inc(request.cached_tokens)
        self._cache_hit.inc(request.cached_tokens - loaded)
        self._transferred.inc(loaded)
        self._by_tier[POOL].inc(request.cached_tokens - loaded)
        for tier, tokens in request.cached_by_tier.items():
            self._by_tier[tier].inc(tokens)
        self._computed.inc(computed)
        self._kv_computed.observe(computed)
        if computed == 1 and request.cached_tokens:
            self._recomputed.inc()

    def _finish_request(self, report: FinishReport, request: _OpenRequest | None) -> None:
        self._e2e.observe(report.e2e_time)
        self._request_prompt.observe(report.prompt_tokens)
        self._params_n.observe(report.n)
        self._params_max.observe(report.max_tokens)
        self._request_longest.observe(request.longest_choice if request else report.generated_tokens)
        if report.queue_time is not None:
            self._inference.observe(max(report.e2e_time - report.queue_time, 0.0))
        if report.prefill_time is not None:
            self._prefill_time.observe(report.prefill_time)
        if report.decode_time is not None:
            self._decode_time.observe(report.decode_time)

    def gauges(self) -> Iterable[Metric]:
        """The metrics that are read rather than counted."""
        if self._snapshot is None:
            return
        now = self._snapshot()
        names, values = tuple(self._labels), tuple(self._labels.values())

        def gauge(name: str, text: str, value: float) -> Metric:
            family = GaugeMetricFamily(name, text, labels=names)
            family.add_metric(values, value)
            return family

        def by(label: str, name: str, text: str, values_of: Mapping[str, float]) -> Metric:
            family = GaugeMetricFamily(name, text, labels=(*names, label))
            for key, value in values_of.items():
                family.add_metric((*values, key), value)
            return family

        yield gauge("vllm:num_requests_running", "Sequences with a seat.", now.running)
        yield gauge("vllm:num_requests_waiting", "Requests without a seat.", now.waiting)
        yield by(
            "reason",
            "vllm:num_requests_waiting_by_reason",
            "Requests without a seat: for want of room, or for pages that are being computed or loaded.",
            {"capacity": now.waiting - now.deferred, "deferred": now.deferred},
        )
        usage = now.active_pages / now.total_pages if now.total_pages else 0.0
        yield gauge("vllm:kv_cache_usage_perc", "Share of pages in use by requests, 0 to 1.", usage)
        yield gauge("vllm:gpu_cache_usage_perc", "The older name of vllm:kv_cache_usage_perc.", usage)
        report = self._transfers()
        ram = None if report is None else report.tiers.get("ram")
        ram_usage = ram.used_bytes / ram.capacity_bytes if ram is not None and ram.capacity_bytes else 0.0
        yield gauge("vllm:cpu_cache_usage_perc", "Share of the memory tier in use, 0 to 1.", ram_usage)
        swapped = "Requests whose pages were moved out of the pool: none ever, as a preempted one's pages stay cached."
        yield gauge("vllm:num_requests_swapped", swapped, 0)
        config = {
            **self._labels,
            **self._cache_config,
            "block_size": str(now.page_size),
            "num_gpu_blocks": str(now.total_pages),
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "Settings of the KV cache.", labels=tuple(config))
        info.add_metric(tuple(config.values()), 1)
        yield info
        states = {
            "free": now.free_pages,
            "active": now.active_pages,
            "cached": now.cached_pages,
            "loading": now.loading_pages,
        }
        yield by("state", "pagetrie:pages", "KV pages by state.", states)
        if self._usage is not None:
            yield from self._usage_gauges(self._usage, gauge)
        yield gauge(
            "pagetrie:pinned_pages", "Active pages that contexts and pins keep from eviction.", now.pinned_pages
        )
        yield gauge("pagetrie:contexts", "Contexts kept.", now.contexts)
        for name, text, count in (
            ("pagetrie:evicted_pages", "Cached pages given to other use.", now.evicted_pages),
            ("pagetrie:copy_on_write_copies", "Pages copied because two owners diverged in them.", now.cow_copies),
        ):
            family = CounterMetricFamily(name, text, labels=names)
            family.add_metric(values, count)
            yield family
        if report is not None:
            yield from tier_metrics(report, self._labels)

    def _usage_gauges(self, usage: CacheUsage, gauge: Callable[[str, str, float], Metric]) -> Iterable[Metric]:
        holding, tree = usage.holding, usage.tree
        yield gauge("pagetrie:held_pages", "Distinct pages in the page tables of running sequences.", holding.pages)
        yield gauge(
            "pagetrie:page_references",
            "Entries of the page tables of running sequences: what they would hold if they shared nothing.",
            holding.references,
        )
        yield gauge("pagetrie:unused_slots", "Token slots without a token in held pages.", usage.unused)
        yield gauge(
            "pagetrie:unused_slots_if_reserved",
            "Token slots that a contiguous reservation for each running sequence would leave unused.",
            usage.unused_if_reserved,
        )
        yield gauge("pagetrie:tree_namespaces", "Namespaces with stored prefixes.", tree.namespaces)
        yield gauge("pagetrie:tree_nodes", "Edges of the prefix tree.", tree.nodes)
        yield gauge("pagetrie:tree_leaves", "Edges of the prefix tree that nothing follows.", tree.leaves)
        yield gauge("pagetrie:tree_tokens", "Tokens in the prefix tree.", tree.tokens)

    def old_names(self) -> Iterable[Metric]:
        """Some counts once more, under the names that older dashboards ask for."""
        for family in self._renamed:
            for metric in family.collect():
                old = Metric(OLD_NAMES[metric.name], f"The older name of {metric.name}.", metric.type)
                for sample in metric.samples:
                    name = sample.name.replace(metric.name, old.name)
                    old.add_sample(name, sample.labels, sample.value, sample.timestamp)
                yield old


class _SnapshotCollector(Collector):
    """Asks for the gauges when scraped."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        yield from self._metrics.gauges()
        yield from self._metrics.old_names()
