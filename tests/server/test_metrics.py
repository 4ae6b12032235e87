"""/metrics: vLLM's names, filled from reports and from the engine's numbers."""

from __future__ import annotations

import random
import re
import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagetrie.engine.cache_records import MISS_REASONS
from pagetrie.engine.loop import EngineLoop
from pagetrie.engine.observer import AdmissionReport, FinishReport, StepReport, TokenReport
from pagetrie.kv.interface import TransferReport, TransferStats
from pagetrie.kv.tiers.interface import TierStats
from pagetrie.server.auth import Caller
from pagetrie.server.metrics import TIERS, Metrics, steps_of_1_2_5
from pagetrie.server.quota import Quotas
from tests.engine.toy import World
from tests.server.double import Snapshot
from tests.server.test_contexts import RULES, serving

OBSERVABILITY = Path(__file__).parents[2] / "docs" / "observability.md"
LABELS = {"model_name": "tiny", "engine": "0"}


class Exposed:
    """An exposition, by sample name and labels."""

    def __init__(self, metrics: Metrics) -> None:
        self.samples = [
            sample for family in text_string_to_metric_families(metrics.expose().decode()) for sample in family.samples
        ]

    def __call__(self, name: str, **labels: str) -> float:
        [value] = [s.value for s in self.samples if s.name == name and s.labels == {**LABELS, **labels}]
        return value


def finish(request: str, **changes) -> FinishReport:
    values = {
        "request_id": request, "reason": "stop", "n": 1, "max_tokens": 50, "prompt_tokens": 40, "generated_tokens": 5,
        "cached_tokens": 32, "e2e_time": 2.0, "queue_time": 0.5, "prefill_time": 0.7, "decode_time": 0.8,
        "last_of_request": True,
    }  # fmt: skip
    return FinishReport(**{**values, **changes})


def test_one_request_is_told_in_full():
    metrics = Metrics("tiny", 8192)
    metrics.on_admission(AdmissionReport("r", 0.5, 40, 32, {"disk": 12}, "differs"))
    metrics.on_step(StepReport(1.0, 0.1, 1, 0, computed_tokens=8, prefill_tokens=8, generated_tokens=1, preemptions=0))
    metrics.on_token(TokenReport("r", True, 1.2))
    for _ in range(4):
        metrics.on_token(TokenReport("r", False, 0.2))
        metrics.on_step(StepReport(2.0, 0.1, 1, 0, 1, 0, 1, preemptions=1))
    metrics.on_finish(finish("r"))
    value = Exposed(metrics)
    assert value("vllm:prefix_cache_queries_total") == 40
    assert value("vllm:prefix_cache_hits_total") == value("vllm:gpu_prefix_cache_hits_total") == 20
    assert value("vllm:external_prefix_cache_queries_total") == 20
    assert value("vllm:external_prefix_cache_hits_total") == 12
    assert value("pagetrie:cache_lookups_total", reason="differs") == 1
    assert value("pagetrie:missed_tokens_total", reason="differs") == 8
    tiers = {"pool": 20, "ram": 0, "disk": 12, "store": 0}
    assert {tier: value("pagetrie:prompt_tokens_cached_total", tier=tier) for tier in tiers} == tiers
    assert value("vllm:prompt_tokens_total") == 40
    assert value("vllm:prompt_tokens_cached_total") == 32
    assert value("vllm:prompt_tokens_by_source_total", source="local_compute") == 8
    assert value("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 20
    assert value("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == 12
    assert value("vllm:prompt_tokens_recomputed_total") == 0
    assert value("vllm:generation_tokens_total") == 5
    assert value("vllm:num_preemptions_total") == 4
    assert value("pagetrie:prefill_tokens_total") == 8
    assert value("vllm:request_success_total", finished_reason="stop") == 1
    assert value("vllm:request_success_total", finished_reason="abort") == 0
    sums = {
        "time_to_first_token_seconds": (1.2, 1), "inter_token_latency_seconds": (0.8, 4),
        "time_per_output_token_seconds": (0.8, 4),
        "request_time_per_output_token_seconds": (0.2, 1), "e2e_request_latency_seconds": (2.0, 1),
        "request_queue_time_seconds": (0.5, 1), "request_inference_time_seconds": (1.5, 1),
        "request_prefill_time_seconds": (0.7, 1), "request_decode_time_seconds": (0.8, 1),
        "request_prompt_tokens": (40, 1), "request_generation_tokens": (5, 1),
        "request_max_num_generation_tokens": (5, 1), "request_params_n": (1, 1), "request_params_max_tokens": (50, 1),
        "request_prefill_kv_computed_tokens": (8, 1), "iteration_tokens_total": (12, 5),
    }  # fmt: skip
    for name, (total, count) in sums.items():
        assert value(f"vllm:{name}_sum") == pytest.approx(total), name
        assert value(f"vllm:{name}_count") == count, name
    assert value("vllm:time_to_first_token_seconds_bucket", le="1.0") == 0
    assert value("vllm:time_to_first_token_seconds_bucket", le="2.5") == 1


def test_choices_share_a_prompt_and_a_first_token():
    metrics = Metrics("tiny", 8192)
    metrics.on_admission(AdmissionReport("r", 0.0, 10, 9))
    for _ in range(3):
        metrics.on_token(TokenReport("r", True, 0.1))
    for tokens, last in ((4, False), (9, False), (2, True)):
        metrics.on_finish(finish("r", n=3, generated_tokens=tokens, prompt_tokens=10, last_of_request=last))
    value = Exposed(metrics)
    assert value("vllm:time_to_first_token_seconds_count") == 1
    assert value("vllm:prompt_tokens_total") == 10
    assert value("vllm:prompt_tokens_recomputed_total") == 1
    assert value("vllm:request_success_total", finished_reason="stop") == 3
    assert value("vllm:request_generation_tokens_count") == 3
    assert value("vllm:request_max_num_generation_tokens_sum") == 9
    assert value("vllm:e2e_request_latency_seconds_count") == 1
    assert value("vllm:request_params_n_sum") == 3
    assert not metrics._open


def test_an_abort_before_the_first_token_counts_no_prompt_and_leaves_nothing_behind():
    metrics = Metrics("tiny", 8192)
    metrics.on_admission(AdmissionReport("r", 0.0, 10, 0))
    times = {"prefill_time": None, "decode_time": None}
    metrics.on_finish(finish("r", reason="abort", generated_tokens=0, **times))
    metrics.on_finish(finish("queued", reason="abort", generated_tokens=0, queue_time=None, **times))
    value = Exposed(metrics)
    assert value("vllm:request_success_total", finished_reason="abort") == 2
    assert value("vllm:prompt_tokens_total") == 0
    assert value("vllm:request_inference_time_seconds_count") == 1
    assert value("vllm:request_decode_time_seconds_count") == 0
    assert not metrics._open


def test_a_prompt_without_generation_counts_at_its_end():
    metrics = Metrics("tiny", 8192)
    metrics.on_admission(AdmissionReport("r", 0.0, 10, 4))
    metrics.on_finish(finish("r", reason="length", generated_tokens=0, decode_time=None))
    assert Exposed(metrics)("vllm:prompt_tokens_total") == 10
    assert Exposed(metrics)("vllm:time_to_first_token_seconds_count") == 0


@pytest.mark.anyio
async def test_gauges_come_from_the_engine_at_scrape_time(site):
    response = await site.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    value = Exposed(site.metrics)
    assert value("vllm:num_requests_running") == 0
    assert value("vllm:kv_cache_usage_perc") == pytest.approx(0.1)
    assert value("vllm:cache_config_info", block_size="16", num_gpu_blocks="100", cache_dtype="fp16") == 1
    for state, count in (("free", 70), ("active", 10), ("cached", 17), ("loading", 3)):
        assert value("pagetrie:pages", state=state) == count
    assert value("vllm:gpu_cache_usage_perc") == pytest.approx(0.1)
    assert value("vllm:num_requests_waiting_by_reason", reason="capacity") == 0
    assert value("vllm:num_requests_waiting_by_reason", reason="deferred") == 0
    assert value("pagetrie:evicted_pages_total") == 5
    assert value("pagetrie:copy_on_write_copies_total") == 3


def test_scraping_while_the_engine_reports():
    metrics = Metrics("tiny", 8192)

    def report() -> None:
        for i in range(2000):
            metrics.on_admission(AdmissionReport(str(i), 0.0, 3, 1))
            metrics.on_token(TokenReport(str(i), True, 0.1))
            metrics.on_finish(finish(str(i)))

    thread = threading.Thread(target=report)
    thread.start()
    while thread.is_alive():
        Exposed(metrics)
    assert Exposed(metrics)("vllm:prompt_tokens_total") == 6000


def test_buckets():
    assert steps_of_1_2_5(120) == [1, 2, 5, 10, 20, 50, 100]
    assert steps_of_1_2_5(1) == [1]


@pytest.mark.parametrize("seed", range(2))
def test_numbers_add_up_over_preemptions_and_cancels(seed: int):
    """Prompt tokens are cached or computed, pages are in one state, and prefill is what the model was given."""
    rng = random.Random(seed)
    metrics = Metrics("tiny", 8192)
    world = World(num_pages=16, page_size=4, max_model_len=60, seats=6, observer=metrics)
    loop = EngineLoop(world.engine)
    metrics.bind(lambda: loop._take_snapshot())
    trunk = [rng.randrange(1, 200) for _ in range(12)]
    alive: list[str] = []
    for number in range(60):
        prompt = trunk[: rng.randrange(13)] + [rng.randrange(1, 200) for _ in range(rng.randrange(1, 12))]
        name = str(number)
        world.add(name, prompt, max_tokens=rng.randrange(20), n=rng.choice((1, 1, 2)), temperature=1.0, seed=number)
        alive.append(name)
        for _ in range(rng.randrange(4)):
            world.step()
        if rng.random() < 0.2:
            world.abort(alive.pop(rng.randrange(len(alive))))
        if number % 10 == 0:
            value = Exposed(metrics)
            assert sum(value("pagetrie:pages", state=state) for state in ("free", "active", "cached", "loading")) == 16
    world.run()
    value = Exposed(metrics)
    assert value("vllm:num_preemptions_total") > 0 and value("vllm:request_success_total", finished_reason="abort") > 0
    cached = sum(value("pagetrie:prompt_tokens_cached_total", tier=tier) for tier in TIERS)
    computed = value("vllm:prompt_tokens_by_source_total", source="local_compute")
    assert cached == value("vllm:prompt_tokens_cached_total") > 0
    assert value("vllm:prompt_tokens_total") == cached + computed
    # Prefill and decode together are what the model was given.
    given = world.runner.computed_tokens
    assert value("pagetrie:prefill_tokens_total") <= given == value("vllm:iteration_tokens_total_sum")
    lookups = sum(value("pagetrie:cache_lookups_total", reason=reason) for reason in MISS_REASONS)
    missed = sum(value("pagetrie:missed_tokens_total", reason=reason) for reason in MISS_REASONS)
    assert lookups == value("vllm:request_queue_time_seconds_count")
    assert missed == value("vllm:prefix_cache_queries_total") - value("vllm:prefix_cache_hits_total")


@pytest.mark.anyio
async def test_the_tree_in_numbers():
    async with serving() as client:
        await client.complete(prompt=RULES, max_tokens=1)
        text = (await client.http.get("/metrics")).text
    samples = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
    assert samples["pagetrie:held_pages"] == samples["pagetrie:page_references"] == 0
    assert samples["pagetrie:tree_tokens"] == len(RULES) and samples["pagetrie:tree_namespaces"] == 1
    assert samples["pagetrie:tree_leaves"] >= 1


def test_usage_of_sequences_that_share_a_trunk():
    world = World(page_size=4, max_model_len=40)
    for name in range(3):
        world.add(str(name), [*range(1, 9), 20 + name, 30], max_tokens=9, ignore_eos=True)
    while world.engine.num_running < 3:
        world.step()
    world.step()
    usage = world.engine.usage()
    holding = usage.holding
    leases = [sequence.lease for sequence in world.engine._scheduler.running]
    pages = {page for lease in leases for page in lease.pages}
    assert (holding.leases, holding.pages) == (3, len(pages)) and holding.references == sum(
        len(x.pages) for x in leases
    )
    assert holding.references - holding.pages == 2 * 2  # two shared pages, each counted once
    assert holding.tokens == sum(lease.computed for lease in leases)
    assert usage.unused == len(pages) * 4 - (holding.tokens - 2 * 8)
    assert usage.unused_if_reserved == 3 * 40 - holding.tokens
    world.run()


def test_tiers_are_shown_where_there_are_some():
    metrics = Metrics("tiny", 8192)
    metrics.bind(lambda: Snapshot())
    assert b"pagetrie:tier_" not in metrics.expose()
    disk = TierStats(capacity_bytes=1000, hit_pages=3, failed_pages=1, queued_bytes=50, healthy=False)
    report = TransferReport({"disk": disk, "store": TierStats()}, TransferStats(loads=2))
    metrics.bind(lambda: Snapshot(), lambda: report)
    exposed = Exposed(metrics)
    assert exposed("pagetrie:tier_hit_pages_total", tier="disk") == 3
    assert exposed("pagetrie:tier_failed_pages_total", tier="disk") == 1
    assert exposed("pagetrie:tier_queued_bytes", tier="disk") == 50
    assert exposed("pagetrie:tier_capacity_bytes", tier="disk") == 1000
    assert [exposed("pagetrie:tier_healthy", tier=tier) for tier in ("disk", "store")] == [0, 1]
    assert exposed("pagetrie:tier_loads_total") == 2
    assert exposed("vllm:cpu_cache_usage_perc") == 0
    report.tiers["ram"] = TierStats(capacity_bytes=400, used_bytes=100)
    assert Exposed(metrics)("vllm:cpu_cache_usage_perc") == 0.25


def test_what_is_exposed_is_documented_and_nothing_else():
    """Name by name, with its kind, with tiers and tenants and all."""
    world = World(num_pages=40)
    metrics = Metrics("tiny", 8192)
    quotas = Quotas()
    quotas.admit(Caller(), 1, 1)
    metrics.registry.register(quotas)
    loop = EngineLoop(world.engine)
    report = TransferReport({"disk": TierStats()}, TransferStats())
    metrics.bind(loop.snapshot, lambda: report)
    text = metrics.expose(world.engine.usage()).decode()
    exposed = {
        f"{family.name} {family.type}"
        for family in text_string_to_metric_families(text)
        if not (family.name.startswith("process_") or family.name.endswith("_created"))
    }
    assert "process_resident_memory_bytes" in text
    applying, _, others = OBSERVABILITY.read_text().partition("### vLLM's names that don't apply")
    documented = set()
    for line in applying.splitlines():
        if re.match(r"\| `(vllm:|pagetrie:|http_)", line):
            names, kind = line.split("|")[1:3]
            documented |= {f"{name} {kind.strip()}" for name in re.findall(r"`([\w:]+)`", names)}
    assert documented == exposed
    assert not {name for name in re.findall(r"vllm:\w+", others) if re.search(rf"{name}\b", text)}
