"""How fast the memory tier takes and gives pages with each codec, against copying the same bytes.

``python -m bench tiers --only codec``: pages of the bundled model's size with normally distributed values, by the one
thread that asks for them; rates are of the pages' bytes in the pool.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch

from pagetrie.bundled import bundled_model_path
from pagetrie.kv.keys import SECRET_BYTES, ChainKeys
from pagetrie.kv.tiers.codec import CodecName
from pagetrie.kv.tiers.interface import PageRef
from pagetrie.kv.tiers.ram import ENTRY_BYTES, RamTier
from pagetrie.kv.tokens import pack_tokens
from pagetrie.models.loading import load_checkpoint
from pagetrie.runner.page_codec import make_page_codec
from pagetrie.runner.storage import PageStorage

PAGES = 256
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second in and out, and bytes of a page in the tier."""

    put: float
    get: float
    page_bytes: int


def measure_codecs() -> tuple[float, dict[CodecName, Rates]]:
    """The rate of plain copies of pages, and each codec's; medians of rounds in which they take turns."""
    storage = PageStorage(2 * PAGES, 16, load_checkpoint(bundled_model_path()).config)
    torch.manual_seed(0)
    for page in range(2 * PAGES):  # the second half is written, too, so that its memory is there
        storage.data[page] = torch.randn(storage.data.shape[1:]).half()
    keys = ChainKeys(bytes(SECRET_BYTES))
    namespace = keys.root(b"codec")
    refs = []
    for page in range(PAGES):
        tokens = pack_tokens([page])
        refs.append(PageRef(keys.page(namespace, tokens), namespace, namespace, tokens))

    def copy() -> None:
        storage.copy_pages((page, PAGES + page) for page in range(PAGES))

    def put(tier: RamTier) -> None:
        for page, ref in enumerate(refs):
            tier.put([(ref, storage.read_page(page))])

    def get(tier: RamTier) -> None:
        for page, data in enumerate(tier.get(refs)):
            storage.write_page(PAGES + page, data)

    copies: list[float] = []
    seconds: dict[CodecName, list[tuple[float, float]]] = {name: [] for name in get_args(CodecName)}
    codecs = {name: make_page_codec(name, storage) for name in seconds}
    capacity = PAGES * (storage.bytes_per_page + ENTRY_BYTES)
    tiers = {name: RamTier(capacity, storage.bytes_per_page, codec=codec) for name, codec in codecs.items()}
    for _ in range(ROUNDS + 1):
        copies.append(_seconds(copy))
        for name, tier in tiers.items():
            tier.clear()
            seconds[name].append((_seconds(lambda tier=tier: put(tier)), _seconds(lambda tier=tier: get(tier))))
            assert tier.stats.pages == PAGES and not tier.stats.failed_pages
    total = PAGES * storage.bytes_per_page
    found: dict[CodecName, Rates] = {}
    for name, times in seconds.items():
        puts, gets = zip(*times[1:], strict=True)  # the first round takes the memory
        codec = codecs[name]
        size = storage.bytes_per_page if codec is None else codec.encoded_bytes
        found[name] = Rates(total / statistics.median(puts), total / statistics.median(gets), size)
    return total / statistics.median(copies[1:]), found


def show() -> None:
    copied, found = measure_codecs()
    print(f"Pages of 16 tokens into memory and back, one thread (a plain copy: {copied / 1e6:,.0f} MB/s):")
    for name, rates in found.items():
        times = found["none"].page_bytes / rates.page_bytes
        print(
            f"  {name:5s} {rates.page_bytes:8,d} bytes a page ({times:.2f} times as many), "
            f"in {rates.put / 1e6:6,.0f} MB/s, out {rates.get / 1e6:6,.0f} MB/s"
        )


def _seconds(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
