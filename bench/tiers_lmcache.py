"""The RAM and disk tiers against LMCache's, on the same bytes, in turns: ``python -m bench tiers --only lmcache``."""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import numpy as np

from bench.peers import PEERS, PeerError, installed_version
from bench.tiers import REPEATS, TOKENS, drop_from_page_cache, prompt_of, synthetic
from pagetrie.bundled import bundled_model_path
from pagetrie.kv.keys import SECRET_BYTES, ChainKeys
from pagetrie.kv.tiers.disk import DiskTier
from pagetrie.kv.tiers.folder import CacheFolder
from pagetrie.kv.tiers.interface import Bytes, PageRef, Tier
from pagetrie.kv.tiers.load import Load
from pagetrie.kv.tiers.ram import ENTRY_BYTES, RamTier
from pagetrie.kv.tiers.stack import TierStack
from pagetrie.models.config import ModelConfig
from pagetrie.models.gguf_checkpoint import GgufCheckpoint
from pagetrie.runner.storage import PageStorage

PAGE_TOKENS = 16
CHUNKS = (256, PAGE_TOKENS)
"""Tokens that LMCache stores as one: its default, and as many as a page holds."""


@dataclass(frozen=True, slots=True)
class Row:
    """Median seconds to get a prompt's keys and values (``size`` bytes) back into memory."""

    source: str
    tokens: int
    size: int
    lmcache: float
    pagetrie: float


class Tiers:
    """A tier that holds prompts of some lengths, each the first of the source's pages, and a pool to load them into."""

    def __init__(self, tier: Tier, storage: PageStorage, source: Bytes, lengths: Sequence[int]) -> None:
        self._keys = ChainKeys(bytes(SECRET_BYTES))
        self._tier = tier
        self._storage = storage
        self._source = source
        self._stack = TierStack([tier], storage)
        for length in lengths:
            for ref, page in zip(self._refs(length), source, strict=False):
                assert tier.put([(ref, page)]) == 1

    def _refs(self, length: int) -> list[PageRef]:
        return synthetic(self._keys, b"bench", prompt_of(random.Random(length), length), PAGE_TOKENS)

    def load(self, length: int) -> float:
        """Seconds to name a prompt's pages and to load them, on the thread that loads."""
        count = length // PAGE_TOKENS
        self._storage.data[:count] = 0
        finished = Event()
        began = time.perf_counter()
        load = Load(self._refs(length), [self._tier] * count, list(range(count)))
        self._stack.start(load, lambda: finished.set() if load.finished else None)
        finished.wait()
        seconds = time.perf_counter() - began
        assert load.ready == count, f"{load.ready} of {count} pages were loaded"
        assert all(np.array_equal(self._storage.read_page(n), self._source[n]) for n in range(count)), "other bytes"
        return seconds

    def close(self) -> None:
        self._stack.close(10)


@contextmanager
def lmcache(arguments: Sequence[str], log: Path) -> Iterator[Callable[[int], float]]:
    """An engine that has stored the prompts; what is yielded retrieves one and returns the seconds that it took.

    Raises:
        PeerError: it fails, or gives back too little or other bytes.
    """
    command = [str(PEERS["lmcache"].python), str(Path(__file__).with_name("lmcache_adapter.py")), *arguments]
    environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
    with log.open("ab") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
    assert process.stdin is not None and process.stdout is not None

    def answer() -> dict[str, object]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise PeerError(f"LMCache ended with {process.wait()}: {log.read_text(errors='replace')[-500:].strip()}")
        found: dict[str, object] = json.loads(line)
        return found

    def retrieve(length: int) -> float:
        assert process.stdin is not None
        process.stdin.write(f"{length}\n")
        process.stdin.flush()
        found = answer()
        if found["tokens"] != length or found["same"] is not True:
            raise PeerError(f"LMCache gave {found['tokens']} of {length} tokens back, same bytes: {found['same']}")
        return float(str(found["seconds"]))

    try:
        answer()  # it has stored all
        yield retrieve
        process.stdin.close()
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def measure(folder: Path, total: int) -> Iterator[Row]:
    """LMCache's backends and our tiers in turns, each verified byte for byte after the clock has stopped."""
    config = GgufCheckpoint(bundled_model_path(), folder).config
    pages = max(TOKENS, total // config.kv_bytes_per_token(2)) // PAGE_TOKENS
    storage = PageStorage(pages, PAGE_TOKENS, config)
    lengths = [TOKENS, storage.num_pages * PAGE_TOKENS]
    (folder / "source").write_bytes(np.random.default_rng(0).bytes(storage.num_pages * storage.bytes_per_page))
    source = np.memmap(folder / "source", np.uint8, "r", shape=(storage.num_pages, storage.bytes_per_page))
    size = sum(lengths) // PAGE_TOKENS * (storage.bytes_per_page + ENTRY_BYTES)
    arguments = _arguments(folder, config, lengths)

    tiers = Tiers(RamTier(size, storage.bytes_per_page), storage, source, lengths)
    for chunk in CHUNKS:
        with lmcache([*arguments, "--backend", "cpu", "--chunk", str(chunk)], folder / "lmcache.log") as retrieve:
            for length in lengths:
                yield _in_turns(f"memory, chunks of {chunk}", length, storage, retrieve, tiers)
    tiers.close()

    ours = folder / "pagetrie"
    tiers = Tiers(DiskTier(CacheFolder(ours), 4 * size), storage, source, lengths)
    for chunk, direct in (*((chunk, False) for chunk in CHUNKS), (CHUNKS[0], True)):
        theirs = folder / f"lmcache-{chunk}-{direct}"
        theirs.mkdir()
        more = ["--backend", "disk", "--chunk", str(chunk), "--folder", str(theirs), *["--odirect"] * direct]
        with lmcache([*arguments, *more], folder / "lmcache.log") as retrieve:
            for cold in (True,) if direct else (True, False):
                what = "disk, O_DIRECT" if direct else "disk" if cold else "page cache"
                drop = [theirs, ours] * cold
                for length in lengths:
                    yield _in_turns(f"{what}, chunks of {chunk}", length, storage, retrieve, tiers, drop)
        shutil.rmtree(theirs)
    tiers.close()


def _arguments(folder: Path, config: ModelConfig, lengths: Sequence[int]) -> list[str]:
    shape = (config.n_layers, config.n_kv_heads, config.head_dim)
    return ["--source", str(folder / "source"), "--shape", *map(str, shape), "--tokens", *map(str, lengths)]


def _in_turns(
    source: str,
    length: int,
    storage: PageStorage,
    retrieve: Callable[[int], float],
    tiers: Tiers,
    drop: Sequence[Path] = (),
) -> Row:
    theirs, ours = [], []
    for _ in range(REPEATS):
        for folder in drop:
            drop_from_page_cache(folder)
        theirs.append(retrieve(length))
        ours.append(tiers.load(length))
    size = length // PAGE_TOKENS * storage.bytes_per_page
    return Row(source, length, size, statistics.median(theirs), statistics.median(ours))


def show(folder: Path, total: int) -> None:
    """Print the table, or why there is none."""
    try:
        print(
            f"Into the pool's pages, LMCache {installed_version(PEERS['lmcache'])} and pagetrie in turns:", flush=True
        )
        for row in measure(folder, total):
            print(
                f"  {row.source:32s} {row.tokens:6,} tokens, {row.size / 1e6:5.0f} MB:"
                f"  LMCache {row.lmcache * 1e3:6.0f} ms, {row.size / row.lmcache / 1e6:5.0f} MB/s"
                f"  pagetrie {row.pagetrie * 1e3:6.0f} ms, {row.size / row.pagetrie / 1e6:5.0f} MB/s",
                flush=True,
            )
    except PeerError as error:
        print(f"LMCache: {error}")
