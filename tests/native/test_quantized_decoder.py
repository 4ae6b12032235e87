"""The decoder over quantised weights: every family against torch with the same matrices, and independence of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pagetrie import _native
from pagetrie.errors import ConfigError, ModelLoadError
from pagetrie.models import decoder as torch_decoder
from pagetrie.models.checkpoint import QuantizedTensor
from pagetrie.models.linear import Linear
from pagetrie.models.loading import load_checkpoint
from pagetrie.models.quantized import QuantizedDecoder
from pagetrie.runner import ModelRunner
from pagetrie.runner.attention import Share
from pagetrie.runner.native_attention import NativeAttention, native_planner
from pagetrie.runner.storage import PageStorage
from tests.runner.helpers import VOCAB, ModelCheckpoint, tiny_model

PAGE_SIZE = 4
FAMILIES = ["llama", "llama-bias", "mistral", "qwen2", "qwen3"]


class FloatCheckpoint(ModelCheckpoint):
    """A tiny model that stores nothing in blocks."""

    def quantized(self, name: str) -> QuantizedTensor | None:
        return None


def tiny(family: str, **overrides: object) -> FloatCheckpoint:
    model, checkpoint = tiny_model(family, **overrides)
    return FloatCheckpoint(model, checkpoint.config)


class Pages:
    """Pages for a model, and plans over them."""

    def __init__(self, checkpoint: ModelCheckpoint, num_pages: int = 64) -> None:
        self.storage = PageStorage(num_pages, PAGE_SIZE, checkpoint.config, "fp32")
        self.storage.data.fill_(torch.nan)
        self._plan = native_planner(self.storage, checkpoint.config)

    def plan(self, shares: list[Share]) -> NativeAttention:
        return self._plan(shares)


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    yield
    _native.set_threads(0)
    _native.set_isa("auto")


def run(decoder: QuantizedDecoder, pages: Pages, parts: list[tuple[list[int], int, list[int]]]) -> torch.Tensor:
    """Compute (token ids, start, page table) of some sequences in one step; hidden states of all."""
    shares, ids, positions = [], [], []
    for tokens, start, table in parts:
        shares.append(Share(len(ids), len(tokens), start, table))
        ids += tokens
        positions += range(start, start + len(tokens))
    step = pages.plan(shares)
    return decoder.forward(torch.tensor(ids), torch.tensor(positions), max(positions) + 1, step.plan, step.pages)


def tokens_of(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()


def quantised_linear(weight: torch.Tensor, bias: torch.Tensor | None, dtype: str, name: str) -> Linear:
    matrix = _native.QuantizedMatrix.from_floats(weight.float().contiguous(), bias)

    def product(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), matrix.out_features)
        matrix.multiply(x.contiguous(), out)
        return out

    return product


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n", [1, 13, 90])
def test_every_family_computes_what_torch_does_with_the_same_matrices(
    family: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny(family)
    embedding = checkpoint.tensor("model.embed_tokens.weight")
    _native.QuantizedMatrix.from_floats(embedding.clone()).dequantize(embedding)  # the table is the same in both then
    tokens = tokens_of(n, seed=1)
    table = list(range(30))
    quantised = QuantizedDecoder(checkpoint, "q8")
    hidden = run(quantised, Pages(checkpoint), [(tokens, 0, table)])
    monkeypatch.setattr(torch_decoder, "pack_linear", quantised_linear)
    with torch.inference_mode():
        reference = torch_decoder.Decoder(checkpoint, "fp32")
        attend = Pages(checkpoint).plan([Share(0, n, 0, table)])
        expected = reference.forward(torch.tensor(tokens), torch.arange(n), n, attend)
        # Norms sum in another order, so an activation may fall on the other side of a step.
        scale = expected.std()
        assert ((hidden - expected).abs().mean() / scale) < 2e-3
        assert ((hidden - expected).abs().max() / scale) < 0.1
        logits, expected_logits = quantised.logits(hidden), reference.logits(hidden)
    assert (logits - expected_logits).abs().max() < 1e-4 * expected_logits.abs().max()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_is_the_same_alone_in_a_batch_and_in_any_chunks(family: str, threads: int) -> None:
    checkpoint = tiny(family)
    decoder = QuantizedDecoder(checkpoint, "q8")
    tokens = tokens_of(80, seed=2)
    _native.set_threads(1)
    pages = Pages(checkpoint)
    alone = torch.cat([run(decoder, pages, [([t], i, list(range(20)))]) for i, t in enumerate(tokens)])
    _native.set_threads(threads)
    other = tokens_of(7, seed=3)
    for cuts in ([80], [37, 43], [1, 2, 77], [79, 1]):
        pages, start, parts = Pages(checkpoint), 0, []
        for n in cuts:
            both = run(decoder, pages, [(other, 0, [40, 41]), (tokens[start : start + n], start, list(range(20)))])
            parts.append(both[len(other) :])
            start += n
        assert torch.equal(torch.cat(parts), alone)


@pytest.mark.skipif(_native.best_isa() == "portable", reason="this machine has the portable kernels only")
def test_instruction_sets_give_the_same_logits_but_for_attention() -> None:
    checkpoint = tiny("qwen2")
    decoder = QuantizedDecoder(checkpoint, "q8")
    results = []
    for isa in ("portable", "auto"):
        _native.set_isa(isa)
        hidden = run(decoder, Pages(checkpoint), [(tokens_of(9, seed=4), 0, [0, 1, 2])])
        results.append(decoder.logits(hidden))
    assert (results[0] - results[1]).abs().max() < 0.1 * results[0].std()


def test_q4_keeps_a_files_blocks_as_they_are(bundled_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In q4 the result of the first layers is nearer to the file's than in q8, which rounds their weights anew."""
    checkpoint = load_checkpoint(bundled_model)
    few = replace(checkpoint.config, n_layers=4)
    monkeypatch.setattr(type(checkpoint), "config", property(lambda _: few))
    tokens = checkpoint.tokenizer().encode("The radix tree holds one copy of what many prompts share.")
    table = list(range(8))
    with torch.inference_mode():
        reference = torch_decoder.Decoder(checkpoint, "fp32")
        attend = Pages(checkpoint).plan([Share(0, len(tokens), 0, table)])  # type: ignore[arg-type]
        exact = reference.logits(reference.forward(torch.tensor(tokens), torch.arange(len(tokens)), 99, attend))
        exact = exact.log_softmax(-1)
        kl = {}
        for weights in ("q4", "q8"):
            decoder = QuantizedDecoder(checkpoint, weights)  # type: ignore[arg-type]
            hidden = run(decoder, Pages(checkpoint), [(tokens, 0, table)])  # type: ignore[arg-type]
            kl[weights] = float((exact.exp() * (exact - decoder.logits(hidden).log_softmax(-1))).sum(-1).mean())
    assert 0 < kl["q4"] < kl["q8"] < 0.002


def test_token_ids_beyond_the_vocabulary_are_refused() -> None:
    checkpoint = tiny("llama")
    decoder = QuantizedDecoder(checkpoint, "q8")
    for token in (-1, VOCAB):
        with pytest.raises(ValueError, match=f"token ids must be from 0 to {VOCAB - 1}, got {token}"):
            run(decoder, Pages(checkpoint), [([1, token], 0, [0])])


def test_pages_of_another_model_are_refused() -> None:
    decoder = QuantizedDecoder(tiny("llama"), "q8")
    with pytest.raises(ValueError, match="those of another model"):
        run(decoder, Pages(tiny("llama", num_hidden_layers=3)), [([1], 0, [0])])


def test_weights_that_cannot_be_quantised_are_named() -> None:
    checkpoint = tiny("llama")
    checkpoint.tensor("model.layers.1.mlp.down_proj.weight")[3, 5] = torch.inf
    with pytest.raises(ModelLoadError, match=r"model.layers.1.mlp.down_proj can't be quantised: row 3 has"):
        QuantizedDecoder(checkpoint, "q4")


def test_torch_attention_cannot_go_with_quantised_weights() -> None:
    with pytest.raises(ConfigError, match="q8 weights come with native attention"):
        ModelRunner(tiny("llama"), num_pages=4, page_size=4, weights="q8", attention="torch")
