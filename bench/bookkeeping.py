"""What the cache manager costs per request, without a model: ``python -m bench.bookkeeping [--json]``.

Three figures, as medians over many requests: admitting a 2,000-token request of which 1,888 tokens are cached (open,
extend, commit of the prompt, from a list of ids), one decoded token (append, extend, commit; averaged over a run of
tokens, so that page edges are in it) and closing the request.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

from pagetrie.kv import CacheManager, ContiguousCacheManager, KVCache

PAGE_SIZE = 16
VOCABULARY = 49_152
PROMPT, CACHED = 2_000, 1_888
INDEXES = ("radix", "hash")


@dataclass(frozen=True, slots=True)
class Costs:
    """Microseconds."""

    admit: float
    decode: float
    free: float


TARGET = Costs(150, 2, 10)
VLLM = Costs(487, 7.6, 26)
"""vLLM 0.32's KVCacheManager doing the same, Python 3.11, 2 cores AVX2."""


def measure(index: str, *, requests: int = 300, decoded: int = 128, num_pages: int = 4_000, seed: int = 0) -> Costs:
    """Median costs over ``requests`` requests, each with 112 tokens of its own behind the shared 1,888.

    With a pool too small for all of them (``num_pages``), the cost of eviction is in it.
    """
    rng = random.Random(seed)
    manager = CacheManager(num_pages=num_pages, page_size=PAGE_SIZE, index=index)  # type: ignore[arg-type]
    shared = [rng.randrange(VOCABULARY) for _ in range(CACHED)]
    admit, decode, free = [], [], []
    for number in range(-1, requests):
        prompt = shared + [rng.randrange(VOCABULARY) for _ in range(PROMPT - CACHED)]
        output = [rng.randrange(VOCABULARY) for _ in range(decoded)]
        start = perf_counter()
        lease = manager.open(prompt)
        new = PROMPT - lease.computed
        missing = lease.extend(new)
        lease.commit(new)
        admitted = perf_counter()
        for token in output:
            lease.append((token,))
            missing += lease.extend(1)
            lease.commit(1)
        ended = perf_counter()
        lease.close()
        closed = perf_counter()
        manager.take_copies()
        if missing:
            raise RuntimeError(f"{missing} pages were missing; the pool of {num_pages} pages is too small")
        if number < 0:  # the first one computes the shared prefix
            continue
        # A few more than the shared ones: the page where two prompts part is copied.
        if not CACHED <= lease.cached_tokens < CACHED + PAGE_SIZE:
            raise RuntimeError(f"{lease.cached_tokens} tokens were cached instead of {CACHED}")
        admit.append(admitted - start)
        decode.append((ended - admitted) / decoded)
        free.append(closed - ended)
    manager.check()
    return Costs(*(median(times) * 1e6 for times in (admit, decode, free)))


def dialogues(manager: KVCache, *, requests: int = 2_000, seed: int = 0) -> tuple[float, float]:
    """Median microseconds per step and per request of dialogues of 1 to 5 tokens in and out.

    A step is one token's extend, commit and append; a request adds opening, its prompt's pages and closing. Prompts
    are unrelated, so that what is measured is the page table and the index, not sharing.
    """
    rng = random.Random(seed)
    steps, wholes = [], []
    for _ in range(requests):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5))]
        output = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5))]
        start = perf_counter()
        lease = manager.open(prompt)
        lease.extend(len(prompt))
        lease.commit(len(prompt))
        began = perf_counter()
        for token in output:
            lease.append((token,))
            lease.extend(1)
            lease.commit(1)
        ended = perf_counter()
        lease.close()
        wholes.append(perf_counter() - start)
        steps.append((ended - began) / len(output))
    manager.check()
    return median(steps) * 1e6, median(wholes) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.bookkeeping", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--requests", type=int, default=300, help="requests to take the median of (default 300)")
    parser.add_argument("--num-pages", type=int, default=4_000, help="pages in the pool (default 4000)")
    options = parser.parse_args()
    rows = {index: measure(index, requests=options.requests, num_pages=options.num_pages) for index in INDEXES} | {
        "target": TARGET,
        "vLLM 0.32": VLLM,
    }
    pool: dict[str, Any] = {"num_pages": options.num_pages, "page_size": PAGE_SIZE}
    short = {index: dialogues(CacheManager(index=index, **pool)) for index in (*INDEXES, "none")}  # type: ignore[arg-type]
    short["contiguous"] = dialogues(ContiguousCacheManager(max_tokens=512, **pool))
    if options.json:
        report: dict[str, Any] = {name: asdict(costs) for name, costs in rows.items()}
        report["dialogues"] = {name: {"step": step, "request": whole} for name, (step, whole) in short.items()}
        print(json.dumps(report, indent=2))
        return
    print(f"Bookkeeping, microseconds ({PROMPT:,} prompt tokens, {CACHED:,} of them cached, page size {PAGE_SIZE})")
    print(f"{'':<10}{'admit':>9}{'per token':>11}{'free':>9}")
    for name, costs in rows.items():
        print(f"{name:<10}{costs.admit:>9.0f}{costs.decode:>11.2f}{costs.free:>9.1f}")
    print("\nDialogues of 1 to 5 tokens in and out, microseconds")
    print(f"{'':<10}{'per step':>9}{'per request':>13}")
    for name, (step, whole) in short.items():
        print(f"{name:<10}{step:>9.2f}{whole:>13.1f}")


if __name__ == "__main__":
    main()
