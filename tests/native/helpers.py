"""Random steps over random pages, and attention over them in plain float64."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from pagetrie import _native
from pagetrie.models.config import ModelConfig, RopeConfig
from pagetrie.runner.attention import Share
from pagetrie.runner.storage import KvDtype, PageStorage


def make_config(heads: int = 6, kv_heads: int = 2, head_dim: int = 64, window: int | None = None) -> ModelConfig:
    """A model with two layers; only the sizes that attention looks at matter."""
    return ModelConfig(
        "llama", "tiny", 64, 16, 32, 2, heads, kv_heads, head_dim, 1e-5, 8192, RopeConfig(), sliding_window=window
    )


@dataclass
class Held:
    """A sequence of a step: ``count`` tokens from position ``start`` on, over these pages."""

    start: int
    count: int
    pages: list[int]


@dataclass
class Step:
    """Sequences over pages; what no sequence holds is NaN.

    Attributes:
        page_size: tokens in a page.
        sequences: the shares.
    """

    config: ModelConfig
    page_size: int
    dtype: KvDtype = "fp32"
    seed: int = 0
    sequences: list[Held] = field(default_factory=list)
    _next_page: int = 0

    def add(self, start: int, count: int, shared: Held | None = None, shared_tokens: int = 0) -> Held:
        """A sequence; it may hold the full pages of another's first ``shared_tokens``."""
        pages = list(shared.pages[: shared_tokens // self.page_size]) if shared else []
        while len(pages) * self.page_size < start + count:
            pages.append(self._next_page)
            self._next_page += 1
        self.sequences.append(Held(start, count, pages))
        return self.sequences[-1]

    def finish(self) -> None:
        """Fill the pages in random order and draw the queries."""
        rng = random.Random(self.seed)
        order = rng.sample(range(self._next_page + 3), self._next_page)
        for sequence in self.sequences:
            sequence.pages = [order[page] for page in sequence.pages]
        torch.manual_seed(self.seed)
        config = self.config
        self.storage = PageStorage(self._next_page + 3, self.page_size, config, self.dtype)
        self.storage.data.fill_(torch.nan)
        for sequence in self.sequences:
            at = torch.arange(sequence.start + sequence.count)
            pages, slots = torch.tensor(sequence.pages)[at // self.page_size], at % self.page_size
            for layer in range(config.n_layers):
                self.storage.write(layer, pages, slots, torch.randn(len(at), 2, config.n_kv_heads, config.head_dim))
        self.tokens = sum(sequence.count for sequence in self.sequences)
        # Scores spread over some powers of two, so that the softmax is far from flat.
        self.q = torch.randn(self.tokens, config.n_heads, config.head_dim) * 2
        self.pages = _native.KvPages(self.storage.data, self.page_size)

    def rows(self, index: int) -> slice:
        first = sum(sequence.count for sequence in self.sequences[:index])
        return slice(first, first + self.sequences[index].count)

    def shares(self) -> list[Share]:
        return [Share(self.rows(i).start, s.count, s.start, s.pages) for i, s in enumerate(self.sequences)]

    def plan(self, chosen: Sequence[int] | None = None) -> _native.AttentionPlan:
        return make_plan([self.sequences[i] for i in chosen or range(len(self.sequences))], self.page_size, self.config)

    def native(self, layer: int = 1, chosen: Sequence[int] | None = None) -> torch.Tensor:
        """The kernels' result for some of the sequences, in that order."""
        q = self.q if chosen is None else torch.cat([self.q[self.rows(i)] for i in chosen])
        out = torch.full(q.shape, torch.nan)
        _native.attend(self.plan(chosen), self.pages, layer, q, out, 1 / math.sqrt(self.config.head_dim))
        return out

    def exact(self, layer: int = 1) -> torch.Tensor:
        """The same in float64, one query head at a time."""
        config, window = self.config, self.config.sliding_window
        out = torch.empty(self.q.shape, dtype=torch.float64)
        for index, sequence in enumerate(self.sequences):
            end = sequence.start + sequence.count
            at = torch.arange(end)
            pages, slots = torch.tensor(sequence.pages)[at // self.page_size], at % self.page_size
            keys = self.storage.keys[pages, layer, :, :, slots].double()
            values = self.storage.values[pages, layer, :, slots].double()
            queries = torch.arange(sequence.start, end).unsqueeze(1)
            hidden = at > queries
            if window is not None:
                hidden |= at <= queries - window
            for head in range(config.n_heads):
                of = head * config.n_kv_heads // config.n_heads
                scores = self.q[self.rows(index), head].double() @ keys[:, of].T / math.sqrt(config.head_dim)
                shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
                out[self.rows(index), head] = shares @ values[:, of]
        return out


def make_plan(sequences: Sequence[Held], page_size: int, config: ModelConfig) -> _native.AttentionPlan:
    offsets = np.cumsum([0] + [len(s.pages) for s in sequences]).astype(np.int32)
    return _native.AttentionPlan(
        page_size,
        np.array([s.start for s in sequences], np.int32),
        np.array([s.count for s in sequences], np.int32),
        np.array([page for s in sequences for page in s.pages], np.int32),
        offsets,
        config.n_heads,
        config.n_kv_heads,
        config.sliding_window or 0,
    )


def random_step(seed: int, dtype: KvDtype) -> Step:
    """Sequences of a random tree: prefill chunks and decodes, of all page sizes, head sizes and groupings."""
    rng = random.Random(seed)
    kv_heads = rng.choice((1, 2, 3))
    config = make_config(
        heads=kv_heads * rng.choice((1, 2, 3, 4, 7)),
        kv_heads=kv_heads,
        head_dim=rng.choice((8, 16, 24, 64, 64, 80, 96, 128)),
        window=rng.choice((None, None, None, 5, 40, 600)),
    )
    step = Step(config, rng.choice((1, 2, 3, 4, 7, 8, 16, 16, 16, 20, 32, 48, 64, 128)), dtype, seed)
    longest = rng.choice((20, 150, 700, 1300))
    for _ in range(rng.randint(1, 10)):
        count = rng.choice((1, 1, 1, 1, 2, 5, rng.randint(6, 90)))
        parent = rng.choice((None, *step.sequences))
        start = rng.randint(0, longest)
        if parent is None:
            step.add(start, count)
        else:
            shared = min(rng.randint(0, parent.start), start)
            step.add(start, count, parent, shared)
    step.finish()
    return step


@contextmanager
def isa(name: str) -> Iterator[None]:
    before = _native.isa()
    _native.set_isa(name)
    try:
        yield
    finally:
        _native.set_isa(before)


@contextmanager
def threads(n: int) -> Iterator[None]:
    _native.set_threads(n)
    try:
        yield
    finally:
        _native.set_threads(0)


def available_isas() -> list[str]:
    names = ["portable", "avx2", "avx512"]
    return names[: names.index(_native.best_isa()) + 1]
