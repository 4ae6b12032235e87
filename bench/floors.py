"""What decode and prefill must cost on this machine, and what they do cost: ``python -m bench floors``.

The limits are measured in the same run: bytes that the threads read from memory per second, multiply-adds that they do
in registers. Bytes and operations are counted from the model's sizes, rates are medians.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table

from pagetrie import _native
from pagetrie.bundled import bundled_model_path
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.runner import SampleSpec, SequenceStep, StepPlan
from pagetrie.models.loading import load_checkpoint
from pagetrie.models.quantized import QuantizedDecoder
from pagetrie.runner.attention import Share
from pagetrie.runner.model_runner import ModelRunner
from pagetrie.runner.native_attention import native_planner

PAGE_SIZE, CHUNK, PROMPT = 16, 512, 2_000
_READ_BYTES = 512 << 20
_TURNS = 2_000_000


def seconds(work: Callable[[], object], times: int) -> float:
    """Median duration, after one that doesn't count."""
    work()
    taken = []
    for _ in range(times):
        start = perf_counter()
        work()
        taken.append(perf_counter() - start)
    return median(taken)


def read_rate() -> float:
    """Bytes per second that all threads read in order, from far more memory than the caches hold."""
    numbers = torch.ones(_READ_BYTES // 4)
    return _READ_BYTES / seconds(numbers.sum, 5)


def multiply_add_rate(threads: int) -> float:
    """fp32 operations per second in registers alone."""
    start = perf_counter()
    operations = _native.peak(_TURNS, threads)
    return operations / (perf_counter() - start)


class Model:
    """The bundled model in a runner, with what a step reads and computes."""

    def __init__(self, path: Path, threads: int) -> None:
        checkpoint = load_checkpoint(path)
        self.config = checkpoint.config
        pages = -(-self.config.max_position // PAGE_SIZE)
        self.pages = list(range(pages))
        self.runner = ModelRunner(
            checkpoint, num_pages=pages, page_size=PAGE_SIZE, weights="q4", kv_dtype="fp16", threads=threads
        )
        self.weight_bytes = QuantizedDecoder(checkpoint, "q4").weight_bytes
        self.kv_bytes = self.config.kv_bytes_per_token(2)

    def run(self, start: int, count: int, *, sample: bool) -> None:
        spec = SampleSpec(SamplingParams(temperature=0.0), 0, [1], [1])
        step = SequenceStep([500] * count, start, self.pages, [spec] if sample else [])
        self.runner.execute(StepPlan([], [step]))

    def prefill(self, length: int) -> None:
        for start in range(0, length, CHUNK):
            self.run(start, min(CHUNK, length - start), sample=False)

    def attention(self, length: int) -> float:
        """Seconds that attention takes of a prefill, all layers."""
        plan = native_planner(self.runner.storage, self.config)
        total = 0.0
        for start in range(0, length, CHUNK):
            n = min(CHUNK, length - start)
            step = plan([Share(0, n, start, self.pages)])
            q = torch.randn(n, self.config.n_heads, self.config.head_dim)
            out = torch.empty_like(q)
            scale = self.config.head_dim**-0.5
            total += seconds(lambda: _native.attend(step.plan, step.pages, 0, q, out, scale), 3)  # noqa: B023
        return total * self.config.n_layers


def decode_table(model: Model, contexts: list[int]) -> Table:
    rate = read_rate()
    table = Table(title=f"decode, one sequence (reads {rate / 1e9:.1f} GB/s)")
    for column in ("context", "MB", "floor ms", "ms", "of the floor"):
        table.add_column(column, justify="right")
    for context in contexts:
        model.prefill(context)
        size = model.weight_bytes + context * model.kv_bytes
        floor, taken = size / rate, seconds(lambda: model.run(context, 1, sample=True), 64)  # noqa: B023
        cells = (size / 1e6, floor * 1e3, taken * 1e3, floor / taken)
        table.add_row(f"{context:,}", *(f"{cell:.{digits}f}" for cell, digits in zip(cells, (1, 1, 1, 2), strict=True)))
    return table


def prefill_table(model: Model, threads: int) -> Table:
    config = model.config
    width = config.n_heads * config.head_dim
    inputs = config.hidden_size * (width + 2 * config.n_kv_heads * config.head_dim) + width * config.hidden_size
    products = 2 * PROMPT * config.n_layers * (inputs + 3 * config.hidden_size * config.intermediate_size)
    mixing = 4 * width * config.n_layers * PROMPT * (PROMPT + 1) // 2
    before = multiply_add_rate(threads)
    whole, attention = seconds(lambda: model.prefill(PROMPT), 3), model.attention(PROMPT)
    peak = (before + multiply_add_rate(threads)) / 2
    table = Table(title=f"prefill of {PROMPT:,} tokens (multiply-adds: {peak / 1e9:.0f} GFLOP/s)")
    for column in ("part", "G operations", "s", "G/s", "limit G/s", "of the limit"):
        table.add_column(column, justify="right")
    # A core that does two 8-lane multiply-adds a cycle does two of 32 byte products with `vpmaddubsw`: four times that.
    rows = (("attention", mixing, attention, peak), ("the rest, 8-bit products", products, whole - attention, 4 * peak))
    for name, operations, taken, limit in rows:
        numbers = (operations / 1e9, operations / taken / 1e9, limit / 1e9)
        table.add_row(
            name,
            f"{numbers[0]:.0f}",
            f"{taken:.2f}",
            f"{numbers[1]:.0f}",
            f"{numbers[2]:.0f}",
            f"{operations / taken / limit:.2f}",
        )
    floor = mixing / peak + products / (4 * peak)
    table.add_row("all", f"{(mixing + products) / 1e9:.0f}", f"{whole:.2f}", "", "", f"{floor / whole:.2f}")
    return table


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench floors", description=(__doc__ or "").split(":")[0])
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help=f"threads to compute with [{cores}]")
    parser.add_argument("--model", type=Path, help="a GGUF file [the bundled model]")
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 1_000, 4_000], help="tokens before decode")
    options = parser.parse_args(arguments)
    with torch.inference_mode():
        model = Model(options.model or bundled_model_path(), options.threads)
        console = Console(width=100)
        console.print(decode_table(model, options.contexts))
        console.print(prefill_table(model, options.threads))
    return 0
