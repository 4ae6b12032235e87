"""``pagetrie replay``: what a trace would have hit, and how long its requests would have taken."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pagetrie.cli.charts import bars, console, table
from pagetrie.errors import ConfigError
from pagetrie.kv.eviction import POLICIES
from pagetrie.replay.engine import CostModel, Outcome, ReplicaOptions, percentiles, replay_engine
from pagetrie.replay.index_only import replay_index
from pagetrie.replay.reference import belady_hits
from pagetrie.replay.routing import ROUTINGS, Routing
from pagetrie.replay.trace import Trace

BELADY = "belady"


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a good request meets, in seconds."""

    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas alike, each with a pool of ``capacity`` pages of the trace's size."""

    capacities: Sequence[int]
    policies: Sequence[str]
    index: str
    replicas: int
    routing: Routing


def check_policies(names: Sequence[str], *, bound: bool) -> list[str]:
    """Names of policies, ``all`` for all of them; with ``bound`` also Belady's optimum.

    Raises:
        ConfigError: there is no such policy.
    """
    known = [*POLICIES, *([BELADY] if bound else [])]
    chosen = known if "all" in names else list(dict.fromkeys(names))
    for name in chosen:
        if name not in known:
            raise ConfigError(f"no eviction policy {name!r}; there are {', '.join(known)}, or all")
    return chosen


def check_routing(name: str) -> Routing:
    """Raises ConfigError if there is no such routing."""
    for routing in ROUTINGS:
        if routing == name:
            return routing
    raise ConfigError(f"no routing {name!r}; there are {', '.join(ROUTINGS)}")


def replay_hits(trace: Trace, fleet: Fleet, *, as_json: bool, plot: bool) -> None:
    """Index-only replay: hit rates by policy and capacity."""
    pages = trace.pages
    rows: list[dict[str, Any]] = []
    for name in fleet.policies:
        for capacity in fleet.capacities:
            begin = time.process_time()
            if name == BELADY:
                hits = belady_hits(trace, capacity * fleet.replicas)
            else:
                (count,) = replay_index(
                    trace, capacity, name, index=fleet.index, replicas=fleet.replicas, routing=fleet.routing
                )
                hits = count.hits
            seconds = time.process_time() - begin
            rows.append(
                {
                    "eviction": name,
                    "capacity": capacity,
                    "hit_pages": hits,
                    "hit_rate": hits / pages if pages else 0.0,
                    "pages_per_second": round(pages / seconds) if seconds else None,
                }
            )
    if as_json:
        head = {"trace": trace.name, "requests": len(trace.requests), "pages": pages, "page_tokens": trace.page_tokens}
        print(json.dumps({**head, "replicas": fleet.replicas, "routing": fleet.routing, "results": rows}, indent=2))
        return
    out = console()
    title = f"{trace.name}: {len(trace.requests):,} requests, {pages:,} pages of {trace.page_tokens} tokens; hit rates"
    by_policy = {name: [row for row in rows if row["eviction"] == name] for name in fleet.policies}
    table(
        out,
        title + (f", {fleet.replicas} replicas, {fleet.routing}" if fleet.replicas > 1 else ""),
        ["eviction", *(f"{capacity:,} pages" for capacity in fleet.capacities), "pages/s"],
        [
            [
                name,
                *(f"{row['hit_rate']:.4f}" for row in chosen),
                f"{_harmonic([row['pages_per_second'] for row in chosen]):,.0f}",
            ]
            for name, chosen in by_policy.items()
        ],
    )
    if plot:
        for capacity in fleet.capacities:
            chosen = [row for row in rows if row["capacity"] == capacity]
            bars(
                out,
                f"hit rate, {capacity:,} pages",
                [(row["eviction"], row["hit_rate"]) for row in chosen],
                [f"{row['hit_rate']:.4f}" for row in chosen],
            )


def replay_times(
    trace: Trace,
    fleet: Fleet,
    options: ReplicaOptions,
    cost: CostModel,
    slo: Slo,
    *,
    as_json: bool,
    plot: bool,
) -> None:
    """Full replay: hit rates, times, goodput, preemptions and waste by policy and capacity."""
    rows = []
    for name in fleet.policies:
        for capacity in fleet.capacities:
            pool = capacity * trace.page_tokens // options.page_size
            made = ReplicaOptions(**{**asdict(options), "num_pages": pool, "eviction": name, "index": fleet.index})
            with _Progress(f"{name}, {capacity:,} pages", len(trace.requests), quiet=as_json) as progress:
                outcome = replay_engine(
                    trace, made, cost, replicas=fleet.replicas, routing=fleet.routing, on_progress=progress.show
                )
            rows.append({"eviction": name, "capacity": capacity, **_figures(outcome, slo)})
    if as_json:
        head = {"trace": trace.name, "page_tokens": trace.page_tokens, "slo": asdict(slo)}
        print(json.dumps({**head, "replicas": fleet.replicas, "routing": fleet.routing, "results": rows}, indent=2))
        return
    out = console()
    columns = [
        "eviction", "pages", "hit rate", "TTFT p50", "p90", "p99", "TPOT p50", "p90", "p99",
        "goodput", "tok/s", "preempted", "waste",
    ]  # fmt: skip
    table(
        out,
        f"{trace.name}: {rows[0]['requests']:,} requests served, {rows[0]['refused']:,} too long; {fleet.replicas} "
        f"replicas; SLO: TTFT {slo.ttft:g} s, TPOT {slo.tpot * 1e3:g} ms",
        columns,
        [
            [
                row["eviction"],
                f"{row['capacity']:,}",
                f"{row['hit_rate']:.4f}",
                *(f"{value:.2f} s" for value in row["ttft"]),
                *(f"{value * 1e3:.1f} ms" for value in row["tpot"]),
                f"{row['goodput']:.2f}/s",
                f"{row['output_tokens_per_second']:,.0f}",
                f"{row['preemptions']:,}",
                f"{row['waste']:.1%}",
            ]
            for row in rows
        ],
    )
    if plot:
        labels = [f"{row['eviction']} {row['capacity']:,}" for row in rows]
        for key, title, form in (("hit_rate", "hit rate", ".4f"), ("goodput", "goodput, requests/s", ".2f")):
            values = [row[key] for row in rows]
            bars(out, title, list(zip(labels, values, strict=True)), [format(value, form) for value in values])


def _figures(outcome: Outcome, slo: Slo) -> dict[str, Any]:
    output = sum(one.tokens for one in outcome.served)
    return {
        "requests": len(outcome.served),
        "refused": outcome.refused,
        "hit_rate": outcome.hit_rate,
        "seconds": outcome.seconds,
        "ttft": percentiles([one.first for one in outcome.served]),
        "tpot": percentiles([one.tpot for one in outcome.served if one.tokens > 1]),
        "goodput": outcome.goodput(slo.ttft, slo.tpot),
        "output_tokens_per_second": output / outcome.seconds if outcome.seconds else 0.0,
        "computed_tokens": outcome.computed_tokens,
        "evicted_pages": outcome.evicted_pages,
        "preemptions": outcome.preemptions,
        "steps": outcome.steps,
        "waste": outcome.waste,
    }


def _harmonic(rates: Sequence[float | None]) -> float:
    known = [rate for rate in rates if rate]
    return len(known) / math.fsum(1 / rate for rate in known) if known else math.nan


class _Progress:
    """Says how far a replay is, on stderr, if that is a terminal."""

    def __init__(self, label: str, total: int, *, quiet: bool) -> None:
        self._label, self._total = label, total
        self._on = sys.stderr.isatty() and not quiet

    def __enter__(self) -> _Progress:
        return self

    def show(self, done: int) -> None:
        if self._on and done % 100 == 0:
            print(f"\r{self._label}: {done:,} of {self._total:,} requests", end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._on:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
