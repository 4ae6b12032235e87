"""``pagetrie replay``: what a trace would have hit, and how long its requests would have taken."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from pagetrie.cli.charts import Chart, console, plot, table
from pagetrie.errors import ConfigError
from pagetrie.kv.eviction import POLICIES
from pagetrie.kv.tiers.disk import DiskTier
from pagetrie.kv.tiers.interface import Speed
from pagetrie.kv.tiers.ram import RamTier
from pagetrie.replay.engine import CostModel, Outcome, ReplicaOptions, percentiles, replay_engine
from pagetrie.replay.index_only import replay_index
from pagetrie.replay.reference import belady_hits
from pagetrie.replay.routing import ROUTINGS, Routing
from pagetrie.replay.trace import Trace
from pagetrie.settings import parse_size
from pagetrie.sim import SimTierOptions

BELADY = "belady"


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a good request meets, in seconds."""

    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas alike, each with a pool of ``capacity`` pages of the trace's size, and tiers below it.

    A token's keys and values take ``token_bytes`` bytes in tiers.
    """

    capacities: Sequence[int]
    policies: Sequence[str]
    index: str
    replicas: int
    routing: Routing
    tiers: tuple[SimTierOptions, ...] = ()
    token_bytes: int = 0

    @property
    def places(self) -> list[str]:
        """Where a hit may be found."""
        return ["pool", *(tier.name for tier in self.tiers)]


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


def read_tiers(
    ram: str | None, disk: str | None, ram_bandwidth: str, disk_bandwidth: str, ram_share: float = 1.0
) -> tuple[SimTierOptions, ...]:
    """Tiers from sizes and bytes per second, such as "64GiB" and "20GB".

    Args:
        ram, disk: capacities; None for none.
        ram_bandwidth, disk_bandwidth: of pages as the pool has them.
        ram_share: of the bytes of a page in the pool, what one takes in memory.

    Raises:
        ConfigError: not a size, or nothing.
    """

    def size(flag: str, text: str) -> int:
        try:
            value = int(str(parse_size(text)))
        except ValueError as error:
            raise ConfigError(f"{flag}: {error}") from error
        if value < 1:
            raise ConfigError(f"{flag} must be at least 1 byte, got {text!r}")
        return value

    tiers = []
    if ram is not None:
        speed = Speed(RamTier.traits.speed.latency, size("--ram-bandwidth", ram_bandwidth))
        tiers.append(SimTierOptions(RamTier.name, size("--ram-cache", ram), speed, ram_share))
    if disk is not None:
        speed = Speed(DiskTier.traits.speed.latency, size("--disk-bandwidth", disk_bandwidth))
        tiers.append(SimTierOptions(DiskTier.name, size("--disk-cap", disk), speed))
    return tuple(tiers)


def replay_hits(trace: Trace, fleet: Fleet, *, as_json: bool, file: Path | None) -> None:
    """Index-only replay: hit rates by policy and capacity; drawn into ``file`` if one is given.

    Raises:
        ConfigError: a tier holds no page of the trace, or the file can't be written.
    """
    pages = trace.pages
    page_bytes = trace.page_tokens * fleet.token_bytes
    tiers = {tier.name: tier.pages(page_bytes) for tier in fleet.tiers}
    rows: list[dict[str, Any]] = []
    for name in fleet.policies:
        for capacity in fleet.capacities:
            begin = time.process_time()
            below: Counter[str] = Counter()
            if name == BELADY:  # of the pool alone
                hits = belady_hits(trace, capacity * fleet.replicas)
            else:
                (count,) = replay_index(
                    trace,
                    capacity,
                    name,
                    index=fleet.index,
                    replicas=fleet.replicas,
                    routing=fleet.routing,
                    tiers=tiers,
                )
                hits, below = count.hits, count.below
            seconds = time.process_time() - begin
            rows.append(
                {
                    "eviction": name,
                    "capacity": capacity,
                    "hit_pages": hits,
                    "hit_rate": hits / pages if pages else 0.0,
                    "hit_rates": {
                        place: (below[place] if place != "pool" else hits - below.total()) / pages if pages else 0.0
                        for place in fleet.places
                    },
                    "pages_per_second": round(pages / seconds) if seconds else None,
                }
            )
    if as_json:
        head = {"trace": trace.name, "requests": len(trace.requests), "pages": pages, "page_tokens": trace.page_tokens}
        print(json.dumps({**head, "replicas": fleet.replicas, "routing": fleet.routing, "results": rows}, indent=2))
        plot(console(stderr=True), _charts(rows, fleet, [("hit rate", "hit_rate", ".4f")]), file)
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
    _show_places(out, rows, fleet)
    plot(out, _charts(rows, fleet, [("hit rate", "hit_rate", ".4f")]), file)


def replay_times(
    trace: Trace,
    fleet: Fleet,
    options: ReplicaOptions,
    cost: CostModel,
    slo: Slo,
    *,
    as_json: bool,
    file: Path | None,
) -> None:
    """Full replay: hit rates, times, goodput, preemptions and waste; drawn into ``file`` if one is given.

    Raises:
        ConfigError: the options don't fit each other, or the file can't be written.
    """
    rows = []
    drawn = [
        ("hit rate", "hit_rate", ".4f"),
        ("goodput, requests/s", "goodput", ".2f"),
        ("median TTFT, s", "median_ttft", ".3f"),
    ]
    for name in fleet.policies:
        for capacity in fleet.capacities:
            pool = capacity * trace.page_tokens // options.page_size
            made = replace(
                options,
                num_pages=pool,
                eviction=name,
                index=fleet.index,
                tiers=fleet.tiers,
                bytes_per_token=fleet.token_bytes,
            )
            with _Progress(f"{name}, {capacity:,} pages", len(trace.requests), quiet=as_json) as progress:
                outcome = replay_engine(
                    trace, made, cost, replicas=fleet.replicas, routing=fleet.routing, on_progress=progress.show
                )
            rows.append({"eviction": name, "capacity": capacity, **_figures(outcome, slo, fleet)})
    if as_json:
        head = {"trace": trace.name, "page_tokens": trace.page_tokens, "slo": asdict(slo)}
        print(json.dumps({**head, "replicas": fleet.replicas, "routing": fleet.routing, "results": rows}, indent=2))
        plot(console(stderr=True), _charts(rows, fleet, drawn), file)
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
    _show_places(out, rows, fleet)
    plot(out, _charts(rows, fleet, drawn), file)


def _show_places(out: Console, rows: Sequence[dict[str, Any]], fleet: Fleet) -> None:
    """Where the prompts were found, if there are tiers."""
    if not fleet.tiers:
        return
    table(
        out,
        "of the prompts: found in each tier, and computed",
        ["eviction", "pages", *fleet.places, "computed"],
        [
            [
                row["eviction"],
                f"{row['capacity']:,}",
                *(f"{row['hit_rates'][place]:.4f}" for place in fleet.places),
                f"{1 - row['hit_rate']:.4f}",
            ]
            for row in rows
        ],
    )


def _charts(rows: Sequence[dict[str, Any]], fleet: Fleet, drawn: Sequence[tuple[str, str, str]]) -> list[Chart]:
    """One chart per (title, figure, form) over capacities and policies; with tiers, one of where hits were found."""
    groups = [f"{capacity:,} pages" for capacity in fleet.capacities]

    def value(row: dict[str, Any], figure: str) -> float:
        return float(row["ttft"][0] if figure == "median_ttft" else row[figure])

    charts = [
        Chart(
            title,
            groups,
            {name: [value(row, figure) for row in rows if row["eviction"] == name] for name in fleet.policies},
            form,
        )
        for title, figure, form in drawn
    ]
    if fleet.tiers:
        found = {place: [row["hit_rates"][place] for row in rows] for place in fleet.places}
        labels = [f"{row['eviction']} {row['capacity']:,}" for row in rows]
        found["computed"] = [1 - row["hit_rate"] for row in rows]
        charts.append(Chart("where the prompts were found", labels, found, ".4f"))
    return charts


def _figures(outcome: Outcome, slo: Slo, fleet: Fleet) -> dict[str, Any]:
    output, rates = sum(one.tokens for one in outcome.served), outcome.hit_rates()
    return {
        "requests": len(outcome.served),
        "refused": outcome.refused,
        "hit_rate": outcome.hit_rate,
        "hit_rates": {place: rates.get(place, 0.0) for place in fleet.places},
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
