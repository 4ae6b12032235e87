"""What ``--ram-codec`` changes: the rest of a text after a prefix that went through memory, and after one that didn't.

Each window's prefix is computed into pages, which a ``RamTier`` takes and gives back into other pages; the rest is then
computed token by token as it stands in the text (teacher forcing) on either. Compared are the distributions of each
next token. A yardstick for what is noise: the same with fp16 pages in place of fp32 ones, without a codec.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bench.quality_text import text_windows
from pagetrie.kv.keys import SECRET_BYTES, ChainKeys
from pagetrie.kv.tiers.codec import CodecName
from pagetrie.kv.tiers.interface import PageRef
from pagetrie.kv.tiers.ram import RamTier
from pagetrie.kv.tokens import pack_tokens
from pagetrie.models.checkpoint import Checkpoint
from pagetrie.models.linear import WeightDtype
from pagetrie.runner.attention import Share
from pagetrie.runner.model_runner import ModelRunner
from pagetrie.runner.page_codec import make_page_codec
from pagetrie.runner.storage import KvDtype

PAGE = 16

MAX_KL: dict[CodecName, float] = {"none": 0.0, "int8": 0.003, "k8v4": 0.01}
MIN_AGREEMENT: dict[CodecName, float] = {"none": 1.0, "int8": 0.98, "k8v4": 0.95}
"""Gates, for fp16 weights: q4 and q8 weights round activations, so that their noise alone is larger than the first."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Of next-token distributions: KL divergence in nats, mean and 99th percentile; share of positions with the same
    likeliest token; relative change of the perplexity. And bytes of a page in the tier."""

    mean_kl: float
    p99_kl: float
    agreement: float
    perplexity: float
    page_bytes: int

    def within_gate(self, codec: CodecName) -> bool:
        return self.mean_kl <= MAX_KL[codec] and self.agreement >= MIN_AGREEMENT[codec]


class Text:
    """A runner with room for one window twice: pages of the first prefix, of the second one, and of the rest.

    Args:
        prefix, rest: tokens; the prefix whole pages.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        prefix: int,
        rest: int,
        weights: WeightDtype,
        kv_dtype: KvDtype = "fp16",
        threads: int | None = None,
    ) -> None:
        if prefix < PAGE or prefix % PAGE or rest < 2:
            raise ValueError(
                f"the prefix must be whole pages of {PAGE} tokens and the rest 2 tokens, got {prefix}, {rest}"
            )
        self.prefix = prefix
        self._pages = prefix // PAGE
        self._rest_pages = list(range(2 * self._pages, 2 * self._pages - (-rest // PAGE)))
        self.runner = ModelRunner(
            checkpoint,
            num_pages=2 * self._pages + len(self._rest_pages),
            page_size=PAGE,
            weights=weights,
            kv_dtype=kv_dtype,
            threads=threads,
        )

    @torch.inference_mode()
    def compute_prefix(self, ids: Sequence[int]) -> None:
        """Into the first pages."""
        self._hidden(ids[: self.prefix], 0, list(range(self._pages)))

    @torch.inference_mode()
    def rest(self, ids: Sequence[int], *, from_tier: bool) -> torch.Tensor:
        """Log-probabilities [rest, vocab_size], after the prefix or after what the tier gave back."""
        first = self._pages if from_tier else 0
        pages = [*range(first, first + self._pages), *self._rest_pages]
        return F.log_softmax(self.runner._logits(self._hidden(ids[self.prefix :], self.prefix, pages)), -1)

    def through_tier(self, ids: Sequence[int], codec: CodecName) -> int:
        """Take the prefix's pages through a memory tier into the second pages; returns bytes of a page there."""
        storage = self.runner.storage
        made = make_page_codec(codec, storage)
        tier = RamTier((self._pages + 1) * (storage.bytes_per_page + 1024), storage.bytes_per_page, codec=made)
        keys = ChainKeys(bytes(SECRET_BYTES))
        namespace = parent = keys.root(b"quality")
        refs = []
        for page in range(self._pages):
            tokens = pack_tokens(ids[page * PAGE : (page + 1) * PAGE])
            refs.append(PageRef(keys.page(parent, tokens), parent, namespace, tokens))
            parent = refs[-1].key
            tier.put([(refs[-1], storage.read_page(page))])
        for page, data in enumerate(tier.get(refs)):
            storage.write_page(self._pages + page, data)
        assert tier.stats.hit_pages == self._pages
        return made.encoded_bytes if made is not None else storage.bytes_per_page

    def _hidden(self, ids: Sequence[int], start: int, pages: list[int]) -> torch.Tensor:
        positions = torch.arange(start, start + len(ids))
        share = Share(0, len(ids), start, pages)
        return self.runner._forward(torch.tensor(ids), positions, start + len(ids), [share])


class _Sums:
    def __init__(self) -> None:
        self.kl: list[torch.Tensor] = []
        self.same: list[torch.Tensor] = []
        self.loss: list[torch.Tensor] = []
        self.page_bytes = 0

    def add(self, expected: torch.Tensor, actual: torch.Tensor, following: Sequence[int]) -> None:
        self.kl.append((expected.exp() * (expected - actual)).sum(-1))
        self.same.append((expected.argmax(-1) == actual.argmax(-1)).float())
        index = torch.tensor(following).unsqueeze(1)
        self.loss.append((expected[:-1].gather(1, index) - actual[:-1].gather(1, index)).flatten())

    def result(self) -> Difference:
        kl = torch.cat(self.kl)
        return Difference(
            mean_kl=float(kl.mean()),
            p99_kl=float(kl.quantile(0.99)),
            agreement=float(torch.cat(self.same).mean()),
            perplexity=math.expm1(float(torch.cat(self.loss).mean())),
            page_bytes=self.page_bytes,
        )


def compare_codecs(
    checkpoint: Checkpoint,
    codecs: Sequence[CodecName],
    *,
    windows: int,
    prefix: int,
    rest: int,
    weights: WeightDtype,
    kv_dtype: KvDtype = "fp16",
    threads: int | None = None,
) -> dict[CodecName, Difference]:
    """How far each codec's pages are from those that stayed in the pool."""
    text = Text(checkpoint, prefix=prefix, rest=rest, weights=weights, kv_dtype=kv_dtype, threads=threads)
    sums = {codec: _Sums() for codec in codecs}
    for ids in text_windows(checkpoint, windows, prefix + rest):
        text.compute_prefix(ids)
        expected = text.rest(ids, from_tier=False)
        for codec, each in sums.items():
            each.page_bytes = text.through_tier(ids, codec)
            each.add(expected, text.rest(ids, from_tier=True), ids[prefix + 1 :])
    return {codec: each.result() for codec, each in sums.items()}


def noise(
    checkpoint: Checkpoint, *, windows: int, prefix: int, rest: int, weights: WeightDtype, threads: int | None = None
) -> Difference:
    """How far runs on fp16 pages are from runs on fp32 pages."""
    dtypes: tuple[KvDtype, ...] = ("fp32", "fp16")
    made = [
        Text(checkpoint, prefix=prefix, rest=rest, weights=weights, kv_dtype=kv_dtype, threads=threads)
        for kv_dtype in dtypes
    ]
    sums = _Sums()
    sums.page_bytes = made[1].runner.storage.bytes_per_page
    for ids in text_windows(checkpoint, windows, prefix + rest):
        for text in made:
            text.compute_prefix(ids)
        exact, rounded = (text.rest(ids, from_tier=False) for text in made)
        sums.add(exact, rounded, ids[prefix + 1 :])
    return sums.result()
