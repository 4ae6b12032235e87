"""Eviction policies on traces: ``python -m bench.eviction TRACE [TRACE ...] [--json]``.

Hit rates over the whole trace and over its second half (the first half is what a policy may be tuned on), the share of
the way from LRU to Belady's offline optimum, and the policy's cost per page touched or evicted: CPU time of the whole
index-only replay over both.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time

from pagetrie.kv.eviction import POLICIES
from pagetrie.replay.index_only import IndexReplay
from pagetrie.replay.reference import belady_hits
from pagetrie.replay.trace import Trace, read_trace

CAPACITIES = (1000, 3000, 5000, 10_000, 30_000, 50_000)


@dataclass(frozen=True, slots=True)
class Row:
    """Rates of one policy at one capacity. ``closed``: share of the gap from LRU to the optimum; ``us``: per page."""

    trace: str
    eviction: str
    capacity: int
    whole: float
    second_half: float
    closed: float
    closed_second_half: float
    us: float


def measure(trace: Trace, capacity: int, policies: tuple[str, ...]) -> list[Row]:
    """All policies and the optimum at one capacity."""
    half = len(trace.requests) // 2
    pages = [sum(len(request.pages) for request in trace.requests[start:]) for start in (0, half)]
    found: dict[str, tuple[float, float, float]] = {}
    for name in policies:
        replay, begin = IndexReplay(capacity, trace.page_tokens, name), process_time()
        hits = [replay.serve(request) for request in trace.requests]
        seconds = process_time() - begin
        us = 1e6 * seconds / (pages[0] + replay.index.evicted_pages)
        found[name] = sum(hits) / pages[0], sum(hits[half:]) / pages[1], us
    best = tuple(
        belady_hits(trace, capacity, since=since) / total for since, total in zip((0, half), pages, strict=True)
    )
    found["belady"] = best[0], best[1], 0.0

    def closed(name: str, part: int) -> float:
        gap = best[part] - found["lru"][part]
        return (found[name][part] - found["lru"][part]) / gap if gap > 1e-6 else 0.0

    return [
        Row(trace.name, name, capacity, whole, second, closed(name, 0), closed(name, 1), us)
        for name, (whole, second, us) in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.eviction", description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--eviction", nargs="+", default=list(POLICIES), help="policies besides lru (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    policies = tuple(dict.fromkeys(["lru", *options.eviction]))
    rows = [
        row
        for path in options.traces
        for capacity in CAPACITIES
        for row in measure(read_trace(path), capacity, policies)
    ]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(
        f"{'trace':<28}{'policy':<10}{'pages':>7}{'whole':>8}{'closed':>8}{'2nd half':>10}{'closed':>8}{'us/page':>9}"
    )
    for row in rows:
        print(
            f"{row.trace:<28}{row.eviction:<10}{row.capacity:>7}{row.whole:>8.4f}{row.closed:>8.0%}"
            f"{row.second_half:>10.4f}{row.closed_second_half:>8.0%}{row.us:>9.1f}"
        )


if __name__ == "__main__":
    main()
