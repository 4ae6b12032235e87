"""Metrics of the tiers below the pool, read when scraped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pagetrie.kv import TransferReport

_COUNTERS = (
    ("hit_pages", "Pages handed out, verified."),
    ("hit_bytes", "Bytes of these."),
    ("failed_pages", "Pages that a tier seemed to have and didn't deliver."),
    ("stored_pages", "Pages taken in."),
    ("stored_bytes", "Bytes of these."),
    ("evicted_pages", "Pages given up to stay within the capacity."),
    ("refused_pages", "Pages not taken in: no room, a full disk, a store that fails."),
    ("dropped_pages", "Pages not even queued, because the queue was full."),
    ("get_seconds", "Time spent reading."),
    ("put_seconds", "Time spent writing."),
)
_GAUGES = (
    ("pages", "Pages held."),
    ("used_bytes", "Bytes held, overhead included."),
    ("capacity_bytes", "Most bytes that may be held; 0 where that is not ours to say."),
    ("queued_bytes", "Bytes waiting to be written."),
    ("healthy", "1 while it takes and gives pages."),
)
_LOADS = (
    ("loads", "Loads begun."),
    ("loaded_pages", "Pages that came back into the pool."),
    ("meeting_loads", "Loads of a prompt's last pages while its first ones were computed."),
    ("declined_loads", "Loads not begun, because computing was estimated to be faster."),
    ("late_loads", "Loads given up at their deadline."),
    ("failed_loads", "Loads that ended early because a tier didn't deliver."),
    ("copied_bytes", "Bytes copied out of the pool by the engine's thread."),
)


def tier_metrics(report: TransferReport, labels: Mapping[str, str]) -> Iterable[Metric]:
    """One family per number, labelled with ``labels`` and the tier; then the loads over all tiers."""
    names, values = tuple(labels), tuple(labels.values())
    for field, text in _COUNTERS:
        counter = CounterMetricFamily(f"pagetrie:tier_{field}", text, labels=(*names, "tier"))
        for name, stats in report.tiers.items():
            counter.add_metric((*values, name), getattr(stats, field))
        yield counter
    for field, text in _GAUGES:
        gauge = GaugeMetricFamily(f"pagetrie:tier_{field}", text, labels=(*names, "tier"))
        for name, stats in report.tiers.items():
            gauge.add_metric((*values, name), float(getattr(stats, field)))
        yield gauge
    for field, text in _LOADS:
        family = CounterMetricFamily(f"pagetrie:tier_{field}", text, labels=names)
        family.add_metric(values, getattr(report.transfers, field))
        yield family
