"""What tiers are worth: time to first token from each, read rates, and what a neighbour notices of a load.

``python -m bench tiers`` needs the bundled model; Valkey (or Redis), llama.cpp and LMCache are measured if they are
installed. It takes about five minutes; ``--only`` runs one part.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import PEERS, PeerError, llama_server
from pagetrie.assembly import Parts, build
from pagetrie.bundled import bundled_model_path
from pagetrie.engine.observer import EngineObserver, TokenReport
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import Request
from pagetrie.kv import CacheManager
from pagetrie.kv.keys import ChainKeys
from pagetrie.kv.tiers.disk import DiskTier
from pagetrie.kv.tiers.folder import CacheFolder
from pagetrie.kv.tiers.interface import PageRef
from pagetrie.kv.tiers.store import Backend, StoreTier
from pagetrie.kv.tokens import pack_tokens
from pagetrie.kv.transfers import Transfers
from pagetrie.settings import Settings

TOKENS = 4_000
REPEATS = 3
NEIGHBOUR_TOKENS = 150
GIB = 1 << 30
SLOW_LINE = 20e6
_UNTIL_RELOAD = 2.2  # what was just loaded isn't loaded again at once, if it was evicted


class Gaps(EngineObserver):
    """Times between a request's tokens."""

    def __init__(self) -> None:
        self.first: dict[str, float] = {}
        self.gaps: list[float] = []

    def on_token(self, report: TokenReport) -> None:
        if report.first:
            self.first[report.request_id] = report.gap
        elif report.request_id == "neighbour":
            self.gaps.append(report.gap)


class Bench:
    """An engine with some tiers, driven on this thread."""

    def __init__(self, threads: int, **options: Any) -> None:
        self.seen = Gaps()
        settings = Settings(threads=threads, **{"num_pages": 1200, "max_model_len": 8192, **options})
        self.parts: Parts = build(settings, make_observer=lambda *_: self.seen)
        self.engine = self.parts.engine
        cache = self.parts.cache
        assert isinstance(cache, CacheManager)
        self.cache = cache
        self._count = 0

    @property
    def transfers(self) -> Transfers:
        transfers = self.cache.transfers
        assert transfers is not None
        return transfers

    def ttft(self, prompt: Sequence[int]) -> float:
        """Seconds to the first token of a prompt, alone."""
        name = f"r{self._count}"
        self._count += 1
        self.engine.add(Request(name, list(prompt), SamplingParams(max_tokens=1, temperature=0.0)))
        while self.engine.has_work:
            self.step()
        return self.seen.first[name]

    def step(self) -> None:
        pause = self.engine.pause()
        if pause:
            time.sleep(min(pause, 2e-4))
        else:
            self.engine.step()

    def evict(self) -> None:
        self.cache.index.evict(self.cache.index.cached_pages)

    def quiet_gap(self) -> float:
        """Median seconds between the neighbour's next tokens."""
        self.seen.gaps.clear()
        while len(self.seen.gaps) < NEIGHBOUR_TOKENS:
            self.step()
        return statistics.median(self.seen.gaps)

    def load_beside(self, name: str, prompts: Sequence[Sequence[int]], least: float) -> tuple[float, float]:
        """Load what these prompts find below the pool. Returns (seconds, median gap of the neighbour's tokens)."""
        transfers = self.transfers
        self.seen.gaps.clear()
        began, loaded = time.perf_counter(), transfers.stats.loaded_pages
        for number, prompt in enumerate(prompts):
            self.engine.add(Request(f"{name}-{number}", prompt, SamplingParams(max_tokens=1)))
        self.step()
        for number in range(len(prompts)):  # only the loads shall be seen, not what follows them
            self.engine.abort(f"{name}-{number}")
        while transfers.loading_pages:
            self.step()
        seconds = time.perf_counter() - began
        count = transfers.stats.loaded_pages - loaded
        assert count * self.parts.page_bytes > least, f"{count} pages were loaded, {transfers.stats}"
        return seconds, statistics.median(self.seen.gaps)

    def close(self) -> None:
        self.engine.close()


def prompt_of(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(count)]


def drop_from_page_cache(folder: Path) -> None:
    """Make the system forget the contents of a folder's files."""
    for path in filter(Path.is_file, folder.iterdir()):
        descriptor = os.open(path, os.O_RDWR)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure_ttft(threads: int, folder: Path, store: str | None) -> Iterator[tuple[str, float, int]]:
    """(source, median seconds, cached tokens) for a prompt of ``TOKENS`` tokens and one more."""
    prompt = prompt_of(random.Random(1), TOKENS + 1)
    kinds: dict[str, dict[str, Any]] = {"ram": {"ram_cache": GIB}, "disk": {"disk_cache": folder / "ttft"}}
    kinds |= {codec: {"ram_cache": GIB, "ram_codec": codec} for codec in ("int8", "k8v4")}
    if store is not None:
        kinds["store"] = {"store": store, "store_secret": "only for this benchmark"}
    for kind, options in kinds.items():
        bench = Bench(threads, **options)
        bench.ttft(prompt_of(random.Random(2), 200))
        cold = bench.ttft(prompt)
        if kind == "ram":
            yield "recomputed", cold, 0
            yield "pool", statistics.median(bench.ttft(prompt) for _ in range(REPEATS)), TOKENS
        bench.transfers.flush(60)
        for warm in (False, True) if kind == "disk" else (True,):
            times = []
            for _ in range(REPEATS):
                bench.evict()
                time.sleep(_UNTIL_RELOAD)
                if not warm:
                    drop_from_page_cache(folder / "ttft")
                before = bench.transfers.stats.loaded_pages
                times.append(bench.ttft(prompt))
                assert bench.transfers.stats.loaded_pages - before == TOKENS // 16, "it was not loaded"
            names = {"ram": "memory", "store": "Valkey, loopback", "int8": "memory, int8", "k8v4": "memory, k8v4"}
            yield names.get(kind, "disk, in the page cache" if warm else "disk"), statistics.median(times), TOKENS
        bench.close()


class Throttled:
    """A store (``Backend``) behind a line of so many bytes per second."""

    def __init__(self, backend: Backend, rate: float) -> None:
        self._backend = backend
        self._rate = rate
        self.exists, self.put, self.close = backend.exists, backend.put, backend.close

    def get(self, names: Sequence[str], limit: int) -> list[bytes | memoryview | None]:
        values = self._backend.get(names, limit)
        time.sleep(sum(len(value) for value in values if value is not None) / self._rate)
        return values


def measure_meeting(threads: int, folder: Path, rate: float) -> Iterator[tuple[str, float, int]]:
    """(how, median seconds, cached tokens) to the first token with a store behind a slow line, alone."""
    bench = Bench(threads, store=f"file://{folder / 'slow'}", store_secret="only for this benchmark")
    prompt, transfers = prompt_of(random.Random(1), TOKENS + 1), bench.transfers
    yield "computed", bench.ttft(prompt), 0
    transfers.flush(60)
    tier = transfers.stack.remote
    assert isinstance(tier, StoreTier)
    tier._backend = Throttled(tier._backend, rate)
    for how, pages in (("loaded", 1 << 30), ("first pages computed, last ones loaded", type(transfers).meeting_pages)):
        transfers.meeting_pages = pages
        times, before = [], transfers.stats.loaded_pages
        for _ in range(REPEATS):
            bench.evict()
            time.sleep(_UNTIL_RELOAD)
            times.append(bench.ttft(prompt))
        loaded = (transfers.stats.loaded_pages - before) // REPEATS
        yield how, statistics.median(times), 16 * loaded
    bench.close()


def synthetic(keys: ChainKeys, namespace: bytes, prompt: Sequence[int], page_size: int = 16) -> list[PageRef]:
    """Names of a prompt's full pages, as the cache gives them."""
    root = parent = keys.root(namespace)
    refs = []
    for start in range(0, len(prompt) - page_size + 1, page_size):
        tokens = pack_tokens(prompt[start : start + page_size])
        key = keys.page(parent, tokens)
        refs.append(PageRef(key, parent, root, tokens))
        parent = key
    return refs


def measure_disk(folder: Path, page_bytes: int, total: int) -> list[tuple[str, float, float]]:
    """(what, bytes/s of the tier, bytes/s of a plain sequential read of the same files), cold and warm."""
    folder = folder / "rate"
    tier = DiskTier(CacheFolder(folder), 4 * total)
    rng = np.random.default_rng(0)
    page = rng.integers(0, 256, page_bytes, np.uint8)
    refs = synthetic(ChainKeys(tier.folder.secret), b"bench", prompt_of(random.Random(3), 16 * (total // page_bytes)))
    for start in range(0, len(refs), 16):
        tier.put([(ref, page) for ref in refs[start : start + 16]])
    rows = []
    for cold in (True, False):
        rates: dict[str, list[float]] = {"tier": [], "plain": []}
        for _ in range(3):
            if cold:
                drop_from_page_cache(folder)
            began = time.perf_counter()
            count = sum(data.nbytes for data in tier.get(refs))
            rates["tier"].append(count / (time.perf_counter() - began))
            assert count == len(refs) * page_bytes
            if cold:
                drop_from_page_cache(folder)
            rates["plain"].append(_plain_read(sorted(folder.glob("segment-*"))))
        name = "from the device" if cold else "from the page cache"
        rows.append((name, statistics.median(rates["tier"]), statistics.median(rates["plain"])))
    tier.close()
    return rows


def _plain_read(paths: Sequence[Path]) -> float:
    buffer, count, began = bytearray(1 << 20), 0, time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while got := file.readinto(buffer):
                count += got
    return count / (time.perf_counter() - began)


def measure_neighbour(threads: int, folder: Path, total: int) -> list[tuple[str, float, float, float, list[float]]]:
    """What a decoding neighbour notices of loads, each round between two quiet spells.

    Returns:
        Per source: seconds for a load, the median gap between the neighbour's tokens beside it and that during it, and
        by how much the gap rose in each round. Medians of ``REPEATS`` rounds.
    """
    rows = []
    kinds: dict[str, dict[str, Any]] = {
        "memory": {"ram_cache": 2 * GIB},
        "disk": {"disk_cache": folder / "neighbour", "disk_cap": 4 * GIB},
    }
    for kind, options in kinds.items():
        bench = Bench(threads, num_pages=4000, **options)
        transfers, size = bench.transfers, bench.parts.page_bytes
        (tier,) = transfers.stack.tiers
        per_prompt = 480 * 16
        prompts = [prompt_of(random.Random(10 + n), per_prompt + 1) for n in range(-(-total // (480 * size)))]
        bench.ttft(prompt_of(random.Random(5), 2000))  # so that the speed of computing is known
        namespace = bench.engine.namespace("")
        page = np.zeros(size, np.uint8)
        for number in range(bench.cache.num_pages):  # what the system gives at first use is no cost of a load
            transfers.stack.memory.write_page(number, page)
        for prompt in prompts:
            for ref in synthetic(transfers._keys, namespace, prompt):
                tier.put([(ref, page)])
        bench.engine.add(
            Request("neighbour", prompt_of(random.Random(4), 100), SamplingParams(max_tokens=7000, ignore_eos=True))
        )
        bench.quiet_gap()
        times, quiet, during = list[float](), [bench.quiet_gap()], list[float]()
        for number in range(REPEATS):
            seconds, gap = bench.load_beside(f"{number}", prompts, 0.9 * total)
            times.append(seconds)
            during.append(gap)
            bench.evict()
            until = time.monotonic() + _UNTIL_RELOAD
            while time.monotonic() < until:
                bench.step()
            quiet.append(bench.quiet_gap())
        beside = [(before + after) / 2 for before, after in itertools.pairwise(quiet)]
        rises = [gap / base - 1 for gap, base in zip(during, beside, strict=True)]
        rows.append((kind, statistics.median(times), statistics.median(beside), statistics.median(during), rises))
        bench.engine.abort("neighbour")
        bench.close()
    return rows


@contextmanager
def valkey(folder: Path) -> Iterator[str | None]:
    """A server of our own, None where none is installed."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        time.sleep(1)
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def measure_llama(program: Path, threads: int, folder: Path) -> list[tuple[str, float]]:
    """llama.cpp: the same prompt computed, and its slot saved to a file and restored from it."""
    folder = folder / "slots"
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    number = str(threads)
    command = [
        *(str(program), "-m", str(bundled_model_path()), "-t", number, "-tb", number, "-np", "1", "-c", "8192"),
        *("--host", "127.0.0.1", "--port", str(port), "--slot-save-path", str(folder), "--no-webui"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def call(path: str, body: dict[str, Any]) -> float:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=300) as answer:
            answer.read()
        return time.perf_counter() - began

    try:
        for _ in range(600):
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            time.sleep(0.1)
        prompt = {"prompt": prompt_of(random.Random(1), TOKENS + 1), "n_predict": 1, "cache_prompt": True, "id_slot": 0}
        cold = call("/completion", prompt)
        call("/slots/0?action=save", {"filename": "slot.bin"})
        times = []
        for _ in range(REPEATS):
            call("/slots/0?action=erase", {})
            times.append(call("/slots/0?action=restore", {"filename": "slot.bin"}) + call("/completion", prompt))
        size = (folder / "slot.bin").stat().st_size
        return [
            ("llama.cpp, recomputed", cold),
            (f"llama.cpp, slot restored ({size / 1e6:.0f} MB)", statistics.median(times)),
        ]
    finally:
        process.kill()
        process.wait()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench tiers", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to put files (default: a temporary folder)")
    parser.add_argument("--bytes", type=float, default=1e9, help="to read for the rates")
    parser.add_argument("--llama-server", type=Path, help="the program (default: that of python -m bench peers)")
    parser.add_argument("--only", action="append", choices=PARTS, help="one part; may be repeated")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for part in options.only or PARTS:
            PARTS[part](options, Path(name))
    return 0


def _show_ttft(options: argparse.Namespace, folder: Path) -> None:
    print(f"Time to first token, {TOKENS:,} tokens cached and one new:", flush=True)
    with valkey(folder) as store:
        for source, seconds, _ in measure_ttft(options.threads, folder, store):
            print(f"  {source:36s} {seconds * 1e3:8.0f} ms", flush=True)


def _show_meeting(options: argparse.Namespace, folder: Path) -> None:
    print(f"The same with a store behind a line of {SLOW_LINE / 1e6:.0f} MB/s:")
    for how, seconds, cached in measure_meeting(options.threads, folder, SLOW_LINE):
        print(f"  {how:40s} {seconds * 1e3:8.0f} ms, {cached:,} tokens loaded", flush=True)


def _show_llama(options: argparse.Namespace, folder: Path) -> None:
    program = options.llama_server
    if program is None:
        with suppress(PeerError):
            program = llama_server(PEERS["llama.cpp"].folder)
    if program is None:
        print("llama.cpp isn't installed (python -m bench peers install llama.cpp)")
        return
    print(f"The same with llama.cpp, {TOKENS:,} tokens:")
    for source, seconds in measure_llama(program, options.threads, folder):
        print(f"  {source:36s} {seconds * 1e3:8.0f} ms", flush=True)


def _show_disk(options: argparse.Namespace, folder: Path) -> None:
    print("Reading pages from disk, verified, against a plain sequential read of the same files:")
    for what, tier, plain in measure_disk(folder, 368_640, int(options.bytes)):
        print(f"  {what:36s} {tier / 1e6:8.0f} MB/s, plain {plain / 1e6:.0f} MB/s: {tier / plain:.0%}")


def _show_neighbour(options: argparse.Namespace, folder: Path) -> None:
    print(f"A neighbour's tokens while {options.bytes / 1e9:.1f} GB are loaded:")
    for source, seconds, beside, during, rises in measure_neighbour(options.threads, folder, int(options.bytes)):
        print(
            f"  from {source:31s} {options.bytes / seconds / 1e6:8.0f} MB/s, gap {beside * 1e3:.1f} ms beside, "
            f"{during * 1e3:.1f} ms during: {statistics.median(rises):+.0%} "
            f"({', '.join(f'{rise:+.0%}' for rise in sorted(rises))})"
        )


def _show_lmcache(options: argparse.Namespace, folder: Path) -> None:
    from bench.tiers_lmcache import show  # which is made of what is above

    show(folder, int(options.bytes))


def _show_codec(_options: argparse.Namespace, _folder: Path) -> None:
    from bench.tiers_codec import show

    show()


PARTS = {
    "ttft": _show_ttft,
    "meeting": _show_meeting,
    "llama": _show_llama,
    "disk": _show_disk,
    "neighbour": _show_neighbour,
    "codec": _show_codec,
    "lmcache": _show_lmcache,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
