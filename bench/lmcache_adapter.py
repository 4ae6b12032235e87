"""LMCache's cache engine over keys and values in a CPU's memory, so that the benchmark can time what it gives back.

Runs in the peer's own environment: torch, LMCache, and nothing of this project. It stores what a file holds, then
answers each line on standard input, a number of tokens, with one of JSON: how long it took to get them back into
memory, and whether their bytes are those of the file.

``python lmcache_adapter.py --source FILE --shape 30 3 64 --tokens 4000 43392 --backend disk --folder DIR --chunk 256``
"""

from __future__ import annotations

import argparse
import json
import mmap
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.cache_engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

INSTANCE = "bench"
STORE_SECONDS = 120


class MemoryConnector(GPUConnectorInterface):
    """Copies chunks from and to memory in which tokens, whatever is stored or retrieved, lie in their order.

    A chunk's bytes are taken as they are, nothing is transposed: one copy per chunk, the least that a connector can do.

    Args:
        memory: uint8 [tokens * bytes of a token].
        shape: layers, KV heads, dimension of a head.
    """

    def __init__(self, memory: torch.Tensor, shape: tuple[int, int, int]) -> None:
        self._memory = memory
        self._shape = shape
        self._token_bytes = token_bytes(shape)

    def _both(self, chunk: Any, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        part = self._memory[start * self._token_bytes : end * self._token_bytes]
        return chunk.raw_tensor[: len(part)], part

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        chunk, part = self._both(memory_obj, start, end)
        chunk.copy_(part)

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        chunk, part = self._both(memory_obj, start, end)
        part.copy_(chunk)

    def batched_from_gpu(self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any) -> None:
        for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(chunk, start, end)

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any) -> None:
        for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(chunk, start, end)

    def get_shape(self, num_tokens: int) -> torch.Size:
        layers, heads, head_dim = self._shape
        return torch.Size([2, layers, num_tokens, heads * head_dim])


def token_bytes(shape: tuple[int, int, int]) -> int:
    """Bytes of a token's keys and values in fp16."""
    layers, heads, head_dim = shape
    return layers * 2 * heads * head_dim * 2


def make_engine(options: argparse.Namespace, connector: MemoryConnector) -> LMCacheEngine:
    """An engine with one backend: of two, only the first would be read."""
    settings: dict[str, Any] = {
        "chunk_size": options.chunk,
        "local_cpu": options.backend == "cpu",
        "max_local_cpu_size": options.gib,  # of the memory that chunks from disk are read into, too
        "save_unfull_chunk": True,
    }
    if options.backend == "disk":
        settings |= {
            "local_disk": str(options.folder),
            "max_local_disk_size": options.gib,
            "extra_config": {"use_odirect": options.odirect},
        }
    layers, heads, head_dim = options.shape
    metadata = LMCacheMetadata(
        model_name="bench",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.float16,
        kv_shape=(layers, 2, options.chunk, heads, head_dim),
        chunk_size=options.chunk,
    )
    config = LMCacheEngineConfig.from_dict(settings)
    engine = LMCacheEngineBuilder.get_or_create(
        INSTANCE, config, metadata, connector, lambda _tensor, _rank: None, lambda value, _rank: value
    )
    engine.post_init()
    return engine


def prompt(count: int) -> list[int]:
    """Tokens that no prompt of another length begins with."""
    return [count, *range(1, count)]


def store(engine: LMCacheEngine, counts: list[int], backend: str) -> None:
    for count in counts:
        engine.store(prompt(count))
    if backend == "disk":
        writer = engine.storage_manager.storage_backends["LocalDiskBackend"].disk_worker
        deadline = time.monotonic() + STORE_SECONDS
        while writer.put_tasks:  # written in the background
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(writer.put_tasks)} chunks were not written in {STORE_SECONDS} s")
            time.sleep(0.01)


def retrieve(engine: LMCacheEngine, count: int, memory: torch.Tensor, source: torch.Tensor) -> dict[str, Any]:
    memory.zero_()
    tokens = prompt(count)
    began = time.perf_counter()
    found = engine.retrieve(tokens)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens": int(found.sum()), "same": torch.equal(memory, source)}


def reserve(size: int) -> torch.Tensor:
    """Memory in huge pages, uint8 [size]."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=Path, required=True, help="the bytes of keys and values")
    parser.add_argument("--shape", type=int, nargs=3, required=True, help="layers, KV heads, dimension of a head")
    parser.add_argument("--tokens", type=int, nargs="+", required=True, help="how many the prompts have")
    parser.add_argument("--backend", choices=("cpu", "disk"), required=True)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--gib", type=float, default=2.0, help="capacity of each backend")
    parser.add_argument("--odirect", action="store_true")
    options = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)  # a copy on two threads of two cores takes up to eight times as long
    size = token_bytes(options.shape)
    source = torch.from_file(str(options.source), size=max(options.tokens) * size, dtype=torch.uint8)
    memory = reserve(len(source))
    memory.copy_(source)
    engine = make_engine(options, MemoryConnector(memory, options.shape))
    store(engine, options.tokens, options.backend)
    print(json.dumps({"stored": options.tokens}), file=answers, flush=True)
    for line in sys.stdin:
        part = slice(int(line) * size)
        print(json.dumps(retrieve(engine, int(line), memory[part], source[part])), file=answers, flush=True)
    LMCacheEngineBuilder.destroy(INSTANCE)


if __name__ == "__main__":
    main()
