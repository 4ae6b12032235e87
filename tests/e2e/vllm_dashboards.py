"""What dashboards made for vLLM ask Prometheus for, old ones and new ones, panel by panel."""

from __future__ import annotations

MODEL = '{model_name="$model_name"}'
ALL = '{job=~"$job", model_name=~"$model_name", instance=~"$instance", engine=~"$engine"}'
RATE = "[$__rate_interval]"


def quantiles(metric: str, *ranks: float) -> list[str]:
    return [f"histogram_quantile({rank}, sum by(le) (rate({metric}_bucket{MODEL}{RATE})))" for rank in ranks]


def mean(metric: str) -> str:
    return f"rate({metric}_sum{MODEL}{RATE}) / rate({metric}_count{MODEL}{RATE})"


FIRST = [
    *quantiles("vllm:e2e_request_latency_seconds", 0.99, 0.95, 0.9, 0.5),
    mean("vllm:e2e_request_latency_seconds"),
    f"rate(vllm:prompt_tokens_total{MODEL}{RATE})",
    f"rate(vllm:generation_tokens_total{MODEL}{RATE})",
    *quantiles("vllm:time_per_output_token_seconds", 0.99, 0.95, 0.9, 0.5),
    mean("vllm:time_per_output_token_seconds"),
    *quantiles("vllm:inter_token_latency_seconds", 0.99, 0.95, 0.9, 0.5),
    mean("vllm:inter_token_latency_seconds"),
    f"vllm:num_requests_running{MODEL}",
    f"vllm:num_requests_swapped{MODEL}",
    f"vllm:num_requests_waiting{MODEL}",
    *quantiles("vllm:time_to_first_token_seconds", 0.99, 0.95, 0.9, 0.5),
    mean("vllm:time_to_first_token_seconds"),
    f"vllm:gpu_cache_usage_perc{MODEL}",
    f"vllm:cpu_cache_usage_perc{MODEL}",
    f"vllm:kv_cache_usage_perc{MODEL}",
    f"sum by(le) (increase(vllm:request_prompt_tokens_bucket{MODEL}{RATE}))",
    f"sum by(le) (increase(vllm:request_generation_tokens_bucket{MODEL}{RATE}))",
    f"sum by(finished_reason) (increase(vllm:request_success_total{MODEL}{RATE}))",
    f"rate(vllm:request_queue_time_seconds_sum{MODEL}{RATE})",
    f"rate(vllm:request_prefill_time_seconds_sum{MODEL}{RATE})",
    f"rate(vllm:request_decode_time_seconds_sum{MODEL}{RATE})",
    f"rate(vllm:request_max_num_generation_tokens_sum{MODEL}{RATE})",
]
"""The one dashboard of the early releases."""

STATISTICS = [
    f"sum by (model_name) (rate(vllm:request_success_total{MODEL}{RATE}))",
    *quantiles("vllm:request_prompt_tokens", 0.5, 0.9, 0.99),
    *quantiles("vllm:request_generation_tokens", 0.5, 0.9, 0.99),
    f"sum(rate(vllm:prompt_tokens_total{MODEL}{RATE})) / sum(rate(vllm:request_success_total{MODEL}{RATE}))",
    f"sum(rate(vllm:generation_tokens_total{MODEL}{RATE})) / sum(rate(vllm:request_success_total{MODEL}{RATE}))",
    f"sum by (le) (rate(vllm:iteration_tokens_total_bucket{MODEL}{RATE}))",
    f"rate(vllm:prefix_cache_hits_total{MODEL}{RATE}) / rate(vllm:prefix_cache_queries_total{MODEL}{RATE})",
    f"rate(vllm:gpu_prefix_cache_hits_total{MODEL}{RATE}) / rate(vllm:gpu_prefix_cache_queries_total{MODEL}{RATE})",
]
"""For requests by size, and performance."""

TODAY = [
    f"count(vllm:num_requests_running{ALL})",
    f'sum(vllm:num_requests_waiting_by_reason{ALL[:-1]}, reason="capacity"}})',
    f'sum(vllm:num_requests_waiting_by_reason{ALL[:-1]}, reason="deferred"}})',
    f"max by (instance, engine) (vllm:kv_cache_usage_perc{ALL})",
    f"vllm:cache_config_info{ALL} * on (instance, engine) group_left () vllm:kv_cache_usage_perc{ALL}",
    f"sum(rate(vllm:prompt_tokens_cached_total{ALL}{RATE})) / (sum(rate(vllm:prompt_tokens_total{ALL}{RATE})) > 0)",
    f"sum(rate(vllm:prompt_tokens_recomputed_total{ALL}{RATE}))",
    f"sum by (source) (rate(vllm:prompt_tokens_by_source_total{ALL}{RATE}))",
    (
        f"sum(rate(vllm:external_prefix_cache_hits_total{ALL}{RATE}))"
        f" / (sum(rate(vllm:external_prefix_cache_queries_total{ALL}{RATE})) > 0)"
    ),
    f"sum(rate(vllm:num_preemptions_total{ALL}{RATE}))",
    f"histogram_quantile(0.95, sum by (le) (rate(vllm:request_time_per_output_token_seconds_bucket{ALL}{RATE})))",
    f"histogram_quantile(0.95, sum by (le) (rate(vllm:request_inference_time_seconds_bucket{ALL}{RATE})))",
    f"histogram_quantile(0.95, sum by (le) (rate(vllm:request_prefill_kv_computed_tokens_bucket{ALL}{RATE})))",
    f"histogram_quantile(0.95, sum by (le) (rate(vllm:request_params_max_tokens_bucket{ALL}{RATE})))",
    f"sum(rate(vllm:request_params_n_sum{ALL}{RATE})) / sum(rate(vllm:request_params_n_count{ALL}{RATE}))",
    (
        f'(sum(rate(http_requests_total{{job=~"$job", instance=~"$instance", status="5xx"}}{RATE})) or vector(0))'
        f' / (sum(rate(http_requests_total{{job=~"$job", instance=~"$instance"}}{RATE})) > 0)'
    ),
    f'histogram_quantile(0.95, sum by (le) (rate(http_request_duration_seconds_bucket{{job=~"$job"}}{RATE})))',
    'count(up{job=~"$job"} == 0) or vector(0)',
]
"""The overview and the KV cache of recent releases; not LoRA, speculation, connectors and sampled blocks."""

QUERIES = [*FIRST, *STATISTICS, *TODAY]
