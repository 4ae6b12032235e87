"""From a shape, a device and a load to numbers: memory, sequences, times, and what a miss costs.

Times are rooflines: the larger of arithmetic at the device's peak and bytes at its bandwidth, each times a stated
efficiency. They are what to expect at best, not what a server with its queues will show; ``replay`` adds those.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from pagetrie.engine.runner import StepPlan
from pagetrie.errors import ConfigError
from pagetrie.plan.devices import Device
from pagetrie.plan.shapes import Shape

BITS: dict[str, float] = {"fp32": 32, "fp16": 16, "fp8": 8, "int8": 8.5, "k8v4": 6.5, "int4": 4.5, "int2": 2.5}
"""Bits per value with their scales: one 16-bit scale for 32 values where there are some."""
WEIGHT_BITS: dict[str, float] = {"fp32": 32, "bf16": 16, "fp8": 8, "int8": 8.5, "int4": 4.5}
SAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Load:
    """What is served.

    Attributes:
        prompt, output: median lengths in tokens.
        spread: standard deviation of the lengths' logarithm; 0 makes all equal.
        shared: leading tokens that all prompts have in common.
        context: longest sequence; what a contiguous layout reserves.
        page: tokens per page.
    """

    prompt: int
    output: int
    spread: float
    shared: int
    context: int
    page: int = 16

    def __post_init__(self) -> None:
        if min(self.prompt, self.output, self.page) < 1 or self.shared < 0 or not 0 <= self.spread <= 3:
            raise ConfigError("lengths and the page size must be at least 1, the spread between 0 and 3")
        if self.shared > self.prompt:
            raise ConfigError(f"the shared prefix ({self.shared} tokens) is longer than the prompt ({self.prompt})")
        if self.prompt + self.output > self.context:
            raise ConfigError(
                f"prompt and output ({self.prompt} + {self.output} tokens) exceed the context of {self.context}"
            )

    def lengths(self) -> list[int]:
        """Whole sequences at their end, ``SAMPLES`` of them, log-normal, cut at the context; always the same."""
        rng = random.Random(0)

        def draw(median: int) -> float:
            return median * rng.lognormvariate(0, self.spread) if self.spread else median

        return [
            min(self.context, max(self.shared + 1, round(draw(self.prompt))) + max(1, round(draw(self.output))))
            for _ in range(SAMPLES)
        ]


@dataclass(frozen=True, slots=True)
class Fit:
    """Sequences that fit at once with one codec, by layout, and the codec's sizes.

    Attributes:
        bytes_per_token: of keys and values, all layers.
        tokens: that the cache holds, where no layer has a window.
    """

    codec: str
    bytes_per_token: float
    tokens: int
    contiguous: int
    paged: int
    shared: int


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the device's peaks that real kernels reach, and of its memory that may be used."""

    compute: float = 0.6
    bandwidth: float = 0.8
    memory: float = 0.9


class Planner:
    """Answers for one model on one device.

    Args:
        shape, device: what runs where.
        weight_bytes: of all weights.
        efficiency: see there.

    Raises:
        ConfigError: the weights don't fit.
    """

    def __init__(self, shape: Shape, device: Device, weight_bytes: float, efficiency: Efficiency | None = None) -> None:
        self.shape = shape
        self.device = device
        self.weight_bytes = weight_bytes
        self.efficiency = efficiency or Efficiency()
        self.cache_bytes = device.memory * self.efficiency.memory - weight_bytes
        if self.cache_bytes <= 0:
            raise ConfigError(
                f"{shape.name} takes {weight_bytes / 1e9:.1f} GB of weights; {device.name} has "
                f"{device.memory / 1e9:.0f} GB, of which {self.efficiency.memory:.0%} may be used"
            )

    def sequence_bytes(self, tokens: float, codec: str) -> float:
        """Keys and values of one sequence."""
        return self.shape.cached_values(tokens) * BITS[codec] / 8

    def pages(self, page: int, codec: str) -> int:
        """Pages of ``page`` tokens that fit. A server gives all layers whole pages, with a window or not."""
        return int(self.cache_bytes // (page * self.shape.values_per_token() * BITS[codec] / 8))

    def fit(self, load: Load, codec: str) -> Fit:
        """How many sequences of a load fit, all at their full length: a promise that needs no preemption."""
        lengths = load.lengths()

        def paged(tokens: int) -> float:
            return self.sequence_bytes(math.ceil(tokens / load.page) * load.page, codec)

        mean = sum(map(paged, lengths)) / len(lengths)
        # Only whole pages are shared; what a window has passed is no longer held by anyone.
        prefix = paged(load.shared // load.page * load.page)
        own = max(mean - prefix, paged(load.page))
        return Fit(
            codec,
            self.shape.values_per_token() * BITS[codec] / 8,
            int(self.cache_bytes / (self.shape.values_per_token() * BITS[codec] / 8)),
            int(self.cache_bytes // self.sequence_bytes(load.context, codec)),
            int(self.cache_bytes // mean),
            max(int((self.cache_bytes - prefix) // own), int(self.cache_bytes // mean)),
        )

    # -- times -------------------------------------------------------------------------------------------------------

    def _seconds(self, flops: float, moved: float) -> float:
        return max(
            flops / (self.device.flops * self.efficiency.compute),
            moved / (self.device.bandwidth * self.efficiency.bandwidth),
        )

    def ttft(self, new: float, cached: float = 0.0, codec: str = "fp16") -> float:
        """Seconds to compute ``new`` prompt tokens behind ``cached`` ones, with nobody else there."""
        flops = 2 * self.shape.active * new + self.shape.attention_flops(new, cached)
        return self._seconds(flops, self._weights_read(new) + self.sequence_bytes(cached + new, codec))

    def tpot(self, batch: int, context: float, codec: str = "fp16") -> float:
        """Seconds per step in which each of ``batch`` sequences of ``context`` tokens gets one more."""
        flops = batch * (2 * self.shape.active + self.shape.attention_flops(1, context))
        return self._seconds(flops, self._weights_read(batch) + batch * self.sequence_bytes(context, codec))

    def _weights_read(self, tokens: float) -> float:
        """Bytes of weights that a step reads: with experts, those that its tokens pass, as if none passed the same."""
        return self.weight_bytes * min(1.0, tokens * self.shape.active / self.shape.parameters)

    def miss_cost(self, prompt: int, prefix: int, codec: str = "fp16") -> float:
        """Seconds that it costs to compute a prefix anew that might have been cached."""
        return self.ttft(prompt, 0, codec) - self.ttft(prompt - prefix, prefix, codec)

    def worthwhile_bandwidth(self, prompt: int, prefix: int, codec: str = "fp16") -> float:
        """Bytes per second from which on loading a prefix from a tier beats computing it. Infinite if never."""
        saved = self.miss_cost(prompt, prefix, codec)
        return self.sequence_bytes(prefix, codec) / saved if saved > 0 else math.inf

    def seconds(self, plan: StepPlan) -> float:
        """What a step takes: the rooflines over all of its shares, as a cost model for replay."""
        shape, new, flops, cached = self.shape, 0, 0.0, 0.0
        for share in plan.sequences:
            count = len(share.token_ids)
            new += count
            flops += shape.attention_flops(count, share.start)
            cached += self.sequence_bytes(share.start + count, "fp16")
        return self._seconds(flops + 2 * shape.active * new, self._weights_read(new) + cached)
