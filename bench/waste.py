"""How much held memory is unused, paged against contiguous: ``python -m bench.waste [--json]``.

64 requests whose lengths follow a long-tailed (log-normal) distribution run through the real scheduler and the real
cache managers, with a runner that computes nothing, since pages depend on lengths alone. Waste is unused slots over
held slots, both summed over all steps. Sharing is off, so that it can't flatter the paged figure.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, dataclass
from itertools import count
from statistics import mean

from pagetrie.cli.demo import BookkeepingRunner
from pagetrie.engine.config import EngineConfig
from pagetrie.engine.engine import Engine
from pagetrie.engine.observer import EngineObserver, StepReport
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import Request
from pagetrie.kv import CacheManager, ContiguousCacheManager, KVCache
from pagetrie.kv.holding import Holding
from pagetrie.kv.metering import MeteredCache

REQUESTS = 64
PAGE_SIZE = 16
CONTEXT = 8_192
"""The bundled model's context, which the baseline has to reserve."""
POOL_TOKENS = 131_072
PROMPT_MEDIAN, OUTPUT_MEDIAN, SPREAD = 260, 120, 0.9


class _Plain:
    """A vocabulary of which no token ends anything."""

    vocab_size = 49_152
    eos_ids: frozenset[int] = frozenset()
    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return b"."


class _Meter(EngineObserver):
    def __init__(self, cache: KVCache) -> None:
        self.cache = MeteredCache(cache)
        self.holdings: list[Holding] = []

    def on_step(self, report: StepReport) -> None:
        self.holdings.append(self.cache.measure())


@dataclass(frozen=True, slots=True)
class Waste:
    """One run. ``unused`` is a share of the held slots; ``peak_running`` is how many requests ran at once."""

    unused: float
    peak_running: int
    peak_pages: int
    steps: int


def lengths(seed: int = 0) -> list[tuple[int, int]]:
    """(prompt, output) tokens of each request."""
    rng = random.Random(seed)

    def draw(median: int) -> int:
        return max(1, min(3_000, round(median * rng.lognormvariate(0, SPREAD))))

    return [(draw(PROMPT_MEDIAN), draw(OUTPUT_MEDIAN)) for _ in range(REQUESTS)]


def run(cache: KVCache, requests: list[tuple[int, int]]) -> Waste:
    """Run the requests to their end and measure after every step."""
    meter = _Meter(cache)
    ticks = count()
    engine = Engine(
        runner=BookkeepingRunner(),
        cache=meter.cache,
        vocabulary=_Plain(),
        config=EngineConfig(max_model_len=CONTEXT, max_num_seqs=REQUESTS, max_num_batched_tokens=512),
        clock=lambda: float(next(ticks)),
        rng=random.Random(0),
        observer=meter,
    )
    rng = random.Random(1)
    for number, (prompt, output) in enumerate(requests):
        ids = [rng.randrange(_Plain.vocab_size) for _ in range(prompt)]
        engine.add(Request(str(number), ids, SamplingParams(max_tokens=output, temperature=0)))
    while engine.has_work:
        engine.step()
    held = [holding for holding in meter.holdings if holding.slots]
    return Waste(
        unused=1 - sum(holding.used for holding in held) / sum(holding.slots for holding in held),
        peak_running=max(holding.leases for holding in held),
        peak_pages=max(holding.pages for holding in held),
        steps=len(meter.holdings),
    )


def measure(seed: int = 0) -> dict[str, Waste]:
    """Both layouts over the same pool and the same requests."""
    requests, pages = lengths(seed), POOL_TOKENS // PAGE_SIZE
    return {
        "paged": run(CacheManager(num_pages=pages, page_size=PAGE_SIZE, index="none"), requests),
        "contiguous": run(ContiguousCacheManager(num_pages=pages, page_size=PAGE_SIZE, max_tokens=CONTEXT), requests),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.waste", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    results = measure()
    if options.json:
        print(json.dumps({name: asdict(waste) for name, waste in results.items()}, indent=2))
        return
    total = mean(prompt + output for prompt, output in lengths())
    print(
        f"Waste, {REQUESTS} requests of {total:.0f} tokens on average, page size {PAGE_SIZE}, "
        f"pool of {POOL_TOKENS:,} tokens, context {CONTEXT:,}"
    )
    print(f"{'':<12}{'unused slots':>14}{'running, peak':>15}{'pages, peak':>13}{'steps':>8}")
    for name, waste in results.items():
        print(f"{name:<12}{waste.unused:>13.2%}{waste.peak_running:>15}{waste.peak_pages:>13,}{waste.steps:>8,}")


if __name__ == "__main__":
    main()
